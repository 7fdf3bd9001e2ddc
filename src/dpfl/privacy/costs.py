"""Privacy costs, plans and charges: what a ledger stores, and how an account's costs combine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from dpfl.core.errors import ConfigurationError, LedgerError
from dpfl.core.types import Adjacency, Observer, Unit
from dpfl.privacy.events import Event, History, merged


@dataclass(frozen=True, kw_only=True)
class PrivacyCost:
    """What one round releases of one unit under one adjacency."""

    unit: Unit
    adjacency: Adjacency
    events: History
    before: tuple[History, ...] = ()

    def times(self, count: int) -> History:
        """Return the history of ``count`` such rounds."""
        return merged(event.times(event.steps * count) for event in self.events)

    def to_json(self) -> str:
        """Write canonically."""
        events = [json.loads(event.to_json()) for event in self.events]
        return json.dumps(
            {"unit": self.unit, "adjacency": self.adjacency, "events": events}, sort_keys=True
        )

    @classmethod
    def from_json(cls, text: str) -> PrivacyCost:
        """Read back what :meth:`to_json` wrote."""
        try:
            body = json.loads(text)
            events = tuple(Event.from_json(json.dumps(event)) for event in body["events"])
            return cls(
                unit=Unit(body["unit"]), adjacency=Adjacency(body["adjacency"]), events=events
            )
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerError(
                "ledger",
                f"holds a privacy cost that cannot be read ({error})",
                "use the version of dpfl that wrote it",
            ) from error


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """What a run may release of an account at most, fixed before its first release.

    ``account`` is a client or a population, ``cost`` what one round releases, ``releases`` how many
    rounds at most. ``delta`` is the share of the budget's delta that the plan is priced at under
    the filter "allotments"; None means all of it, so that no other plan fits beside this one.

    *Formal guarantees.* Which of the planned rounds take place, in which order, what they compute
    and when the run stops may depend on earlier outputs. Sampling rates, noise and their number may
    not: they are this plan's.
    """

    account: str
    observer: Observer
    cost: PrivacyCost
    releases: int
    delta: float | None = None

    def __post_init__(self) -> None:
        where = f"plan of '{self.account}'"
        if self.releases < 1 or self.releases != int(self.releases):
            raise ConfigurationError(
                where, f"releases = {self.releases}", "give a whole number, 1 or above"
            )
        if self.delta is not None and not 0 < self.delta < 1:
            raise ConfigurationError(
                where, f"delta = {self.delta} is not between 0 and 1", "give a share of the budget"
            )


@dataclass(frozen=True, kw_only=True)
class Charge:
    """One account's bill for one round against one observer; ``draw`` names its randomness, if
    repeatable.
    """

    account: str
    observer: Observer
    cost: PrivacyCost
    draw: str = ""


@dataclass(frozen=True, kw_only=True)
class AccountHistory:
    """Everything an account was charged against an observer, ready for an accountant."""

    unit: Unit
    adjacency: Adjacency
    history: History
    mixed: bool = False

    def adjacency_as(self, unit: Unit) -> Adjacency | None:
        """Under which adjacency the history speaks of this unit, if it does.

        A client-level history also protects records; a record-level one says nothing of clients.
        One changed record may change a client's whole contribution into another: for records,
        client-level events count under replace-one.
        """
        if unit is self.unit and not self.mixed:
            return self.adjacency
        return Adjacency.REPLACE_ONE if unit is Unit.RECORD else None


def account_history(costs: Iterable[tuple[PrivacyCost, int]]) -> AccountHistory | None:
    """Combine bills into one history under the strongest adjacency any of them states."""
    counted = list(costs)
    if not counted:
        return None
    units = {cost.unit for cost, _ in counted}
    adjacencies = {cost.adjacency for cost, _ in counted}
    strict = Adjacency.REPLACE_ONE in adjacencies or len(units) > 1
    adjacency = Adjacency.REPLACE_ONE if strict else max(adjacencies)
    history = merged(event.times(event.steps * n) for cost, n in counted for event in cost.events)
    unit = Unit.RECORD if Unit.RECORD in units else Unit.CLIENT
    return AccountHistory(unit=unit, adjacency=adjacency, history=history, mixed=len(units) > 1)
