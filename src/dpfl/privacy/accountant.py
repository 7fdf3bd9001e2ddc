"""dp-accounting's curves behind one face: upper bounds only, adjacency always explicit.

*Formal guarantees.* Every number returned is an upper bound on epsilon for the stated history, delta and adjacency:
PLD with pessimistic discretisation wherever every event has one, RDP otherwise. Where no single accountant covers a
history, it is split, delta is shared out equally and the epsilons add up.

*The replace-one trap.* dp-accounting 0.6.0's RDP accountant takes the add/remove sensitivity under replace-one
(sigma 1, delta 1e-5: 4.73, where 9.997 is right). Here it is given half the multiplier; PLD applies the factor itself.

*What exists.* Poisson sampling: PLD under any adjacency, RDP under add/remove and zero-out. Fixed-size samples: PLD and
RDP under replace-one only; no smaller adjacency is proven for them (leaving one unit out brings another in). Their PLD is
made here, from the hockey-stick curve of Zhu, Dong, Wang (AISTATS 2022, Theorem 11): RDP's bound is several times larger.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpfl.core.errors import ConfigurationError, PrivacyRefusal, unknown_name
from dpfl.core.types import Adjacency
from dpfl.privacy.cache import remembered
from dpfl.privacy.events import Event, History, Sampling, merged
from dpfl.privacy.published import CLASSIC, classic_epsilon

AccountantName = Literal["pld", "rdp"]

_FILES = ("accountant.py", "calibrate.py", "events.py")
_CODE = hashlib.sha256(b"".join(Path(__file__).with_name(name).read_bytes() for name in _FILES)).hexdigest()[:16]
RULES = f"dp-accounting {version('dp-accounting')}, code {_CODE}"
"""Which curves and whose code: part of every cached result's key, so that no correction is answered from an old cache."""

SMALLEST_DELTA = 1e-12
SMALLEST_NOISE = 1e-3
"""A multiplier below this hides nothing worth stating: its epsilon (above 10^5) is given as infinite."""

INTERVAL = 1e-4
"""PLD discretisation of every reported epsilon. Any interval gives a valid upper bound; a finer one a tighter one."""

COARSEST_INTERVAL = 2e-3
SMALLEST_CURVED_DELTA = 1e-8
"""Below, the differences that a fixed-size sample's losses are made of could round: RDP is used."""

_FAR = 9.0  # standard deviations of the loss, beyond which all of it counts as infinite
_MOST_POINTS = 2_000_000  # of one step's discretised loss: bounds memory at very small noise


@dataclass(frozen=True, kw_only=True)
class Spend:
    """An epsilon with everything needed to read it, but for unit and observer, which the ledger adds."""

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

    ``noise_multiplier`` is std / clip under any adjacency. ``accountant`` left out takes the tightest that exists; a
    combination the named accountant cannot do is refused. ``"classic-rdp"`` gives the figure a paper would print, with
    sensitivity ``clip`` whatever the adjacency: **for display only**, nothing is ever billed by it.

    >>> round(epsilon(1.0, 0.05, 200, 2000**-1.1), 2)
    3.7
    >>> round(epsilon(1.0, 0.05, 200, 2000**-1.1, accountant="classic-rdp"), 2)
    5.07
    """
    if accountant == CLASSIC:
        if sampling == "none":
            return classic_epsilon(noise_multiplier, 1.0, steps, delta)
        return classic_epsilon(noise_multiplier, sampling_rate, steps, delta, sampling)
    rate = 1.0 if sampling == "none" else sampling_rate
    event = Event(noise_multiplier=noise_multiplier, sampling=sampling, sampling_rate=rate, steps=steps)
    wanted: Any = accountant
    return spend((event,), delta, adjacency=adjacency_named(adjacency), accountant=wanted).epsilon


def adjacency_named(name: Adjacency | str) -> Adjacency:
    """Return the adjacency of this name."""
    if name not in list(Adjacency):
        raise unknown_name("accountant", "adjacency", str(name), list(Adjacency))
    return Adjacency(name)


def spend(
    history: Iterable[Event], delta: float, *, adjacency: Adjacency, accountant: AccountantName | None = None
) -> Spend:
    """Upper bound on epsilon of a whole history, by one accountant where one covers it."""
    _check_delta(delta)
    events = _released(history)
    left = delta - math.fsum(event.failure * event.steps for event in events)
    if any(event.noise_multiplier < SMALLEST_NOISE for event in events) or left < SMALLEST_DELTA:
        return Spend(epsilon=math.inf, delta=delta, adjacency=adjacency, accountant="none: not private")
    groups = _groups(events, adjacency, accountant, left)
    share = left / max(len(groups), 1)
    total = math.fsum(_group_epsilon(name, group, share, adjacency, INTERVAL) for name, group in groups)
    label = " + ".join(name.upper() for name, _ in groups) or "PLD"
    return Spend(epsilon=total, delta=delta, adjacency=adjacency, accountant=label)


def within(history: Iterable[Event], limit: float, delta: float, *, adjacency: Adjacency) -> bool:
    """Whether a history fits under ``limit``. A quick coarse bound decides where it can; it is a bound as well."""
    events = _released(history)
    quick = quick_epsilon(events, delta, adjacency=adjacency)
    if quick <= limit:
        return True
    return quick <= 1.02 * limit and spend(events, delta, adjacency=adjacency).epsilon <= limit


def quick_epsilon(history: Iterable[Event], delta: float, *, adjacency: Adjacency) -> float:
    """Upper bound on epsilon with a discretisation as coarse as the steps' own losses allow (5 to 10 x faster)."""
    events = _released(history)
    if any(e.sampling == "uniform" or e.failure or e.noise_multiplier < SMALLEST_NOISE for e in events):
        return spend(events, delta, adjacency=adjacency).epsilon
    _check_delta(delta)
    return _group_epsilon("pld", events, delta, adjacency, _coarse_interval(events)) if events else 0.0


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


def _released(history: Iterable[Event]) -> History:
    """Leave out what was drawn with probability zero: nothing of it was released."""
    return merged(event for event in history if event.sampling_rate > 0)


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ConfigurationError(
            "accountant", f"delta = {delta} is not between 0 and 1", "give a delta well below 1 / records"
        )
    if delta < SMALLEST_DELTA:
        raise PrivacyRefusal(
            "accountant",
            f"delta = {delta:g} is below {SMALLEST_DELTA:g}, where the accountant's own rounding would matter",
            f"give a delta of at least {SMALLEST_DELTA:g}",
        )


def _groups(
    events: History, adjacency: Adjacency, wanted: AccountantName | None, delta: float
) -> list[tuple[AccountantName, History]]:
    """Split a history among accountants: one group wherever one accountant covers everything."""
    if any(event.sampling == "uniform" for event in events) and adjacency is not Adjacency.REPLACE_ONE:
        raise PrivacyRefusal(
            "accountant",
            f"fixed-size samples have no proven bound under {adjacency} (leaving one unit out brings another in)",
            "bill them as replace_one",
        )
    fixed = tuple(e for e in events if _fixed_size(e))
    rest = tuple(e for e in events if not _fixed_size(e))
    curved = not fixed or (all(_has_curve(e) for e in fixed) and delta >= SMALLEST_CURVED_DELTA)
    able: dict[AccountantName, bool] = {
        "pld": (not fixed or not rest) and curved,
        "rdp": not (adjacency is Adjacency.REPLACE_ONE and any(_poisson(e) for e in events)),
    }
    if wanted is not None and wanted not in able:
        raise unknown_name("accountant", "accountant", wanted, able)
    if not events:
        return []
    for name in (wanted,) if wanted else ("pld", "rdp"):
        if able[name]:
            return [(name, events)]
    if wanted:
        what = "this history of fixed-size samples" if wanted == "pld" else "Poisson samples under replace_one"
        other = "rdp" if wanted == "pld" else "pld"
        raise PrivacyRefusal("accountant", f"{wanted.upper()} has no bound for {what}", f"use accountant = '{other}'")
    return [("pld", rest), ("pld" if curved else "rdp", fixed)]


def _fixed_size(event: Event) -> bool:
    return event.sampling == "uniform" and event.sampling_rate < 1


def _has_curve(event: Event) -> bool:
    """Whether the losses of a fixed-size sample stay within what a double can hold."""
    shift = 2 / event.noise_multiplier
    return shift**2 / 2 + _FAR * shift < 600


def _gaussians_as_one(events: History) -> History:
    """Compose unsampled Gaussians exactly: sum of 1 / z^2. (Thirty steps at z = 0.3 would take the PLD half a minute.)"""
    plain = [event for event in events if event.sampling_rate == 1]
    if len(plain) == 0 or (len(plain) == 1 and plain[0].steps == 1):
        return events
    total = math.fsum(event.steps / event.noise_multiplier**2 for event in plain)
    one = Event(noise_multiplier=total**-0.5 * (1 - 1e-12))  # rounding on the safe side
    return (*(event for event in events if event.sampling_rate < 1), one)


def _poisson(event: Event) -> bool:
    return event.sampling == "poisson" and event.sampling_rate < 1


def _group_epsilon(name: AccountantName, events: History, delta: float, adjacency: Adjacency, interval: float) -> float:
    events = _gaussians_as_one(events)
    if any(event.noise_multiplier < SMALLEST_NOISE for event in events):
        return math.inf
    key = "|".join(
        [
            "epsilon",
            RULES,
            name,
            adjacency,
            repr(delta),
            repr(interval),
            *(e.to_json() for e in events),
        ]
    )
    return remembered(key, lambda: _compute(name, events, delta, adjacency, interval))


def _compute(name: AccountantName, events: History, delta: float, adjacency: Adjacency, interval: float) -> float:
    # Imported here: a second, which a result from the cache does not cost.
    from dp_accounting import NeighboringRelation, pld, rdp

    # Zero-out has add/remove's pair of output distributions.
    replace_one = adjacency is Adjacency.REPLACE_ONE
    relation = NeighboringRelation.REPLACE_ONE if replace_one else NeighboringRelation.ADD_OR_REMOVE_ONE
    logging.getLogger("absl").setLevel(logging.ERROR)  # the RDP search warns thousands of times
    if name == "pld" and _fixed_size(events[0]):
        return _fixed_size_epsilon(events, delta, interval)
    if name == "pld":
        widest = max(_loss_range(event) for event in events)
        step = max(interval, widest / _MOST_POINTS)  # coarser only where noise is tiny; still an upper bound
        accountant: Any = pld.PLDAccountant(relation, value_discretization_interval=step)
        factor = 1.0
    else:
        accountant = rdp.RdpAccountant(neighboring_relation=relation)
        factor = 0.5 if replace_one else 1.0
    for event in events:
        accountant.compose(_as_dp_event(event, factor), event.steps)
    return max(0.0, float(accountant.get_epsilon(delta)))


def _fixed_size_epsilon(events: History, delta: float, interval: float) -> float:
    """Compose fixed-size samples under replace-one, each from its hockey-stick curve, by connecting the dots from above."""
    from dp_accounting.pld import privacy_loss_distribution

    total = None
    for event in events:
        curve = privacy_loss_distribution.PrivacyLossDistribution(_fixed_size_losses(event, interval))
        composed = curve.self_compose(event.steps)
        total = composed if total is None else total.compose(composed)
    assert total is not None
    return max(0.0, float(total.get_epsilon_for_delta(delta)))


def _fixed_size_losses(event: Event, interval: float) -> Any:
    """Theorem 11 of Zhu, Dong, Wang, for a mechanism with delta(e) under replace-one (sensitivity: two clips).

    A sample of the fraction q has  q delta(log(1 + (exp(e) - 1) / q))  for e >= 0, and by symmetry, at -e,
    1 - exp(-e) + exp(-e) times that.
    """
    from dp_accounting.pld import pld_pmf
    from scipy.special import log_ndtr, ndtr

    rate, shift = event.sampling_rate, 2 / event.noise_multiplier
    largest = math.log1p(rate * math.expm1(shift**2 / 2 + _FAR * shift))
    points = math.ceil(largest / interval)
    losses = np.arange(points + 1) * interval
    # log(1 + (exp(e) - 1) / q), for large e without overflow
    unsampled = losses - math.log(rate) + np.log1p((rate - 1) * np.exp(-losses))
    first = ndtr(shift / 2 - unsampled / shift)
    second = np.exp(np.minimum(unsampled + log_ndtr(-shift / 2 - unsampled / shift), 0.0))
    above = rate * np.maximum(first - second, 0.0)
    below = -np.expm1(-losses[1:]) + np.exp(-losses[1:]) * above[1:]
    deltas = np.minimum.accumulate(np.concatenate([below[::-1], above]))
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -points, points, deltas)


def _as_dp_event(event: Event, factor: float) -> Any:
    import dp_accounting

    gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier * factor)
    if event.sampling_rate == 0:
        return dp_accounting.NoOpDpEvent()
    if _poisson(event):
        return dp_accounting.PoissonSampledDpEvent(event.sampling_rate, gaussian)
    if event.sampling == "uniform" and event.sampling_rate < 1:
        rate = Fraction(event.sampling_rate).limit_denominator(10**7)
        if rate < Fraction(event.sampling_rate) * (1 - Fraction(1, 10**12)):
            rate = Fraction(math.ceil(event.sampling_rate * 10**7), 10**7)  # never a smaller sample than was drawn
        return dp_accounting.SampledWithoutReplacementDpEvent(rate.denominator, rate.numerator, gaussian)
    return gaussian


def _loss_range(event: Event) -> float:
    """Rough width of one step's privacy loss, for memory only."""
    z = event.noise_multiplier
    return 4 / z**2 + 40 / z


def _coarse_interval(events: History) -> float:
    """An eighth of the smallest per-step loss spread, between the reported interval and twenty times it."""
    spread = min(_loss_spread(event) for event in events)
    return min(COARSEST_INTERVAL, max(INTERVAL, spread / 8))


def _loss_spread(event: Event) -> float:
    """Standard deviation of one step's loss in the central-limit picture: q sqrt(exp(1 / z^2) - 1)."""
    exponent = min(event.noise_multiplier**-2, 50.0)
    return event.sampling_rate * math.sqrt(math.expm1(exponent))
