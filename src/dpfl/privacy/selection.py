"""The best of a random number of runs, and what the whole search costs.

Paper
    Papernot, Steinke: *Hyperparameter Tuning with Renyi Differential Privacy*, ICLR 2022
    (arXiv 2110.03620).

In one sentence
    If each run is private and the number of runs K is random, independent of the data and kept
    secret, then the best run costs little more than one run; with a fixed number it does not.

Equations
    Definition 1, truncated negative binomial, shape eta (0: logarithmic, 1: geometric) and gamma:

        P(K = k) = (1 - gamma)^k / (gamma^-eta - 1)  prod_{l < k} (l + eta) / (l + 1),  k >= 1
        P(K = k) = (1 - gamma)^k / (k log(1 / gamma))                          where eta = 0

    Theorem 2, for orders a > 1 and b >= 1 at which one run has the divergences r(a) and r(b):

        r'(a) = r(a) + (1 + eta) ((1 - 1/b) r(b) + log(1 / gamma) / b) + log(E K) / (a - 1)

    Theorem 6, K Poisson with mean m, one run (e, d)-DP with exp(e) <= 1 + 1 / (a - 1):

        r'(a) = r(a) + m d + log(m) / (a - 1)

Formal guarantees
    The epsilon is that of whoever sees the chosen run and nothing of the others, nor how many there
    were. Runs are drawn from one law: candidates at random, with replacement. **A server that
    sees every run is not covered**: against it all runs compose.

Departures
    K is drawn from a table of exact thresholds that ends where less than 2^-80 is left. That, and
    the noise sampler over the longest search, are charged to delta.
"""

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from dpfl.core.checks import check
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.types import Adjacency
from dpfl.privacy.accountant import (
    LARGEST_SAMPLER_SHARE,
    SAMPLER_DELTA_EXPONENT,
    SAMPLER_EPSILON,
    Spend,
    adjacency_named,
    check_question,
    sampler_delta,
)
from dpfl.privacy.calibrate import rung
from dpfl.privacy.events import Event, History, Sampling, merged
from dpfl.privacy.random_runs import TAIL, RandomRuns
from dpfl.privacy.renyi import conversion, renyi_costs

SEARCH_ORDERS = (
    *(1 + i / 20 for i in range(1, 20)),
    *(2 + i / 4 for i in range(32)),
    *(float(i) for i in range(10, 64)),
    *(64 * 1.15**i for i in range(20)),
)
"""Orders at which a search is bounded; the best one counts, since a search is one mechanism."""

_RUNGS = range(-923, 2310)  # of the ladder of multipliers


def search_spend(
    one_run: Iterable[Event], delta: float, *, adjacency: Adjacency | str, runs: RandomRuns
) -> Spend:
    """Upper bound on epsilon of a search, for whoever sees only the run that was chosen.

    ``one_run`` is everything that one run releases, its score included; where candidates differ in
    cost, use :func:`search_spend_of`. ``delta`` is that of the whole search, ``adjacency`` which
    data sets are neighbours, ``runs`` the law of the number of runs.

    >>> one = (Event(noise_multiplier=8.0),)
    >>> spent = search_spend(one, 1e-5, adjacency="zero_out", runs=RandomRuns(mean=10))
    >>> round(spent.epsilon, 2)  # one run costs 0.44, ten of them 1.54
    1.07
    """
    return search_spend_of([tuple(one_run)], delta, adjacency=adjacency, runs=runs)


def search_spend_of(
    candidates: Iterable[History], delta: float, *, adjacency: Adjacency | str, runs: RandomRuns
) -> Spend:
    """As :func:`search_spend`, for candidates of different costs, of which each run draws one.

    The divergence of a run is at most the largest of any candidate, order by order. ``delta``,
    ``adjacency`` and ``runs`` are those of the search.
    """
    named = adjacency_named(adjacency)
    histories = [merged(history) for history in candidates]
    for history in histories:
        check_question(history, delta, named, "renyi")
        check(
            all(event.failure == 0 for event in history),
            "search",
            "a run has bounds that may fail, for which no bound of a search is proven",
            "use bounds that do not fail",
            PrivacyRefusal,
        )
    costs = [renyi_costs(history, named, SEARCH_ORDERS) for history in histories]
    one_run = [max(row) for row in zip(*costs, strict=True)]
    draws = max((sum(e.numbers * e.steps for e in own) for own in histories), default=0)
    value = _epsilon(runs.divergences(SEARCH_ORDERS, one_run), delta, draws * runs.most)
    label = "RDP of a search (Papernot and Steinke 2022)"
    return Spend(epsilon=value, delta=delta, adjacency=named, accountant=label)


def _epsilon(divergences: Sequence[float], delta: float, draws: int) -> float:
    """Convert to epsilon, leaving room in delta for the noise sampler and the end of the table."""

    def ideal(at: float) -> float:
        pairs = zip(divergences, SEARCH_ORDERS, strict=True)
        return max(0.0, min(r + conversion(a, at) for r, a in pairs))

    def outside(epsilon: float) -> float:
        tail = float(TAIL) * (1 + math.exp(min(epsilon, 700.0)))
        return sampler_delta(draws, epsilon) + tail

    value = ideal(delta)
    if not math.isfinite(value):
        return math.inf
    room = 1.25 * outside(value + SAMPLER_EPSILON)
    if room > LARGEST_SAMPLER_SHARE * delta:
        return math.inf
    value = ideal((delta - room) * math.exp(-SAMPLER_DELTA_EXPONENT)) + SAMPLER_EPSILON
    return value if outside(value) <= room else math.inf


def calibrate_search(
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    *,
    runs: RandomRuns,
    beside: History = (),
    sampling: Sampling = "poisson",
    adjacency: Adjacency | str = Adjacency.ADD_REMOVE,
    numbers: int = 0,
) -> float:
    """Smallest multiplier of one run's steps with which the whole search stays within a budget.

    ``epsilon`` and ``delta`` are the budget of the search, ``runs`` is the law of the number of
    runs, ``beside`` what each run releases besides its steps, such as its score. ``sampling_rate``,
    ``steps``, ``sampling``, ``adjacency`` and ``numbers`` are those of
    :func:`dpfl.privacy.calibrate`.

    >>> z = calibrate_search(2.0, 1e-5, 1.0, 1, runs=RandomRuns(mean=10), sampling="none")
    >>> round(z, 2)
    4.31
    """
    rate = 1.0 if sampling == "none" else sampling_rate
    plan = Event(
        noise_multiplier=1.0, sampling=sampling, sampling_rate=rate, steps=steps, numbers=numbers
    )
    cost = partial(search_spend, delta=delta, adjacency=adjacency, runs=runs)

    def fits(index: int) -> bool:
        return cost((*beside, replace(plan, noise_multiplier=rung(index)))).epsilon <= epsilon

    place = bisect.bisect_left(_RUNGS, True, key=fits)
    check(
        place < len(_RUNGS),
        "search",
        f"no noise keeps a search of {runs.mean:g} runs within epsilon = {epsilon}",
        "plan fewer steps or runs, or raise epsilon or delta",
        PrivacyRefusal,
    )
    return rung(_RUNGS[place])
