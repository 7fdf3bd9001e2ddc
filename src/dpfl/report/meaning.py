"""What an epsilon means, in numbers: for a person with several records, at other deltas, and as the
errors of an adversary who guesses.

Everything follows from points (epsilon, delta) at which a guarantee holds, by the formulas of
:mod:`dpfl.privacy.meaning`.
"""

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dpfl.core.errors import DpflError
from dpfl.core.types import Observer, Promise
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.meaning import group_delta, least_misses
from dpfl.privacy.statement import Statement, statement
from dpfl.report.charts import Chart, Series
from dpfl.runs.result import promise_in

DELTAS = tuple(10.0**-power for power in range(2, 13))
_SMALL_ALARMS = {10.0**-power for power in (4, 3.5, 3, 2.5)}
_ALARMS = sorted({number / 100 for number in range(101)} | _SMALL_ALARMS)


class Point(NamedTuple):
    """A guarantee: epsilon at a delta."""

    delta: float
    epsilon: float


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What one account's guarantee means; ``name`` identifies it on its page.

    ``point`` is what is stated, ``curve`` the guarantees at other deltas (``point`` alone where
    they are not known), from the largest delta to the smallest.
    """

    name: str
    account: str
    promise: Promise
    point: Point
    curve: Sequence[Point]

    def for_group(self, size: int) -> float:
        """Epsilon for a person with ``size`` units at the stated delta, infinite if unknown.

        Of the points whose delta for the group does not exceed the stated one, the best counts.
        """
        if size == 1:
            return self.point.epsilon
        limit = self.point.delta
        fitting = [p.epsilon for p in self.curve if group_delta(p.epsilon, p.delta, size) <= limit]
        return size * min(fitting, default=math.inf)

    def missed(self, alarm: float) -> float:
        """The least rate of misses at a rate of false alarms, by the best of all points."""
        return least_misses(alarm, self.curve)

    @property
    def charts(self) -> list[Chart]:
        """Epsilon over delta, where it is known at several, and the trade-off curve.

        The latter is the supremum of what all points guarantee.
        """
        deltas, epsilons = ([*column] for column in zip(*self.curve, strict=True))
        stated = Series(name="stated", x=[self.point.delta], y=[self.point.epsilon], kind="rings")
        over_delta = [stated, Series(name="guarantee", x=deltas, y=epsilons)]
        trade_off = [
            Series(name="guarantee", x=_ALARMS, y=[self.missed(alarm) for alarm in _ALARMS]),
            Series(name="nothing learned", x=[0.0, 1.0], y=[1.0, 0.0], kind="dashes"),
        ]
        both = {"epsilon-over-delta": over_delta, "trade-off": trade_off}
        charts = [Chart.of(kind, series, **vars(self)) for kind, series in both.items()]
        return charts if len(self.curve) > 1 else charts[1:]


def meaning_of(line: Statement, name: str, ledger: Ledger | None = None) -> Meaning | None:
    """What a statement means, under a name for its page; None where it bounds nothing.

    With the ledger that it was read from, guarantees at other deltas are priced as well. Where
    studies are charged as they go, only the budget is guaranteed, and only at its own delta.
    """
    if line.delta is None or not math.isfinite(line.guarantee) or not line.studies:
        return None
    point = Point(epsilon=line.guarantee, delta=line.delta)
    curve = {point.delta: point.epsilon}
    if ledger is not None and line.filter == "allotments":
        for delta in DELTAS:
            other = statement(ledger, line.account, Observer(line.observer), delta)
            if other is not None and math.isfinite(other.epsilon):
                curve.setdefault(delta, other.epsilon)
    promise = promise_in(vars(line))
    ordered = [Point(*pair) for pair in sorted(curve.items(), reverse=True)]
    return Meaning(name=name, account=line.account, promise=promise, point=point, curve=ordered)


def largest_of(lines: Sequence[Statement]) -> Statement | None:
    """The statement with the largest finite epsilon."""
    finite = [line for line in lines if math.isfinite(line.epsilon) and line.delta is not None]
    return max(finite, key=lambda line: line.guarantee, default=None)


def meaning_in_run(lines: Sequence[Statement], path: Path) -> Meaning | None:
    """What the largest epsilon of a run means.

    ``lines`` are the statements of its summary, ``path`` its ledger. Where the ledger is missing or
    cannot be read, only what is stated is known.
    """
    line = largest_of(lines)
    if line is None:
        return None
    try:
        with closing(Ledger.open(path, read_only=True)) as ledger:
            return meaning_of(line, "run", ledger)
    except DpflError:
        return meaning_of(line, "run")
