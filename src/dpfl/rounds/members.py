"""A member of the federation, as its own site sees it: what it holds, what it enforces, what it
says of itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dpfl.core.errors import ConfigurationError
from dpfl.core.types import Budget, Claims, ClientSettings, Observer, Unit
from dpfl.data.federation import Federation
from dpfl.data.inputs import NUMBERS, Inputs
from dpfl.data.records import Shard
from dpfl.plugs.base import Participant


@dataclass(frozen=True, kw_only=True)
class Member:
    """``budget`` is enforced by the member's ledger; ``claims`` is what the server is told, true or
    not.
    """

    id: str
    shard: Shard
    budget: Budget | None
    claims: Claims
    client_settings: ClientSettings = field(default_factory=ClientSettings)
    inputs: Inputs = NUMBERS

    @property
    def participant(self) -> Participant:
        """The member's own side of the contract, for planning its local work."""
        return Participant(
            examples=self.shard.examples, client_settings=self.client_settings, budget=self.budget
        )


def honest_members(
    federation: Federation, claims: Mapping[str, Claims] | None = None
) -> dict[str, Member]:
    """Members that claim what they enforce, but for those whose ``claims`` are given."""
    members = {}
    for client in federation.ids:
        shard, budget = federation.shards[client], federation.budgets.get(client)
        truth = Claims(
            epsilon=budget.epsilon if budget else float("inf"),
            delta=budget.delta if budget else 0.0,
            examples=shard.examples,
            accountant=budget.accountant if budget else None,
        )
        members[client] = Member(
            id=client,
            shard=shard,
            budget=budget,
            claims=(claims or {}).get(client, truth),
            client_settings=federation.client_settings.get(client, ClientSettings()),
            inputs=federation.inputs,
        )
    return members


def false_claims(federation: Federation, misreports: Mapping[str, float]) -> dict[str, Claims]:
    """Claims of clients that multiply their epsilon; a client is named by its id, or by its number
    in the order of ids.
    """
    claims = {}
    for name, factor in misreports.items():
        client = name
        if name not in federation.shards and name.isdecimal() and int(name) < len(federation.ids):
            client = federation.ids[int(name)]
        if client not in federation.shards or client not in federation.budgets:
            raise ConfigurationError(
                f"liar '{name}'",
                "is no client with a budget",
                "name a client, or its number from 0",
            )
        if not (math.isfinite(factor) and factor > 0):
            raise ConfigurationError(
                f"liar '{name}'", f"multiplies by {factor}", "give a positive number"
            )
        budget, shard = federation.budgets[client], federation.shards[client]
        claims[client] = Claims(
            epsilon=budget.epsilon * factor, delta=budget.delta, examples=shard.examples
        )
    return claims


def check_budget(member: Member, *, unit: Unit, observer: Observer) -> None:
    """Refuse a budget that is about another unit, or against someone the strategy does not protect
    from.
    """
    budget = member.budget
    if budget is None:
        return
    if budget.unit is not None and budget.unit is not unit:
        raise ConfigurationError(
            f"budget of '{member.id}'",
            f"is per {budget.unit}, but the method protects a {unit}",
            "choose a method with that unit",
        )
    protected = {
        Observer.SERVER: {Observer.SERVER, Observer.WORLD},
        Observer.WORLD: {Observer.WORLD},
    }.get(observer, set())
    if budget.observer is not None and budget.observer not in protected:
        raise ConfigurationError(
            f"budget of '{member.id}'",
            f"is against the {budget.observer}, but the method's guarantee is against {observer}",
            "choose a method that protects from that observer",
        )
