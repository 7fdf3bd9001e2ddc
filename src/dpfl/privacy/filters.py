"""Privacy filters: what a budget admits when a study may be chosen by the outputs of earlier ones.

Composing the privacy losses that were realised is not a filter: an adversary who picks the second
study by the output of the first exceeds an epsilon of 1.0 with two stages and four options. Inside
one plan, whose noise, rates and counts are fixed beforehand, the privacy loss distribution (PLD) of
the whole plan is the price. Across plans, one of these rules holds, fixed when the ledger is made.

``allotments``
    Each plan k has its own (epsilon_k, delta_k), the PLD price of the whole plan; the sums stay
    within the budget. The whole price is taken when the plan is committed, and nothing is given
    back. (Basic composition, which is a filter: Rogers, Roth, Ullman, Vadhan, NeurIPS 2016.)
``renyi``
    Each of the orders a, fixed beforehand, has a share delta_a of delta that follows from the
    budget alone. A release is admitted while for one order

        sum rho(a) <= epsilon - log((a - 1) / a) + (log(delta_a) + log a) / (a - 1).

    A study pays release by release. (Feldman and Zrnic, NeurIPS 2021.)
``gaussian``
    Unsampled Gaussians only: sum of steps / z^2 (four times that under replace-one) <= mu(epsilon,
    delta)^2, which is exact. A study pays release by release. (Smith and Thakurta 2022; Koskela,
    Tobaben, Honkela 2023.)

Under the last two a fixed part of delta (``RESERVED``) and an epsilon of 1e-7 are kept for bounds
that may fail and for the noise sampler, so "delta" and "epsilon" above are what is left of the
budget's.

*Formal guarantees.* Whatever is chosen adaptively, all releases that a filter admits are (epsilon,
delta)-DP together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, Protocol

from dpfl.core.checks import check
from dpfl.core.errors import PrivacyRefusal, unknown_name
from dpfl.core.types import Adjacency
from dpfl.privacy.accountant import SAMPLER_EPSILON, Spend, quick_epsilon, sampler_delta, spend
from dpfl.privacy.budget_check import largest_that_fits, most_releases
from dpfl.privacy.costs import PrivacyCost
from dpfl.privacy.events import Event, merged
from dpfl.privacy.gaussian import gaussian_epsilon, gaussian_mu
from dpfl.privacy.renyi import ORDERS, RESERVED, renyi_admits, renyi_costs, renyi_epsilon

FilterName = Literal["allotments", "renyi", "gaussian"]

# Most noise values that a ledger with a filter covers: some ten thousand rounds of a model of a
# million parameters.
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

    def events(self) -> list[tuple[Event, int]]:
        """Return every event of the portion with its number of steps."""
        once = [(event, event.steps) for events in self.cost.before for event in events]
        return once + [(event, event.steps * self.count) for event in self.cost.events]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A budget's epsilon and delta, and the adjacency in which it is read."""

    epsilon: float
    delta: float
    adjacency: Adjacency


class Filter(Protocol):
    """A rule across plans.

    ``reserves`` says that a plan counts as a whole once committed, else release by release.
    """

    name: FilterName
    reserves: bool

    def check(self, account: str, cost: PrivacyCost) -> None:
        """Refuse a privacy cost that the filter has no proof for."""
        ...

    def admits(self, portions: Sequence[Portion], limit: Limit) -> bool:
        """Whether everything together stays within the limit."""
        ...

    def most(self, portions: Sequence[Portion], new: Portion, limit: Limit) -> int:
        """Return the largest count up to ``new.count`` that is admitted on top of the portions."""
        ...

    def spent(self, portions: Sequence[Portion], delta: float, adjacency: Adjacency) -> Spend:
        """Return what the portions cost together, as a statement says it."""
        ...


@lru_cache(maxsize=4096)
def plan_price(cost: PrivacyCost, count: int, delta: float, adjacency: Adjacency) -> Spend:
    """Price a whole plan: the PLD of its releases and ``count`` rounds, at its own delta."""
    return spend(cost.times(count), delta, adjacency=adjacency)


class Allotments:
    """Whole plans, each at its own epsilon and delta, added up."""

    name: FilterName = "allotments"
    reserves = True

    def check(self, account: str, cost: PrivacyCost) -> None:
        """Everything that an accountant can read has a price."""

    def admits(self, portions: Sequence[Portion], limit: Limit) -> bool:
        """Whether the plans' epsilons and deltas add up to no more than the limit's."""
        if math.fsum(_shares(portions, limit.delta)) > limit.delta * (1 + _ROUNDING):
            return False
        prices = _prices(portions, limit.delta, limit.adjacency)
        return math.fsum(price.epsilon for price in prices) <= limit.epsilon

    def most(self, portions: Sequence[Portion], new: Portion, limit: Limit) -> int:
        """Search on a coarse upper bound and confirm by the price itself."""
        shares = _shares([*portions, new], limit.delta)
        if math.fsum(shares) > limit.delta * (1 + _ROUNDING):
            return 0
        prices = _prices(portions, limit.delta, limit.adjacency)
        left = limit.epsilon - math.fsum(price.epsilon for price in prices)

        def bound(count: int) -> float:
            """Bound epsilon: coarsely where that decides, else by the price."""
            history = new.cost.times(count)
            quick = quick_epsilon(history, shares[-1], adjacency=limit.adjacency)
            if not left < quick <= 1.02 * left:
                return quick
            return plan_price(new.cost, count, shares[-1], limit.adjacency).epsilon

        found = most_releases(bound, left, new.count)
        while found and not self.admits([*portions, replace(new, count=found)], limit):
            found -= 1
        return found

    def spent(self, portions: Sequence[Portion], delta: float, adjacency: Adjacency) -> Spend:
        """Add up the plans' prices, each at its own share of delta, else at ``delta``."""
        prices = _prices(portions, delta, adjacency)
        if len(prices) == 1:
            return prices[0]
        label = " or ".join(dict.fromkeys(price.accountant for price in prices)) or "PLD"
        infinite = [price.accountant for price in prices if math.isinf(price.epsilon)]
        if prices:
            label = infinite[0] if infinite else f"{label} per study, added up"
        total = math.fsum(price.epsilon for price in prices)
        whole = math.fsum(_shares(portions, delta)) or delta
        return Spend(epsilon=total, delta=whole, adjacency=adjacency, accountant=label)


class PayAsYouGo:
    """What the filters share under which a plan pays release by release.

    A part of delta (``reserved``) is kept for bounds that may fail and for the noise sampler.
    """

    name: FilterName
    label: str
    reserved: float
    reserves = False

    def admits(self, portions: Sequence[Portion], limit: Limit) -> bool:
        """Whether everything together stays within the limit."""
        epsilon = min(limit.epsilon, self._ceiling(limit.delta)) - SAMPLER_EPSILON
        return self._within_reserve(portions, limit.delta) and self._holds(
            portions, epsilon, self._kept(limit.delta), limit.adjacency
        )

    def most(self, portions: Sequence[Portion], new: Portion, limit: Limit) -> int:
        """Count by bisection: every question is a sum."""

        def fits(count: int) -> bool:
            return self.admits([*portions, replace(new, count=count)], limit)

        return largest_that_fits(fits, new.count)

    def spent(self, portions: Sequence[Portion], delta: float, adjacency: Adjacency) -> Spend:
        """Return the epsilon of the summed costs, with the noise sampler's part."""
        value = 0.0
        if any(portion.count or portion.cost.before for portion in portions):
            value = self._epsilon(portions, self._kept(delta), adjacency) + SAMPLER_EPSILON
            if value > self._ceiling(delta) or not self._within_reserve(portions, delta):
                value = math.inf
        return Spend(epsilon=value, delta=delta, adjacency=adjacency, accountant=self.label)

    def _holds(
        self, portions: Sequence[Portion], epsilon: float, delta: float, adjacency: Adjacency
    ) -> bool:
        raise NotImplementedError

    def _epsilon(self, portions: Sequence[Portion], delta: float, adjacency: Adjacency) -> float:
        raise NotImplementedError

    def _kept(self, delta: float) -> float:
        """The part of delta that the filter works with; the sampler stretches it by exp(5e-8)."""
        return delta * (1 - self.reserved) * (1 - 1e-7)

    def _ceiling(self, delta: float) -> float:
        """The largest epsilon: beyond it, the sampler would use up its part of delta.

        A budget with a larger epsilon is held to this one. It depends on public numbers alone, as
        everything fixed beforehand.
        """
        return math.log(self.reserved * delta / 2 / sampler_delta(MOST_FILTERED, 0.0))

    def _within_reserve(self, portions: Sequence[Portion], delta: float) -> bool:
        """Whether failure probabilities and the number of noise values stay within the reserve."""
        events = [pair for portion in portions for pair in portion.events()]
        failure = math.fsum(event.failure * steps for event, steps in events)
        numbers = sum(event.numbers * steps for event, steps in events)
        return numbers <= MOST_FILTERED and failure <= self.reserved * delta / 2


class Gaussian(PayAsYouGo):
    """The exact filter of unsampled Gaussians, up to the reserve for the noise sampler."""

    name: FilterName = "gaussian"
    label = "Gaussian filter"
    reserved = 1e-3

    def check(self, account: str, cost: PrivacyCost) -> None:
        """Refuse everything that is not an unsampled Gaussian with a bound that always holds."""
        for event in cost.times(1):
            what = "sampled" if event.sampling_rate < 1 else "with a failure probability"
            problem = f"a release {what} is planned; the filter is for unsampled Gaussians only"
            remedy = "make a ledger with the filter renyi or allotments"
            good = event.sampling_rate == 1 and event.failure == 0
            check(good, f"account '{account}'", problem, remedy, PrivacyRefusal)

    def _holds(
        self, portions: Sequence[Portion], epsilon: float, delta: float, adjacency: Adjacency
    ) -> bool:
        """Whether the summed squared mu stays within that of the limit."""
        return epsilon > 0 and (
            _mu_squared(portions, adjacency) <= _gaussian_mu(epsilon, delta) ** 2
        )

    def _epsilon(self, portions: Sequence[Portion], delta: float, adjacency: Adjacency) -> float:
        return gaussian_epsilon(math.sqrt(_mu_squared(portions, adjacency)), delta)


class Renyi(PayAsYouGo):
    """Renyi costs, added up at orders that are fixed beforehand."""

    name: FilterName = "renyi"
    label = "RDP filter"
    reserved = RESERVED

    def check(self, account: str, cost: PrivacyCost) -> None:
        """Whether a bound exists depends on the adjacency: a budget's admission asks for it."""

    def _holds(
        self, portions: Sequence[Portion], epsilon: float, delta: float, adjacency: Adjacency
    ) -> bool:
        """Whether for one order the summed costs stay within what its share of delta leaves."""
        return renyi_admits(_renyi_costs(portions, adjacency), epsilon, delta)

    def _epsilon(self, portions: Sequence[Portion], delta: float, adjacency: Adjacency) -> float:
        return renyi_epsilon(_renyi_costs(portions, adjacency), delta)


FILTERS: dict[str, Filter] = {"allotments": Allotments(), "renyi": Renyi(), "gaussian": Gaussian()}


def filter_named(name: str) -> Filter:
    """Return the filter of this name.

    >>> filter_named("renyi").reserves
    False
    """
    if name not in FILTERS:
        raise unknown_name("ledger", "filter", name, FILTERS)
    return FILTERS[name]


def _shares(portions: Sequence[Portion], delta: float) -> list[float]:
    return [delta if portion.delta is None else portion.delta for portion in portions]


def _prices(portions: Sequence[Portion], delta: float, adjacency: Adjacency) -> list[Spend]:
    pairs = zip(portions, _shares(portions, delta), strict=True)
    return [plan_price(one.cost, one.count, share, adjacency) for one, share in pairs]


_gaussian_mu = lru_cache(maxsize=1024)(gaussian_mu)


def _mu_squared(portions: Sequence[Portion], adjacency: Adjacency) -> float:
    """Sum steps / z^2, times four under replace-one, rounded on the safe side."""
    factor = 4.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
    events = [pair for portion in portions for pair in portion.events() if pair[1]]
    if any(event.noise_multiplier**2 == 0 for event, _ in events):
        return math.inf
    terms = (steps / event.noise_multiplier**2 for event, steps in events)
    return factor * math.fsum(terms) * (1 + _ROUNDING)


@lru_cache(maxsize=4096)
def _costs_of(events: tuple[Event, ...], adjacency: Adjacency) -> tuple[float, ...]:
    return renyi_costs(merged(events), adjacency)


def _renyi_costs(portions: Sequence[Portion], adjacency: Adjacency) -> tuple[float, ...]:
    rows = [(one.count, one.cost.events) for one in portions if one.count]
    rows += [(1, events) for one in portions for events in one.cost.before]
    priced = [(count, _costs_of(events, adjacency)) for count, events in rows]
    sums = (math.fsum(count * costs[i] for count, costs in priced) for i in range(len(ORDERS)))
    return tuple(total * (1 + _ROUNDING) for total in sums)
