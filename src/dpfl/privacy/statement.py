"""What each account has spent, derived from stored events alone: the page for an ethics board."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from dpfl.core.types import Adjacency, Observer, Unit
from dpfl.privacy.accountant import Spend, spend
from dpfl.privacy.bills import Tab
from dpfl.privacy.ledger import Ledger

_UNKNOWN = Spend(epsilon=math.inf, delta=1.0, adjacency=Adjacency.REPLACE_ONE, accountant="none: no delta is known")


@dataclass(frozen=True, kw_only=True)
class Statement:
    """An epsilon with its unit, adjacency, observer, delta and accountant, beside what was granted (if anything was)."""

    account: str
    unit: str
    observer: str
    adjacency: str
    accountant: str
    epsilon: float
    delta: float | None
    granted: float | None
    rounds: int

    def to_dict(self) -> dict[str, object]:
        """Return plain values; infinity as text, which JSON can carry."""
        values = asdict(self)
        return {k: "infinite" if isinstance(v, float) and math.isinf(v) else v for k, v in values.items()}


def statement(ledger: Ledger, account: str, observer: Observer, delta: float | None = None) -> Statement | None:
    """One account's spend against one observer, None if nothing was charged.

    ``delta`` left out takes the granted one; where none is known, no finite epsilon can be stated.
    """
    tab = ledger.tab(account, observer)
    grant = ledger.grant_of(account)
    chosen = delta if delta is not None else (grant.delta if grant else None)
    if tab is None and grant is not None and grant.unit and grant.observer is observer:
        nothing = Tab(unit=grant.unit, adjacency=Adjacency.ZERO_OUT, history=())  # granted, and never took part
        return _stated(ledger, account, observer, nothing, chosen)
    return None if tab is None else _stated(ledger, account, observer, tab, chosen)


def _stated(ledger: Ledger, account: str, observer: Observer, tab: Tab, delta: float | None) -> Statement:
    grant = ledger.grant_of(account)
    unit = grant.unit if grant and grant.unit else tab.unit
    readable = tab.adjacency_as(Unit(unit))
    # Without any delta nothing finite can be said; what hides nothing is infinite at every delta.
    spent = spend(tab.history, delta, adjacency=readable or tab.adjacency) if delta is not None else _UNKNOWN
    # A grant at another delta is no limit of this epsilon, and must not stand beside it.
    covered = (
        grant is not None
        and grant.delta == delta
        and (grant.observer is observer or (grant.observer is Observer.SERVER and observer is Observer.WORLD))
    )
    return Statement(
        account=account,
        unit=str(unit),
        observer=str(observer),
        adjacency=str(readable or tab.adjacency),
        accountant=spent.accountant,
        epsilon=spent.epsilon if readable else math.inf,
        delta=delta,
        granted=grant.epsilon if grant and covered else None,
        rounds=ledger.participations(account, observer) or ledger.participations(account, Observer.SERVER),
    )


def statements(ledger: Ledger, delta: float | None = None) -> list[Statement]:
    """Every account against every observer it was billed against.

    A bill against the server covers the world, which sees less; the world is listed apart only where it was billed apart.
    """
    found = []
    for account in ledger.accounts():
        grant = ledger.grant_of(account)
        unused = [grant.observer] if grant and grant.observer else []
        for observer in ledger.observers(account) or unused:
            line = statement(ledger, account, observer, delta)
            if line is not None:
                found.append(line)
    return found
