"""What the tests of ledgers share: privacy costs, charges, plans, and budgets with exactly known
ends.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from scipy import optimize, special

from dpfl.core.types import Adjacency, Budget, Observer, Unit
from dpfl.privacy.costs import Charge, PrivacyCost, PrivacyPlan
from dpfl.privacy.events import Event
from dpfl.privacy.ledger import Ledger

SERVER, WORLD = Observer.SERVER, Observer.WORLD
DELTA = 1e-5


def cost(
    noise: float = 10.0, unit: Unit = Unit.CLIENT, adjacency: Adjacency = Adjacency.ADD_REMOVE
) -> PrivacyCost:
    return PrivacyCost(unit=unit, adjacency=adjacency, events=(Event(noise_multiplier=noise),))


def charge(
    account: str = "a", what: PrivacyCost | None = None, observer: Observer = SERVER, draw: str = ""
) -> Charge:
    return Charge(account=account, observer=observer, cost=what or cost(), draw=draw)


def plan(
    account: str = "a",
    what: PrivacyCost | None = None,
    observer: Observer = SERVER,
    releases: int = 100,
    delta: float | None = None,
) -> PrivacyPlan:
    return PrivacyPlan(
        account=account, observer=observer, cost=what or cost(), releases=releases, delta=delta
    )


def plans_of(charges: Sequence[Charge], releases: int = 100) -> list[PrivacyPlan]:
    return [plan(one.account, one.cost, one.observer, releases) for one in charges]


def pay(ledger: Ledger, run: str, round_: int, charges: Sequence[Charge]) -> frozenset[str]:
    """Plan a hundred such rounds, as a run does at first, and charge one; returns who
    was refused.
    """
    refused = ledger.commit(run, plans_of(charges))
    return refused | ledger.charge(
        run, round_, [one for one in charges if one.account not in refused]
    )


def exact_epsilon(rounds: int, noise: float, delta: float = DELTA) -> float:
    """Epsilon of Gaussian releases, by a formula that shares no code with the accountant."""
    mu = math.sqrt(rounds) / noise

    def excess(value: float) -> float:
        return float(
            special.ndtr(mu / 2 - value / mu)
            - math.exp(value + special.log_ndtr(-mu / 2 - value / mu))
            - delta
        )

    return float(optimize.brentq(excess, 0, 100))


def cap_for(rounds: int, noise: float = 10.0) -> float:
    """An epsilon between the exact costs of ``rounds`` and of one more Gaussian release."""
    return (exact_epsilon(rounds, noise) + exact_epsilon(rounds + 1, noise)) / 2


def set_budgets(
    ledger: Ledger,
    rounds: int,
    *accounts: str,
    observer: Observer = SERVER,
    unit: Unit = Unit.CLIENT,
) -> None:
    budget = Budget(epsilon=cap_for(rounds), delta=DELTA)
    ledger.set_budgets(dict.fromkeys(accounts or ("a",), budget), unit=unit, observer=observer)


def history(ledger: Ledger, account: str = "a", observer: Observer = SERVER) -> tuple[Event, ...]:
    return ledger.history(account, observer)


def charged_rounds(path: Path) -> list[tuple[str, int, str, str]]:
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT run, round, account, observer FROM charges ORDER BY 1, 2, 3, 4"
        return connection.execute(query).fetchall()
