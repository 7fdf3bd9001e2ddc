"""What is claimed, as a curve that measured errors can refute.

A claim is the history that a ledger is charged for. Its trade-off curve says how rarely an
adversary with a given rate of false alarms misses a unit that is there. To turn a refutation into a
number, the claim is stretched: the same history with all noise divided by a factor. A factor above
1 that the evidence refutes refutes the claim. The epsilon of the largest refuted factor is a lower
bound for mechanisms whose noise is the claim's, divided by some factor.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from scipy.special import ndtr, ndtri

from dpfl.core.promise import Promise
from dpfl.core.types import Adjacency
from dpfl.privacy.accountant import spend
from dpfl.privacy.events import History, merged
from dpfl.privacy.meaning import epsilon_curve, least_misses

_DELTAS = [10**-power for power in (9, 7, 6, 5, 4, 3, 2.5, 2, 1.5, 1, 0.6, 0.3, 0.1)]
_FACTORS = 2.0**-8, 2.0**8
_BISECTIONS = 14


class Curve(Protocol):
    """A trade-off curve f, symmetric, convex and falling."""

    def misses(self, alarms: float) -> float:
        """The least rate of misses at a rate of false alarms."""
        ...

    def inverse_blow_up(self, share: float) -> float:
        """The least x with 1 - f(x) >= ``share``: how likely an event is at least in one world, if
        it has the probability ``share`` in the other.
        """
        ...


@dataclass(frozen=True)
class GaussianCurve:
    """The trade-off of a Gaussian mechanism: f(a) = Phi(Phi^-1(1 - a) - mu).

    >>> round(GaussianCurve(1.0).misses(0.05), 4), round(GaussianCurve(1.0).inverse_blow_up(0.5), 4)
    (0.7405, 0.1587)
    """

    mu: float

    def misses(self, alarms: float) -> float:
        """The least rate of misses, in closed form."""
        return float(ndtr(-ndtri(alarms) - self.mu))

    def inverse_blow_up(self, share: float) -> float:
        """Phi(Phi^-1(share) - mu)."""
        return float(ndtr(ndtri(share) - self.mu)) if share > 0 else 0.0


@dataclass(frozen=True)
class PointsCurve:
    """The trade-off that pairs (delta, epsilon) guarantee together."""

    pairs: Sequence[tuple[float, float]]

    def misses(self, alarms: float) -> float:
        """The best of all pairs."""
        return least_misses(alarms, self.pairs)

    def inverse_blow_up(self, share: float) -> float:
        """The best of both lines of all pairs: share <= e^epsilon x + delta, and its mirror."""
        lines = [0.0]
        for delta, epsilon in self.pairs:
            growth = math.exp(min(epsilon, 700.0))
            lines += [(share - delta) / growth, 1 - delta - growth * (1 - share)]
        return max(lines)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a client is charged for all releases and rounds together, against one adversary.

    ``history`` is read under ``adjacency``, at ``delta``; ``promise`` says whose unit it is about
    and against whom it holds.
    """

    history: History
    adjacency: Adjacency
    delta: float
    promise: Promise

    def stretched(self, factor: float) -> History:
        """The history with all noise divided by a ``factor``."""
        return merged(
            replace(event, noise_multiplier=event.noise_multiplier / factor)
            for event in self.history
        )

    def epsilon(self, factor: float = 1.0) -> float:
        """The epsilon that is claimed, or that of a stretched claim."""
        if factor <= _FACTORS[0]:
            return 0.0
        events = self.stretched(factor)
        return spend(events, self.delta, adjacency=self.adjacency).epsilon

    @property
    def finite(self) -> bool:
        """Whether anything is claimed at all."""
        return math.isfinite(self.epsilon())

    def curve(self, factor: float = 1.0) -> Curve:
        """The trade-off curve of the claim, or of a stretched one."""
        events = [event for event in self.stretched(factor) if event.sampling_rate > 0]
        if all(event.sampling_rate == 1 and event.failure == 0 for event in events):
            total = math.fsum(event.steps / event.noise_multiplier**2 for event in events)
            replaced = self.adjacency is Adjacency.REPLACE_ONE
            return GaussianCurve((2.0 if replaced else 1.0) * math.sqrt(total))
        return PointsCurve(epsilon_curve(events, self.adjacency, _DELTAS))

    def largest_refuted(self, refutes: Callable[[Curve], bool]) -> float:
        """The largest factor whose curve the evidence ``refutes``; 0 where it refutes none."""
        low, high = _FACTORS
        if not refutes(self.curve(low)):
            return 0.0
        if refutes(self.curve(high)):
            return high
        for _ in range(_BISECTIONS):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if refutes(self.curve(middle)) else (low, middle)
        return low
