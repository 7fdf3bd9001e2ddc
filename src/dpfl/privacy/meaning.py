"""What an epsilon means for people: for a group, for someone at several sites, for an attacker.

*Formal guarantees.* Every epsilon is an upper bound and every error rate a lower bound, for the
unit, adjacency and adversary of what is given in. Histories must be plans that were fixed before
their first release; what was chosen by looking at outputs is covered by statements.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from dpfl.core.checks import check, whole_number
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.types import Adjacency
from dpfl.privacy.accountant import SMALLEST_DELTA, check_question, gaussian_log_delta, spend
from dpfl.privacy.events import Event, merged
from dpfl.privacy.statement import Statement

_BISECTIONS = 24
_LARGEST_EXPONENT = 700.0
_ROUNDING = 1e-14
# Where the trade-off of sampled releases is looked at: many small deltas, and some large ones.
_DELTAS = [10 ** (-12 + i / 6) for i in range(60)] + [0.01 * i for i in range(1, 100)]


class Guarantee(NamedTuple):
    """An epsilon and a delta, with the unit, the adjacency and the adversary they are about."""

    unit: str
    adjacency: str
    observer: str
    epsilon: float
    delta: float


def group_epsilon(history: Iterable[Event], k: int, delta: float, *, adjacency: Adjacency) -> float:
    """Upper bound on epsilon for a group of ``k`` units, such as a person with k records.

    A group of k moves a clipped sum k times as far as one unit, and its bounds fail k times as
    often: noise multipliers are divided by k. That is exact without sampling, and holds with it
    (given who is drawn, the sums are no further apart). Samples are also covered by the definition:
    an epsilon at a smaller delta' for one unit gives, for k of them,

        k epsilon    at    delta' (1 + e^epsilon + ... + e^((k - 1) epsilon)).

    The smaller of the two bounds is returned.

    >>> plan = (Event(noise_multiplier=10.0, steps=5),)
    >>> [round(group_epsilon(plan, k, 1e-5, adjacency=Adjacency.ZERO_OUT), 2) for k in (1, 2, 4)]
    [0.82, 1.76, 3.85]
    """
    k = whole_number("group", "k", k)
    events = merged(history)
    check_question(events, delta, adjacency, None)
    if k == 1:
        return spend(events, delta, adjacency=adjacency).epsilon
    moved = [
        Event(
            noise_multiplier=event.noise_multiplier / k * (1 - _ROUNDING),
            steps=event.steps,
            failure=min(1.0, k * event.failure),
            numbers=event.numbers,
        )
        for event in events
        if event.sampling_rate > 0
    ]
    together = spend(moved, delta, adjacency=adjacency).epsilon
    if all(event.sampling_rate == 1 for event in events):
        return together

    def single(share: float) -> float:
        return spend(events, share, adjacency=adjacency).epsilon

    return min(together, _by_definition(single, k, delta))


def _by_definition(single: Callable[[float], float], k: int, delta: float) -> float:
    """k epsilon(delta') at the largest delta' that is found to be small enough for a group."""

    def fits(share: float) -> bool:
        return group_delta(single(share), share, k) <= delta

    if not fits(SMALLEST_DELTA):
        return math.inf
    low = math.log(SMALLEST_DELTA)
    high = math.log(delta)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(math.exp(middle)) else (low, middle)
    return k * single(max(math.exp(low), SMALLEST_DELTA)) * (1 + _ROUNDING)


def group_delta(epsilon: float, delta: float, k: int) -> float:
    """Return the delta at which ``k`` units have k times ``epsilon``, from that of one unit.

    >>> round(group_delta(0.0, 1e-6, 3), 9)
    3e-06
    """
    if k * epsilon > _LARGEST_EXPONENT:
        return 1.0
    return min(1.0, delta * math.fsum(math.exp(j * epsilon) for j in range(k)) * (1 + _ROUNDING))


def sites_epsilon(
    histories: Iterable[Iterable[Event]], delta: float, *, adjacency: Adjacency
) -> float:
    """Upper bound on epsilon for someone with one unit at each of several sites.

    Each history is a site's plan. All plans must have been fixed before the first release of any;
    otherwise use :func:`sites_guarantee`.

    >>> plan = (Event(noise_multiplier=10.0, steps=5),)
    >>> round(sites_epsilon([plan, plan], 1e-5, adjacency=Adjacency.ZERO_OUT), 2)
    1.2
    """
    events = [event for history in histories for event in history]
    return spend(merged(events), delta, adjacency=adjacency).epsilon


def sites_guarantee(statements: Sequence[Statement]) -> Guarantee:
    """Add up the statements of several sites for someone who is at all of them.

    Basic composition: epsilons and deltas add up, whatever was chosen by looking at outputs. The
    statements must be about the same unit, adjacency and adversary. Where a site cannot state a
    delta, the epsilon is infinite.
    """
    kinds = {(line.unit, line.adjacency, line.observer) for line in statements}
    check(
        len(kinds) == 1,
        "sites",
        f"statements of {len(kinds)} kinds (unit, adjacency, adversary) cannot be added up",
        "give statements of one kind",
        PrivacyRefusal,
    )
    known = [line.delta for line in statements if line.delta is not None]
    if len(known) < len(statements):
        return Guarantee(*kinds.pop(), math.inf, 1.0)
    epsilon = math.fsum(line.guarantee for line in statements)
    return Guarantee(*kinds.pop(), epsilon, min(1.0, math.fsum(known)))


def epsilon_curve(
    history: Iterable[Event], adjacency: Adjacency, deltas: Iterable[float]
) -> list[tuple[float, float]]:
    """Return (delta, epsilon) for each delta, in rising order; every pair holds.

    >>> curve = epsilon_curve((Event(noise_multiplier=2.0),), Adjacency.ZERO_OUT, [1e-6, 1e-3])
    >>> [(delta, round(epsilon, 2)) for delta, epsilon in curve]
    [(1e-06, 2.25), (0.001, 1.35)]
    """
    rising = sorted(deltas)
    events = merged(history)
    epsilons = (spend(events, delta, adjacency=adjacency).epsilon for delta in rising)
    # What holds at a smaller delta holds at a larger one.
    return list(zip(rising, itertools.accumulate(epsilons, min), strict=True))


def trade_off_curve(
    history: Iterable[Event], adjacency: Adjacency, points: Iterable[float]
) -> list[tuple[float, float]]:
    """Return (a, b): an attacker with false positive rate a has at least false negative rate b.

    The attacker decides from the releases whether one unit was there. ``points`` are the rates a,
    from 0 to 1. Each pair (delta, epsilon) that holds gives two lines,

        b >= 1 - delta - e^epsilon a    and    b >= e^-epsilon (1 - delta - a),

    and b is the largest of them. Without sampling the deltas are those of the tangents at the
    points, so that b is the exact trade-off of the Gaussian mechanism up to rounding.

    >>> curve = trade_off_curve((Event(noise_multiplier=1.0),), Adjacency.ZERO_OUT, [0.05, 0.5])
    >>> [(a, round(b, 4)) for a, b in curve]
    [(0.05, 0.7405), (0.5, 0.1587)]
    """
    rates = sorted(points)
    events = merged(history)
    check(
        all(0 <= rate <= 1 for rate in rates),
        "trade-off",
        f"points {rates} are not all rates",
        "give numbers from 0 to 1",
    )
    plain = all(event.sampling_rate == 1 and event.noise_multiplier > 0 for event in events)
    deltas = _tangents(events, adjacency, rates) if events and plain else _DELTAS
    pairs = epsilon_curve(events, adjacency, deltas)
    return [(rate, least_misses(rate, pairs)) for rate in rates]


def least_misses(rate: float, pairs: Sequence[tuple[float, float]]) -> float:
    """Return the least rate of misses at a rate of false alarms, by guarantees (delta, epsilon)."""
    lines = [0.0]
    for delta, epsilon in pairs:
        if epsilon < _LARGEST_EXPONENT:  # others say nothing
            growth = math.exp(epsilon)
            lines += [1 - delta - growth * rate, (1 - delta - rate) / growth]
    return max(0.0, max(lines) - _ROUNDING)


def _tangents(events: Sequence[Event], adjacency: Adjacency, rates: Sequence[float]) -> list[float]:
    """The deltas at which the tangents of a Gaussian trade-off touch it at these rates."""
    from scipy.special import ndtri

    factor = 2.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
    terms = (event.steps / event.noise_multiplier**2 for event in events)
    mu = factor * math.sqrt(math.fsum(terms))
    failure = sum(e.failure * e.steps for e in events)
    inside = [float(ndtri(1 - rate)) for rate in rates if 0 < rate < 1]
    slopes = [abs(mu * place - mu**2 / 2) for place in inside]
    deltas = [failure + math.exp(gaussian_log_delta(slope, mu)) for slope in slopes]
    small = [10.0**-digits for digits in range(2, 13)]
    return [*small, *(delta for delta in deltas if SMALLEST_DELTA < delta < 1)]
