"""Every method gives the bits that were recorded before the project was rebuilt: models, ledgers
and rounds.

``python tests/equivalence/test_recorded_bits.py`` records them anew. Do that only for a change that
is meant to change results, and say so in the CHANGELOG. Last bits of matrix products depend on the
processor: on another one than the recording was made on, models are compared to a relative error of
1e-4 instead.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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


def processor() -> str:
    """What the last bits of matrix products depend on."""
    info = np.show_config(mode="dicts")  # type: ignore[call-overload]
    blas = info["Build Dependencies"]["blas"]["name"]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{capability} torch {torch.__version__} numpy {np.__version__} {blas}"


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


TOLD = (
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
    """Run three seeded rounds and condense everything that came of them."""
    torch.manual_seed(3)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        start = MODELS[model]()
        result = dpfl.train(
            start, federation(), METHODS[name](**settings), rounds=3, seed=11, ledger=path, new_ledger=True
        )  # fmt: skip
        rows = ledger_rows(path)
    vector = torch.cat([p.detach().flatten() for p in result.model.parameters()])
    history = [record.to_dict() for record in result.history]
    plain = [{key: line[key] for key in TOLD if key in line} for line in history]
    told = [[line.get("weights"), line.get("update_norm"), line.get("loss")] for line in history]
    statements = {client: [line.epsilon, line.budget] for client, line in result.spent.items()}
    return {
        "model": hashlib.sha256(vector.numpy().tobytes()).hexdigest()[:24],
        "told": digest(told),
        "ledger": digest(rows),
        "rounds": digest(plain),
        "epsilon": digest(statements),
        "values": [round(float(v), 7) for v in vector[:6]],
        "accuracies": [line["accuracy"] for line in history],
    }


RECORDED: dict[str, Any] = (
    json.loads(FILE.read_text()) if FILE.exists() else {"processor": "", "cases": {}}
)


def test_nothing_recorded_was_lost() -> None:
    assert len(RECORDED["cases"]) >= 100
    assert set(RECORDED["cases"]) <= set(CASES)


@pytest.mark.filterwarnings("ignore:training ended:RuntimeWarning")
@pytest.mark.parametrize("case", sorted(RECORDED["cases"]))
def test_the_bits_are_those_recorded(case: str) -> None:
    expected, found = RECORDED["cases"][case], measure(*CASES[case])
    for part in ("ledger", "rounds", "epsilon"):
        assert found[part] == expected[part], f"{part} of {case}"
    if processor() == RECORDED["processor"]:
        assert found == expected
    else:
        size = math.sqrt(sum(v * v for v in expected["values"]))
        assert found["values"] == pytest.approx(expected["values"], abs=1e-4 * size)


if __name__ == "__main__":
    recorded = {}
    for case in sorted(CASES):
        with suppress(DpflError):  # a model that a method cannot train, a cohort that it refuses
            recorded[case] = measure(*CASES[case])
    FILE.write_text(json.dumps({"processor": processor(), "cases": recorded}, indent=1) + "\n")
