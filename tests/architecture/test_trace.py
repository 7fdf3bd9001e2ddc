"""What is built in a run: strategies, models, ledgers are made once and handed on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tools import trace_run

LIMITS = json.loads((Path(__file__).parents[2] / "tools" / "trace_limits.json").read_text())


@pytest.mark.parametrize("scene", LIMITS)
def test_no_count_exceeds_its_limit(scene: str) -> None:
    counts = trace_run.played(scene)
    assert counts["Strategy objects"] >= 1
    assert not trace_run.excesses(counts, LIMITS[scene])


def test_rough_counts_have_slack_and_others_none() -> None:
    limits = {"calls": 1000, "Strategy objects": 5, "seconds": 1.0}
    assert not trace_run.excesses({"calls": 1050, "Strategy objects": 5, "seconds": 9.0}, limits)
    sentences = trace_run.excesses({"calls": 1051, "Strategy objects": 6}, limits)
    assert sentences == ["calls: 1,051 exceeds 1,050", "Strategy objects: 6 exceeds 5"]
