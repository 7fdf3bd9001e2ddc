"""The [server] section: one optimiser for every method, and what makes no sense is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dpfl.core.errors import ConfigurationError
from dpfl.methods import METHODS, find
from dpfl.plugs.step import AveragedIterates, LearningRate, ServerAdam, ServerSgd, ServerYogi
from dpfl.runs.experiment import Experiment
from dpfl.sim.train import run_experiment

WORK = {"lr": 0.2, "clip": 1.0, "batch_size": 16, "local_steps": 2, "dimension": 20}


def of(method: str = "weiavg", server: dict[str, Any] | None = None, **run: Any) -> Experiment:
    known = {name: value for name, value in WORK.items() if name in find(method).settings}
    values: dict[str, Any] = {
        "data": {"name": "digits"},
        "partition": {"clients": 4},
        "budgets": {"epsilon": [0.5, 1.0, 4.0, 8.0], "delta": 1e-3},
        "method": {"name": method, **known},
        "run": {"rounds": 2, **run},
    }
    return Experiment.from_dict(values if server is None else {**values, "server": server})


def start_of(experiment: Experiment) -> torch.Tensor:
    model = experiment.build_model(experiment.federation())
    return torch.cat([value.flatten() for value in model.state_dict().values()])


def trained(experiment: Experiment, folder: Path) -> torch.Tensor:
    run_experiment(experiment, folder)
    names = experiment.build_model(experiment.federation()).state_dict()
    found = load_file(folder / "model.safetensors")
    return torch.cat([found[name].flatten() for name in names])


@pytest.mark.parametrize("method", sorted(n for n in METHODS if METHODS[n].model is None))
def test_without_the_section_a_method_keeps_its_step_and_its_digest(method: str) -> None:
    plain, empty = of(method), of(method, {})
    assert "server" not in plain.to_dict()
    assert empty.strategy(4).step == plain.strategy(4).step


def test_a_method_that_plans_its_own_step_takes_no_section() -> None:
    with pytest.raises(ConfigurationError, match="plans its own step"):
        of("preconditioned", {}).strategy(4)


@pytest.mark.parametrize(
    ("server", "step"),
    [
        ({"lr": 0.1}, ServerSgd(lr=LearningRate(rate=0.1))),
        ({"momentum": 0.9}, ServerSgd(momentum=0.9)),
        ({"momentum": 0.9, "nesterov": True}, ServerSgd(momentum=0.9, nesterov=True)),
        (
            {"lr": 0.5, "schedule": "exponential", "factor": 0.9},
            ServerSgd(lr=LearningRate(rate=0.5, decay="exponential", factor=0.9)),
        ),
        ({"schedule": "inverse_sqrt"}, ServerSgd(lr=LearningRate(decay="inverse_sqrt"))),
        ({"schedule": "cosine"}, ServerSgd(lr=LearningRate(decay="cosine", rounds=2))),
        ({"optimizer": "adam", "lr": 0.1}, ServerAdam(lr=LearningRate(rate=0.1))),
        (
            {"optimizer": "yogi", "lr": 0.1, "beta1": 0.5, "beta2": 0.9, "tau": 0.1},
            ServerYogi(lr=LearningRate(rate=0.1), beta1=0.5, beta2=0.9, tau=0.1),
        ),
        ({"average": "uniform"}, AveragedIterates()),
        (
            {"lr": 0.1, "average": 0.9},
            AveragedIterates(step=ServerSgd(lr=LearningRate(rate=0.1)), decay=0.9),
        ),
    ],
)
def test_the_section_is_the_step_and_survives_the_file(
    server: dict[str, Any], step: Any, tmp_path: Path
) -> None:
    experiment = of(server=server)
    assert experiment.strategy(4).step == step
    assert experiment.digest() != of().digest()
    (tmp_path / "e.toml").write_text(experiment.to_toml())
    assert Experiment.from_file(tmp_path / "e.toml") == experiment


@pytest.mark.parametrize("method", ["airsgd", "dprp"])
def test_a_method_with_a_learning_rate_of_its_own_keeps_it(method: str) -> None:
    assert of(method, {"momentum": 0.9}).strategy(4).step == ServerSgd(
        lr=LearningRate(rate=0.2), momentum=0.9
    )
    adam = of(method, {"optimizer": "adam"}).strategy(4).step
    assert adam == ServerAdam(lr=LearningRate(rate=0.2))


@pytest.mark.parametrize(
    ("server", "key"),
    [
        ({"optimizer": "adam", "lr": 0.1, "momentum": 0.9}, "momentum"),
        ({"optimizer": "yogi", "lr": 0.1, "nesterov": True}, "nesterov"),
        ({"optimizer": "adam"}, "lr"),
        ({"beta1": 0.9}, "beta1"),
        ({"optimizer": "sgd", "tau": 0.1}, "tau"),
        ({"nesterov": True}, "nesterov"),
        ({"factor": 0.9}, "factor"),
        ({"schedule": "exponential"}, "factor"),
        ({"optimizer": "adagrad"}, "optimizer"),
        ({"learning_rate": 0.1}, "learning_rate"),
        ({"lr": -1.0}, "lr"),
        ({"average": "mean"}, "average"),
        ({"average": 1.5}, "decay"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(server: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigurationError, match=key) as caught:
        of(server=server).check()
    assert "\n" not in str(caught.value)


def test_a_server_lr_of_a_tenth_makes_a_tenth_of_the_step_and_costs_the_same(
    tmp_path: Path,
) -> None:
    """The printed algorithm of FedCEO: every step of the model is a tenth of the mean update."""
    whole, tenth = of("fedceo", rounds=1), of("fedceo", {"lr": 0.1}, rounds=1)
    start = start_of(whole)
    long, short = trained(whole, tmp_path / "whole"), trained(tenth, tmp_path / "tenth")
    assert torch.allclose(short - start, 0.1 * (long - start), atol=1e-6)
    spent = [(tmp_path / name / "summary.json").read_text() for name in ("whole", "tenth")]
    one, other = (text[text.index('"statements"') : text.index('"seconds"')] for text in spent)
    assert one == other


@pytest.mark.parametrize(
    "server", [{"optimizer": "adam", "lr": 0.01}, {"momentum": 0.5}, {"average": "uniform"}]
)
@pytest.mark.parametrize("method", ["weiavg", "dp_fed", "ppsgd"])
def test_optimisers_with_a_memory_change_the_model_and_nothing_that_is_charged(
    method: str, server: dict[str, Any], tmp_path: Path
) -> None:
    experiment, plain = of(method, server), of(method)
    if method == "ppsgd":
        changes = {"model": {"name": "mlp", "hidden": 8}}
        experiment, plain = (
            Experiment.from_dict({**one.to_dict(), **changes}) for one in (experiment, plain)
        )
    own = run_experiment(experiment, tmp_path / "own").summary
    other = run_experiment(plain, tmp_path / "plain").summary
    assert own.epsilon == other.epsilon
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("own", "plain")]
    assert any(not torch.equal(models[0][name], models[1][name]) for name in models[0])
