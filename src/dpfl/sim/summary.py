"""What a run's summary says in a few words: epsilons of many clients, and rounds of which nothing
came.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from dpfl.privacy.statement import Statement


def silence(history: list[dict[str, Any]]) -> list[str]:
    """Rounds count although nothing came of them: that must be said."""
    silent = sum("published" in line or line.get("arrived") == [] for line in history)
    said = f"UNPUBLISHED: in {silent} of {len(history)} rounds too few uploads arrived, and the model stayed as it was"
    return [said] if silent else []


def spread(lines: Mapping[str, Statement]) -> dict[str, Any]:
    """Smallest, median and largest epsilon, spent and granted."""

    def three(values: list[float]) -> dict[str, float | str]:
        numbers = {
            "smallest": min(values),
            "median": statistics.median(values),
            "largest": max(values),
        }
        return {name: "infinite" if math.isinf(value) else value for name, value in numbers.items()}

    if not lines:
        return {}
    granted = [line.granted for line in lines.values() if line.granted is not None]
    return {
        "spent": three([line.epsilon for line in lines.values()]),
        **({"granted": three(granted)} if granted else {}),
        "accountant": sorted({line.accountant for line in lines.values()}),
    }
