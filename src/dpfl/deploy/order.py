"""In which order a study's releases follow each other.

Rounds count up from the releases before round one. A measurement has a number below all of them,
and comes after the round that it measures. A site keeps its last answer only: whatever stands at
or before it is never computed again.
"""

from dpfl.rounds import Agreement
from dpfl.runs.deployment import Offer


def place(study: Offer, agreement: Agreement, round_: int) -> tuple[int, int]:
    """Where a round, release or measurement of the plan stands: what comes later is larger.

    No two of them stand at the same place.
    """
    if round_ not in agreement.measurements:
        return round_, 0
    assert study.accounted is not None
    number = round_ - agreement.measurement(0)
    return (number + 1) * study.accounted.every - 1, 1


def following(study: Offer, agreement: Agreement, round_: int) -> tuple[int, ...]:
    """What a site may be asked next: the measurement that is due, if one is, and the next round.

    Behind the last round that is one which is not planned.
    """
    metric, (last, measured) = study.accounted_metric(), place(study, agreement, round_)
    if metric is not None and not measured and metric.is_due(last + 1):
        return agreement.measurement((last + 1) // metric.every - 1), last + 1
    return (last + 1,)
