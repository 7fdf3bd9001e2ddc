"""What a server writes down of a study: the noise that a published sum really carries, and who was
missed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dpfl.rounds import Agreement, Plan


def effective_noise(agreement: Agreement, plan: Plan, told: Mapping[str, Any]) -> dict[str, Any]:
    """How much noise the published sum carries, given who arrived."""
    strategy, arrived = agreement.strategy, len(told["arrived"]) - len(told["not_finite"])
    found: dict[str, Any] = {"arrived": arrived, "drawn": len(plan.cohort)}
    if strategy.noise_multiplier is None:
        return {**found, "made_by": "each site, within its own budget"}
    if strategy.central_noise is not None:
        return {**found, "made_by": "the server", "noise_multiplier": strategy.noise_multiplier}
    shares = max(1, len(plan.cohort) - strategy.tolerated_dropouts)
    distributed = any(stage.shares_noise for stage in strategy.stages)
    noisy = (
        len(plan.cohort) if agreement.amplified else max(arrived, 0)
    )  # the server stands in for the others' shares
    factor = math.sqrt(noisy / shares) if distributed else math.sqrt(noisy)
    return {
        **found,
        "made_by": "shares of the sites",
        "noise_multiplier": strategy.noise_multiplier * factor,
    }


def missed_rounds(history: list[dict[str, Any]]) -> dict[str, int]:
    """How many rounds each site was drawn for and missed."""
    counts: dict[str, int] = {}
    for line in history:
        for site in line.get("missing", {}):
            counts[site] = counts.get(site, 0) + 1
    return counts
