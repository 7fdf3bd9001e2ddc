"""The numbers that the benchmark prints: medians, ratios, verdicts."""

import io
import math

import numpy as np
import pytest
from bench import table
from bench.workloads import KEYS, WORKLOADS, workload
from rich.console import Console


def test_the_first_round_is_a_warm_up() -> None:
    assert table.median_after_warm_up([100.0, 1.0, 3.0, 2.0]) == 2.0
    assert table.median_after_warm_up([100.0]) is None


def test_a_ratio_needs_both_sides() -> None:
    assert table.ratio(6.0, 2.0) == 3.0
    assert table.ratio(None, 2.0) is None
    assert table.ratio(6.0, None) is None


@pytest.mark.parametrize(
    ("value", "goal", "words"),
    [
        (12.0, {"at_least": 12.0}, ">= 12, reached"),
        (11.9, {"at_least": 12.0}, ">= 12, missed"),
        (1.3, {"at_most": 1.3}, "<= 1.3, reached"),
        (1.31, {"at_most": 1.3}, "<= 1.3, missed"),
        (None, {"at_least": 2.0}, ">= 2, unknown"),
        (5.0, {}, "-"),
    ],
)
def test_goals_are_reached_or_missed(
    value: float | None, goal: dict[str, float], words: str
) -> None:
    assert table.verdict(value, **goal) == words


def test_errors_are_relative_to_the_update() -> None:
    update = np.array([3e-6, 4e-6], dtype=np.float32)
    assert table.relative_error(update, update) == 0.0
    assert table.relative_error(2 * update, update) == pytest.approx(1.0)
    assert math.isinf(table.relative_error(np.array([math.nan, 0.0]), update))
    assert math.isinf(table.relative_error(np.zeros(3), update))


def test_an_error_above_the_limit_is_a_mismatch() -> None:
    assert table.agreement({"check": {"error": 1e-6}}) == "1.0e-06"
    assert table.agreement({"check": {"error": 1e-3}}) == "MISMATCH"
    assert table.agreement({"check": {"error": None}}) == "FAILED"
    assert table.agreement({}) == "-"
    assert table.mismatched({"check": {"error": math.inf}})
    assert not table.mismatched({"check": {"error": 2e-4, "peer_error": 3e-4}})
    assert table.mismatched({"check": {"error": 7e-4, "peer_error": 3e-4}})


def test_the_tables_fit_and_hide_no_failure() -> None:
    entry = {
        "peer_name": "Opacus",
        "goal": 2.0,
        "ratio": None,
        "ours": {"median": 1234.5, "peak_mib": 12345.6},
        "peer": {"median": None, "failure": "it ended"},
        "check": {"error": 1e-3},
        "plain": {"median": 1000.0, "peak_mib": 2000.0},
        "plain_ratio": 1.2345,
        "plain_goal": 1.3,
    }
    sizes = [
        {
            "population": 100_000,
            "seconds": [1.0, 2.0],
            "build": 1.0,
            "failure": "not done after 600 s",
        }
    ]
    out = io.StringIO()
    console = Console(file=out, width=table.WIDTH)
    console.print(table.comparison({"W2-flower": entry}))
    console.print(table.growth(sizes))
    text = out.getvalue()
    assert "FAILED" in text
    assert "MISMATCH" in text
    assert "see below" in text
    assert max(len(line) for line in text.splitlines()) <= table.WIDTH


def test_every_workload_has_a_miniature() -> None:
    assert set(WORKLOADS) < set(KEYS)
    for key, whole in WORKLOADS.items():
        small = workload(key, small=True)
        assert small.clients <= whole.clients
        assert small.records <= whole.records
        assert (small.steps is None) == (whole.steps is None)
