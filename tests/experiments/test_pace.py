"""How long a run would take: only sizes matter, no record is used, nothing is charged."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dpfl.core.errors import DpflError
from dpfl.data.federation import Federation
from dpfl.experiments import plan as pace
from dpfl.plugs.selection import Everyone
from dpfl.runs.experiment import Experiment
from dpfl.sim.train import run_experiment
from tests.sim.conftest import small

LAPS = [
    {
        "open": 9.0,
        "clients": 9.0,
        "close": 9.0,
        "evaluate": 9.0,
    },  # the first round plans noise and does not count
    {"open": 0.1, "clients": 2.0, "close": 0.4, "evaluate": 5.0},
    {"open": 0.3, "clients": 4.0, "close": 0.8, "evaluate": 5.0},
]


class Spy:
    """Stands in for training: remembers what it was given, and takes known times."""

    def __init__(self) -> None:
        self.federation: Any = None
        self.strategy: Any = None
        self.more: dict[str, Any] = {}

    def __call__(self, model: Any, federation: Federation, strategy: Any, **more: Any) -> Any:
        self.federation, self.strategy, self.more = federation, strategy, more
        return SimpleNamespace(timings=LAPS)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    found = Spy()
    monkeypatch.setattr(pace, "train", found)
    return found


@pytest.mark.parametrize(
    ("run", "heard", "workers"),
    [({"cohort": 4}, 4, 1), ({"cohort": None}, 6, 1), ({"cohort": 0.5, "workers": 2}, 3, 2)],
)
def test_the_time_of_a_few_clients_is_scaled_to_all_rounds_and_the_whole_cohort(
    spy: Spy, run: dict[str, Any], heard: int, workers: int
) -> None:
    experiment = small(run={"rounds": 50, **run})
    by_hand = 50 * (0.2 + (3.0 / workers + 0.6) / 4 * heard)
    assert pace.seconds_in_all(experiment) == pytest.approx(by_hand)
    assert isinstance(spy.strategy.selection, Everyone)
    assert spy.more["rounds"] == len(LAPS)
    assert spy.more.get("ledger") is None


def test_records_are_made_up_and_only_as_many_as_there_are(
    spy: Spy, experiment: Experiment
) -> None:
    pace.seconds_in_all(experiment)
    real = experiment.federation()
    assert 0 < len(spy.federation.ids) <= pace.SAMPLE
    for client in spy.federation.ids:
        blank, own = spy.federation.shards[client], real.shards[client]
        assert blank.features.shape == own.features.shape
        assert not blank.features.any()
        assert not blank.labels.any()
        assert not blank.test_features.any()
        assert torch.count_nonzero(own.features) > 0
        assert spy.federation.budgets[client] == real.budgets[client]
    assert set(spy.federation.client_settings) == set(real.client_settings) & set(
        spy.federation.ids
    )


@pytest.mark.parametrize("count", [1, 3, 4, 5, 9, 40])
def test_the_smallest_and_the_largest_budget_are_among_the_few(count: int) -> None:
    epsilons = [float(1 + (7 * number) % count) for number in range(count)]
    federation = Experiment.from_dict(
        {
            "data": {"name": "digits"},
            "partition": {"clients": count},
            "budgets": {"epsilon": epsilons, "delta": 1e-3},
            "method": {"name": "weiavg"},
            "run": {"rounds": 1},
        }
    ).federation()
    few = pace._blank(federation, pace.SAMPLE)
    chosen = {few.budgets[client].epsilon for client in few.ids}
    assert len(few.ids) == min(count, pace.SAMPLE)
    assert {min(epsilons), max(epsilons)} <= chosen
    assert set(few.budgets) == set(few.ids)


def test_the_estimate_is_of_the_right_order_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    method = {"name": "fedavg", "lr": 0.1, "batch_size": 8, "local_steps": 20}
    values = {"data": {"name": "digits"}, "partition": {"clients": 12}, "method": method}
    experiment = Experiment.from_dict({**values, "run": {"rounds": 30, "evaluate_every": 30}})
    estimate = pace.seconds_in_all(experiment)
    assert list(tmp_path.iterdir()) == []
    began = time.perf_counter()
    run_experiment(experiment, tmp_path / "run")
    took = time.perf_counter() - began
    assert (
        0.05 * took < estimate < 10 * took
    )  # other processes may be busy; files and evaluation are not counted


def test_a_run_in_which_nobody_can_afford_a_round_has_no_pace() -> None:
    poor = small(
        method={"name": "dp_fed", "noise_multiplier": 0.3},
        run={"rounds": 3, "cohort": None},
        clients={},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a run that is not one
        try:
            estimate = pace.seconds_in_all(poor)
        except DpflError as error:  # dpfl plan says why there is none, and goes on
            assert "\n" not in str(error)
        else:
            assert estimate >= 0
