"""The least noise on a public ladder that keeps a plan within its budget.

Multipliers are powers of 1.005. Clients with equal rate and steps share the points of one curve
epsilon(z), and a multiplier says no more about a budget than its rung. *Formal guarantee:* the plan
with the multiplier returned costs at most the target, as ``spend`` computes it in this process;
with the next smaller rung it would cost more.

A small file in the cache folder proposes what was calibrated before. Anyone could have edited it: a
proposal is evaluated afresh. A file that cannot be read or written is done without.
"""

import bisect
import math
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import lru_cache, partial
from importlib.metadata import version

from dpfl.core.checks import check, positive
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.files import cache_folder
from dpfl.core.types import Adjacency
from dpfl.privacy import accountant as bounds
from dpfl.privacy.accountant import AccountantName, gaussian_mu
from dpfl.privacy.events import Event, Sampling

LADDER = 1.005  # the ratio of neighbouring multipliers
_FIRST, _LAST = -923, 2309
_STRIDE = 220  # rungs between multipliers of a ratio of about 3
_COARSE = 32  # rungs between sampling rates of a ratio of about 1.17
# Whose numbers a proposal rests on
_RULES = f"dp-accounting {version('dp-accounting')}, dpfl accounting {bounds.ACCOUNTING_VERSION}"


def rung(index: int) -> float:
    """Return the multiplier 1.005^index.

    >>> rung(0), round(rung(139), 2)
    (1.0, 2.0)
    """
    return float(LADDER**index)


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
    rate = 1.0 if sampling == "none" else sampling_rate
    positive("calibrate", epsilon=epsilon, steps=steps)
    check(rate != 0, "calibrate", "sampling_rate = 0 releases nothing", "give a rate above 0")
    plan = Event(
        noise_multiplier=1.0, sampling=sampling, sampling_rate=rate, steps=steps, numbers=numbers
    )
    return _calibrated(epsilon, delta, plan, bounds.adjacency_named(adjacency), accountant)


@lru_cache(maxsize=200_000)
def _calibrated(
    target: float, delta: float, plan: Event, adjacency: Adjacency, name: AccountantName | None
) -> float:
    """Take a proposal from the disk if it proves right, else search."""
    cost = partial(bounds.spend, delta=delta, adjacency=adjacency, accountant=name)

    def fine(index: int, accuracy: float = bounds.FINE) -> float:
        return cost([replace(plan, noise_multiplier=rung(index))], accuracy=accuracy).epsilon

    bounds.check_question((plan,), delta, adjacency, name)
    sampler = bounds.sampler_delta(plan.numbers * plan.steps, target)
    check(
        sampler <= bounds.LARGEST_SAMPLER_SHARE * delta,
        "calibrate",
        f"at epsilon = {target} the noise sampler takes over a tenth of delta = {delta}",
        "plan fewer steps or parameters, a smaller epsilon, or a larger delta",
        PrivacyRefusal,
    )
    question = [str(name), adjacency, repr(target), repr(delta), plan.to_json()]
    if (found := proposed("calibrate", *question)) is not None:
        index = next((i for i in range(_FIRST, _LAST + 1) if rung(i) == found), _LAST + 1)
        if _is_smallest(fine, index, target):
            return rung(index)
        text = "a calibrated multiplier in the cache does not verify: it was computed anew"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    rough = partial(fine, accuracy=bounds.QUICK) if name is None else fine
    start = search_rungs(rough, target, _guess(target, delta, plan, adjacency))
    index = _descend(fine, start, target)
    if index > _LAST:
        reach = f"the smallest epsilon this plan can reach is {fine(_LAST):.4g}"
        raise PrivacyRefusal(
            "calibrate",
            f"no finite noise reaches epsilon = {target} at delta = {delta}",
            f"{reach}: allow more, plan fewer steps, or raise delta",
        )
    propose(rung(index), "calibrate", *question)
    return rung(index)


def largest_rate(
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    steps: int,
    *,
    accountant: AccountantName | None = None,
    numbers: int = 0,
    rough: bool = False,
) -> float:
    """Largest Poisson sampling rate of the ladder with which ``steps`` releases at this noise stay
    within a budget, under zero-out adjacency.

    Rates are powers of 1.005, at most 1; where none of them is small enough, the rate is 0.
    ``rough`` asks for a rate near it, which may cost a little more than the budget: budgets share
    the points of the curve that it is read from. The other arguments are those of
    :func:`calibrate`.

    >>> rate = largest_rate(3.0, 1e-5, 1.0, 1000)
    >>> from dpfl.privacy.accountant import epsilon
    >>> epsilon(1.0, rate, 1000, 1e-5) <= 3.0 < epsilon(1.0, rate * LADDER, 1000, 1e-5)
    True
    """
    positive("rates", epsilon=epsilon, noise_multiplier=noise_multiplier, steps=steps)
    plan = Event(noise_multiplier=noise_multiplier, steps=steps, numbers=numbers)
    return _rated(epsilon, delta, plan, accountant, rough)


@lru_cache(maxsize=200_000)
def _rated(
    target: float, delta: float, plan: Event, name: AccountantName | None, rough: bool
) -> float:
    """Search the rates, from 1 downwards: the index of a rate is minus its rung."""
    cost = partial(bounds.spend, delta=delta, adjacency=Adjacency.ZERO_OUT, accountant=name)
    quick = bounds.QUICK if name is None else bounds.FINE

    def spent(index: int, accuracy: float = bounds.FINE) -> float:
        if index < 0:
            return math.inf
        event = replace(plan, sampling="poisson", sampling_rate=rung(-index))
        return cost([event], accuracy=accuracy).epsilon

    places = range(0, _LAST + 1, _COARSE)
    enough = bisect.bisect_left(places, True, key=lambda one: spent(one, quick) <= target)
    if enough == len(places):
        return 0.0
    index = places[enough]
    if index > 0 and (less := spent(index, quick)) > 0:  # log epsilon is nearly straight between
        much = min(spent(index - _COARSE, quick), 1e300)
        index -= math.floor(_COARSE * math.log(target / less) / math.log(much / less))
    if not rough:
        index = _descend(spent, index, target)
    return rung(-index)


def _is_smallest(fine: Callable[[int], float], index: int, target: float) -> bool:
    met = index <= _LAST and fine(index) <= target
    return met and (index == _FIRST or fine(index - 1) > target)


def _descend(fine: Callable[[int], float], index: int, target: float) -> int:
    """The smallest rung that meets the target, from one near it; beyond the last if none does."""
    while index <= _LAST and fine(index) > target:
        index += 1
    while index > _FIRST and fine(index - 1) <= target:
        index -= 1
    return index


def search_rungs(bound: Callable[[int], float], target: float, guess: int) -> int:
    """The smallest rung at which a falling bound meets the target, by secants on log epsilon."""
    low = _FIRST - 1
    high = _LAST + 1  # too little noise; enough, or more than there is
    index = min(max(guess, _FIRST), _LAST)
    slope = -1.2 * math.log(LADDER)
    last: tuple[int, float] | None = None
    while True:
        value = bound(index)
        low, high = (low, index) if value <= target else (index, high)
        if high - low <= 1:
            return high
        step = _STRIDE if value > target else -_STRIDE
        if 0 < value < math.inf:
            level = math.log(value)
            if last is not None:
                slope = min((level - last[1]) / (index - last[0]), -0.05 * math.log(LADDER))
            last = (index, level)
            step = math.ceil((math.log(target) - level) / slope)
            step = min(max(step, -2 * _STRIDE), 2 * _STRIDE)
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


_TABLE = """CREATE TABLE IF NOT EXISTS results
    (key TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID"""


def _key(kind: str, question: Sequence[str]) -> str:
    return "|".join([kind, _RULES, *question])


def proposed(kind: str, *question: str) -> float | None:
    """Return the number on disk for a question of some kind, or None: NaN where it is none.

    Anyone may have edited it.
    """
    query = "SELECT value FROM results WHERE key = ?"
    with suppress(sqlite3.Error, OSError), _database() as database:
        row = database.execute(query, (_key(kind, question),)).fetchone()
        (value,) = row or (None,)
        return value if value is None or isinstance(value, float) else math.nan
    return None


def propose(value: float, kind: str, *question: str) -> None:
    """Write a proposal for later processes; where that fails, warn and go on.

    It is kept for the whole question and the accounting version.
    """
    key = _key(kind, question)
    try:
        with _database() as database:
            database.execute("INSERT OR REPLACE INTO results VALUES (?, ?)", (key, value))
    except (sqlite3.Error, OSError) as error:
        text = f"calibrated noise is not cached on disk: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


@contextmanager
def _database() -> Iterator[sqlite3.Connection]:
    """Open the file for one transaction, and make it where there is none."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    path = cache_folder() / "accounting.sqlite"
    with closing(sqlite3.connect(path, timeout=10)) as connection, connection:
        for command in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=NORMAL", _TABLE):
            connection.execute(command)
        yield connection
