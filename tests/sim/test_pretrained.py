"""Public weights and frozen layers in experiment files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dpfl.core.errors import CheckpointError, ConfigurationError
from dpfl.experiments.describe import describe
from dpfl.models import freeze, load_weights
from dpfl.runs.deployment import StudyFile
from dpfl.runs.experiment import Experiment
from dpfl.sim.train import run_experiment, run_until

from .conftest import small


def tensors(hidden: int = 8, value: float = 0.1) -> dict[str, Tensor]:
    """The first layer of ``mlp`` on digits."""
    return {"1.weight": torch.full((hidden, 64), value), "1.bias": torch.zeros(hidden)}


def written(path: Path, **change: Any) -> str:
    save_file({**tensors(), **change}, path)
    return str(path)


def mlp(weights: str | None, *frozen: str, **more: Any) -> Experiment:
    model = {"name": "mlp", "hidden": 8, "weights": weights, "freeze": list(frozen) or None}
    given = {key: value for key, value in model.items() if value is not None}
    return small(model={**given, **more}, run={"rounds": 2})


def test_a_frozen_layer_keeps_its_public_weights_and_is_not_sent(tmp_path: Path) -> None:
    experiment = mlp(written(tmp_path / "w.safetensors"), "1")
    result = run_experiment(experiment, tmp_path / "run")
    assert torch.equal(result.model[1].weight, tensors()["1.weight"])
    assert not torch.equal(
        result.model[3].weight, mlp(None).build_model(experiment.federation())[3].weight
    )
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(saved["1.weight"], tensors()["1.weight"])  # public, and needed to predict
    sent = {line.bytes_up for line in result.history}
    assert max(sent) < 2 * len(experiment.federation().ids) * 4 * (8 * 10 + 10)
    found = describe(experiment)
    assert found.parameters == 8 * 10 + 10
    assert found.slow_layers == {}


def test_weights_are_only_a_start_where_nothing_is_frozen(tmp_path: Path) -> None:
    experiment = mlp(written(tmp_path / "w.safetensors"))
    model = experiment.build_model(experiment.federation())
    assert torch.equal(model[1].weight, tensors()["1.weight"])
    assert describe(experiment).parameters == 8 * 64 + 8 + 8 * 10 + 10


def test_the_result_is_named_by_the_content_of_the_weights(tmp_path: Path) -> None:
    one = mlp(written(tmp_path / "a.safetensors"), "1")
    same = mlp(written(tmp_path / "b.safetensors"), "1")
    other = mlp(written(tmp_path / "c.safetensors", **{"1.bias": torch.ones(8)}), "1")
    assert one.digest() == same.digest() != other.digest()
    assert one.content() == same.content() != other.content()
    assert mlp(written(tmp_path / "a.safetensors")).digest() != one.digest()
    assert Experiment.from_dict(one.to_dict()) == one


def test_weights_that_change_under_a_run_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    experiment = mlp(written(path), "1")
    run_until(experiment, tmp_path / "run", 1)
    written(path, **{"1.bias": torch.ones(8)})
    stored = Experiment.from_file(tmp_path / "run" / "experiment.toml")
    with pytest.raises(ConfigurationError, match="has changed"):
        run_until(stored, tmp_path / "run", 2, resume=True)
    with pytest.raises(CheckpointError, match="another experiment"):
        run_until(mlp(str(path), "1"), tmp_path / "run", 2, resume=True)
    written(path)
    run_until(stored, tmp_path / "run", 2, resume=True)


BAD: dict[str, tuple[dict[str, Tensor], tuple[str, ...], str]] = {
    "an unknown name": ({"1.wieght": torch.zeros(8, 64)}, (), "'1.wieght' is not in the model; did you mean '1.weight'"),
    "another shape": ({"1.weight": torch.zeros(9, 64)}, (), r"'1.weight' has shape \(9, 64\), and the model's has \(8, 64\)"),
    "a frozen layer without weights": ({}, ("3",), "'3.bias' is frozen, and .* does not hold it"),
    "no such layer": ({}, ("l",), "'l' begins the name of no parameter; use its names, such as 1, 1.bias"),
    "a part of a name": ({}, ("1.weigh",), "did you mean '1.weight'"),
    "everything": ({"3.weight": torch.zeros(10, 8), "3.bias": torch.zeros(10)}, ("1", "3"), "frozen parameters only"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_by_name(case: str, tmp_path: Path) -> None:
    change, frozen, said = BAD[case]
    experiment = mlp(written(tmp_path / "w.safetensors", **change), *frozen)
    with pytest.raises(ConfigurationError, match=said) as caught:
        run_experiment(experiment, tmp_path / "run")
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_not_there_or_holds_no_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no\.safetensors: cannot be read"):
        mlp(str(tmp_path / "no.safetensors"))
    (tmp_path / "bad.safetensors").write_text("nothing")
    experiment = mlp(str(tmp_path / "bad.safetensors"))
    with pytest.raises(ConfigurationError, match=r"is not a \.safetensors file"):
        experiment.build_model(experiment.federation())


def test_a_study_between_sites_takes_no_file_of_weights(tmp_path: Path) -> None:
    values = {
        "study": {"name": "s", "sites": ["a", "b"], "feature_shape": [64], "classes": 10},
        "model": {"name": "mlp", "weights": written(tmp_path / "w.safetensors")},
        "method": {"name": "weiavg", "lr": 0.3, "clip": 1.0, "batch_size": 8, "local_steps": 3},
        "run": {"rounds": 2, "least_sites": 2},
    }
    with pytest.raises(ConfigurationError, match="is not at the sites"):
        StudyFile.from_dict(values)


def test_from_python(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    other = copy.deepcopy(model)
    nn.init.normal_(model[0].weight)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    assert load_weights(other, tmp_path / "w.safetensors") == set(model.state_dict())
    assert torch.equal(other[0].weight, model[0].weight)
    assert freeze(other, ["0.weight", "1"]) == {"0.weight", "1.weight", "1.bias"}
    assert [own.requires_grad for own in other.parameters()] == [False, True, False, False]
