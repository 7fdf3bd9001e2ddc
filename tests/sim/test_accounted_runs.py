"""An accounted metric in an experiment file: measured, resumed after a kill, never charged twice."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dpfl.core.errors import ConfigurationError
from dpfl.core.types import Observer
from dpfl.experiments.describe import prepared
from dpfl.privacy.ledger import Ledger
from dpfl.runs.experiment import Experiment
from dpfl.runs.folder import RunFolder
from dpfl.sim.train import run_experiment

from .conftest import small
from .test_loop import _traces
from .test_resume import Killed, _strike

ACCOUNTED = {"every": 2, "share": 0.2}


def metered(**run: Any) -> Experiment:
    return small(run={"rounds": 4, **run}, accounted=ACCOUNTED)


def charged(folder: Path) -> set[tuple[int, str]]:
    with closing(Ledger.open(RunFolder(folder).ledger)) as ledger:
        run = ledger.studies()[0].run
        return {pair for pair in ledger.charged(run) if pair[0] < 0}


@pytest.mark.parametrize("visit", [3, 4, 6])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_round_a_measurement_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, visit: int
) -> None:
    """The third charge of two rounds is that of the first measurement, the sixth the second's."""
    run_experiment(metered(), tmp_path / "whole")
    folder = tmp_path / "killed"
    with monkeypatch.context() as patch:
        _strike(patch, "Ledger.charge", moment, visit)
        with pytest.raises(Killed):
            run_experiment(metered(), folder)
    result = run_experiment(metered(), folder, resume=True)
    assert _traces(folder) == _traces(tmp_path / "whole")
    assert [line.measured is not None for line in result.history] == [False, True, False, True]
    assert {round_ for round_, _ in charged(folder)} == {-2, -1}


def test_without_a_seed_a_lost_measurement_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, experiment = tmp_path / "run", metered(noise="system")
    with monkeypatch.context() as patch:
        _strike(patch, "Ledger.charge", "after", 3)  # charged, then killed before it was computed
        with pytest.raises(Killed):
            run_experiment(experiment, folder)
    result = run_experiment(experiment, folder, resume=True)
    assert [bool(line.lost) for line in result.history] == [False, True, False, False]
    assert [line.measured is not None for line in result.history] == [False, False, False, True]
    assert len(charged(folder)) == 12  # six clients, two measurements: the lost one was paid for
    for client, line in result.spent.items():
        assert line.epsilon <= experiment.federation().budgets[client].epsilon


def test_the_file_is_checked_and_plans_know_of_it() -> None:
    plain, with_it = prepared(small(run={"rounds": 4})), prepared(metered())
    for client, member in plain.members.items():
        (phase,), (other,) = (
            one.agreement.phases(one.members[client].participant) for one in (plain, with_it)
        )
        assert other.noise_multiplier > phase.noise_multiplier  # the rounds get what is left
        cost = with_it.agreement.plan(Observer.SERVER, member.participant)
        assert len(cost.before) == 2
    again = Experiment.from_dict(metered().to_dict())
    assert again.digest() == metered().digest() != small(run={"rounds": 4}).digest()
    for wrong in ({"share": 2.0}, {"every": 0}, {"metric": "loss"}, {"metric": "auc"}, {"shar": 1}):
        with pytest.raises(ConfigurationError):
            prepared(small(run={"rounds": 4}, accounted={**ACCOUNTED, **wrong}))
