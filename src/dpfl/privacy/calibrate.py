"""The least noise that keeps a plan within its budget: never overshooting, at most 0.5 % below the target."""

from __future__ import annotations

import math

from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.types import Adjacency
from dpfl.privacy.accountant import RULES, AccountantName, adjacency_named, quick_epsilon, spend
from dpfl.privacy.cache import remembered
from dpfl.privacy.events import Event, Sampling

LARGEST_MULTIPLIER = 1e5
SMALLEST_MULTIPLIER = 1e-2
_AIM, _SLACK = 0.9988, 0.0010  # aim here; a first bound within target x (aim +- slack) is taken


def calibrate(
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    *,
    sampling: Sampling = "poisson",
    adjacency: Adjacency | str = Adjacency.ADD_REMOVE,
    accountant: AccountantName | None = None,
) -> float:
    """Smallest noise multiplier (std / clip) with which ``steps`` releases cost at most ``epsilon`` at ``delta``.

    >>> z = calibrate(3.0, 1e-5, 0.01, 1000)
    >>> from dpfl.privacy.accountant import epsilon
    >>> 0.995 * 3.0 <= epsilon(z, 0.01, 1000, 1e-5) <= 3.0
    True
    """
    if math.isnan(epsilon) or epsilon <= 0 or math.isinf(epsilon):
        raise ConfigurationError(
            "calibrate", f"epsilon = {epsilon} is not a positive finite number", "give an epsilon above 0"
        )
    if steps < 1:
        raise ConfigurationError("calibrate", f"steps = {steps}: nothing would be released", "plan at least one step")
    adjacency = adjacency_named(adjacency)
    rate = 1.0 if sampling == "none" else sampling_rate
    if rate == 0:
        raise ConfigurationError("calibrate", "sampling_rate = 0: nothing would be released", "give a rate above 0")
    template = Event(noise_multiplier=1.0, sampling=sampling, sampling_rate=rate, steps=steps)
    return _calibrated(epsilon, delta, template, adjacency, accountant)


def _calibrated(
    target: float, delta: float, template: Event, adjacency: Adjacency, accountant: AccountantName | None
) -> float:
    """Look it up before searching."""
    key = "|".join(["calibrate", RULES, str(accountant), adjacency, repr(target), repr(delta), template.to_json()])
    return remembered(key, lambda: _search(target, delta, template, adjacency, accountant))


def _search(
    target: float, delta: float, template: Event, adjacency: Adjacency, accountant: AccountantName | None
) -> float:
    """Secant on log noise against log epsilon inside a bracket; only a bound at or below the target is accepted."""

    def bound(multiplier: float, *, fine: bool) -> float:
        event = Event(
            noise_multiplier=multiplier,
            sampling=template.sampling,
            sampling_rate=template.sampling_rate,
            steps=template.steps,
        )
        if fine or accountant is not None:
            return spend((event,), delta, adjacency=adjacency, accountant=accountant).epsilon
        return quick_epsilon((event,), delta, adjacency=adjacency)

    low, high = 0.0, math.inf  # too little noise, enough noise
    guess = _central_limit_guess(target, delta, template, adjacency)
    points: list[tuple[float, float]] = []
    for _ in range(60):
        reached = bound(guess, fine=False)
        if _AIM - _SLACK <= reached / target <= _AIM + _SLACK:
            return guess
        if reached > target * _AIM:
            low = max(low, guess)
        else:
            high = min(high, guess)
        if low >= LARGEST_MULTIPLIER:
            break
        if high <= SMALLEST_MULTIPLIER:
            return SMALLEST_MULTIPLIER  # the plan is so short that hardly any noise is needed
        if low > 0 and high < math.inf and high / low < 1 + 1e-9:
            return high  # the curve jumps: the smaller epsilon is the safe side
        if math.isfinite(reached) and reached > 0:
            points.append((math.log(guess), math.log(reached)))
        guess = _next_guess(points, math.log(target * _AIM), low, high, guess)
    smallest = bound(LARGEST_MULTIPLIER, fine=True)
    raise PrivacyRefusal(
        "calibrate",
        f"no finite noise reaches epsilon = {target} at delta = {delta} in {template.steps} steps with sampling rate "
        f"{template.sampling_rate:.4g}",
        f"the smallest epsilon this plan can reach is {smallest:.4g}: grant more, plan fewer steps, or raise delta",
    )


def _next_guess(points: list[tuple[float, float]], goal: float, low: float, high: float, last: float) -> float:
    if len(points) >= 2:
        (x0, y0), (x1, y1) = points[-2:]
        slope = (y1 - y0) / (x1 - x0) if x1 != x0 else -1.0
    else:
        slope = -1.0
    if points and slope < -0.05:
        candidate = math.exp(points[-1][0] + max(-2.0, min(2.0, (goal - points[-1][1]) / slope)))
    else:
        candidate = last * 3 if high == math.inf else last / 3
    if low < candidate < high:
        return min(candidate, LARGEST_MULTIPLIER)
    if high == math.inf:
        return min(max(low, last) * 3, LARGEST_MULTIPLIER)
    return math.sqrt(max(low, high / 9) * high)


def _central_limit_guess(target: float, delta: float, template: Event, adjacency: Adjacency) -> float:
    """Where to start: Gaussian-DP's limit. An approximation, used for speed only and never reported."""
    from scipy import optimize, special

    def log_delta_gap(log_mu: float) -> float:
        mu = math.exp(log_mu)
        first = special.log_ndtr(-target / mu + mu / 2)
        second = target + special.log_ndtr(-target / mu - mu / 2)
        gap = first + math.log1p(-math.exp(min(second - first, -1e-15)))
        return float(gap - math.log(delta))

    try:
        mu = math.exp(optimize.brentq(log_delta_gap, -14.0, 6.0))
    except ValueError:
        return 1.0
    if adjacency is Adjacency.REPLACE_ONE:
        mu /= 2
    per_step = mu / (template.sampling_rate * math.sqrt(template.steps))
    guess = 1 / math.sqrt(math.log1p(per_step**2))
    return min(max(guess, SMALLEST_MULTIPLIER), LARGEST_MULTIPLIER)
