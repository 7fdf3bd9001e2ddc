"""The least noise on a public ladder that keeps a plan within its budget.

Multipliers are powers of 1.005. Clients with equal rate and steps share the points of one curve
epsilon(z), and a multiplier says no more about a budget than its rung. *Formal guarantee:* the plan
with the multiplier returned costs at most the target, as ``spend`` computes it in this process;
with the next smaller rung it would cost more.
"""

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version

from dpfl.core.checks import check, positive
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.types import Adjacency
from dpfl.privacy.accountant import (
    ACCOUNTING_VERSION,
    LARGEST_SAMPLER_SHARE,
    MOST_NUMBERS,
    AccountantName,
    adjacency_named,
    check_covered,
    check_delta,
    quick_epsilon,
    sampler_delta,
    spend,
)
from dpfl.privacy.cache import propose, proposed, remembered
from dpfl.privacy.events import Event, Sampling
from dpfl.privacy.gaussian import gaussian_mu

LADDER = 1.005  # the ratio of neighbouring multipliers
_FIRST, _LAST = -923, 2309
_STRIDE = 220  # rungs between multipliers of a ratio of about 3


def rung(index: int) -> float:
    """Return the multiplier 1.005^index.

    >>> rung(0), round(rung(139), 2)
    (1.0, 2.0)
    """
    return float(LADDER**index)


SMALLEST_MULTIPLIER = rung(_FIRST)  # 0.01
LARGEST_MULTIPLIER = rung(_LAST)  # 100,000


def calibrate(
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    *,
    sampling: Sampling = "poisson",
    adjacency: Adjacency | str = Adjacency.ADD_REMOVE,
    accountant: AccountantName | None = None,
    numbers: int = 0,
) -> float:
    """Smallest multiplier (std / clip) with which ``steps`` releases stay within a budget.

    ``numbers`` is how many noise values one step draws from the grid sampler, whose own cost is
    then included. The other arguments are those of :func:`dpfl.privacy.epsilon`.

    >>> z = calibrate(3.0, 1e-5, 0.01, 1000)
    >>> from dpfl.privacy.accountant import epsilon
    >>> epsilon(z, 0.01, 1000, 1e-5) <= 3.0 < epsilon(z / LADDER, 0.01, 1000, 1e-5)
    True
    """
    adjacency = adjacency_named(adjacency)
    rate = 1.0 if sampling == "none" else sampling_rate
    positive("calibrate", epsilon=epsilon, steps=steps)
    problem = "sampling_rate = 0: nothing is released"
    check(rate != 0, "calibrate", problem, "give a rate above 0")
    plan = Event(
        noise_multiplier=1.0, sampling=sampling, sampling_rate=rate, steps=steps, numbers=numbers
    )
    question = [str(accountant), adjacency, repr(epsilon), repr(delta), plan.to_json()]
    key = "|".join(["calibrate", _rules(), *question])
    return remembered(key, lambda: _calibrated(key, epsilon, delta, plan, adjacency, accountant))


@functools.cache
def _rules() -> str:
    """Whose numbers a proposal rests on."""
    return f"dp-accounting {version('dp-accounting')}, dpfl accounting {ACCOUNTING_VERSION}"


def _calibrated(
    key: str,
    target: float,
    delta: float,
    plan: Event,
    adjacency: Adjacency,
    accountant: AccountantName | None,
) -> float:
    """Take a proposal from the disk if it proves right, else search."""

    def fine(index: int) -> float:
        event = replace(plan, noise_multiplier=rung(index))
        return spend((event,), delta, adjacency=adjacency, accountant=accountant).epsilon

    def quick(index: int) -> float:
        event = replace(plan, noise_multiplier=rung(index))
        return quick_epsilon((event,), delta, adjacency=adjacency)

    check_delta(delta)
    check_covered((plan,), adjacency, accountant)
    _check_sampler(target, delta, plan)
    found = proposed(key)
    if found is not None:
        index = _index_of(found)
        if index is not None and _is_smallest(fine, index, target):
            return rung(index)
        text = "a calibrated multiplier in the cache does not verify: it was computed anew"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    guess = _guess(target, delta, plan, adjacency)
    index = _descend(fine, _search(quick if accountant is None else fine, target, guess), target)
    if index > _LAST:
        plea = "allow more, plan fewer steps, or raise delta"
        raise PrivacyRefusal(
            "calibrate",
            f"no finite noise reaches epsilon = {target} at delta = {delta} in {plan.steps} steps "
            f"with sampling rate {plan.sampling_rate:.4g}",
            f"the smallest epsilon this plan can reach is {fine(_LAST):.4g}: {plea}",
        )
    propose(key, rung(index))
    return rung(index)


def _check_sampler(target: float, delta: float, plan: Event) -> None:
    numbers = plan.numbers * plan.steps
    share = sampler_delta(numbers, target)
    problem = (
        f"at epsilon = {target} the noise sampler's own distance to the ideal law takes more than "
        f"a tenth of delta = {delta} over {numbers:.3g} values"
    )
    remedy = "plan fewer steps or parameters, a smaller epsilon, or a larger delta"
    good = numbers <= MOST_NUMBERS and share <= LARGEST_SAMPLER_SHARE * delta
    check(good, "calibrate", problem, remedy, PrivacyRefusal)


def _index_of(found: object) -> int | None:
    """The rung that a proposal is, None if it is not one."""
    if not isinstance(found, float) or not SMALLEST_MULTIPLIER <= found <= LARGEST_MULTIPLIER:
        return None
    index = round(math.log(found) / math.log(LADDER))
    return index if rung(index) == found else None


def _is_smallest(fine: Callable[[int], float], index: int, target: float) -> bool:
    return fine(index) <= target and (index == _FIRST or fine(index - 1) > target)


def _descend(fine: Callable[[int], float], index: int, target: float) -> int:
    """The smallest rung that meets the target, from one near it; beyond the last if none does."""
    while index <= _LAST and fine(index) > target:
        index += 1
    while index > _FIRST and fine(index - 1) <= target:
        index -= 1
    return index


def _search(bound: Callable[[int], float], target: float, guess: int) -> int:
    """The smallest rung at which a falling bound meets the target, by secants on log epsilon."""
    low, high = _FIRST - 1, _LAST + 1  # too little noise; enough, or more than there is
    index, slope = min(max(guess, _FIRST), _LAST), -1.2 * math.log(LADDER)
    last: tuple[int, float] | None = None
    while True:
        value = bound(index)
        low, high = (low, index) if value <= target else (index, high)
        if high - low <= 1:
            return high
        if 0 < value < math.inf:
            level = math.log(value)
            if last is not None and last[0] != index:
                slope = min((level - last[1]) / (index - last[0]), -0.05 * math.log(LADDER))
            last = (index, level)
            step = math.ceil((math.log(target) - level) / slope)
            step = min(max(step, -2 * _STRIDE), 2 * _STRIDE)
        else:
            step = _STRIDE if value > target else -_STRIDE
        index = min(max(index + step, low + 1), high - 1)


def _guess(target: float, delta: float, plan: Event, adjacency: Adjacency) -> int:
    """Where to start: exact without sampling, else Gaussian-DP's limit, used for speed only."""
    mu = gaussian_mu(target, delta) / (2 if adjacency is Adjacency.REPLACE_ONE else 1)
    if mu == 0:
        return _LAST
    if plan.sampling_rate == 1:
        multiplier = math.sqrt(plan.steps) / mu
    else:
        per_step = min(mu / (plan.sampling_rate * math.sqrt(plan.steps)), 1e100)
        multiplier = 1 / math.sqrt(math.log1p(per_step**2))
    return math.ceil(math.log(multiplier) / math.log(LADDER))
