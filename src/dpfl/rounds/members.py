"""A member of the federation, as its own site sees it: what it holds, what it enforces, what it
says of itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from dpfl.core.checks import check, positive
from dpfl.core.types import Budget, Claims, ClientSettings, Observer, Unit
from dpfl.data.federation import Federation
from dpfl.data.inputs import NUMBERS, Inputs
from dpfl.data.records import Shard
from dpfl.plugs.base import Participant
from dpfl.plugs.local_work import LocalWork
from dpfl.plugs.sampling import ALL
from dpfl.privacy.flags import Flag, RaisedFlag
from dpfl.tasks import CLASSIFICATION, Task


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
    task: Task = CLASSIFICATION

    @cached_property
    def participant(self) -> Participant:
        """The member's own side of the contract, for planning its local work."""
        return Participant(
            examples=self.shard.examples,
            client_settings=self.client_settings,
            budget=self.budget,
            client=self.id,
        )


def true_claims(budget: Budget | None, examples: int) -> Claims:
    """What a client says that claims what it enforces."""
    if budget is None:
        return Claims(epsilon=float("inf"), delta=0.0, examples=examples)
    curve = budget.accountant
    return Claims(epsilon=budget.epsilon, delta=budget.delta, examples=examples, accountant=curve)


def honest_members(
    federation: Federation, claims: Mapping[str, Claims] | None = None
) -> dict[str, Member]:
    """Members that claim what they enforce, but for those whose ``claims`` are given."""
    members = {}
    for client in federation.ids:
        shard = federation.shards[client]
        budget = federation.budgets.get(client)
        members[client] = Member(
            id=client,
            shard=shard,
            budget=budget,
            claims=(claims or {}).get(client) or true_claims(budget, shard.examples),
            client_settings=federation.client_settings.get(client, ClientSettings()),
            inputs=federation.inputs,
            task=federation.task,
        )
    return members


def false_claims(federation: Federation, misreports: Mapping[str, float]) -> dict[str, Claims]:
    """Claims of clients that multiply their epsilon.

    A client is named by its id, or by its number in the order of ids.
    """
    claims = {}
    numbered = {str(i): client for i, client in enumerate(federation.ids)}
    for name, factor in misreports.items():
        where = f"misreporting client '{name}'"
        client = name if name in federation.shards else numbered.get(name, "")
        check(
            client in federation.budgets,
            where,
            "is not a client with a budget",
            "name a client, or its number from 0",
        )
        positive(where, factor=factor)
        honest = true_claims(federation.budgets[client], federation.shards[client].examples)
        claims[client] = replace(honest, epsilon=honest.epsilon * factor, accountant=None)
    return claims


def data_flags(members: Mapping[str, Member], work: LocalWork | None = None) -> list[RaisedFlag]:
    """What only operators may know of the members' records.

    ``work`` is what is done with them: records that are too large count as zero where it clips
    their gradients, and it says how many a step takes.
    """
    usual = work.batch_size if work else 0
    large = []
    small = []
    for client, member in members.items():
        shard = member.shard
        if (work is None or work.private) and shard.train.too_large(shard.span):
            large.append(client)
        if usual and shard.examples < (member.client_settings.batch_size or usual) < ALL:
            small.append(client)
    raised = {Flag.TOO_LARGE: large, Flag.WHOLE_BATCHES: small}
    return [
        RaisedFlag(flag, f"{len(clients)} client(s): {', '.join(clients[:5])}")
        for flag, clients in raised.items()
        if clients
    ]


def check_budget(member: Member, *, unit: Unit, observer: Observer) -> None:
    """Refuse a budget that is about another unit, or against someone the strategy does not protect
    from.
    """
    budget = member.budget
    where = f"budget of '{member.id}'"
    if budget is None:
        return
    check(
        budget.unit in (None, unit),
        where,
        f"is per {budget.unit}, but the method protects a {unit}",
        "choose a method with that unit",
    )
    protected = {Observer.SERVER: (Observer.SERVER, Observer.WORLD), Observer.WORLD: (observer,)}
    check(
        budget.observer is None or budget.observer in protected.get(observer, ()),
        where,
        f"is against the {budget.observer}, but the method protects against {observer}",
        "choose a method that protects from that adversary",
    )
