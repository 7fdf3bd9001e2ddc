"""Every method gives what was recorded: models, ledgers, rounds and statements.

``python tests/equivalence/test_recorded_bits.py`` records anew; unset ``OPENBLAS_*`` and
``ATEN_CPU_CAPABILITY`` first. Do that only for a change that is meant to change results, and say so
in the CHANGELOG.

Bits are keyed by the arithmetic in use (:mod:`arithmetic`). Where it is the one they were recorded
with, every bit is compared. On any other, rounds are still compared exactly, ledgers to nine digits,
epsilons to 1e-9, and models, norms and losses to 1e-5. With AVX-512, AVX2 and plain kernels of
torch, numpy, OpenBLAS and oneDNN these differ by at most 1e-13, 3e-7 and 6e-7.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from arithmetic import arithmetic, described
from threadpoolctl import threadpool_limits
from torch import nn

import dpfl
from dpfl.core.errors import DpflError, PrivacyRefusal
from dpfl.methods import METHODS

FILE = Path(__file__).with_name("bits.json")
VALUES: dict[str, Any] = {
    "lr": 0.2,
    "clip": 0.7,
    "batch_size": 6,
    "local_steps": 2,
    "dimension": 20,
}
CHOICES: dict[str, tuple[Any, ...]] = {
    "clip_after": (True,),
    "coefficient": (3.0,),
    "interval": (2,),
    "noise": ("local",),
    "personal_starts": (False,),
    "selection": (dpfl.FixedCohort(size=3, least=4), dpfl.PoissonCohort(sampling_rate=0.6)),
    "smoothing": (0.3,),
    "spending": ("smallest",),
    "tolerated_dropouts": (1,),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 3),
    "mlp": lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)),
    "cnn": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(9, 3)
    ),
}


def federation() -> dpfl.Federation:
    """Five clients of different sizes and budgets, made without any random generator of a library."""

    def numbers(client: int, count: int) -> np.ndarray:
        return np.sin(np.arange(1, count + 1, dtype=np.float64) * (client + 1.7)) * 1.3

    sizes = [40, 60, 50, 80, 45]
    epsilons = [1.0, 8.0, 2.0, 6.0, 1.5]
    clients = {}
    for i, size in enumerate(sizes):
        x = numbers(i, size * 8).reshape(size, 8)
        clients[f"c{i}"] = (x, (np.abs(x[:, 0] * 2.1 + x[:, 1]) // 1.1).astype(int).clip(0, 2))
    budgets = {f"c{i}": dpfl.Budget(epsilon=e, delta=1e-3) for i, e in enumerate(epsilons)}
    return dpfl.Federation.from_arrays(clients, budgets=budgets)


def cases() -> dict[str, tuple[str, dict[str, Any], str]]:
    """Every method with its defaults on three models, and with each setting that changes its
    mechanism on one.
    """
    found = {}
    for name in sorted(name for name in METHODS if METHODS[name].model is None):
        known = METHODS[name].settings
        needed = {p for p in known if known[p].default is inspect.Parameter.empty} | (
            {"local_steps"} & set(known)
        )
        settings = {setting: VALUES[setting] for setting in needed}
        for model in MODELS:
            found[f"{name} on {model}"] = (name, settings, model)
        for setting in sorted(set(CHOICES) & set(known)):
            for value in CHOICES[setting]:
                try:
                    METHODS[name](**settings | {setting: value})
                except PrivacyRefusal:
                    continue
                found[f"{name} with {setting}={value}"] = (name, settings | {setting: value}, "mlp")
    for extra in ({"coefficient": 3.0}, {"personal_starts": False}, {"layers": 1}, {"growth": 1.1}):
        settings = {
            setting: VALUES[setting] for setting in ("lr", "clip", "batch_size", "local_steps")
        }
        found[f"fedceo in every round with {extra}"] = (
            "fedceo",
            settings | {"interval": 1} | extra,
            "mlp",
        )
    return found


CASES = cases()


def exact(value: Any) -> Any:
    """Write floats so that no bit is lost."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return {str(k): exact(v) for k, v in sorted(value.items())}
    return [exact(v) for v in value] if isinstance(value, list | tuple) else value


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(exact(value)).encode()).hexdigest()[:24]


def ledger_rows(path: Path) -> dict[str, list[Any]]:
    """All that a ledger holds, but for the name of the run and the time."""
    queries = {
        "grants": "SELECT account, observer, unit, epsilon, delta FROM grants",
        "members": "SELECT account, population FROM members",
        "plans": "SELECT account, observer, body, releases, delta FROM plans JOIN bills ON bill = digest",
        "charges": "SELECT round, account, observer, plan, body, draw FROM charges JOIN bills ON bill = digest",
        "journal": "SELECT round FROM journal",
    }
    with closing(sqlite3.connect(path)) as connection:
        return {
            table: sorted(map(list, connection.execute(query)), key=str)
            for table, query in queries.items()
        }


def to_nine_digits(value: Any) -> str:
    """The same text wherever its numbers differ by rounding: noise is calibrated in floating point."""
    return re.sub(
        r"\d+\.\d+(e[-+]?\d+)?", lambda number: f"{float(number[0]):.9g}", json.dumps(value)
    )


WITHOUT_ARITHMETIC = (
    "round",
    "cohort",
    "arrived",
    "missing",
    "left",
    "not_finite",
    "bytes_up",
    "payload_bytes_up",
    "bytes_down",
)


def measure(name: str, settings: dict[str, Any], model: str) -> dict[str, Any]:
    """Run three seeded rounds and condense everything that came of them.

    ``bits`` are compared in the same arithmetic, ``anywhere`` in every one, and the numbers under
    ``rounded`` in another one up to rounding.
    """
    torch.manual_seed(3)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, threadpool_limits(limits=1):
        path = Path(folder) / "ledger.sqlite"
        start = MODELS[model]()
        result = dpfl.train(
            start, federation(), METHODS[name](**settings), rounds=3, seed=11, ledger=path, new_ledger=True
        )  # fmt: skip
        rows = ledger_rows(path)
    vector = torch.cat([p.detach().flatten() for p in result.model.parameters()])
    history = [record.to_dict() for record in result.history]
    rounds = [{key: line[key] for key in WITHOUT_ARITHMETIC if key in line} for line in history]
    figures = [[line.get("weights"), line.get("update_norm"), line.get("loss")] for line in history]
    statements = {client: [line.epsilon, line.budget] for client, line in result.spent.items()}
    return {
        "bits": {
            "model": hashlib.sha256(vector.numpy().tobytes()).hexdigest()[:24],
            "figures": digest(figures),
            "ledger": digest(rows),
            "epsilons": digest(statements),
            "accuracies": [line["accuracy"] for line in history],
        },
        "anywhere": {"rounds": digest(rounds), "ledger": digest(to_nine_digits(rows))},
        "rounded": {
            "model": [float(v) for v in (vector.double().norm(), *vector[:6])],
            "update_norms": [line.get("update_norm") or 0.0 for line in history],
            "losses": [line.get("loss") or 0.0 for line in history],
            "epsilons": [epsilon for epsilon, _ in statements.values()],
        },
    }


NOTHING: dict[str, Any] = {"arithmetic": "", "cases": {}}
RECORDED: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else NOTHING


@pytest.fixture(autouse=True, scope="module")
def _no_proposals_of_another_arithmetic(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """Noise is calibrated here, not proposed by a cache that other kernels filled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPFL_CACHE", str(tmp_path_factory.mktemp("proposals")))
        yield


def test_nothing_recorded_was_lost() -> None:
    assert len(RECORDED["cases"]) >= 100
    assert set(RECORDED["cases"]) <= set(CASES)


@pytest.mark.filterwarnings("ignore:training ended:RuntimeWarning")
@pytest.mark.parametrize("case", sorted(RECORDED["cases"]))
def test_the_bits_are_those_recorded(case: str) -> None:
    expected, measured = RECORDED["cases"][case], measure(*CASES[case])
    assert measured["anywhere"] == expected["anywhere"]
    if arithmetic() == RECORDED["arithmetic"]:
        assert measured == expected
    numbers, recorded = measured["rounded"], expected["rounded"]
    size = recorded["model"][0]
    assert numbers["model"] == pytest.approx(recorded["model"], rel=0, abs=1e-5 * size)
    assert numbers["epsilons"] == pytest.approx(recorded["epsilons"], rel=1e-9, abs=0)
    for figure in ("update_norms", "losses"):
        assert numbers[figure] == pytest.approx(recorded[figure], rel=1e-5, nan_ok=True), figure


def record() -> None:
    """Write what every method gives here."""
    cases = {}
    for case in sorted(CASES):
        with suppress(DpflError):  # a model that a method cannot train, a cohort that it refuses
            cases[case] = measure(*CASES[case])
    values = {"arithmetic": arithmetic(), "in use": described(), "cases": cases}
    FILE.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as proposals:
        os.environ["DPFL_CACHE"] = proposals
        record()
