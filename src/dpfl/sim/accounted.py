"""Evaluation and selection on private test records, accounted for like training.

:func:`evaluate` measures one model, :func:`select` chooses among several. Each client adds noise to
a bounded statistic of its own test records, and its account is charged before anything is computed.

*Formal guarantees.* Per test record, zero-out adjacency (the number of test records is public),
against the server, which sees each client's noisy sums. The models are taken as public. Test and
training records of one client are charged to the same account: together they cost the sum, also
where they are different records, because one person may have several.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from dpfl.core.checks import check, positive
from dpfl.core.errors import DataError, PrivacyRefusal
from dpfl.core.random import PublicSeed
from dpfl.core.types import Adjacency, Budget, Observer, Promise, Unit
from dpfl.data.federation import Federation
from dpfl.models import check_model
from dpfl.plugs.measures import Estimate, Measure, make_measure, measured_exposure
from dpfl.plugs.releases import release_noise
from dpfl.privacy.accountant import Spend, shown, spend
from dpfl.privacy.costs import Charge, PrivacyCost, PrivacyPlan
from dpfl.privacy.filters import FilterName
from dpfl.privacy.flags import Flag
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.statement import Statement, statement
from dpfl.rounds.enrol import secret_for
from dpfl.rounds.measure import measured_answer, pooled, records_of
from dpfl.rounds.members import Member, check_budget, honest_members
from dpfl.sim.train import open_ledger

PROMISE = Promise(unit=Unit.RECORD, adjacency=Adjacency.ZERO_OUT, observer=Observer.SERVER)
_SEEN_BY = frozenset({Observer.SERVER, Observer.WORLD})


@dataclass(frozen=True, kw_only=True)
class Accounted:
    """What an accounted release of test statistics cost.

    ``costs`` is the epsilon of this release alone, by client; ``spent`` is what each account has
    spent in the ledger, this release included. ``records`` counts the test records.
    """

    metric: str
    records: int
    costs: Mapping[str, Spend]
    spent: Mapping[str, Statement] = field(repr=False)
    seeded: bool

    @property
    def epsilon(self) -> float:
        """The largest epsilon that this release costs any client."""
        return max(cost.epsilon for cost in self.costs.values())

    @property
    def promise(self) -> str:
        """Epsilon, delta, unit, adjacency and adversary in one clause."""
        delta = max(cost.delta for cost in self.costs.values())
        said = f"epsilon at most {shown(self.epsilon)} at delta {delta:g} {PROMISE}"
        return f"{said}; {Flag.SEEDED.about}" if self.seeded else said

    def _of_whom(self) -> str:
        return f"{self.records} test records of {len(self.costs)} clients"


@dataclass(frozen=True, kw_only=True)
class AccountedEvaluation(Accounted):
    """A noisy metric on private test records; ``standard_error`` is that of the noise.

    ``by_client`` has each client's own noisy value, which the server can see too.
    """

    value: float
    standard_error: float
    by_client: Mapping[str, Estimate]

    def __str__(self) -> str:
        found = Estimate(value=self.value, standard_error=self.standard_error)
        return f"{self.metric} {found} (noise), {self._of_whom()}; {self.promise}"


@dataclass(frozen=True, kw_only=True)
class Selection(Accounted):
    """The candidate with the best noisy metric. ``scores`` has the metric of each one."""

    chosen: str
    scores: Mapping[str, Estimate]

    def __str__(self) -> str:
        best = f"'{self.chosen}' of {len(self.scores)}: {self.metric} {self.scores[self.chosen]}"
        return f"{best} (noise), {self._of_whom()}; {self.promise}"


def evaluate(
    model: nn.Module,
    federation: Federation,
    *,
    metric: str | Measure = "accuracy",
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    bound: float | None = None,
    bins: int = 64,
    ledger: Path | str | None = None,
    new_ledger: bool = False,
    filter: FilterName = "renyi",  # noqa: A002 - as in train
    seed: int | None = None,
) -> AccountedEvaluation:
    """Measure a model on the clients' private test records, with noise, and charge their accounts.

    ``metric`` is "accuracy", "loss" (each record's is brought within ``bound``, a public number),
    "auc" (two classes, scores in ``bins`` bins) or a :class:`dpfl.plugs.measures.Measure`. Either
    ``epsilon`` says what the evaluation may cost each client, or ``noise_multiplier`` how much
    noise there is relative to the largest contribution of a record. ``delta`` left out is that of
    each client's budget. ``ledger``, ``new_ledger`` and ``filter`` are those of
    :func:`dpfl.train`: in the ledger of a training the evaluation adds to what that spent.
    Without a file, the evaluation is accounted for alone. A client whose budget does not cover it
    is named, and nothing is computed. ``seed`` makes the noise repeatable, and NOT PRIVATE.
    """
    measure = make_measure(metric, federation.task, bound, bins)
    privacy = _Privacy(epsilon=epsilon, noise_multiplier=noise_multiplier, delta=delta, seed=seed)
    with closing(open_ledger(ledger, new_ledger, filter)) as book:
        found = _released([model], federation, measure, privacy, book)
    rows = {client: answer[0] for client, answer in found.answers.items()}
    whole = pooled(measure, rows, found.stds, found.records)
    own = {
        client: measure.estimate(row, found.stds[client] ** 2, found.counts[client])
        for client, row in rows.items()
    }
    return AccountedEvaluation(**found.shared(measure), **vars(whole), by_client=own)


def select(
    models: Mapping[str, nn.Module],
    federation: Federation,
    *,
    metric: str | Measure = "accuracy",
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    bound: float | None = None,
    bins: int = 64,
    ledger: Path | str | None = None,
    new_ledger: bool = False,
    filter: FilterName = "renyi",  # noqa: A002 - as in train
    seed: int | None = None,
) -> Selection:
    """Choose the best of several models by a noisy metric on the clients' private test records.

    ``models`` are the candidates by name, each of them public. Every client sends the noisy
    statistics of all candidates, charged as one Gaussian mechanism: for k candidates the same
    epsilon needs sqrt(k) times the noise of one evaluation. The best noisy value is then
    post-processing, and so are all values. The other arguments are those of :func:`evaluate`.
    """
    remedy = "give candidates as {name: model}"
    good = isinstance(models, Mapping) and bool(models)
    check(good, "select", "was given no candidates", remedy)
    measure = make_measure(metric, federation.task, bound, bins)
    privacy = _Privacy(epsilon=epsilon, noise_multiplier=noise_multiplier, delta=delta, seed=seed)
    names = sorted(models)
    with closing(open_ledger(ledger, new_ledger, filter)) as book:
        found = _released([models[name] for name in names], federation, measure, privacy, book)
    scores = {}
    for i, name in enumerate(names):
        rows = {client: answer[i] for client, answer in found.answers.items()}
        scores[name] = pooled(measure, rows, found.stds, found.records)
    sign = 1.0 if measure.higher_is_better else -1.0
    best = max(names, key=lambda name: sign * scores[name].value)
    return Selection(**found.shared(measure), chosen=best, scores=scores)


# -- charging and computing ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Privacy:
    """How much noise there is, from an epsilon or as a multiplier, and where it comes from."""

    epsilon: float | None
    noise_multiplier: float | None
    delta: float | None
    seed: int | None

    def __post_init__(self) -> None:
        one = (self.epsilon is None) != (self.noise_multiplier is None)
        problem = "neither epsilon nor noise_multiplier was given, or both"
        check(one, "evaluation", problem, "give one of the two")
        given = {name: getattr(self, name) for name in ("epsilon", "noise_multiplier")}
        positive("evaluation", **{name: one for name, one in given.items() if one is not None})

    def delta_of(self, member: Member) -> float:
        """The delta of a client's cost: the one given, or its budget's."""
        own = None if member.budget is None else member.budget.delta
        found = own if self.delta is None else self.delta
        where, problem = f"client '{member.id}'", "has no budget, so delta must be given"
        check(found is not None, where, problem, "give delta, well below 1 / records")
        assert found is not None
        good = 0 < found < 1
        check(good, "evaluation", f"delta = {found}", "give a number well below 1 / records")
        return found

    def std(self, member: Member, numbers: int, copies: int, rule: str) -> float:
        """The noise on each number, for statistics of ``copies`` models in the unit ball.

        ``rule`` is the ledger's filter, whose own curve decides what is affordable.
        """
        multiplier = self.noise_multiplier
        if self.epsilon is not None:
            kind: str | None = "renyi" if rule == "renyi" else None
            budget = Budget(epsilon=self.epsilon, delta=self.delta_of(member), accountant=kind)
            (multiplier,) = release_noise(((1.0, numbers),), budget, self.epsilon, 1)
        assert multiplier is not None
        return multiplier * math.sqrt(copies)


@dataclass(frozen=True, kw_only=True)
class _Released:
    """Noisy sums of every client, one row per model, and what they cost."""

    answers: Mapping[str, Tensor]
    stds: Mapping[str, float]
    counts: Mapping[str, int]
    costs: Mapping[str, Spend]
    spent: Mapping[str, Statement]
    seeded: bool

    @property
    def records(self) -> int:
        """All test records."""
        return sum(self.counts.values())

    def shared(self, measure: Measure) -> dict[str, object]:
        """The fields that every accounted result has."""
        kept = {name: getattr(self, name) for name in ("records", "costs", "spent", "seeded")}
        return {"metric": measure.name, **kept}


def _released(
    models: list[nn.Module],
    federation: Federation,
    measure: Measure,
    privacy: _Privacy,
    ledger: Ledger,
) -> _Released:
    """Check, plan and charge every client; then compute and add noise."""
    for model in models:
        shape, target = federation.feature_shape, federation.target_shape
        check_model(model, shape, federation.task, federation.inputs, target)
    members = {c: own for c, own in honest_members(federation).items() if records_of(own)}
    remedy = "give the clients test records"
    check(bool(members), "evaluation", "no client has a test record", remedy, DataError)
    numbers, copies = measure.numbers * len(models), len(models)
    stds, plans = {}, []
    for client, member in members.items():
        check_budget(member, unit=PROMISE.unit, observer=PROMISE.observer)
        stds[client] = privacy.std(member, numbers, copies, ledger.filter)
        events = measured_exposure(stds[client], numbers, copies).events()
        cost = PrivacyCost(unit=PROMISE.unit, adjacency=PROMISE.adjacency, events=events)
        plan = partial(PrivacyPlan, account=client, observer=PROMISE.observer, cost=cost)
        plans.append(plan(releases=1, delta=privacy.delta_of(member)))
    run = f"evaluation-{uuid.uuid4().hex[:16]}"
    _charge(ledger, run, f"evaluation: {measure.name}", plans, members, privacy)
    seed = None if privacy.seed is None else PublicSeed(privacy.seed).child("evaluation")
    answers = {
        client: measured_answer(measure, models, own, stds[client], secret_for(seed, client))
        for client, own in members.items()
    }
    spent = {client: statement(ledger, client, PROMISE.observer) for client in members}
    return _Released(
        answers=answers,
        stds=stds,
        counts={client: records_of(own) for client, own in members.items()},
        costs={plan.account: _price(plan) for plan in plans},
        spent={client: line for client, line in spent.items() if line is not None},
        seeded=seed is not None,
    )


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
    privacy: _Privacy,
) -> None:
    """Commit and charge one release of everyone; refuse if anyone's budget does not cover it."""
    budgets = {client: own.budget for client, own in members.items() if own.budget is not None}
    budgets = {client: replace(own, accountant=None) for client, own in budgets.items()}
    ledger.set_budgets(budgets, unit=PROMISE.unit, observer=PROMISE.observer)
    short = [
        plan.account
        for plan in plans
        if not ledger.affordable_releases(plan.account, plan.cost, _SEEN_BY, 1, delta=plan.delta)
    ]
    _refuse(short)
    ledger.register(run, seeded=privacy.seed is not None, title=title)
    _refuse(sorted(ledger.commit(run, plans)))
    charges = [Charge(account=p.account, observer=p.observer, cost=p.cost) for p in plans]
    _refuse(sorted(ledger.charge(run, 0, charges)))


def _refuse(short: list[str]) -> None:
    """Name who cannot pay."""
    more = f" and {len(short) - 3} more" if len(short) > 3 else ""
    names = ", ".join(f"'{client}'" for client in short[:3]) + more
    problem = f"the budget of {names} does not cover it"
    remedy = "use less epsilon or more noise, or leave these clients out"
    check(not short, "evaluation", problem, remedy, PrivacyRefusal)
