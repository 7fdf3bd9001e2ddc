"""Renyi divergences of histories, and the filter that stays valid when releases are chosen
adaptively.

*The filter.* Feldman and Zrnic (NeurIPS 2021): Renyi costs at one order add up along adaptively
chosen releases, and a budget in them may be spent to the end. With several orders, fixed
beforehand, each has its own share of delta, and the history may go on while at least one of them
has budget left. This holds by a union bound over the orders, and only because orders and shares are
public and fixed: the best order of all, chosen in hindsight, would not be a filter.

Shares of delta follow from the budget (epsilon, delta) alone: nine tenths go to the order that is
best for Gaussian releases at this budget, the rest is shared equally. At epsilon 1, delta 1e-5 the
filter admits mu = 0.246 of Gaussian releases, where the exact filter of those admits 0.268 and a
single order, the best one, 0.247.

*The replace-one trap.* dp-accounting 0.6.0's RDP accountant takes the add/remove sensitivity under
replace-one (sigma 1, delta 1e-5: 4.73, where 9.997 is right). It is given half the multiplier here.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from dpfl.core.checks import check
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.types import Adjacency
from dpfl.privacy.events import Event, History, merged

# Orders of the filter, for epsilons of 0.1 to 10 at deltas of 1e-5 to 1e-7.
ORDERS = (2.0, 2.5, 3.5, 5.0, 7.0, 9.5, 13.0, 18.0, 25.0, 35.0, 50.0, 75.0, 110.0, 160.0, 230.0)
# The share of delta that goes to the order that is best for Gaussian releases.
MAIN_SHARE = 0.9
# The part of delta that is kept for failures of a bound and for the noise sampler, whether needed
# or not. Both depend on what is released, and a share chosen afterwards would not be fixed
# beforehand.
RESERVED = 0.01
_ROUNDING = 1e-12  # relative, added to every cost
_STEP_ROUNDING = 1e-13  # absolute, per sampled step


@lru_cache(maxsize=4096)
def renyi_costs(
    history: History, adjacency: Adjacency, orders: tuple[float, ...] = ORDERS
) -> tuple[float, ...]:
    """Upper bounds on the Renyi divergence of a history at each order, by default ``ORDERS``.

    They are infinite where there is no bound. The costs of two histories add up to those of both.

    >>> costs = renyi_costs((Event(noise_multiplier=2.0, steps=4),), Adjacency.ADD_REMOVE)
    >>> round(costs[ORDERS.index(18.0)], 6)  # steps * order / (2 z^2)
    9.0
    """
    total = [0.0] * len(orders)
    sampled = []
    factor = 4.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
    for event in merged(history):
        noise = event.noise_multiplier
        if 0 < event.sampling_rate < 1 and noise > 0:
            sampled.append(event)
        elif event.sampling_rate > 0:
            unit = factor * event.steps / noise / noise / 2 if noise > 0 else math.inf
            total = [cost + unit * order for cost, order in zip(total, orders, strict=True)]
    if sampled:
        rounding = _STEP_ROUNDING * sum(event.steps for event in sampled)
        for i, cost in enumerate(moments(sampled, adjacency, orders).rdp):
            total[i] += math.inf if math.isnan(cost) else max(float(cost), 0.0) + rounding
    return tuple(cost * (1 + _ROUNDING) for cost in total)


def renyi_epsilon(costs: Sequence[float], delta: float) -> float:
    """Return the epsilon from which on every filter of a budget (epsilon, delta) admits the costs.

    >>> costs = renyi_costs((Event(noise_multiplier=4.0),), Adjacency.ADD_REMOVE)
    >>> round(renyi_epsilon(costs, 1e-5), 3)
    1.019
    """
    smallest = 0.0
    for main, low, high in _main_orders(delta):
        bound = _bound(costs, main, delta)
        # Budgets from ``low`` to the bound whose main order this is do not admit them.
        if bound > low:
            smallest = max(smallest, min(bound, high))
    return smallest


def renyi_admits(costs: Sequence[float], epsilon: float, delta: float) -> bool:
    """Whether the filter of the budget (epsilon, delta), known beforehand, admits these costs.

    >>> costs = renyi_costs((Event(noise_multiplier=1 / 0.245),), Adjacency.ADD_REMOVE)
    >>> renyi_admits(costs, 1.0, 1e-5)
    True
    """
    if not math.isfinite(epsilon):
        return False
    main = next(order for order, _, high in _main_orders(delta) if epsilon <= high)
    return _bound(costs, main, delta) <= epsilon


@lru_cache(maxsize=1024)
def _main_orders(delta: float) -> tuple[tuple[float, float, float], ...]:
    """For which epsilons each order is the main one: (order, from, to), in rising order of epsilon.

    An order a is best for Gaussian releases where (epsilon - conversion(a)) / a is largest: an
    envelope of lines.
    """
    cost = {order: conversion(order, MAIN_SHARE * delta) for order in ORDERS}
    found = []
    low = 0.0
    main = max(reversed(ORDERS), key=lambda order: (low - cost[order]) / order)
    while True:
        smaller = [order for order in ORDERS if order < main]
        crossings = [((cost[main] * a - cost[a] * main) / (a - main), a) for a in smaller]
        ahead = [pair for pair in crossings if pair[0] > low]
        high, following = min(ahead, default=(math.inf, main))
        found.append((main, low, high))
        if not ahead:
            return tuple(found)
        main = following
        low = high


def _bound(costs: Sequence[float], main: float, delta: float) -> float:
    """The smallest bound of all orders, each at its share of delta."""
    rest = (1 - MAIN_SHARE) * delta / (len(ORDERS) - 1)
    shares = [MAIN_SHARE * delta if order == main else rest for order in ORDERS]
    rows = zip(costs, ORDERS, shares, strict=True)
    smallest = min(cost + conversion(order, share) for cost, order, share in rows)
    return max(0.0, smallest) * (1 + _ROUNDING)


def conversion(order: float, delta: float) -> float:
    """By how much epsilon exceeds the divergence of this order.

    Canonne, Kamath and Steinke (NeurIPS 2020), Proposition 12.
    """
    return math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


def moments(
    events: Iterable[Event], adjacency: Adjacency, orders: Sequence[float] | None = None
) -> Any:
    """Return dp-accounting's RDP accountant of a history, with the sensitivity of the adjacency."""
    from dp_accounting import NeighboringRelation, rdp

    replace_one = adjacency is Adjacency.REPLACE_ONE
    relation = NeighboringRelation["REPLACE_ONE" if replace_one else "ADD_OR_REMOVE_ONE"]
    logging.getLogger("absl").setLevel(logging.ERROR)  # the RDP search warns thousands of times
    accountant = rdp.RdpAccountant(orders=orders, neighboring_relation=relation)
    for event in events:
        check_sampling(event, adjacency, by_moments=True)
        accountant.compose(_as_dp_event(event, 0.5 if replace_one else 1.0), event.steps)
    return accountant


def check_sampling(event: Event, adjacency: Adjacency, *, by_moments: bool = False) -> None:
    """Refuse a sampled release that has no proven bound; ``by_moments`` asks for one by RDP."""
    replace_one = adjacency is Adjacency.REPLACE_ONE
    check(
        event.sampling != "uniform" or replace_one,
        "accountant",
        f"fixed-size samples have no proven bound under {adjacency}",
        "account for them under replace_one: leaving one unit out brings another in",
        PrivacyRefusal,
    )
    poisson = event.sampling == "poisson" and event.sampling_rate < 1
    check(
        not (by_moments and poisson and replace_one),
        "accountant",
        "RDP has no bound for Poisson samples under replace_one",
        "use accountant = 'pld'",
        PrivacyRefusal,
    )


def _as_dp_event(event: Event, factor: float) -> Any:
    import dp_accounting

    gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier * factor)
    if event.sampling_rate == 1:
        return gaussian
    if event.sampling == "poisson":
        return dp_accounting.PoissonSampledDpEvent(event.sampling_rate, gaussian)
    rate = Fraction(event.sampling_rate).limit_denominator(10**7)
    if rate < Fraction(event.sampling_rate) * (1 - Fraction(1, 10**12)):
        # Never a smaller sample than was drawn
        rate = Fraction(math.ceil(event.sampling_rate * 10**7), 10**7)
    sampled = dp_accounting.SampledWithoutReplacementDpEvent
    return sampled(rate.denominator, rate.numerator, gaussian)
