"""How many releases fit a budget, found with a handful of evaluations of an expensive accountant."""

from __future__ import annotations

import math
from collections.abc import Callable


def most_releases(epsilon_of: Callable[[int], float], limit: float, most: int) -> int:
    """Return the largest count up to ``most`` whose epsilon is at most ``limit``; epsilon grows with the count.

    Epsilon is close to a power of the count, so each guess interpolates on that power between what is known to fit and
    what is known not to. A thousand releases take four to six evaluations.

    >>> most_releases(lambda n: 0.1 * n**0.5, 1.0, 1000)
    100
    """
    if most < 1 or limit <= 0:
        return 0
    above = epsilon_of(most)
    if above <= limit:
        return most
    fits, fails, below, turns = 0, most, 0.0, 0
    while fails - fits > 1:
        guess = _interpolated(fits, below, fails, above, limit)
        turns += 1
        if turns % 4 == 0:  # whatever the curve looks like, the bracket halves now and then
            guess = (fits + fails) // 2
        guess = min(max(guess, fits + 1), fails - 1)
        value = epsilon_of(guess)
        if value <= limit:
            fits, below = guess, value
            if fits + 1 < fails and (nearest := epsilon_of(fits + 1)) > limit:
                fails, above = fits + 1, nearest
        else:
            fails, above = guess, value
    return fits


def largest_that_fits(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest count up to ``most`` that fits, by bisection: for questions that cost next to nothing."""
    if most < 1 or not fits(1):
        return 0
    if fits(most):
        return most
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _interpolated(fits: int, below: float, fails: int, above: float, limit: float) -> int:
    if not math.isfinite(above) or above <= 0:
        return (fits + fails) // 2
    power = 0.5
    if fits > 0 and 0 < below < above:
        power = min(max(math.log(above / below) / math.log(fails / fits), 0.05), 2.0)
    return int(fails * math.pow(limit / above, 1 / power))
