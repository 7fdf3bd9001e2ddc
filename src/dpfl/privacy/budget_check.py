"""How many releases fit a budget, found with few evaluations of an expensive accountant."""

import bisect
import math
from collections.abc import Callable, Sequence


def most_releases(epsilon_of: Callable[[int], float], limit: float, most: int) -> int:
    """Return the largest count up to ``most`` whose epsilon is at most ``limit``.

    Epsilon grows with the count and is close to a power of it. Each guess follows the power through
    the last two points, and stays between what is known to fit and what is known not to. A thousand
    releases take four to eight evaluations.

    >>> most_releases(lambda n: 0.1 * n**0.5, 1.0, 1000)
    100
    """
    if most < 1 or limit <= 0:
        return 0
    points = [(most, epsilon_of(most))]
    if points[0][1] <= limit:
        return most
    fits = 0
    fails = most
    turns = 0
    while fails - fits > 1:
        turns += 1
        # Whatever the curve looks like, the bracket halves now and then.
        guess = (fits + fails) // 2 if turns % 6 == 0 else _on_the_power(points[-2:], limit)
        guess = min(max(guess, fits + 1), fails - 1)
        # Of two neighbours one fits and one does not, if the guess is right.
        for count in (guess, guess + 1):
            if fits < count < fails:
                points.append((count, epsilon_of(count)))
                fits, fails = (count, fails) if points[-1][1] <= limit else (fits, count)
    return fits


def largest_that_fits(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest count up to ``most`` that fits, by bisection.

    >>> largest_that_fits(lambda count: count**2 <= 50, 100)
    7
    """
    if most >= 1 and fits(most):
        return most
    return bisect.bisect_left(range(1, most), True, key=lambda count: not fits(count))


def _on_the_power(points: Sequence[tuple[int, float]], limit: float) -> int:
    """Where the power through these points meets the limit; one point: a square root."""
    count, value = points[-1]
    if value <= 0:
        return 2 * count
    if not math.isfinite(value):
        return count // 2
    power = 0.5
    other = points[0]
    if other[0] != count and 0 < other[1] < math.inf:
        power = (math.log(value) - math.log(other[1])) / (math.log(count) - math.log(other[0]))
    growth = (math.log(limit) - math.log(value)) / min(max(power, 0.05), 2.0)
    return int(count * math.exp(min(growth, 14.0)))
