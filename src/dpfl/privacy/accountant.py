"""Upper bounds on epsilon of whole histories, with the adjacency always explicit.

*Formal guarantees.* Every number is an upper bound on epsilon for the stated history, delta and
adjacency:

- histories without sampling: the closed form of the Gaussian mechanism, rounded up;
- everything else: privacy loss distributions with pessimistic discretisation
  (``composition``);
- on request ``"rdp"`` (dp-accounting's orders, the best one) and ``"renyi"`` (a filter with fixed
  orders).

*What exists.* Poisson sampling: PLD under any adjacency, RDP under add/remove and zero-out.
Fixed-size samples: PLD and RDP under replace-one only; no smaller adjacency is proven for them
(leaving one unit out brings another in).

*The sampler.* Noise comes from a grid sampler whose law is not exactly the ideal one. A mechanism
that draws N values and has (epsilon', delta') under the ideal law has

    epsilon' + 1e-7,    delta' exp(5e-8) + (1 + exp(epsilon)) (1.53e-23 N + 1e-16)

under the real one, for N <= 1e12. This is charged once per history, for N = sum of numbers x steps.

*Caches.* Nothing here reads a file: a number rests on this process's own computations, which it
remembers.

The Gaussian mechanism without sampling, in closed form (Balle and Wang, ICML 2018, Theorem 8).

Releases with multipliers z_1, z_2, ... compose to one of  mu = sqrt(sum 1 / z_i^2)  (twice that
under replace-one), with

    delta(epsilon, mu) = Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu).

*Formal guarantees.* ``gaussian_epsilon`` is never below the exact epsilon, ``gaussian_mu`` never
above the exact mu: a candidate is accepted only if delta plus a bound on its rounding error stays
below the target.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from dpfl.core.checks import check, one_of
from dpfl.core.errors import PrivacyRefusal, unknown_name
from dpfl.core.types import Adjacency
from dpfl.privacy.classic_rdp import classic_epsilon
from dpfl.privacy.events import Event, History, Sampling, merged
from dpfl.privacy.renyi import RESERVED, check_sampling, moments, renyi_costs, renyi_epsilon

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


AccountantName = Literal["pld", "rdp", "renyi"]
ACCOUNTANTS: tuple[AccountantName, ...] = ("pld", "rdp", "renyi")

# Raised by hand whenever a computed number changes in any bit: part of the key of cached proposals.
ACCOUNTING_VERSION = 1

SMALLEST_DELTA = 1e-12
# A multiplier below this hides nothing worth stating: its epsilon (above 10^5) is infinite.
SMALLEST_NOISE = 1e-3
# Accuracy of every reported epsilon: about this times min(epsilon, 3) above the exact value.
FINE = 1e-4
# Accuracy of ``quick_epsilon``, in the same sense.
QUICK = 3e-3
SAMPLER_EPSILON = 1e-7
SAMPLER_DELTA_EXPONENT = 5e-8
SAMPLER_DELTA_PER_NUMBER = 1.53e-23
SAMPLER_DELTA_ONCE = 1e-16
MOST_NUMBERS = 10**12
# Where the sampler's part of delta is larger than this share of it, no epsilon is stated.
LARGEST_SAMPLER_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class Spend:
    """An epsilon with everything needed to read it but unit and adversary, which ledgers add."""

    epsilon: float
    delta: float
    adjacency: Adjacency
    accountant: str


def epsilon(
    noise_multiplier: float,
    sampling_rate: float,
    steps: int,
    delta: float,
    *,
    sampling: Sampling = "poisson",
    adjacency: Adjacency | str = Adjacency.ADD_REMOVE,
    accountant: AccountantName | Literal["classic-rdp"] | None = None,
) -> float:
    """Upper bound on epsilon after ``steps`` sampled Gaussian releases.

    ``noise_multiplier`` is std / clip under any adjacency. ``accountant`` left out takes the
    tightest that exists; a combination the named accountant cannot do is refused. ``"classic-rdp"``
    gives the figure a paper would print, with sensitivity ``clip`` whatever the adjacency: **for
    display only**, nothing is ever charged by it.

    >>> round(epsilon(1.0, 0.05, 200, 2000**-1.1), 2)
    3.7
    >>> round(epsilon(1.0, 0.05, 200, 2000**-1.1, accountant="classic-rdp"), 2)
    5.07
    """
    rate = 1.0 if sampling == "none" else sampling_rate
    if accountant == "classic-rdp":
        kind = "poisson" if sampling == "none" else sampling
        return classic_epsilon(noise_multiplier, rate, steps, delta, kind)
    event = Event(
        noise_multiplier=noise_multiplier, sampling=sampling, sampling_rate=rate, steps=steps
    )
    named = adjacency_named(adjacency)
    return spend((event,), delta, adjacency=named, accountant=accountant).epsilon


def adjacency_named(name: Adjacency | str) -> Adjacency:
    """Return the adjacency of this name."""
    if name not in list(Adjacency):
        raise unknown_name("accountant", "adjacency", name, list(Adjacency))
    return Adjacency(name)


def spend(
    history: Iterable[Event],
    delta: float,
    *,
    adjacency: Adjacency,
    accountant: AccountantName | None = None,
    accuracy: float = FINE,
) -> Spend:
    """Upper bound on epsilon of a whole history, by the tightest accountant unless one is named.

    >>> round(spend((Event(noise_multiplier=1.0),), 1e-5, adjacency=Adjacency.ZERO_OUT).epsilon, 4)
    4.3772
    """
    events = merged(event for event in history if event.sampling_rate > 0)
    check_question(events, delta, adjacency, accountant)
    name = accountant or "pld"
    value = 0.0
    label = name.upper()
    left = delta - math.fsum(event.failure * event.steps for event in events)
    if any(event.noise_multiplier < SMALLEST_NOISE for event in events) or left < SMALLEST_DELTA:
        value = math.inf
        label = "none: not private"
    elif events:
        numbers = sum(event.numbers * event.steps for event in events)
        ideal = merged(replace(event, failure=0.0, numbers=0) for event in events)
        value = _with_sampler(name, ideal, left, delta, numbers, adjacency, accuracy)
    return Spend(epsilon=value, delta=delta, adjacency=adjacency, accountant=label)


def quick_epsilon(history: Iterable[Event], delta: float, *, adjacency: Adjacency) -> float:
    """Upper bound on epsilon with a coarser discretisation: 0.3 % higher, in a millisecond."""
    return spend(history, delta, adjacency=adjacency, accuracy=QUICK).epsilon


def shown(value: float, digits: int = 3) -> str:
    """Format an epsilon for people: rounded up, never down; small ones to two figures.

    >>> shown(1.00001), shown(0.1), shown(float("inf")), shown(0.00012345)
    ('1.001', '0.100', 'infinite', '0.00013')
    """
    if not math.isfinite(value):
        return "infinite"
    if digits >= 2 and 0 < value < 10 ** (1 - digits):
        digits = min(9, 1 - math.floor(math.log10(value)))
    text = f"{value:.{digits}f}"
    return text if float(text) >= value else f"{float(text) + 10**-digits:.{digits}f}"


def sampler_delta(numbers: int, epsilon: float) -> float:
    """The sampler's own part of delta for ``numbers`` noise values in all, beside ``epsilon``."""
    if numbers == 0 or numbers > MOST_NUMBERS:
        return math.inf if numbers else 0.0
    rate = SAMPLER_DELTA_PER_NUMBER * numbers + SAMPLER_DELTA_ONCE
    return math.exp(min(math.log(rate) + math.log1p(math.exp(-epsilon)) + epsilon, 0.0))


@lru_cache(maxsize=200_000)
def _with_sampler(
    name: AccountantName,
    ideal: History,
    left: float,
    delta: float,
    numbers: int,
    adjacency: Adjacency,
    accuracy: float,
) -> float:
    """Evaluate the ideal curve at a delta that leaves room for the sampler's part of it."""
    curve = _curve(name, ideal, left, adjacency, accuracy)
    value = curve(left)
    if numbers == 0 or not math.isfinite(value):
        return value
    needed = sampler_delta(numbers, value + SAMPLER_EPSILON)
    most = LARGEST_SAMPLER_SHARE * delta
    # A quarter more than at this epsilon: room for the rise that leaving it causes
    room = min(1.25 * needed, most)
    if needed > most or room > left / 2:
        return math.inf
    value = curve((left - room) * math.exp(-SAMPLER_DELTA_EXPONENT)) + SAMPLER_EPSILON
    return value if sampler_delta(numbers, value) <= room else math.inf


def _curve(
    name: AccountantName, events: History, delta: float, adjacency: Adjacency, accuracy: float
) -> Callable[[float], float]:
    """Return epsilon as a function of delta: valid everywhere, tight near the delta given."""
    if name == "rdp":
        accountant: Any = moments(events, adjacency)
        return lambda value: max(0.0, float(accountant.get_epsilon(value)))
    if name == "renyi":
        costs = renyi_costs(events, adjacency)
        return lambda value: renyi_epsilon(costs, (1 - RESERVED) * value)
    sensitivity = 2.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
    plain = [event for event in events if event.sampling_rate == 1]
    total = math.fsum(event.steps / event.noise_multiplier**2 for event in plain)
    mu = sensitivity * math.sqrt(total) * (1 + 1e-14)  # rounding on the safe side
    if len(plain) == len(events):
        return lambda value: gaussian_epsilon(mu, value)
    # Imported here: half a second, which histories without sampling do not cost.
    from dpfl.privacy.composition import Pair, Step, composition

    plan = [Step(std=1 / mu, rate=1.0, steps=1)] if plain else []
    for event in events:
        if event.sampling_rate < 1:
            uniform = event.sampling == "uniform"
            pair: Pair = "mirrored" if uniform else "replaced" if sensitivity == 2 else "sampled"
            std = event.noise_multiplier / (2 if uniform else 1)
            plan.append(Step(std=std, rate=event.sampling_rate, steps=event.steps, pair=pair))
    return composition(plan, delta, accuracy)


def check_question(
    events: History, delta: float, adjacency: Adjacency, accountant: AccountantName | None
) -> None:
    """Refuse a delta that is not a probability, or so small that rounding would matter.

    Also an unknown accountant, and what the named one (or any) has no proven bound for.
    """
    remedy = f"give one well below 1 / records, and at least {SMALLEST_DELTA:g}"
    check(0 < delta < 1, "accountant", f"delta = {delta} is not between 0 and 1", remedy)
    check(
        delta >= SMALLEST_DELTA,
        "accountant",
        f"delta = {delta:g} is so small that the accountant's rounding would matter",
        remedy,
        PrivacyRefusal,
    )
    one_of("accountant", ACCOUNTANTS, accountant="pld" if accountant is None else accountant)
    for event in events:
        check_sampling(event, adjacency, by_moments=accountant in ("rdp", "renyi"))
