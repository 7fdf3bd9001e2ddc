"""A run that is killed in a release before round one can go on: no charge twice, none forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpfl.privacy.ledger import Ledger
from dpfl.runs.experiment import Experiment
from dpfl.runs.folder import RunFolder
from dpfl.sim import loop
from dpfl.sim.train import run_experiment


def experiment(noise: str) -> Experiment:
    return Experiment.from_dict(
        {
            "data": {"name": "breast_cancer"},
            "partition": {"clients": 4},
            "budgets": {"epsilon": 8.0, "delta": 1e-3},
            "method": {"name": "preconditioned", "force": True},
            "run": {"noise": noise, "evaluate_every": 100},
        }
    )


@pytest.mark.parametrize("noise", ["seeded", "system"])
@pytest.mark.parametrize("killed_in", [-2, -1, 0])
def test_a_run_goes_on_after_a_kill_in_a_release(
    noise: str, killed_in: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = loop.close_round

    def cut_off(agreement: Any, state: Any, *more: Any, **named: Any) -> Any:
        if state.round == killed_in:  # charged, and not yet written down
            raise KeyboardInterrupt
        return close(agreement, state, *more, **named)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "close_round", cut_off)
        with pytest.raises(KeyboardInterrupt):
            run_experiment(experiment(noise), tmp_path / "run")
    result = run_experiment(experiment(noise), tmp_path / "run", resume=True)
    assert result.summary.rounds.done == result.summary.rounds.planned
    lost = [line.round for line in RunFolder(tmp_path / "run").read_rounds() if line.lost]
    assert lost == ([] if noise == "seeded" else [killed_in])
    ledger = Ledger.open(tmp_path / "run" / "ledger.sqlite", read_only=True)
    assert ledger.last_charged(ledger.studies()[0].run) == result.summary.rounds.planned - 1
    ledger.close()
    if noise == "seeded":
        whole = run_experiment(experiment(noise), tmp_path / "whole")
        assert whole.summary.scores.value == result.summary.scores.value
