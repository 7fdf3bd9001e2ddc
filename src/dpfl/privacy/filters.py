"""Privacy filters: what a budget admits when a study may be chosen by the outputs of earlier ones.

Composing the privacy losses that were realised is not a filter: an adversary who picks the second
study by the output of the first exceeds an epsilon of 1.0 with two stages and four options. Inside
one plan, whose noise, rates and counts are fixed beforehand, the privacy loss distribution (PLD) of
the whole plan is the price. Across plans, one of these rules holds, fixed when the ledger is made.

``allotments``
    Each plan has its own epsilon and delta, the PLD price of the whole plan, taken when the plan is
    committed and never given back; the sums stay within the budget. (Basic composition, which is a
    filter: Rogers, Roth, Ullman, Vadhan, NeurIPS 2016.)
``renyi``
    Each of the orders a, fixed beforehand, has a share delta_a of delta that follows from the
    budget alone. A study pays release by release, while for one order

        sum rho(a) <= epsilon - log((a - 1) / a) + (log(delta_a) + log a) / (a - 1).

    (Feldman and Zrnic, NeurIPS 2021.)
``gaussian``
    Unsampled Gaussians only, release by release: sum of steps / z^2 (four times that under
    replace-one) <= mu(epsilon, delta)^2, which is exact. (Smith and Thakurta 2022; Koskela,
    Tobaben, Honkela 2023.)

The last two keep a fixed part of delta (``RESERVED``) and an epsilon of 1e-7 for bounds that may
fail and for the noise sampler: "delta" and "epsilon" above are what is left of the budget's.

*Formal guarantees.* All that a filter admits, however chosen, is (epsilon, delta)-DP together.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, Literal, TypeVar

from dpfl.core.checks import check, one_of
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.types import Adjacency
from dpfl.privacy.accountant import (
    SAMPLER_EPSILON,
    Spend,
    gaussian_epsilon,
    gaussian_mu,
    quick_epsilon,
    sampler_delta,
    spend,
)
from dpfl.privacy.budget_check import largest_that_fits, most_releases
from dpfl.privacy.costs import PrivacyCost
from dpfl.privacy.events import Event
from dpfl.privacy.renyi import ORDERS, RESERVED, renyi_admits, renyi_costs, renyi_epsilon

FilterName = Literal["allotments", "renyi", "gaussian"]

# Most noise values that a ledger with a filter covers: 10,000 rounds of a million parameters.
MOST_FILTERED = 10**10
# Relative: sums of floats are compared on the safe side; shares of one delta may add up to it.
_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class Portion:
    """What one plan contributes: its cost, how many rounds count, its share of delta.

    Releases before round one always count in full.
    """

    cost: PrivacyCost
    count: int
    delta: float | None = None

    def share(self, delta: float) -> float:
        """Return the plan's own share of delta, else all of it."""
        return delta if self.delta is None else self.delta

    def events(self) -> list[tuple[Event, int]]:
        """Return every event of the portion with its number of steps."""
        once = [(event, event.steps) for events in self.cost.before for event in events]
        return once + [(event, event.steps * self.count) for event in self.cost.events]


Portions = Sequence[Portion]
Used = TypeVar("Used")


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A budget's epsilon and delta, and the adjacency in which it is read."""

    epsilon: float
    delta: float
    adjacency: Adjacency


@lru_cache(maxsize=4096)
def plan_price(cost: PrivacyCost, count: int, delta: float, adjacency: Adjacency) -> Spend:
    """Price a whole plan: the PLD of its releases and ``count`` rounds, at its own delta."""
    return spend(cost.times(count), delta, adjacency=adjacency)


class Allotments:
    """Whole plans, each at its own epsilon and delta, added up: a plan counts once committed."""

    name: FilterName = "allotments"
    reserves = True

    def check(self, account: str, cost: PrivacyCost) -> None:
        """Everything that an accountant can read has a price."""

    def admits(self, portions: Portions, limit: Limit) -> bool:
        """Whether the plans' epsilons and deltas add up to no more than the limit's."""
        return self._left(portions, limit) >= 0

    def most(self, portions: Portions, new: Portion, limit: Limit) -> int:
        """Return the largest count up to ``new.count`` that is admitted on top of the portions.

        It is searched for on a coarse upper bound, and confirmed by the price itself.
        """
        share = new.share(limit.delta)
        left = self._left(portions, limit, share)

        def bound(count: int) -> float:
            """Bound epsilon: coarsely where that decides, else by the price."""
            quick = quick_epsilon(new.cost.times(count), share, adjacency=limit.adjacency)
            if not left < quick <= 1.02 * left:
                return quick
            return plan_price(new.cost, count, share, limit.adjacency).epsilon

        found = most_releases(bound, left, new.count)
        while found and not self.admits([*portions, replace(new, count=found)], limit):
            found -= 1
        return found

    def spent(self, portions: Portions, delta: float, adjacency: Adjacency) -> Spend:
        """Add up the plans' prices, each at its own share of delta, else at ``delta``."""
        prices = self._prices(portions, delta, adjacency)
        if len(prices) == 1:
            return prices[0]
        labels = " or ".join(dict.fromkeys(price.accountant for price in prices))
        label = f"{labels} per study, added up" if prices else "PLD"
        infinite = (price.accountant for price in prices if math.isinf(price.epsilon))
        return Spend(
            epsilon=math.fsum(price.epsilon for price in prices),
            delta=math.fsum(one.share(delta) for one in portions) or delta,
            adjacency=adjacency,
            accountant=next(infinite, label),
        )

    def _prices(self, portions: Portions, delta: float, adjacency: Adjacency) -> list[Spend]:
        return [plan_price(one.cost, one.count, one.share(delta), adjacency) for one in portions]

    def _left(self, portions: Portions, limit: Limit, more: float = 0.0) -> float:
        """Epsilon that is left; minus infinity if the deltas, and ``more``, exceed the limit's."""
        shares = [more, *(one.share(limit.delta) for one in portions)]
        if math.fsum(shares) > limit.delta * (1 + _ROUNDING):
            return -math.inf
        prices = self._prices(portions, limit.delta, limit.adjacency)
        return limit.epsilon - math.fsum(price.epsilon for price in prices)


@dataclass(frozen=True)
class PayAsYouGo(Generic[Used]):
    """A filter under which a plan pays release by release.

    ``used`` adds up what portions use, ``holds`` says whether it stays within an epsilon and a
    delta, ``epsilon`` what it amounts to at a delta. ``reserved`` is the part of delta that is kept
    for bounds that may fail and for the noise sampler; ``unsampled`` admits no samples.
    """

    name: FilterName
    label: str
    reserved: float
    used: Callable[[Portions, Adjacency], Used]
    holds: Callable[[Used, float, float], bool]
    epsilon: Callable[[Used, float], float]
    unsampled: bool = False
    reserves = False

    def check(self, account: str, cost: PrivacyCost) -> None:
        """Refuse a privacy cost that the filter has no proof for."""
        plain = all(event.sampling_rate == 1 and event.failure == 0 for event in cost.times(1))
        check(
            plain or not self.unsampled,
            f"account '{account}'",
            "a release is sampled, or its bound may fail: this filter is for neither",
            "make a ledger with the filter renyi or allotments",
            PrivacyRefusal,
        )

    def admits(self, portions: Portions, limit: Limit) -> bool:
        """Whether everything together stays within the limit."""
        top, delta = self._beside_reserve(portions, limit.delta)
        epsilon = min(limit.epsilon, top) - SAMPLER_EPSILON
        return top > -math.inf and self.holds(self.used(portions, limit.adjacency), epsilon, delta)

    def most(self, portions: Portions, new: Portion, limit: Limit) -> int:
        """Return the largest count up to ``new.count`` that is admitted on top of the portions."""

        def fits(count: int) -> bool:
            return self.admits([*portions, replace(new, count=count)], limit)

        return largest_that_fits(fits, new.count)

    def spent(self, portions: Portions, delta: float, adjacency: Adjacency) -> Spend:
        """Return the epsilon of the summed costs, with the noise sampler's part."""
        value = 0.0
        if any(portion.count or portion.cost.before for portion in portions):
            ceiling, usable = self._beside_reserve(portions, delta)
            value = self.epsilon(self.used(portions, adjacency), usable) + SAMPLER_EPSILON
            value = value if value <= ceiling else math.inf
        return Spend(epsilon=value, delta=delta, adjacency=adjacency, accountant=self.label)

    def _beside_reserve(self, portions: Portions, delta: float) -> tuple[float, float]:
        """The largest epsilon, and the delta, that can be used beside the reserve.

        Above that epsilon the sampler would use up its part of delta: a budget with a larger one is
        held to it. It depends on public numbers alone, as everything fixed beforehand, and is minus
        infinity where failure probabilities or the number of noise values exceed the reserve.
        """
        events = [pair for portion in portions for pair in portion.events()]
        failure = math.fsum(event.failure * steps for event, steps in events)
        numbers = sum(event.numbers * steps for event, steps in events)
        half = self.reserved * delta / 2
        within = numbers <= MOST_FILTERED and failure <= half
        ceiling = math.log(half / sampler_delta(MOST_FILTERED, 0.0)) if within else -math.inf
        # The sampler stretches delta by exp(5e-8).
        return ceiling, delta * (1 - self.reserved) * (1 - 1e-7)


def _mu_squared(portions: Portions, adjacency: Adjacency) -> float:
    """Sum steps / z^2, times four under replace-one, rounded on the safe side."""
    factor = 4.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
    events = [pair for portion in portions for pair in portion.events() if pair[1]]
    if any(event.noise_multiplier**2 == 0 for event, _ in events):
        return math.inf
    terms = (steps / event.noise_multiplier**2 for event, steps in events)
    return factor * math.fsum(terms) * (1 + _ROUNDING)


def _renyi_costs(portions: Portions, adjacency: Adjacency) -> Sequence[float]:
    """Sum the Renyi costs at each order, rounded on the safe side."""
    rows = [(one.count, one.cost.events) for one in portions if one.count]
    rows += [(1, events) for one in portions for events in one.cost.before]
    priced = [(count, renyi_costs(events, adjacency)) for count, events in rows]
    sums = (math.fsum(count * costs[i] for count, costs in priced) for i in range(len(ORDERS)))
    return [total * (1 + _ROUNDING) for total in sums]


_RENYI = PayAsYouGo("renyi", "RDP filter", RESERVED, _renyi_costs, renyi_admits, renyi_epsilon)
_GAUSSIAN = PayAsYouGo(
    "gaussian",
    "Gaussian filter",
    1e-3,
    _mu_squared,
    lambda used, epsilon, delta: epsilon > 0 and used <= gaussian_mu(epsilon, delta) ** 2,
    lambda used, delta: gaussian_epsilon(math.sqrt(used), delta),
    unsampled=True,
)
Filter = Allotments | PayAsYouGo[Any]
FILTERS: dict[str, Filter] = {rule.name: rule for rule in (Allotments(), _RENYI, _GAUSSIAN)}


def filter_named(name: str) -> Filter:
    """Return the filter of this name.

    >>> filter_named("renyi").reserves
    False
    """
    one_of("ledger", FILTERS, filter=name)
    return FILTERS[name]
