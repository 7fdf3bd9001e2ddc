"""What each account has spent, derived from stored events alone, for an ethics board.

A statement shows the prices of plans under the ledger's filter. It never composes the history that
took place: which studies that history holds may depend on outputs, and composing it would
understate the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from dpfl.core.types import Adjacency, Budget, Observer, Unit
from dpfl.privacy.accountant import Spend
from dpfl.privacy.costs import AccountHistory, account_history
from dpfl.privacy.filters import Portion, filter_named
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.ledger_reader import UNKNOWN


@dataclass(frozen=True, kw_only=True)
class Statement:
    """An epsilon with its unit, adjacency, adversary, delta and accountant, beside the budget.

    ``filter`` is the rule across studies, ``studies`` how many plans the epsilon covers, ``rounds``
    how many rounds were charged. Under the filter "allotments" a plan counts as a whole once it is
    committed, and its price is guaranteed. Where studies pay as they go, ``epsilon`` is what is
    used so far, which decides what is still admitted; because studies may stop by looking at their
    outputs, what is guaranteed is the budget (``guarantee``).
    """

    account: str
    unit: str
    observer: str
    adjacency: str
    accountant: str
    epsilon: float
    delta: float | None
    budget: float | None
    rounds: int
    filter: str
    studies: int

    @property
    def guarantee(self) -> float:
        """The epsilon that holds whatever depended on outputs."""
        return (
            self.epsilon
            if self.filter == "allotments" or self.budget is None
            else max(self.epsilon, self.budget)
        )

    def to_dict(self) -> dict[str, object]:
        """Return plain values; infinity as text, which JSON can carry."""
        values = {**asdict(self), "guarantee": self.guarantee}
        return {k: "infinite" if v == math.inf else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Statement:
        """Read back; what version 0.1 did not write is filled with what it meant."""
        told = {"budget": values.get("granted"), "filter": "allotments", "studies": 1, **values}
        known: dict[str, Any] = {f.name: told[f.name] for f in fields(cls)}
        return cls(**known | {k: math.inf for k, v in known.items() if v == "infinite"})


def statement(
    ledger: Ledger, account: str, observer: Observer, delta: float | None = None
) -> Statement | None:
    """One account's spend against one adversary, None if nothing was planned or charged.

    ``delta`` left out takes each plan's share of the budget's delta, and the budget's where a plan
    has none; where no delta is known, no finite epsilon can be stated. Another ``delta`` is shared
    equally among the plans.
    """
    with ledger.snapshot():
        grant = ledger.budget_of(account)
        portions = ledger.portions(ledger.committed(account, observer))
        tab = account_history((portion.cost, portion.count) for portion in portions)
        if tab is None and grant is not None and grant.unit and grant.observer is observer:
            tab = AccountHistory(
                unit=grant.unit, adjacency=Adjacency.ZERO_OUT, history=()
            )  # a budget that was never used
        return (
            None if tab is None else _stated(ledger, account, observer, tab, portions, grant, delta)
        )


def _stated(
    ledger: Ledger,
    account: str,
    observer: Observer,
    tab: AccountHistory,
    portions: Sequence[Portion],
    grant: Budget | None,
    delta: float | None,
) -> Statement:
    unit = grant.unit if grant and grant.unit else tab.unit
    readable = tab.adjacency_as(Unit(unit))
    spent = _spent(ledger, portions, readable or tab.adjacency, grant, delta)
    # A budget at a smaller delta is no limit of this epsilon, and must not stand beside it.
    covered = (
        grant is not None
        and (delta is None or delta == grant.delta)
        and spent.delta <= grant.delta * (1 + 1e-12)
        and (
            grant.observer is observer
            or (grant.observer is Observer.SERVER and observer is Observer.WORLD)
        )
    )
    return Statement(
        account=account,
        unit=str(unit),
        observer=str(observer),
        adjacency=str(readable or tab.adjacency),
        accountant=spent.accountant,
        epsilon=spent.epsilon if readable else math.inf,
        delta=None if spent is UNKNOWN else spent.delta,
        budget=grant.epsilon if grant and covered else None,
        rounds=ledger.participations(account, observer)
        or ledger.participations(account, Observer.SERVER),
        filter=ledger.filter,
        studies=len(portions),
    )


def _spent(
    ledger: Ledger,
    portions: Sequence[Portion],
    adjacency: Adjacency,
    grant: Budget | None,
    delta: float | None,
) -> Spend:
    """Price the portions under the ledger's filter, at the deltas that :func:`statement` describes."""
    rule = filter_named(ledger.filter)
    if delta is not None and (grant is None or delta != grant.delta):
        share = delta / max(len(portions), 1) if rule.reserves else delta
        spent = rule.spent(
            [replace(portion, delta=share) for portion in portions], delta, adjacency
        )
        return replace(spent, delta=delta)
    if grant is not None:
        return rule.spent(portions, grant.delta, adjacency)
    if rule.reserves and all(portion.delta is not None for portion in portions):
        return rule.spent(portions, 1.0, adjacency)  # every plan has a delta of its own
    return UNKNOWN


def statements(ledger: Ledger, delta: float | None = None) -> list[Statement]:
    """Every account against every adversary it was charged against, all as of one moment.

    A charge against the server covers the world, which sees less; the world is listed apart only
    where it was planned apart.
    """
    found = []
    with ledger.snapshot():
        for account in ledger.accounts():
            grant = ledger.budget_of(account)
            unused = [grant.observer] if grant and grant.observer else []
            for observer in ledger.observers(account) or unused:
                line = statement(ledger, account, observer, delta)
                if line is not None:
                    found.append(line)
    return found
