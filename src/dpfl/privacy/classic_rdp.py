"""Epsilons as papers print them: for display beside the correct ones, never for a charge.

"Classic RDP" is the moments accountant of the papers: Renyi DP of the sampled Gaussian at a list of
orders, converted by epsilon = min over alpha of  rdp(alpha) + log(1 / delta) / (alpha - 1).

*What they are worth.* Poisson sampling: a valid bound under add/remove, looser than ours.
Fixed-size cohorts: the papers charge a sensitivity of one clip (Wang, Balle, Kasiviswanathan,
AISTATS 2019, Theorem 27), where replacing one client by another moves a sum by two; no adjacency we
can prove justifies the number.
"""

import math
from typing import Literal

import numpy as np

from dpfl.core.checks import check, one_of

POISSON_REMARK = "classic RDP: valid, looser than ours"
UNIFORM_REMARK = "classic RDP with sensitivity clip: NOT a bound for replacing a client"
MISREAD_REMARK = "classic RDP of Poisson samples: NOT a bound for cohorts of fixed size"
UNAMPLIFIED_REMARK = "classic RDP of samples: NOT a bound against who sees which clients took part"

_ORDERS = [1 + x / 10 for x in range(1, 100)] + [float(a) for a in range(12, 64)]
_TIGHT_TERMS = 12  # orders up to which the theorem's alternating sums are not lost to rounding


def classic_epsilon(
    noise_multiplier: float,
    sampling_rate: float,
    steps: int,
    delta: float,
    sampling: Literal["poisson", "uniform"] = "poisson",
) -> float:
    """The figure a paper would print; display only.

    >>> round(classic_epsilon(1.0, 0.05, 200, 2000**-1.1), 2)
    5.07
    >>> round(classic_epsilon(1.0, 0.05, 200, 2000**-1.1, "uniform"), 2)
    8.66
    """
    check(
        noise_multiplier > 0 and 0 < sampling_rate <= 1 and steps >= 0 and 0 < delta < 1,
        "classic RDP",
        f"noise {noise_multiplier}, rate {sampling_rate}, steps {steps}, delta {delta}",
        "give numbers in their range",
    )
    one_of("classic RDP", ("poisson", "uniform"), sampling=sampling)
    orders = _ORDERS if sampling == "poisson" else [float(a) for a in range(2, 64)]
    curve = _poisson if sampling == "poisson" else _without_replacement
    divergences = [steps * curve(noise_multiplier, sampling_rate, order) for order in orders]
    pairs = zip(divergences, orders, strict=True)
    return min(divergence + math.log(1 / delta) / (order - 1) for divergence, order in pairs)


def _poisson(noise: float, rate: float, order: float) -> float:
    """log E [((1 - q) + q exp((2 x - 1) / 2 s^2))^alpha] / (alpha - 1) over x ~ N(0, s^2)."""
    if rate == 1:
        return order / (2 * noise**2)
    x = np.linspace(-40 * noise, 40 * noise + order, 20_001)
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * noise**2))
    logs = order * ratio - x**2 / (2 * noise**2)
    top = float(logs.max())
    area = float(np.trapezoid(np.exp(logs - top), x)) / (noise * math.sqrt(2 * math.pi))
    return (top + math.log(area)) / (order - 1)


def _without_replacement(noise: float, rate: float, order: float) -> float:
    """Theorem 27 of Wang, Balle, Kasiviswanathan; noise is relative to the sensitivity."""
    alpha = int(order)
    terms = [0.0]
    for j in range(2, alpha + 1):
        bound = math.log(2) + j * (j - 1) / (2 * noise**2)
        if j <= _TIGHT_TERMS:
            even = _alternating(2 * (j // 2), noise)
            odd = _alternating(2 * ((j + 1) // 2), noise)
            if even > 0 and odd > 0:
                bound = min(bound, math.log(4) + (math.log(even) + math.log(odd)) / 2)
        choose = math.lgamma(alpha + 1) - math.lgamma(j + 1) - math.lgamma(alpha - j + 1)
        terms.append(j * math.log(rate) + choose + bound)
    return float(np.logaddexp.reduce(terms)) / (alpha - 1)


def _alternating(length: int, noise: float) -> float:
    def term(i: int) -> float:
        sign = -1 if i % 2 else 1
        return sign * math.comb(length, i) * math.exp(i * (i - 1) / (2 * noise**2))

    try:
        return math.fsum(term(i) for i in range(length + 1))
    except OverflowError:
        return math.inf
