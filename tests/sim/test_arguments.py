"""Arguments of the wrong kind, at every public door of Python: one sentence that names them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpfl
from dpfl import Budget, ClientSettings, Federation, PublicSeed, make_budgets
from dpfl.core.errors import ConfigurationError, DpflError
from dpfl.core.types import PlugOutput, PlugState, Rows, Total
from dpfl.models import freeze
from dpfl.plugs.weights import Weights
from dpfl.strategy.record_level import RecordWork, record_level
from dpfl.strategy.robust import with_aggregation

from . import own_training as own

X, Y = np.zeros((20, 3), np.float32), np.arange(20) % 2
BUDGET = Budget(epsilon=1.0, delta=1e-3)
SETTINGS: dict[str, Any] = {"lr": 0.1, "clip": 1.0, "batch_size": 8, "local_steps": 2}
FEDERATION = Federation.from_arrays({"a": (X, Y), "b": (X, Y)}).with_budgets(
    {"a": BUDGET, "b": BUDGET}
)


def train(**changed: Any) -> None:
    given = {"strategy": dpfl.weiavg(**SETTINGS), "model": nn.Linear(3, 2), "rounds": 1}
    dpfl.train(**{"federation": FEDERATION, **given, **changed})


DOORS: dict[str, tuple[Callable[[], Any], str]] = {
    "model by name": (lambda: train(model="logistic"), "model is 'logistic', not a Module"),
    "model class": (lambda: train(model=nn.Linear), "model is type, not a Module"),
    "arrays as federation": (lambda: train(federation={"a": (X, Y)}), "federation is dict"),
    "method not called": (lambda: train(strategy=dpfl.weiavg), "strategy is Method"),
    "rounds as text": (lambda: train(rounds="3"), "rounds = '3'"),
    "no rounds": (lambda: train(rounds=0), "rounds = 0"),
    "rounds left out": (lambda: train(rounds=None), "rounds = None"),
    "rounds without end": (lambda: train(rounds=10**9), "at most 1000000"),
    "described": (
        lambda: dpfl.describe(
            federation=FEDERATION,
            model=nn.Linear(3, 2),
            strategy=dpfl.weiavg(**SETTINGS),
            rounds=0,
        ),
        "describe: rounds = 0",
    ),
    "accounted": (lambda: train(accounted="auc"), "accounted is 'auc', not an AccountedMetric"),
    "no ledger": (lambda: train(new_ledger=True), "new_ledger=True without a ledger"),
    "task": (lambda: Federation.from_arrays({"a": (X, Y)}, task="binry"), "^task: .* 'binary'"),
    "metric": (
        lambda: Federation.from_arrays({"a": (X, Y)}, task={"metric": "acuracy"}),
        "^task metric: 'acuracy' is not a metric of classification; did you mean 'accuracy'",
    ),
    "loss": (
        lambda: Federation.from_arrays({"a": (X, Y)}, task={"name": "regression", "loss": "hub"}),
        "^task: loss = 'hub'; did you mean 'huber'",
    ),
    "labels with a gap": (
        lambda: Federation.from_arrays({"a": (X, 15 * Y)}),
        "number the classes without gaps",
    ),
    "aggregation": (
        lambda: with_aggregation(dpfl.weiavg(**SETTINGS), "krm"),
        "^aggregation: aggregation = 'krm'; did you mean 'krum'",
    ),
    "freeze": (lambda: freeze(nn.Linear(3, 2), ["body"]), "^freeze: 'body' begins the name"),
    "linear head": (
        lambda: train(strategy=dpfl.preconditioned(), rounds=None),
        "trains a linear head on public features",
    ),
    "data set": (lambda: dpfl.load_dataset("mnist", "nowhere"), "its files are in none of nowhere"),
    "negative seed": (lambda: train(seed=-1), "-1 is not a seed"),
    "seed as text": (lambda: train(seed="1"), "'1' is not a seed"),
    "engine": (lambda: train(engine=["stacked"]), "engine = "),
    "workers": (lambda: train(workers=0), "workers = 0"),
    "evaluate": (lambda: train(evaluate_every=0), "evaluate_every = 0"),
    "ledger": (lambda: train(ledger=5), "ledger is int, not a path"),
    "no folder": (
        lambda: train(ledger="nowhere/ledger.sqlite", new_ledger=True),
        "is in no folder that exists; make the folder",
    ),
    "progress": (lambda: train(progress="bar"), "progress is 'bar', not a function"),
    "misreports": (lambda: train(misreports={"a": "x"}), "misreports = "),
    "loader": (
        lambda: Federation.from_arrays({"a": DataLoader(TensorDataset(torch.zeros(2, 1)))}),
        "client 'a': has a DataLoader instead of arrays.*from_torch",
    ),
    "no mapping": (lambda: Federation.from_arrays([(X, Y)]), "clients are a list"),  # type: ignore[arg-type]
    "no labels": (lambda: Federation.from_arrays({"a": (X, None)}), "client 'a'"),
    "budgets": (lambda: Federation.from_arrays({"a": (X, Y)}, budgets=5), "budgets = 5"),  # type: ignore[arg-type]
    "settings": (
        lambda: Federation.from_arrays({"a": (X, Y)}, client_settings={"a": {"lr": 1}}),  # type: ignore[dict-item]
        "client_settings of 'a': .*not a ClientSettings",
    ),
    "files": (lambda: Federation.from_files(None), "folder = None"),  # type: ignore[arg-type]
    "data set by name": (
        lambda: Federation.from_dataset("digits", "iid", 4, 0),  # type: ignore[arg-type]
        "dataset = 'digits'; give a Dataset",
    ),
    "lr as text": (lambda: dpfl.weiavg(**{**SETTINGS, "lr": "0.1"}), "lr = '0.1' is not a number"),
    "lr of nothing": (lambda: dpfl.weiavg(**{**SETTINGS, "lr": None}), "lr = None; give a number"),
    "lr in a list": (lambda: dpfl.weiavg(**{**SETTINGS, "lr": [0.1]}), r"lr = \[0.1\]"),
    "huge lr": (lambda: dpfl.weiavg(**{**SETTINGS, "lr": 1e9}), "at most 10000"),
    "selection": (lambda: dpfl.weiavg(**SETTINGS, selection="all"), "selection = 'all'"),
    "delta as text": (lambda: Budget(epsilon=1.0, delta="1e-5"), "delta = '1e-5'"),  # type: ignore[arg-type]
    "unit": (lambda: Budget(epsilon=1.0, delta=1e-5, unit="person"), "unit = 'person'"),  # type: ignore[arg-type]
    "no epsilons": (lambda: make_budgets(None, 1e-5, ["a"], PublicSeed(0)), "None was given"),  # type: ignore[arg-type]
    "epsilon as text": (
        lambda: make_budgets(["x"], 1e-5, ["a"], PublicSeed(0)),  # type: ignore[list-item]
        "budget of 'a': epsilon = 'x'",
    ),
    "plain seed": (lambda: make_budgets("gauss", 1e-5, ["a"], 0), "seed = 0"),  # type: ignore[arg-type]
    "one id": (lambda: make_budgets(1.0, 1e-5, "ab", PublicSeed(0)), "ids = 'ab'"),
    "settings' lr": (lambda: ClientSettings(lr="0.1"), "lr = '0.1'"),  # type: ignore[arg-type]
    "cohort": (lambda: dpfl.FixedCohort(size="3"), "size = '3'"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("door", "said"), DOORS.values(), ids=DOORS)
def test_a_wrong_kind_of_argument_is_one_sentence(door: Callable[[], Any], said: str) -> None:
    with pytest.raises(DpflError, match=said) as raised:
        door()
    # Who calls Python has neither sections of a file nor options of a command.
    assert not re.search(r"\[\w+\] |\[\w+\]:|--\w", str(raised.value))


class _Total(Weights):
    """Weights that are meant to be, and are not, shares."""

    def __call__(self, state: PlugState, received: Rows | Total, round_: int) -> PlugOutput:
        return torch.ones(len(received.cohort)), state, {}


def test_weights_of_one_s_own_that_do_not_sum_to_one_are_refused() -> None:
    strategy = record_level("mine", RecordWork(**SETTINGS), weights=_Total())
    with pytest.raises(ConfigurationError, match="weights _Total: sum to 2, not to 1; divide them"):
        train(strategy=strategy)


def test_a_model_without_shapes_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="layers without shapes; call it on one batch"):
        dpfl.train(nn.LazyLinear(2), own.federation(), own.strategy(), rounds=1, seed=None)
