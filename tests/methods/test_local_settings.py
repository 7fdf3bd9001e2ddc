"""Settings of local steps: every method that trains takes them, and they reach its phases, the
description, the command line and a search.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.sim.conftest import small

from dpfl.core.types import Budget, ClientSettings, Terms
from dpfl.experiments.describe import describe
from dpfl.experiments.study import Sweep
from dpfl.methods import METHODS
from dpfl.plugs.base import Participant

SETTINGS: dict[str, Any] = {"lr": 0.1, "clip": 1.0, "batch_size": 8, "local_steps": 2}
STEPS = {"momentum": 0.9, "weight_decay": 0.01, "proximal": 0.2}
TERMS = Terms(
    rounds=2,
    population=4,
    expected_cohort=4,
    participations=2,
    smallest_epsilon=1.0,
    largest_epsilon=1.0,
    parameters=10,
    noise_multiplier=1.0,
)
OWN = Participant(
    examples=20, client_settings=ClientSettings(), budget=Budget(epsilon=1.0, delta=1e-3)
)
TRAINING = sorted(name for name, one in METHODS.items() if "local_steps" in one.settings)


def test_every_method_but_those_of_one_gradient_takes_them() -> None:
    one_gradient = {"airsgd", "dprp", "individual_clips", "preconditioned", "preconditioned_sum"}
    assert set(METHODS) - set(TRAINING) == one_gradient
    for name in TRAINING:
        left_out = {"weight_decay"} if name == "ppsgd" else set()
        assert STEPS.keys() - left_out <= METHODS[name].settings.keys()


@pytest.mark.parametrize("name", TRAINING)
def test_they_reach_every_phase_and_the_description(name: str) -> None:
    known = METHODS[name].settings
    given = {k: v for k, v in (SETTINGS | STEPS).items() if k in known}
    if "clipping" in known:
        given["clipping"] = "normalised"
    strategy = METHODS[name](**given)
    for phase in strategy.local.phases(TERMS, OWN):
        for setting, value in STEPS.items():
            assert getattr(phase, setting) == (value if setting in known else 0.0)
        assert phase.clipping == given.get("clipping", "flat")
    told = dict(strategy.describe())["local work"]
    assert "momentum=0.9" in told
    assert "proximal=0.2" in told


def test_describe_shows_them_and_the_adaptive_clip() -> None:
    method = {"name": "dp_fed", "project": "once", "target_quantile": 0.4, "momentum": 0.5}
    method |= {"noise_multiplier": 1.0, "vote_share": 0.1}
    found = describe(small(method=method, run={"cohort": 0.5}))
    pipeline = dict(found.pipeline)
    assert "target_quantile=0.4" in pipeline["client stage"]
    assert "momentum=0.5" in pipeline["local work"]
    assert found.parameters == 650
    assert found.bytes_up == 40 + 4 * 651  # the vote rides with the row


def test_a_search_takes_them_where_a_method_has_them() -> None:
    over = {
        "method.momentum": [0.0, 0.9],
        "method.clipping": ["flat", "per_layer", "normalised"],
        "method.target_quantile": [0.3, 0.5],
    }
    study = Sweep.from_dict(
        {
            "title": "steps",
            "base": small(method={"clip": 1.0}).to_dict(),
            "methods": {"weiavg": {}, "fedavg": {}, "dp_fed": {"project": "once"}},
            "tune": {"over": over, "seeds": [9]},
            "seeds": [0],
        }
    )
    counts = {label: len(study.tunable(label)) for label in study.methods}
    assert counts == {"weiavg": 6, "fedavg": 2, "dp_fed": 4}
    last = study.tunable("weiavg")[-1]
    chosen = study.experiment({}, "weiavg", last, 0).method.settings()
    assert (chosen["momentum"], chosen["clipping"]) == (0.9, "normalised")
