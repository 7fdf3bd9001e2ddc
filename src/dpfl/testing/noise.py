"""Laws about noise: the exact law of the sampler, and the attack on a single release."""

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dpfl.core import grid_noise

Wide = np.longdouble


def impossible(
    released: Tensor, guess: Tensor, image: Callable[[Tensor], Tensor], *, whole: bool
) -> Tensor:
    """Which coordinates of a float32 release noise alone can never produce.

    The attacker knows how a release is computed from noise n alone (``image``), and about which n
    it would take (``guess``). ``whole``: n is an integer, otherwise any float32 number. Candidates
    are the guess and its neighbours.
    """
    found = torch.zeros_like(released, dtype=torch.bool)
    if whole:
        for away in range(-64, 65):
            found |= image(guess.round() + away) == released
        return ~found
    for direction in (-math.inf, math.inf):
        near = guess.to(torch.float32)
        for _ in range(4):
            found |= image(near) == released
            near = torch.nextafter(near, torch.full_like(near, direction))
    return ~found


def check_sampler() -> dict[int, float]:
    """The law of what the sampler really does against the ideal one, on every integer it can
    produce.

    Returns the largest |log ratio| within 2, 6 and 10 standard deviations, and under 0 the root of
    its mean square. The code's integer thresholds and its 53-bit acceptance are taken as they are;
    nothing is sampled.
    """
    cells = [(number, sign) for number in range(grid_noise.CELLS) for sign in (1, -1)]
    shares = _cell_shares()
    drawn = [_rare(number, sign) * shares[number] for number, sign in cells]
    mass = sum(part.sum() for part in drawn)
    often = 1 - Wide(1) / 512
    limits = dict.fromkeys((2, 6, 10), 0.0)
    total = Wide(0)
    square = Wide(0)
    for (number, sign), part in zip(cells, drawn, strict=True):
        x = _integers(number, sign)
        real = often * grid_noise.fast(x).astype(Wide) + (1 - often) * part / mass
        ideal = _ideal(x)
        ratios = np.log1p((real - ideal) / ideal)
        total += real.sum()
        square += (ideal * ratios**2).sum()
        for limit in limits:
            if (number + 1) * grid_noise.CELL <= limit * grid_noise.SCALE:
                limits[limit] = max(limits[limit], float(np.abs(ratios).max()))
    assert abs(float(total - 1)) < 1e-15, f"the law adds up to 1 + {float(total - 1)}"
    gap = (int(grid_noise.GAPS[0]) * 512 - 2**64) / 2**64
    assert abs(gap) < 2**-50, "a number is rare with another probability than 1 / 512"
    limits[0] = math.sqrt(float(square))
    # The surcharge: over 10^12 numbers log ratios of this size add up to less than 5e-8, but for
    # 1e-16 of probability.
    for limit, bound in ((0, 2.0**-50), (2, 2.0**-49), (6, 2.0**-42), (10, 2.0**-28)):
        found = limits[limit]
        assert found <= bound, f"log ratio {found:.3g} within {limit} standard deviations"
    return limits


def _integers(number: int, sign: int) -> np.ndarray:
    """The integers of a cell. Negative numbers are -1 - x: the same odds, one place further out."""
    x = number * grid_noise.CELL + np.arange(grid_noise.CELL)
    return x if sign > 0 else -1 - x


def _rare(number: int, sign: int) -> np.ndarray:
    """How often the rare path draws each integer of a cell that it has proposed."""
    rest = grid_noise.rest(_integers(number, sign))
    roof = grid_noise.ROOFS[number]
    assert rest.min() > 0, f"the fast path exceeds the ideal law in cell {number}"
    assert rest.max() <= roof, f"the envelope is too low in cell {number}"
    odds = np.ceil(rest / roof * 2.0**53).clip(0, 2.0**53).astype(Wide)
    accepted: np.ndarray = odds * Wide(2) ** -70  # 53 bits, one of 2^16 places, one of two signs
    return accepted


def _cell_shares() -> list[np.longdouble]:
    """How often the rare path proposes each cell, from the 64-bit thresholds themselves."""

    def steps(thresholds: np.ndarray) -> list[np.longdouble]:
        ends = [0, *map(int, thresholds), 2**64]
        return [Wide(end - begin) / Wide(2) ** 64 for begin, end in pairwise(ends)]

    *near, beyond = steps(grid_noise.NEAR_CELLS)
    return [*near, *(beyond * part for part in steps(grid_noise.FAR_CELLS))]


def _ideal(x: np.ndarray) -> np.ndarray:
    """The law of round(N(0, SCALE^2)), with two terms of the series beyond the density."""
    s = Wide(grid_noise.SCALE)
    t = np.square(x.astype(Wide) / s)
    peak = 1 / (np.sqrt(2 * Wide("3.14159265358979323846264338327950288")) * s)
    series = 1 + (t - 1) / (24 * s * s) + (t * t - 6 * t + 3) / (1920 * s**4)
    density: np.ndarray = peak * np.exp(-t / 2) * series
    return density
