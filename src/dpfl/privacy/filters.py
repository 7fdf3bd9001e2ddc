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

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

from dpfl.core.errors import PrivacyRefusal, unknown_name
from dpfl.core.types import Adjacency
from dpfl.privacy.accountant import SAMPLER_EPSILON, Spend, quick_epsilon, sampler_delta, spend
from dpfl.privacy.budget_check import largest_that_fits, most_releases
from dpfl.privacy.costs import PrivacyCost
from dpfl.privacy.gaussian import gaussian_epsilon
from dpfl.privacy.renyi import (
    ORDERS,
    RESERVED,
    gaussian_mu,
    renyi_admits,
    renyi_costs,
    renyi_epsilon,
)

FilterName = Literal["allotments", "renyi", "gaussian"]

MOST_FILTERED = 10**10
"""Most noise values that a ledger with a filter covers: some ten thousand rounds of a model of a
million parameters.
"""

_RESERVED: dict[str, float] = {"renyi": RESERVED, "gaussian": 1e-3}
# Relative: sums of floats are compared on the safe side; shares of one delta may add up to it.
_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class Portion:
    """What one plan contributes: the cost of a round, how many rounds count, the plan's share of
    delta.
    """

    cost: PrivacyCost
    count: int
    delta: float | None = None


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What portions are held against: a budget's epsilon and delta, and the adjacency in which it
    is read.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency


class Filter(Protocol):
    """A rule across plans. ``reserves``: a plan counts as a whole once committed, else release by
    release.
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
    """Price a whole plan: the PLD of ``count`` rounds at its own delta."""
    return spend(cost.times(count), delta, adjacency=adjacency)


class Allotments:
    """Whole plans, each at its own epsilon and delta, added up."""

    name: FilterName = "allotments"
    reserves = True

    def check(self, account: str, cost: PrivacyCost) -> None:
        """Everything that an accountant can read has a price."""

    def admits(self, portions: Sequence[Portion], limit: Limit) -> bool:
        """Whether the plans' epsilons and deltas add up to no more than the limit's."""
        shares = _shares(portions, limit.delta)
        if math.fsum(shares) > limit.delta * (1 + _ROUNDING):
            return False
        pairs = zip(portions, shares, strict=True)
        return (
            math.fsum(plan_price(p.cost, p.count, d, limit.adjacency).epsilon for p, d in pairs)
            <= limit.epsilon
        )

    def most(self, portions: Sequence[Portion], new: Portion, limit: Limit) -> int:
        """Search on a coarse upper bound and confirm by the price itself."""
        taken, own = _shares(portions, limit.delta), limit.delta if new.delta is None else new.delta
        if math.fsum([*taken, own]) > limit.delta * (1 + _ROUNDING):
            return 0
        pairs = zip(portions, taken, strict=True)
        left = limit.epsilon - math.fsum(
            plan_price(p.cost, p.count, d, limit.adjacency).epsilon for p, d in pairs
        )
        found = most_releases(
            lambda n: _near(new.cost, n, own, limit.adjacency, left), left, new.count
        )
        while found and not self.admits([*portions, _counted(new, found)], limit):
            found -= 1
        return found

    def spent(self, portions: Sequence[Portion], delta: float, adjacency: Adjacency) -> Spend:
        """Add up the plans' prices, each at its own share of delta or, if it has none, at
        ``delta``.
        """
        shares = _shares(portions, delta)
        prices = [
            plan_price(p.cost, p.count, d, adjacency) for p, d in zip(portions, shares, strict=True)
        ]
        if len(prices) == 1:
            return prices[0]
        label = " or ".join(dict.fromkeys(price.accountant for price in prices)) or "PLD"
        if any(math.isinf(price.epsilon) for price in prices):
            label = next(price.accountant for price in prices if math.isinf(price.epsilon))
        elif prices:
            label += " per study, added up"
        total = math.fsum(price.epsilon for price in prices)
        return Spend(
            epsilon=total, delta=math.fsum(shares) or delta, adjacency=adjacency, accountant=label
        )


class Gaussian:
    """The exact filter of unsampled Gaussians, up to the reserve for the noise sampler."""

    name: FilterName = "gaussian"
    reserves = False

    def check(self, account: str, cost: PrivacyCost) -> None:
        """Refuse everything that is not an unsampled Gaussian with a bound that always holds."""
        for event in cost.events:
            if event.sampling_rate < 1 or event.failure > 0:
                what = "sampled" if event.sampling_rate < 1 else "with a failure probability"
                raise PrivacyRefusal(
                    f"account '{account}'",
                    f"a release {what} is planned, and this ledger's filter is for unsampled Gaussians only",
                    "make a ledger with the filter renyi or allotments",
                )

    def admits(self, portions: Sequence[Portion], limit: Limit) -> bool:
        """Whether the summed squared mu stays within that of the limit."""
        epsilon, delta = (
            min(limit.epsilon, _ceiling(self.name, limit.delta)) - SAMPLER_EPSILON,
            _kept(self.name, limit.delta),
        )
        if epsilon <= 0 or not _within_reserve(self.name, portions, limit.delta):
            return False
        return _mu_squared(portions, limit.adjacency) <= _gaussian_mu(epsilon, delta) ** 2

    def most(self, portions: Sequence[Portion], new: Portion, limit: Limit) -> int:
        """Count by bisection: every question is a sum."""
        return largest_that_fits(
            lambda n: self.admits([*portions, _counted(new, n)], limit), new.count
        )

    def spent(self, portions: Sequence[Portion], delta: float, adjacency: Adjacency) -> Spend:
        """Return the closed-form epsilon of the summed mu."""
        value = gaussian_epsilon(
            math.sqrt(_mu_squared(portions, adjacency)), _kept(self.name, delta)
        )
        value = _with_reserve(self.name, portions, value, delta)
        return Spend(epsilon=value, delta=delta, adjacency=adjacency, accountant="Gaussian filter")


class Renyi:
    """Renyi costs, added up at orders that are fixed beforehand."""

    name: FilterName = "renyi"
    reserves = False

    def check(self, account: str, cost: PrivacyCost) -> None:
        """Whether a Renyi bound exists depends on the adjacency: it is asked where a budget is
        concerned.
        """

    def admits(self, portions: Sequence[Portion], limit: Limit) -> bool:
        """Whether for one order the summed costs stay within what that order's share of delta
        leaves.
        """
        if not _within_reserve(self.name, portions, limit.delta):
            return False
        costs = _renyi_costs(portions, limit.adjacency)
        return renyi_admits(
            costs,
            min(limit.epsilon, _ceiling(self.name, limit.delta)) - SAMPLER_EPSILON,
            _kept(self.name, limit.delta),
        )

    def most(self, portions: Sequence[Portion], new: Portion, limit: Limit) -> int:
        """Count by bisection: every question is a sum."""
        return largest_that_fits(
            lambda n: self.admits([*portions, _counted(new, n)], limit), new.count
        )

    def spent(self, portions: Sequence[Portion], delta: float, adjacency: Adjacency) -> Spend:
        """Return the epsilon of the summed costs, each order at its share of delta."""
        value = 0.0
        if any(portion.count for portion in portions):
            value = renyi_epsilon(_renyi_costs(portions, adjacency), _kept(self.name, delta))
        value = _with_reserve(self.name, portions, value, delta)
        return Spend(epsilon=value, delta=delta, adjacency=adjacency, accountant="RDP filter")


FILTERS: dict[str, Filter] = {"allotments": Allotments(), "renyi": Renyi(), "gaussian": Gaussian()}


def filter_named(name: str) -> Filter:
    """Return the filter of this name."""
    if name not in FILTERS:
        raise unknown_name("ledger", "filter", name, FILTERS)
    return FILTERS[name]


def _shares(portions: Sequence[Portion], delta: float) -> list[float]:
    return [delta if portion.delta is None else portion.delta for portion in portions]


def _counted(portion: Portion, count: int) -> Portion:
    return Portion(cost=portion.cost, count=count, delta=portion.delta)


def _near(cost: PrivacyCost, count: int, delta: float, adjacency: Adjacency, limit: float) -> float:
    """Bound epsilon: coarsely where that decides, else by the price."""
    quick = quick_epsilon(cost.times(count), delta, adjacency=adjacency)
    return (
        quick
        if not limit < quick <= 1.02 * limit
        else plan_price(cost, count, delta, adjacency).epsilon
    )


_gaussian_mu = lru_cache(maxsize=1024)(gaussian_mu)


def _mu_squared(portions: Sequence[Portion], adjacency: Adjacency) -> float:
    """Sum steps / z^2, times four under replace-one, rounded on the safe side."""
    factor = 4.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
    events = [
        (event, portion.count)
        for portion in portions
        for event in portion.cost.events
        if portion.count
    ]
    if any(event.noise_multiplier**2 == 0 for event, _ in events if event.steps):
        return math.inf
    terms = (
        event.steps * count / event.noise_multiplier**2 for event, count in events if event.steps
    )
    return factor * math.fsum(terms) * (1 + _ROUNDING)


@lru_cache(maxsize=4096)
def _bill_costs(cost: PrivacyCost, adjacency: Adjacency) -> tuple[float, ...]:
    return renyi_costs(cost.times(1), adjacency)


def _renyi_costs(portions: Sequence[Portion], adjacency: Adjacency) -> tuple[float, ...]:
    rows = [
        (portion.count, _bill_costs(portion.cost, adjacency))
        for portion in portions
        if portion.count
    ]
    sums = (math.fsum(count * costs[i] for count, costs in rows) for i in range(len(ORDERS)))
    return tuple(total * (1 + _ROUNDING) for total in sums)


def _kept(name: FilterName, delta: float) -> float:
    """Return the part of delta that the filter itself works with; the sampler stretches it by
    exp(5e-8).
    """
    return delta * (1 - _RESERVED[name]) * (1 - 1e-7)


def _ceiling(name: FilterName, delta: float) -> float:
    """Return the largest epsilon that the filter works with: beyond it, the sampler would use up
    its part of delta.

    A budget with a larger epsilon is held to this one. It depends on public numbers alone, as
    everything fixed beforehand.
    """
    return math.log(_RESERVED[name] * delta / 2 / sampler_delta(MOST_FILTERED, 0.0))


def _within_reserve(name: FilterName, portions: Sequence[Portion], delta: float) -> bool:
    """Whether failure probabilities and the number of noise values stay within what is reserved for
    them.
    """
    events = [
        (event, event.steps * portion.count)
        for portion in portions
        for event in portion.cost.events
    ]
    failure = math.fsum(event.failure * steps for event, steps in events)
    numbers = sum(event.numbers * steps for event, steps in events)
    return numbers <= MOST_FILTERED and failure <= _RESERVED[name] * delta / 2


def _with_reserve(
    name: FilterName, portions: Sequence[Portion], epsilon: float, delta: float
) -> float:
    """Add the sampler's part to a filter's epsilon; infinite where the reserve does not cover it."""
    if not any(portion.count for portion in portions):
        return 0.0
    total = epsilon + SAMPLER_EPSILON
    return (
        total
        if total <= _ceiling(name, delta) and _within_reserve(name, portions, delta)
        else math.inf
    )
