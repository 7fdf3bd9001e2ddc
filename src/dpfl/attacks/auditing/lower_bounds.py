"""Lower bounds on epsilon, with confidence, from scores and coins.

A *trial* is a unit whose coin decided whether it was there (or which of two values it had), and a
score that grows with the evidence that it was.

*Many canaries in one run* (Steinke, Nasr, Jagielski, NeurIPS 2023, Theorem 5.2): m canaries, each
there by a fair coin; the auditor guesses r of them, and v guesses are right. Under (epsilon,
delta)-DP, with q = e^epsilon / (e^epsilon + 1),

    P[v or more] <= P[B >= v] + 2 m delta max_i (1/i) P[v > B >= v - i],    B ~ Binomial(r, q).

*The same for a whole trade-off curve* (Mahloujifar, Melis, Chaudhuri, ICML 2025, Algorithm 3): with
b the blow-up 1 - f of the curve, significance s and

    r_v = s v / m,  h_v = s (r - v) / m;   h_i = b^-1(r_{i+1}),
    r_i = r_{i+1} + i / (r - i) (h_i - h_{i+1})   for i = v - 1, ..., 0,

v right guesses refute the curve if r_0 + h_0 > r / m.

*Independent trials*: rates of false alarms and misses with Clopper-Pearson limits a and b; a curve
is refuted that allows no such pair, and epsilon is at least log((1 - delta - b) / a), or the same
with a and b exchanged.

Two kinds of bounds: *plain* ones hold for any mechanism. A refuted curve refutes the claim for any
mechanism, too; but the epsilon that is derived from it is that of a claim stretched by a factor,
and holds for mechanisms whose noise is the claim's, divided by some factor.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri
from scipy.stats import beta, binom

from dpfl.attacks.auditing.claims import Claim, Curve

Floats = NDArray[np.float64]
SHARES = (0.02, 0.05, 0.15, 0.5, 1.0)
"""Shares of the canaries that are guessed: the best one counts, at a fifth of the significance."""


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Scores of units, and whether each was there.

    >>> Trials(scores=np.array([3.0, -1.0]), present=np.array([True, False])).guessed(2)
    2
    """

    scores: Floats
    present: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.scores)

    def guessed(self, guesses: int) -> int:
        """How many guesses are right: the higher half is said to be there, the lower one not."""
        order = np.argsort(self.scores, kind="stable")
        high = (guesses + 1) // 2
        said_there = order[len(order) - high :]
        said_gone = order[: guesses - high]
        return int(self.present[said_there].sum() + (~self.present[said_gone]).sum())


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """An audited epsilon: the true epsilon is at least this, with ``confidence``.

    ``test`` says how it was found, ``trials`` how many units were guessed about, ``claimed`` what
    the audited game claims. ``factor`` says by how much the claim's noise can be divided and still
    be refuted; None for a plain bound, which assumes nothing about the noise.
    """

    test: str
    epsilon: float
    claimed: float
    confidence: float
    trials: int
    factor: float | None = None

    @property
    def refutes(self) -> bool:
        """Whether the claim of the game cannot hold."""
        return self.epsilon > self.claimed if self.factor is None else self.factor > 1


def one_run_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Bound the probability of so many right guesses under (epsilon, delta)-DP.

    >>> round(one_run_p_value(10, 10, 10, 0.0, 0.0), 6)
    0.000977
    """
    chance = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, chance))
    if delta == 0 or right == 0:
        return tail
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, chance))
    worst = float((below / np.arange(1, right + 1)).max())
    return min(1.0, tail + 2 * canaries * delta * worst)


def one_run_epsilon(
    canaries: int, guesses: int, right: int, significance: float, delta: float
) -> float:
    """The largest epsilon that the guesses refute, 0 where they refute none."""

    def refuted(epsilon: float) -> bool:
        return one_run_p_value(canaries, guesses, right, epsilon, delta) < significance

    return _largest(refuted)


def guesses_refute(
    curve: Curve, canaries: int, guesses: int, right: int, significance: float
) -> bool:
    """Whether so many right guesses refute that a mechanism has this trade-off curve."""
    hit = significance * right / canaries
    missed = significance * (guesses - right) / canaries
    for left in range(right - 1, -1, -1):
        more = max(missed, curve.inverse_blow_up(min(hit, 1.0)))
        hit += left / (guesses - left) * (more - missed)
        missed = more
        if hit + missed > guesses / canaries:
            return True
    return hit + missed > guesses / canaries


def canary_bounds(trials: Trials, claim: Claim, confidence: float) -> list[LowerBound]:
    """Both bounds from many canaries; each has the confidence asked for by itself."""
    significance = (1 - confidence) / len(SHARES)
    count = len(trials)
    guesses = [max(2, round(share * count)) for share in SHARES]
    found = [(own, trials.guessed(own)) for own in guesses]
    plain = max(
        one_run_epsilon(count, own, right, significance, claim.delta) for own, right in found
    )

    def refutes(curve: Curve) -> bool:
        return any(guesses_refute(curve, count, *own, significance) for own in found)

    bound = partial(LowerBound, claimed=claim.epsilon(), confidence=confidence, trials=count)
    factor = claim.largest_refuted(refutes)
    return [
        bound(test="canaries", epsilon=plain),
        bound(test="canaries, f-DP", epsilon=claim.epsilon(factor), factor=factor),
    ]


def upper_limit(errors: int, trials: int, significance: float) -> float:
    """The Clopper-Pearson upper limit of a rate.

    >>> round(upper_limit(0, 100, 0.05), 4)
    0.0295
    """
    if errors >= trials:
        return 1.0
    return float(beta.ppf(1 - significance, errors + 1, trials - errors))


def repeated_bounds(
    chosen_on: Trials, tried_on: Trials, claim: Claim, confidence: float
) -> list[LowerBound]:
    """Both bounds from independent trials: a threshold is chosen on some, and tried on the others.

    They rest on the same two limits, and hold together with the confidence asked for.
    """
    threshold = max(_thresholds(chosen_on), key=_apart(chosen_on), default=0.0)
    alarms, misses = error_limits(tried_on, threshold, 1 - confidence)
    factor = claim.largest_refuted(lambda curve: misses < curve.misses(alarms))
    bound = partial(
        LowerBound, claimed=claim.epsilon(), confidence=confidence, trials=len(tried_on)
    )
    odds = [(1 - claim.delta - one) / other for one, other in ((misses, alarms), (alarms, misses))]
    plain = max(0.0, *(math.log(one) for one in odds if one > 0), 0.0)
    return [
        bound(test="repeated runs", epsilon=plain),
        bound(test="repeated runs, f-DP", epsilon=claim.epsilon(factor), factor=factor),
    ]


def error_limits(trials: Trials, threshold: float, significance: float) -> tuple[float, float]:
    """Upper limits of false alarms and of misses at a threshold, both at once."""
    absent = trials.scores[~trials.present]
    there = trials.scores[trials.present]
    alarms = upper_limit(int((absent > threshold).sum()), len(absent), significance / 2)
    return alarms, upper_limit(int((there <= threshold).sum()), len(there), significance / 2)


def separation(trials: Trials) -> float:
    """How far apart the two worlds look at the best threshold, as a Gaussian's mu."""
    return max(map(_apart(trials), _thresholds(trials)), default=0.0)


def _thresholds(trials: Trials) -> list[float]:
    if not len(trials):
        return []
    return [float(one) for one in np.unique(np.quantile(trials.scores, np.linspace(0, 1, 81)))]


def _apart(trials: Trials) -> Callable[[float], float]:
    """Phi^-1(1 - alarms) - Phi^-1(misses), by limits that hold with 90 % at each threshold."""

    def apart(threshold: float) -> float:
        alarms, misses = error_limits(trials, threshold, 0.1)
        if alarms >= 1 or misses >= 1:
            return -math.inf
        return float(ndtri(1 - alarms) - ndtri(misses))

    return apart


def _largest(refuted: Callable[[float], bool]) -> float:
    """The largest epsilon that is refuted, to four digits; 0 where none is."""
    if not refuted(0.0):
        return 0.0
    low = 0.0
    high = 1.0
    while refuted(high) and high < 1e3:
        low = high
        high = 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
