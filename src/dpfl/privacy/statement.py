"""What each account has spent, derived from stored events alone, for an ethics board.

A statement shows the prices of plans under the ledger's filter. It never composes the history that
took place: which studies that history holds may depend on outputs, and composing it would
understate the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from dpfl.core.html import html_table
from dpfl.core.types import Adjacency, Budget, Observer
from dpfl.privacy.accountant import Spend, shown
from dpfl.privacy.costs import Delta, adjacency_of, speak_of, unit_of
from dpfl.privacy.filters import Filter, Portion
from dpfl.privacy.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Statement:
    """An epsilon with its unit, adjacency, adversary, delta and accountant, beside the budget.

    ``account`` is whose epsilon it is, and ``observer`` the adversary. ``delta`` is None, and
    ``epsilon`` infinite, where no delta is known. ``budget`` is None where no budget limits this
    epsilon.

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
        unpriced = 0.0 if self.filter == "allotments" else self.budget or 0.0
        return max(self.epsilon, unpriced)

    @property
    def cells(self) -> list[str]:
        """The account, its rounds, epsilon spent, budget and delta, as cells of a table."""
        numbers = [str(self.rounds), shown(self.epsilon)]
        budget = "-" if self.budget is None else shown(self.budget)
        return [self.account, *numbers, budget, "-" if self.delta is None else f"{self.delta:g}"]

    def to_dict(self) -> dict[str, object]:
        """Return plain values; infinity as text, which JSON can carry."""
        values = {**asdict(self), "guarantee": self.guarantee}
        return {k: "infinite" if v == math.inf else v for k, v in values.items()}

    def _repr_html_(self) -> str:
        return Statements.of([self])._repr_html_()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Statement:
        """Read back what :meth:`to_dict` wrote."""
        known: dict[str, Any] = {f.name: values[f.name] for f in fields(cls)}
        return cls(**known | {k: math.inf for k, v in known.items() if v == "infinite"})


class Statements(dict[str, Statement]):
    """Statements by account; in a notebook they show themselves as a table."""

    @classmethod
    def of(cls, lines: Iterable[Statement]) -> Statements:
        """Collect ``lines`` by their account."""
        return cls({line.account: line for line in lines})

    def _repr_html_(self) -> str:
        headings = ("account", "rounds", "epsilon spent", "budget", "delta")
        tables: dict[str, list[list[str]]] = {}
        for line in self.values():
            about = f"per {line.unit}, {line.adjacency} adjacency, against the {line.observer}"
            tables.setdefault(f"{about}, by {line.accountant}; rounded up", []).append(line.cells)
        found = (html_table(headings, rows) + f"<p>{about}</p>" for about, rows in tables.items())
        return "".join(found)


def statement(
    ledger: Ledger, account: str, observer: Observer, delta: Delta = None
) -> Statement | None:
    """One account's spend against one adversary, None if nothing was planned or charged.

    ``delta`` left out takes each plan's share of the budget's delta, and the budget's where a plan
    has none; where no delta is known, no finite epsilon can be stated. Another ``delta`` is shared
    equally among the plans.
    """
    with ledger.snapshot():
        budget = ledger.budget_of(account)
        portions = ledger.portions(ledger.committed(account, observer))
        costs = [portion.cost for portion in portions]
        if not costs and (budget is None or budget.observer is not observer):
            return None
        unit = budget.unit if budget and budget.unit else unit_of(costs)
        readable = speak_of(costs, unit)
        adjacency = adjacency_of(costs, unit if readable else None)
        spent = _spent(ledger.rule, portions, adjacency, budget.delta if budget else None, delta)
        limits = budget and spent and _limits(budget, observer, spent, delta)
        rounds = ledger.participations(account, observer)
        return Statement(
            account=account,
            unit=str(unit),
            observer=str(observer),
            adjacency=str(adjacency),
            accountant=spent.accountant if spent else "none: no delta is known",
            epsilon=spent.epsilon if spent and readable else math.inf,
            delta=spent.delta if spent else None,
            budget=budget.epsilon if budget and limits else None,
            rounds=rounds or ledger.participations(account, Observer.SERVER),
            filter=ledger.filter,
            studies=len(portions),
        )


def _limits(budget: Budget, observer: Observer, spent: Spend, delta: Delta) -> bool:
    """Whether a budget is a limit of this epsilon, and may stand beside it.

    A budget at a smaller delta is not. One against the server also limits what the world learns.
    """
    same_delta = delta in (None, budget.delta) and spent.delta <= budget.delta * (1 + 1e-12)
    covers = budget.observer is Observer.SERVER and observer is Observer.WORLD
    return same_delta and (budget.observer is observer or covers)


def _spent(
    rule: Filter, portions: list[Portion], adjacency: Adjacency, own: Delta, delta: Delta
) -> Spend | None:
    """Price the portions, at the deltas :func:`statement` describes; None if none is known.

    ``own`` is the delta of the budget.
    """
    if delta not in (None, own):
        share = delta / max(len(portions), 1) if rule.reserves else delta
        shared = [replace(portion, delta=share) for portion in portions]
        return replace(rule.spent(shared, delta, adjacency), delta=delta)
    if own is None and rule.reserves and all(portion.delta is not None for portion in portions):
        own = 1.0  # every plan has a delta of its own
    return None if own is None else rule.spent(portions, own, adjacency)


def statements(ledger: Ledger, delta: Delta = None) -> list[Statement]:
    """State every account against every adversary it was charged against, as of one moment.

    A charge against the server covers the world, which sees less; the world is listed apart only
    where it was planned apart.
    """
    found = []
    with ledger.snapshot():
        for account in ledger.accounts():
            budget = ledger.budget_of(account)
            unused = [budget.observer] if budget and budget.observer else []
            for observer in ledger.observers(account) or unused:
                found.append(statement(ledger, account, observer, delta))
    return [line for line in found if line is not None]
