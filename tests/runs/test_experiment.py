"""Experiments as files: complete, re-runnable, and refused by the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpfl.core.errors import ConfigurationError, DpflError
from dpfl.core.types import ClientSettings
from dpfl.plugs.selection import Everyone, FixedCohort, PoissonCohort
from dpfl.runs.experiment import Experiment

BASE = {
    "data": {"name": "digits"},
    "partition": {"clients": 10},
    "budgets": {"epsilon": "mixgauss1", "delta": 1e-3},
    "method": {"name": "weiavg", "lr": 0.1, "clip": 1.0, "batch_size": 8, "local_steps": 2},
    "run": {"rounds": 5},
}


def _with(**changes: dict) -> Experiment:
    return Experiment.from_options(
        {**BASE, **{k: {**BASE.get(k, {}), **v} for k, v in changes.items()}}
    )


def test_a_written_experiment_reads_back_equal(tmp_path: Path) -> None:
    for experiment in (
        _with(),
        _with(budgets={"epsilon": [1.0] * 10}),
        _with(clients={"client-3": {"lr": 0.2}}),
    ):
        path = tmp_path / "e.toml"
        path.write_text(experiment.to_toml())
        assert Experiment.from_file(path) == experiment
        assert Experiment.from_file(path).digest() == experiment.digest()


def test_the_digest_names_the_result_and_not_how_it_was_computed() -> None:
    assert _with(run={"workers": 2}).digest() == _with().digest()
    for change in (
        {"run": {"seed": 1}},
        {"run": {"rounds": 6}},
        {"method": {"lr": 0.2}},
        {"budgets": {"delta": 1e-4}},
    ):
        assert _with(**change).digest() != _with().digest()


def test_cohorts_are_numbers_or_fractions() -> None:
    assert _with().strategy(10).selection == Everyone()
    assert _with(run={"cohort": 4}).strategy(10).selection == FixedCohort(size=4)
    assert _with(run={"cohort": 0.8}).strategy(10).selection == FixedCohort(size=8)
    assert _with(run={"cohort": 0.5, "sampling": "poisson"}).strategy(
        10
    ).selection == PoissonCohort(sampling_rate=0.5)
    for bad in (0, -1, 11, 1.5):
        with pytest.raises(ConfigurationError, match="cohort"):
            _with(run={"cohort": bad}).strategy(10)


def test_federation_budgets_and_practices_follow_the_file() -> None:
    federation = _with(clients={"client-3": {"lr": 0.2, "local_epochs": 2}}).federation()
    assert len(federation.ids) == 10
    assert sum(b.epsilon > 5 for b in federation.budgets.values()) == 1
    assert federation.client_settings == {"client-3": ClientSettings(lr=0.2, local_epochs=2)}
    again = _with(method={"name": "fedavg_dp"}).federation()
    assert again.budgets == federation.budgets  # another method, the same federation
    assert all(
        (again.shards[c].features == federation.shards[c].features).all() for c in federation.ids
    )
    other = _with(run={"seed": 1}).federation()
    assert other.budgets != federation.budgets


def test_natural_silos_are_the_default_where_there_are_any() -> None:
    experiment = _with(
        data={"name": "heart_disease"}, partition={"clients": None}, budgets={"epsilon": 1.0}
    )
    assert experiment.federation().ids == ("cleveland", "hungarian", "switzerland", "va")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": {"folder": "x"}}, "either a name or a folder"),
        ({"method": {"name": "pfaa"}}, "no method 'pfaa'"),
        ({"method": {"clipp": 1.0}}, "did you mean 'clip'"),
        ({"budgets": {"delta": {"nobody": 1e-3}}}, "no value for client"),
        ({"partition": {"kind": "diriclet"}}, "did you mean 'dirichlet'"),
        ({"partition": {"kind": "natural"}}, "no natural silos"),
        ({"clients": {"client-33": {"lr": 0.1}}}, "client-33"),
    ],
)
def test_what_cannot_be_built_is_refused(change: dict, words: str) -> None:
    with pytest.raises(DpflError, match=words):
        experiment = _with(**change)
        experiment.check()
        experiment.strategy(len(experiment.federation().ids))


def test_a_budgets_file_is_read_into_the_experiment(tmp_path: Path) -> None:
    path = tmp_path / "budgets.csv"
    path.write_text(
        "id,epsilon,delta\n"
        + "".join(f"client-{i},{i + 1},{1e-4 if i else ''}\n" for i in range(10))
    )
    experiment = _with(budgets={"epsilon": str(path), "delta": 1e-3})
    path.unlink()
    budgets = Experiment.from_dict(experiment.to_dict()).federation().budgets
    assert [budgets[f"client-{i}"].epsilon for i in range(10)] == [float(i + 1) for i in range(10)]
    assert (budgets["client-0"].delta, budgets["client-1"].delta) == (1e-3, 1e-4)
    path.write_text("id,epsilon,delta\nclient-0,1,\nclient-1,1,1e-4\n")
    with pytest.raises(ConfigurationError, match="no delta for 'client-0'"):
        Experiment.from_options({**BASE, "budgets": {"epsilon": str(path)}})
