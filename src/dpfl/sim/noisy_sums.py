"""Noisy sums of test statistics: planned and charged for every client, then computed.

*Formal guarantees.* Every client's plan is checked, committed and charged before anything is
computed; where one budget does not cover it, nothing is charged to anyone.
"""

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from dpfl.core.checks import check, positive
from dpfl.core.errors import ConfigurationError, DataError, PrivacyRefusal
from dpfl.core.random import PublicSeed
from dpfl.core.types import Adjacency, Budget, Observer, Promise
from dpfl.data.federation import Federation
from dpfl.models import check_model
from dpfl.plugs.channels import Channel, Digital
from dpfl.plugs.measures import Measure, measured_exposure
from dpfl.plugs.release_costs import release_noise
from dpfl.privacy.accountant import Spend, spend
from dpfl.privacy.costs import Charge, PrivacyCost, PrivacyPlan
from dpfl.privacy.flags import Flag
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.statement import Statement, statement
from dpfl.rounds.enrol import secret_for
from dpfl.rounds.measure import measured_answer, records_of
from dpfl.rounds.members import Member, check_budget, honest_members
from dpfl.strategy.slots import MANY

_SERVER = Observer.SERVER
_SEEN_BY = frozenset({Observer.SERVER, Observer.WORLD})


@dataclass(frozen=True, kw_only=True)
class NoiseLevel:
    """How much noise there is, from an epsilon or as a multiplier, and where it comes from."""

    epsilon: float | None
    noise_multiplier: float | None
    delta: float | None
    seed: int | None
    channel: Channel = field(default_factory=Digital)

    def __post_init__(self) -> None:
        one = (self.epsilon is None) != (self.noise_multiplier is None)
        check(
            one,
            "evaluation",
            "neither epsilon nor noise_multiplier was given, or both",
            "give one of the two",
        )
        given = {name: getattr(self, name) for name in ("epsilon", "noise_multiplier")}
        positive("evaluation", **{name: one for name, one in given.items() if one is not None})

    def delta_of(self, member: Member) -> float:
        """The delta of a client's cost: the one given, or its budget's."""
        delta = self.delta
        if delta is None:
            if member.budget is None:
                raise ConfigurationError(
                    f"client '{member.id}'",
                    "has no budget, so delta must be given",
                    "give delta, well below 1 / records",
                )
            delta = member.budget.delta
        check(
            0 < delta < 1, "evaluation", f"delta = {delta}", "give a number well below 1 / records"
        )
        return delta

    def std(self, member: Member, numbers: int, copies: int, rule: str) -> float:
        """The noise on each number, for statistics of ``copies`` models in the unit ball.

        ``rule`` is the ledger's filter, whose own curve decides what is affordable. Over a secure
        sum a billionth of delta is set aside for what the sum costs beside its noise.
        """
        multiplier = self.noise_multiplier
        if self.epsilon is not None:
            aside = 1e-9 if self.channel.group(MANY) else 0.0
            budget = Budget(epsilon=self.epsilon, delta=self.delta_of(member) * (1 - aside))
            budget = replace(budget, accountant="renyi") if rule == "renyi" else budget
            (multiplier,) = release_noise(((1.0, numbers),), budget, self.epsilon, 1)
        assert multiplier is not None
        return multiplier * math.sqrt(copies)


@dataclass(frozen=True, kw_only=True)
class NoisySums:
    """Noisy sums of every client, one row per model, and what they cost.

    ``rows`` says whether anybody sees a single client's sums.
    """

    answers: Mapping[str, Tensor]
    stds: Mapping[str, float]
    counts: Mapping[str, int]
    costs: Mapping[str, Spend]
    spent: Mapping[str, Statement]
    flags: tuple[Flag, ...]
    about: Promise
    rows: bool

    @property
    def records(self) -> int:
        """How many test records all clients that answered have together."""
        return sum(self.counts.values())

    def shared(self, measure: Measure) -> dict[str, Any]:
        """The fields that every accounted result has."""
        kept = {
            name: getattr(self, name) for name in ("records", "costs", "spent", "flags", "about")
        }
        return {"metric": measure.name, **kept}


def noisy_sums(
    models: list[nn.Module],
    federation: Federation,
    measure: Measure,
    level: NoiseLevel,
    ledger: Ledger,
) -> NoisySums:
    """Check, plan and charge every client; then compute and add noise."""
    for model in models:
        check_model(
            model,
            federation.feature_shape,
            federation.task,
            federation.inputs,
            federation.target_shape,
        )
    members = {c: own for c, own in honest_members(federation).items() if records_of(own)}
    check(
        bool(members),
        "evaluation",
        "no client has a test record",
        "give the clients test records",
        DataError,
    )
    numbers = measure.numbers * len(models)
    copies = len(models)
    unit = federation.unit
    stds = {}
    plans = []
    channel = level.channel
    colluders = channel.colluders if channel.group(len(members)) else math.inf
    about = Promise(unit=unit, adjacency=Adjacency.ZERO_OUT, observer=_SERVER, colluders=colluders)
    for client, member in members.items():
        check_budget(member, unit=unit, observer=_SERVER)
        stds[client] = level.std(member, numbers, copies, ledger.filter)
    if channel.group(len(members)):  # one noise for all, of which everyone adds a share
        stds = dict.fromkeys(stds, max(stds.values()))
    for client, member in members.items():
        exposure = measured_exposure(stds[client], numbers, copies, unit)
        events = channel.shared_exposure(exposure, len(members)).events()
        cost = PrivacyCost(unit=unit, adjacency=about.adjacency, events=events)
        plan = partial(PrivacyPlan, account=client, observer=_SERVER, cost=cost)
        plans.append(plan(releases=1, delta=level.delta_of(member)))
    run = f"evaluation-{uuid.uuid4().hex[:16]}"
    _charge(ledger, run, f"evaluation: {measure.name}", plans, members, level)
    seed = None if level.seed is None else PublicSeed(level.seed).child("evaluation")
    stds = {client: channel.noise_share(std, len(members)) for client, std in stds.items()}
    answers = {
        client: measured_answer(measure, models, own, stds[client], secret_for(seed, client))
        for client, own in members.items()
    }
    spent = {client: statement(ledger, client, _SERVER) for client in members}
    return NoisySums(
        answers=answers,
        stds=stds,
        counts={client: records_of(own) for client, own in members.items()},
        costs={plan.account: _price(plan) for plan in plans},
        spent={client: line for client, line in spent.items() if line is not None},
        flags=raised(federation, seeded=seed is not None),
        about=about,
        rows=channel.sees_rows,
    )


def raised(federation: Federation, *, seeded: bool) -> tuple[Flag, ...]:
    """The flags of an accounted release."""
    there = {
        Flag.SEEDED: seeded,
        Flag.STRATIFIED: federation.stratified,
        Flag.INFERRED: federation.inferred,
    }
    return tuple(flag for flag, up in there.items() if up)


def _price(plan: PrivacyPlan) -> Spend:
    """What a plan of one release costs by itself."""
    assert plan.delta is not None
    return spend(plan.cost.events, plan.delta, adjacency=plan.cost.adjacency)


def _charge(
    ledger: Ledger,
    run: str,
    title: str,
    plans: list[PrivacyPlan],
    members: Mapping[str, Member],
    level: NoiseLevel,
) -> None:
    """Commit and charge one release of everyone; refuse if anyone's budget does not cover it."""
    budgets = {client: own.budget for client, own in members.items() if own.budget is not None}
    budgets = {client: replace(own, accountant=None) for client, own in budgets.items()}
    ledger.set_budgets(budgets, unit=plans[0].cost.unit, observer=_SERVER)
    _refuse(
        [
            plan.account
            for plan in plans
            if not ledger.affordable_releases(
                plan.account, plan.cost, _SEEN_BY, 1, delta=plan.delta
            )
        ]
    )
    ledger.register(run, seeded=level.seed is not None, title=title)
    _refuse(sorted(ledger.commit(run, plans)))
    charges = [Charge(account=p.account, observer=p.observer, cost=p.cost) for p in plans]
    _refuse(sorted(ledger.charge(run, 0, charges)))


def _refuse(short: list[str]) -> None:
    """Name who cannot pay."""
    more = f" and {len(short) - 3} more" if len(short) > 3 else ""
    names = ", ".join(f"'{client}'" for client in short[:3]) + more
    check(
        not short,
        "evaluation",
        f"the budget of {names} does not cover it",
        "use less epsilon or more noise, or leave these clients out",
        PrivacyRefusal,
    )
