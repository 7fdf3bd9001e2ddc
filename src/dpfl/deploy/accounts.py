"""What a server writes down of a study: the noise that a published sum really carries, and who was
missed.
"""

from __future__ import annotations

import math
from collections import Counter

from dpfl.rounds import Agreement, Plan
from dpfl.rounds.record import EffectiveNoise, RoundRecord


def effective_noise(agreement: Agreement, plan: Plan, record: RoundRecord) -> EffectiveNoise:
    """How much noise the published sum carries, given who arrived."""
    strategy, arrived = agreement.strategy, len(record.arrived) - len(record.not_finite)
    count = {"arrived": arrived, "drawn": len(plan.cohort)}
    multiplier = strategy.noise_multiplier
    if multiplier is None:
        return EffectiveNoise(made_by="each site, within its own budget", **count)
    if strategy.central_noise is not None:
        return EffectiveNoise(made_by="the server", noise_multiplier=multiplier, **count)
    shares = max(1, len(plan.cohort) - strategy.tolerated_dropouts)
    distributed = any(stage.shares_noise for stage in strategy.stages)
    # The server stands in for the others' shares where the draw is counted on.
    noisy = len(plan.cohort) if agreement.amplified else max(arrived, 0)
    factor = math.sqrt(noisy / shares) if distributed else math.sqrt(noisy)
    return EffectiveNoise(
        made_by="shares of the sites", noise_multiplier=multiplier * factor, **count
    )


def missed_rounds(history: list[RoundRecord]) -> dict[str, int]:
    """How many rounds each site was drawn for and missed."""
    return dict(Counter(site for record in history for site in record.missing))
