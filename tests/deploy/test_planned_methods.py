"""Methods that plan themselves, between sites: the same study as in the simulator."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dpfl
from dpfl.core.types import Observer
from dpfl.privacy.statement import statement
from dpfl.runs.experiment import Experiment
from dpfl.sim.train import run_experiment
from tests.deploy.test_equivalence import (
    DELTA,
    GRANTS,
    PARTITION,
    deploy,
    on_files,
    relative_error,
)

CASES: dict[str, dict[str, Any]] = {
    "preconditioned": {},
    "preconditioned_sum": {},
    "preconditioned_sum, whole clients": {"unit": "client", "force": True},
    "individual_clips": {"lr": 0.3, "clip": 1.0, "batch_size": 64},
}


def experiment_of(case: str) -> Experiment:
    name = case.partition(",")[0]
    planned = name.startswith("preconditioned")
    return Experiment.from_dict(
        {
            "data": {"name": "digits"},
            "model": {"features": "pixels"} if planned else {"name": "logistic"},
            "partition": PARTITION,
            "budgets": {"epsilon": GRANTS, "delta": DELTA},
            "method": {"name": name, **CASES[case]},
            "run": {"seed": 5, **({} if case == "preconditioned" else {"rounds": 2})},
            **({"secure_sum": {"colluders": 1}} if name != "preconditioned" else {}),
        }
    )


@pytest.mark.parametrize("case", sorted(CASES))
def test_sites_and_the_simulator_give_the_same_model_and_spends(case: str, tmp_path: Path) -> None:
    experiment = on_files(experiment_of(case), tmp_path / "files")
    server, _, sites = deploy(tmp_path, experiment)
    simulated = run_experiment(experiment, tmp_path / "simulated")
    summary = json.loads((server / "summary.json").read_text())
    rounds = simulated.summary.rounds.planned
    assert summary["rounds"] == {"planned": rounds, "done": rounds, "ended_early": None}
    assert summary["missed"] == summary["refusals"] == {}
    models = server / "model.safetensors", tmp_path / "simulated" / "model.safetensors"
    assert relative_error(*models) <= 1e-4
    predictors = [dpfl.load(place) for place in (tmp_path / "simulated", server)]
    predictors += [dpfl.load(site.folder, common=True) for site in sites.values()]
    records = np.random.default_rng(0).uniform(0, 16, (40, *predictors[0].shape))
    outputs = [predictor.outputs(records.reshape(40, *predictor.shape)) for predictor in predictors]
    assert all(torch.allclose(one, outputs[0], rtol=1e-3, atol=1e-4) for one in outputs)
    for name, site in sites.items():
        with closing(site.ledger()) as ledger:
            own = statement(ledger, name, Observer.SERVER)
        assert own is not None
        assert own.epsilon == pytest.approx(simulated.spent[name].epsilon, rel=1e-9)
        assert own.epsilon <= GRANTS[sorted(sites).index(name)]
