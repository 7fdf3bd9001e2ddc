"""A small experiment that runs in about a second."""

from __future__ import annotations

from typing import Any

import pytest

from dpfl.runs.experiment import Experiment


def small(**changes: Any) -> Experiment:
    """Digits, six clients, three budgets; sections are merged with ``changes``."""
    values: dict[str, Any] = {
        "data": {"name": "digits"},
        "partition": {"kind": "unequal", "clients": 6, "alpha": 5.0, "smallest": 40},
        "budgets": {"epsilon": [0.5, 1.0, 1.0, 2.0, 4.0, 8.0], "delta": 1e-3},
        "method": {"name": "weiavg", "lr": 0.3, "clip": 1.0, "batch_size": 8, "local_steps": 3},
        "run": {"rounds": 8, "cohort": 4, "seed": 3},
        "clients": {"client-2": {"batch_size": 16, "local_steps": 5}, "client-4": {"lr": 0.1}},
    }
    for section, fields in changes.items():
        values[section] = {**values.get(section, {}), **fields}
    return Experiment.from_options(values)


@pytest.fixture
def experiment() -> Experiment:
    return small()
