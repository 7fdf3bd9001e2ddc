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

How many runs a search has: laws of Papernot and Steinke (ICLR 2022), drawn exactly.
"""

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Context, Decimal, localcontext
from functools import cached_property, partial

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
from dpfl.privacy.renyi import conversion, renyi_costs

MOST_MEAN, MOST_SHAPE = 1000.0, 100.0
TAIL = Decimal(2) ** -80  # what lies beyond the table
_BITS = 128


@dataclass(frozen=True, kw_only=True)
class RandomRuns:
    """How many runs a search has: ``mean`` on average; ``shape`` is the paper's eta.

    A shape of 0 is the logarithmic law, which costs least and varies most, 1 the geometric one,
    infinity the Poisson law, under which there may be no run at all.

    >>> runs = RandomRuns(mean=10)
    >>> runs.gamma, round(float(sum(runs.probabilities)), 12)
    (0.1, 1.0)
    >>> RandomRuns(mean=10).drawn(1 << 127)  # the median
    7
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        check(
            1 < self.mean <= MOST_MEAN,
            "random runs",
            f"mean = {self.mean} runs",
            f"give a number above 1, at most {MOST_MEAN:g}",
        )
        check(
            0 <= self.shape <= MOST_SHAPE or self.shape == math.inf,
            "random runs",
            f"shape = {self.shape}",
            "give 0 (logarithmic), 1 (geometric), infinity (Poisson) or a number between",
        )

    @cached_property
    def gamma(self) -> float:
        """The largest gamma whose mean is at least the one asked for; 1 is unused by Poisson."""
        if self.shape in (1, math.inf):
            return 1 / self.mean if self.shape == 1 else 1.0
        low = 0.0
        high = 1.0
        while low < (middle := (low + high) / 2) < high:
            low, high = (middle, high) if self._mean(middle) >= self.mean else (low, middle)
        return low

    def _mean(self, gamma: float) -> float:
        """Return the mean number of runs with this gamma."""
        log = math.log(gamma)
        parts = -log if self.shape == 0 else -math.expm1(self.shape * log) / self.shape
        return (1 / gamma - 1) / parts

    @property
    def first(self) -> int:
        """The least number of runs."""
        return 0 if self.shape == math.inf else 1

    @cached_property
    def probabilities(self) -> tuple[Decimal, ...]:
        """The law of K from its least value on; the last entry holds all that is above."""
        with localcontext(Context(prec=60)):
            kept: list[Decimal] = []
            term = self._first_term()
            left = Decimal(1)
            while left - term >= TAIL or not kept:
                kept.append(term)
                left -= term
                term *= self._ratio(self.first + len(kept) - 1)
            return (*kept, left)

    def _first_term(self) -> Decimal:
        gamma = Decimal(self.gamma)
        shape = Decimal(self.shape)
        if self.shape == math.inf:
            return (-Decimal(self.mean)).exp()
        if self.shape == 0:
            return (1 - gamma) / -gamma.ln()
        return (1 - gamma) * shape / (gamma**-shape - 1)

    def _ratio(self, k: int) -> Decimal:
        """P(K = k + 1) / P(K = k)."""
        if self.shape == math.inf:
            return Decimal(self.mean) / (k + 1)
        return (1 - Decimal(self.gamma)) * (k + Decimal(self.shape)) / (k + 1)

    @property
    def most(self) -> int:
        """The largest number of runs that is ever drawn."""
        return self.first + len(self.probabilities) - 1

    @cached_property
    def _thresholds(self) -> list[int]:
        with localcontext(Context(prec=60)):
            sums = Decimal(0)
            found = []
            for probability in self.probabilities[:-1]:
                sums += probability
                found.append(int(sums * 2**_BITS))
            return found

    def drawn(self, word: int) -> int:
        """The number of runs that 128 random bits stand for; they must be secret and fresh."""
        return self.first + bisect.bisect_right(self._thresholds, word % 2**_BITS)

    def divergences(self, orders: Sequence[float], one_run: Sequence[float]) -> list[float]:
        """The Renyi divergences of the whole search, from those of one run at the same orders.

        Divergences do not fall with the order: a bound at a larger order also holds at this one.
        """
        mean = self.mean if self.shape == math.inf else self._mean(self.gamma)
        found = []
        smallest = math.inf
        more = partial(self._more, orders, one_run)
        for a, own in sorted(zip(orders, one_run, strict=True), reverse=True):
            rest = math.log(mean) / (a - 1) if a > 1 else math.inf
            smallest = min(smallest, own + more(a) + rest)
            found.append(smallest * (1 + 1e-12))
        return found[::-1]

    def _more(self, orders: Sequence[float], one_run: Sequence[float], a: float) -> float:
        """What the search adds at the order a, beside log(E K) / (a - 1)."""
        pairs = list(zip(orders, one_run, strict=True))
        if self.shape < math.inf:
            log = -math.log(self.gamma)
            return (1 + self.shape) * min((1 - 1 / b) * r + log / b for b, r in pairs)
        epsilon = math.log1p(1 / (a - 1)) if a > 1 else math.inf
        logs = [(b - 1) * (r - epsilon + math.log1p(-1 / b)) - math.log(b) for b, r in pairs]
        return self.mean * math.exp(min(0.0, *logs))


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
