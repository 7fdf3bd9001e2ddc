"""Privacy costs, plans and charges: what a ledger stores, and how an account's costs combine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache

from dpfl.core.checks import check, whole_number
from dpfl.core.errors import ConfigurationError, LedgerError
from dpfl.core.files import parsed
from dpfl.core.types import Adjacency, Observer, Unit
from dpfl.privacy.events import Event, History, merged

Delta = float | None  # None where no share of delta is set aside, or none is known


@dataclass(frozen=True, kw_only=True)
class PrivacyCost:
    """What one round releases of one unit under one adjacency.

    ``before`` holds what a plan releases once each, before its first round. Only the cost of a plan
    has it: a round is charged :attr:`of_round`, and release k is charged ``of_releases[k]``.

    >>> statistics = (Event(noise_multiplier=5.0),)
    >>> cost = PrivacyCost(unit=Unit.CLIENT, adjacency=Adjacency.ADD_REMOVE,
    ...                    events=(Event(noise_multiplier=2.0),), before=(statistics,))
    >>> [(event.noise_multiplier, event.steps) for event in cost.times(10)]
    [(2.0, 10), (5.0, 1)]
    """

    unit: Unit
    adjacency: Adjacency
    events: History
    before: tuple[History, ...] = ()

    @property
    def of_round(self) -> PrivacyCost:
        """What one round is charged."""
        return replace(self, before=()) if self.before else self

    @property
    def of_releases(self) -> tuple[PrivacyCost, ...]:
        """What each release before round one is charged."""
        return tuple(replace(self, events=events, before=()) for events in self.before)

    def times(self, count: int) -> History:
        """Return the history of all releases before round one and ``count`` rounds (0 or more)."""
        once = [event for events in self.before for event in events]
        return merged([*once, *(event.times(event.steps * count) for event in self.events)])

    def to_json(self) -> str:
        """Write canonically; "before" is left out where there is nothing before round one."""
        body = {name: value for name, value in vars(self).items() if value or name != "before"}
        return json.dumps(body, sort_keys=True, default=vars)

    @classmethod
    def from_json(cls, text: str) -> PrivacyCost:
        """Read back what :meth:`to_json` wrote."""
        try:
            body = parsed(text)
            events, *before = (
                tuple(map(Event.from_dict, history))
                for history in (body["events"], *body.get("before", ()))
            )
            unit = Unit(body["unit"])
            adjacency = Adjacency(body["adjacency"])
            return cls(unit=unit, adjacency=adjacency, events=events, before=tuple(before))
        except (ValueError, KeyError, TypeError, AttributeError, ConfigurationError) as error:
            raise LedgerError(
                "ledger",
                f"holds a privacy cost that cannot be read ({error})",
                "use the version of dpfl that wrote it",
            ) from error


@lru_cache(maxsize=4096)
def written(cost: PrivacyCost) -> tuple[str, str]:
    """Return the digest under which a ledger stores a privacy cost, and its text."""
    body = cost.to_json()
    return hashlib.sha256(body.encode()).hexdigest(), body


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """What a run may release of an account at most, fixed before its first release.

    ``account`` is a client or a population, ``cost`` what one round releases and what is released
    once before round one, ``releases`` how many rounds at most. ``delta`` is the share of the
    budget's delta that the plan is priced at under the filter "allotments"; None means all of it,
    so that no other plan fits beside this one.

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
        whole_number(where, "releases", self.releases)
        check(
            self.delta is None or 0 < self.delta < 1,
            where,
            f"delta = {self.delta} is not between 0 and 1",
            "give a share of delta",
        )


@dataclass(frozen=True, kw_only=True)
class Charge:
    """One account's cost of one round against one adversary.

    ``draw`` names the randomness of the release if it can be repeated, else it is empty.
    """

    account: str
    observer: Observer
    cost: PrivacyCost
    draw: str = ""


def unit_of(costs: Collection[PrivacyCost]) -> Unit:
    """Of what costs speak together: of records (or persons), where any of them does."""
    return min((cost.unit for cost in costs if cost.unit.of_data), default=Unit.CLIENT)


def speak_of(costs: Collection[PrivacyCost], unit: Unit | None) -> bool:
    """Whether costs say anything of this unit.

    A client-level cost also protects records and persons; a record-level one says nothing of
    clients, nor of persons, who may have several records.
    """
    units = {cost.unit for cost in costs}
    return units <= {unit or unit_of(costs), Unit.CLIENT}


def adjacency_of(costs: Collection[PrivacyCost], unit: Unit | None = None) -> Adjacency:
    """Under which adjacency costs count together, read for a unit: the strongest of any.

    One changed record may change a client's whole contribution into another: for records,
    client-level costs count under replace-one.
    """
    adjacencies = {cost.adjacency for cost in costs}
    units = {cost.unit for cost in costs} | ({unit} if unit else set())
    strict = Adjacency.REPLACE_ONE in adjacencies or len(units) > 1
    return Adjacency.REPLACE_ONE if strict else max(adjacencies, default=Adjacency.ZERO_OUT)
