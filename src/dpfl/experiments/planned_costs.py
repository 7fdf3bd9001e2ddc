"""What a plan would cost clients: against each adversary, as a paper would print it, and by whose
noise is counted on.

Everything is asked of a prepared simulation; nothing is charged.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from dpfl.core.random import PublicSeed
from dpfl.core.types import Observer, Plain, Unit
from dpfl.plugs.shared_gradient import ALONE
from dpfl.privacy import classic_rdp
from dpfl.privacy.accountant import Spend, spend
from dpfl.privacy.costs import PrivacyCost
from dpfl.privacy.events import Event
from dpfl.runs.result import Spread
from dpfl.secure_sum.session import Group
from dpfl.sim.loop import Simulation

USUAL_DELTA = 1e-5
"""The delta of a client that has no budget."""

_REMARKS = {
    ("poisson", "poisson"): classic_rdp.POISSON_REMARK,
    ("uniform", "uniform"): classic_rdp.UNIFORM_REMARK,
}


@dataclass(frozen=True, kw_only=True)
class PlannedEpsilon:
    """What the plan costs clients against one adversary, as the ledger will state it.

    ``running_out`` counts the clients whose budget ends before their planned participations.
    """

    spread: Spread
    accountants: tuple[str, ...]
    running_out: int

    def to_dict(self) -> Plain:
        """Return plain values."""
        told = {"accountant": list(self.accountants), "clients_that_run_out": self.running_out}
        return {**self.spread.to_dict(), **told}


@dataclass(frozen=True, kw_only=True)
class Published:
    """The epsilon that a paper would print, for display only, and what it is worth."""

    epsilon: float
    remark: str


def _spent(cost: PrivacyCost, times: int, delta: float) -> Spend:
    """What the releases before round one and so many rounds of this cost spend."""
    return spend(cost.times(times), delta, adjacency=cost.adjacency)


def planned(sim: Simulation, observer: Observer) -> PlannedEpsilon:
    """The cost of all rounds, or of as many as fit a budget that is enforced."""
    agreement = sim.agreement
    strategy = sim.strategy
    terms = sim.agreement.terms
    # What sampling amplifies is charged every round to everyone, drawn or not.
    times = terms.rounds if strategy.amplifies(observer) else terms.participations
    epsilons = []
    accountants = set()
    early = 0
    for member in sim.members.values():
        cost = agreement.plan(observer, member.participant)
        budget = member.budget
        limit = math.inf
        delta = budget.delta if budget else USUAL_DELTA
        if budget and not strategy.local.hypothetical:
            enforced = (budget.observer or strategy.observer) in (observer, Observer.SERVER)
            limit = budget.epsilon if enforced else math.inf
        spent = _spent(cost, times, delta)
        early += spent.epsilon > limit
        epsilons.append(min(_spent(cost, terms.rounds, delta).epsilon, limit))
        accountants.add(spent.accountant)
    spread = Spread.of(epsilons)
    assert spread is not None
    return PlannedEpsilon(spread=spread, accountants=tuple(sorted(accountants)), running_out=early)


def _least_delta(sim: Simulation) -> float:
    """The smallest delta of any client."""
    budgets = [member.budget for member in sim.members.values()]
    return min(budget.delta if budget else USUAL_DELTA for budget in budgets)


def published(sim: Simulation) -> Published | None:
    """What the method's paper would print: the moments accountant over sampled clients."""
    strategy = sim.strategy
    terms = sim.agreement.terms
    sampling = strategy.selection.sampling
    noise = strategy.noise_multiplier
    if strategy.unit is not Unit.CLIENT or noise is None or sampling == "none":
        return None
    # Papers without central noise read cohorts of a fixed size as Poisson samples.
    read = sampling if strategy.central_noise is not None else "poisson"
    rate = strategy.selection.rate(terms.population)
    value = classic_rdp.classic_epsilon(noise, rate, terms.rounds, _least_delta(sim), read)
    remark = _REMARKS.get((sampling, read), classic_rdp.MISREAD_REMARK)
    if not strategy.amplifies(strategy.observer):
        remark = classic_rdp.UNAMPLIFIED_REMARK
    return Published(epsilon=value, remark=remark)


def by_assumption(sim: Simulation, seed: PublicSeed) -> dict[str, Spread]:
    """Epsilons of all rounds by whose noise is counted on; Gaussians compose exactly, and bounds
    that may fail take their part of delta.
    """
    strategy = sim.strategy
    terms = sim.agreement.terms
    if strategy.selection.sampling != "none":
        return {}
    ids = tuple(sorted(sim.members))
    losses = strategy.channel.losses_by_assumption(ids, terms, sim.layout, seed)
    sent = strategy.exposure(Observer.SERVER, terms)
    stretch = sent.bound / getattr(strategy.channel, "clip", sent.bound)
    failure = min(1.0, sent.failure * terms.rounds)
    delta = _least_delta(sim)

    def composed(loss: float) -> float:
        """The epsilon of a sum of 1 / z^2."""
        if loss == 0 or math.isinf(loss):
            return loss
        event = Event(noise_multiplier=loss**-0.5 / stretch, failure=failure)
        return spend([event], delta, adjacency=strategy.adjacency).epsilon

    found = {}
    for name, own in losses.items():
        if spread := Spread.of(own):
            found[name] = Spread(**{key: composed(loss) for key, loss in vars(spread).items()})
    return found


def sum_values(group: Group) -> Plain:
    """What a round's secure sum needs, and how many honest clients' noise it counts on."""
    names = ("members", "least", "colluders", "honest", "threshold")
    return {name: getattr(group, name) for name in names}


def sum_text(group: Group, assumptions: Collection[str]) -> str:
    """The same in words; ``assumptions`` say whether every client's noise counts alone."""
    needed = f"{group.least} of {group.members} uploads and {group.threshold} signatures"
    against = f"the server with up to {group.colluders} of them"
    counted = "every client's own noise counts alone"
    if ALONE not in assumptions:
        counted = f"the noise of {group.honest} counts"
    return f"{needed} unmask a sum; against {against} {counted}"
