"""The Gaussian mechanism without sampling, in closed form (Balle and Wang, ICML 2018, Theorem 8).

Releases with multipliers z_1, z_2, ... compose to one of  mu = sqrt(sum 1 / z_i^2)  (twice that
under replace-one), with

    delta(epsilon, mu) = Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu).

*Formal guarantees.* ``gaussian_epsilon`` is never below the exact epsilon, ``gaussian_mu`` never
above the exact mu: a candidate is accepted only if delta plus a bound on its rounding error stays
below the target.
"""

import math
from collections.abc import Callable
from functools import lru_cache

_ROUNDING = 1e-14  # relative error allowed for each logarithm of a normal distribution function


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon with delta(epsilon, mu) <= delta, rounded up.

    >>> round(gaussian_epsilon(1.0, 1e-5), 4)
    4.3772
    """
    if mu == 0 or _meets(0.0, mu, delta):
        return 0.0
    if not math.isfinite(mu):
        return math.inf
    # delta(epsilon, mu) < exp(-x^2 / 2) with x = epsilon / mu - mu / 2
    start = mu * (mu / 2 + math.sqrt(-2 * math.log(delta))) * (1 + 1e-9)
    return _edge(lambda epsilon: not _meets(epsilon, mu, delta), start)[1]


@lru_cache(maxsize=1024)
def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest mu with delta(epsilon, mu) <= delta, rounded down.

    This is the exact filter of Gaussian releases without sampling: whatever is chosen adaptively,
    (epsilon, delta) holds as long as  sum 1 / z^2 <= mu^2  (a quarter of that under replace-one).

    >>> round(gaussian_mu(1.0, 1e-5), 3)
    0.268
    """
    return _edge(lambda mu: _meets(epsilon, mu, delta), 1.0)[0]


def _edge(below: Callable[[float], bool], high: float) -> tuple[float, float]:
    """The last value found below an edge and the first found above it, 1e-13 apart (relative)."""
    low = 0.0
    while below(high):
        low = high
        high = 2 * high
    for _ in range(200):
        if high - low <= 1e-13 * high:
            break
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return low, high


def gaussian_log_delta(epsilon: float, mu: float) -> float:
    """Return log delta(epsilon, mu), with a bound on its rounding error added."""
    from scipy.special import log_ndtr

    first = float(log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    error = _ROUNDING * (1 - first + abs(second) + epsilon)
    gap = first - second + error
    return first + _ROUNDING + (math.log(-math.expm1(-gap)) if gap > 0 else -math.inf)


def _meets(epsilon: float, mu: float, delta: float) -> bool:
    return gaussian_log_delta(epsilon, mu) <= math.log(delta)
