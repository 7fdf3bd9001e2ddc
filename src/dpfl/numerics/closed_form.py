"""Theorems 1 and 2 of DP-Fed-LS: noise in closed form, for comparison with the accountant's."""

import math
from typing import Literal

import numpy as np

from dpfl.core.checks import check, one_of, positive, share
from dpfl.core.errors import ConfigurationError

_THEOREMS = {"uniform": (14.0, 0.67), "poisson": (8.0, 0.53)}


def closed_form_noise(
    epsilon: float,
    delta: float,
    clip: float,
    sampling_rate: float,
    rounds: int,
    sampling: Literal["uniform", "poisson"] = "poisson",
) -> float:
    """Noise std on the sum by Theorem 1 (uniform) or 2 (poisson): the smallest over lambda that
    meets all side conditions.

    nu = rate clip / epsilon sqrt(c rounds / lambda (log(1/delta) / (1 - lambda) + epsilon)), c = 14
    or 8, provided that nu^2 / 4 clip^2 >= 0.67 or 0.53 and alpha - 1 <= nu^2 / 6 clip^2 log(1 /
    (rate alpha (1 + nu^2 / 4 clip^2))).

    Far more than the numerical accountant asks for; kept because the paper plans with it.

    >>> round(closed_form_noise(8.0, 1000**-1.1, 0.3, 0.05, 30), 4)
    0.5662
    """
    one_of("closed form", _THEOREMS, sampling=sampling)
    positive("closed form", epsilon=epsilon, clip=clip, rounds=rounds)
    share("closed form", delta=delta, sampling_rate=sampling_rate)
    check(delta < 1, "closed form", f"delta = {delta}", "give a number below 1")
    found = _closed_form(epsilon, delta, sampling_rate, rounds, sampling)
    if found is None:
        # The smallest epsilon the theorem covers, rounded up to a hundredth
        grid = map(float, np.geomspace(1e-3, 1e4, 1621))
        rest = (delta, sampling_rate, rounds, sampling)
        covered = next((e for e in grid if _closed_form(e, *rest, points=2_001)), math.inf)
        least = f"epsilon >= {math.ceil(covered * 100) / 100:.2f}" if covered < math.inf else "none"
        raise ConfigurationError(
            "closed form",
            f"no lambda meets the theorem's conditions for epsilon = {epsilon:g}",
            f"for these rounds and this rate it covers {least}; or use dpfl.privacy.calibrate",
        )
    return found * clip


def _closed_form(
    epsilon: float, delta: float, rate: float, rounds: int, sampling: str, points: int = 200_001
) -> float | None:
    """The noise multiplier, or None; on a grid of lambda that is dense at both ends."""
    constant, least = _THEOREMS[sampling]
    half = np.geomspace(1e-13, 0.5, points)
    shares = np.concatenate([half, 1 - half[::-1]])
    odds = math.log(1 / delta) / (1 - shares)
    alphas = odds / epsilon + 1
    multipliers = rate / epsilon * np.sqrt(constant * rounds / shares * (odds + epsilon))
    squares = multipliers**2
    room = squares / 6 * np.log(1 / (rate * alphas * (1 + squares / 4)))
    good = (squares / 4 >= least) & (alphas - 1 <= room)
    return float(multipliers[good].min()) if bool(good.any()) else None
