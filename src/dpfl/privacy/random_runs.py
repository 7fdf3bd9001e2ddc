"""How many runs a search has: laws of Papernot and Steinke (ICLR 2022), drawn exactly.

Equations, and what they are good for, are in :mod:`dpfl.privacy.selection`.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from functools import cached_property, partial

from dpfl.core.checks import check

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
