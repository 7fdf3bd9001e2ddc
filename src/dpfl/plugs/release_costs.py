"""What releases before round one cost, and what they leave of a budget for the rounds."""

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from dpfl.core.checks import check
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.grid_noise import SCALE
from dpfl.core.types import Adjacency, Budget, Terms, Unit
from dpfl.privacy.accountant import spend
from dpfl.privacy.calibrate import calibrate, rung
from dpfl.privacy.events import Event, History
from dpfl.privacy.exposure import Exposure

Shares = Sequence[tuple[float, int]]
"""Of each release, its share of a budget and how many numbers it has."""

_RUNGS = range(-923, 2310)  # of the ladder of multipliers: 0.01 to 100,000
_calibrate = partial(calibrate, adjacency=Adjacency.ZERO_OUT)


def release_noise(
    shares: Shares, budget: Budget, epsilon: float, examples: int
) -> tuple[float, ...]:
    """The noise multiplier of each release, from its share of the budget and its numbers.

    One unsampled release with the whole budget would need the multiplier z; a share s gets z /
    sqrt(s), so that the shares of several releases add up to what the budget allows.
    """
    found = []
    kind = budget.accountant
    # Adding up in double precision, and rounding onto the grid, widen the bound a little.
    summation = release_exposure(1.0, 0, examples).bound - 1
    for part, numbers in shares:
        plan = (epsilon, budget.delta, 1.0, 1)
        whole = _calibrate(*plan, sampling="none", accountant=kind, numbers=numbers)
        effective = whole / math.sqrt(part)
        coarse = effective * math.sqrt(numbers) / SCALE
        check(
            coarse < 0.5,
            "release",
            f"noise of {effective:.4g} on {numbers} numbers makes the grid too coarse",
            "give the release a larger share, or use a smaller buffer",
            PrivacyRefusal,
        )
        found.append(effective * (1 + summation) / (1 - coarse) * (1 + 1e-12))
    return tuple(found)


def release_exposure(noise_multiplier: float, numbers: int, examples: int) -> Exposure:
    """What a release of so many numbers shows of one record, of bound 1."""
    clipped = Exposure(unit=Unit.RECORD, numbers=numbers).clipped(1.0)
    return clipped.noised(noise_multiplier, summands=examples)


def release_history(
    shares: Shares,
    noise: Sequence[float],
    examples: int,
    seen: Callable[[Exposure], Exposure] = lambda own: own,
) -> History:
    """What all releases show of one record, one event each; ``seen`` is what is seen of it."""
    planned = zip(noise, (numbers for _, numbers in shares), strict=True)
    return tuple(chain(*(seen(release_exposure(*one, examples)).events() for one in planned)))


def calibrate_rounds(
    terms: Terms, plan: Event, epsilon: float, budget: Budget, examples: int
) -> float:
    """The smallest multiplier of the ladder with which planned steps fit beside the releases."""
    shares = terms.releases
    delta = budget.delta
    kind = budget.accountant
    if not shares:
        steps = (plan.sampling_rate, plan.steps)
        return _calibrate(epsilon, delta, *steps, accountant=kind, numbers=plan.numbers)
    noise = terms.release_noise or release_noise(shares, budget, epsilon, examples)
    before = release_history(shares, noise, examples)

    def fits(index: int) -> bool:
        history = (*before, replace(plan, noise_multiplier=rung(index)))
        spent = spend(history, delta, adjacency=Adjacency.ZERO_OUT, accountant=kind)
        return spent.epsilon <= epsilon

    place = bisect.bisect_left(_RUNGS, True, key=fits)
    check(
        place < len(_RUNGS),
        "releases",
        "the releases leave nothing of the budget for the rounds",
        "give them smaller shares",
        PrivacyRefusal,
    )
    return rung(_RUNGS[place])
