"""Full gradients: exact plans, individual scales over a sum, and clips that follow from budgets."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

import dpfl
from dpfl.core.layout import Layout
from dpfl.core.types import Budget, Claims, ClientSettings, Observer
from dpfl.models.features import make_features
from dpfl.models.preconditioning import linear_head
from dpfl.plugs.base import Participant
from dpfl.plugs.full_gradient import FullGradient
from dpfl.privacy.accountant import spend
from dpfl.privacy.filters import Limit, Portion, filter_named
from dpfl.privacy.unsampled import unsampled_multiplier
from dpfl.rounds import Agreement, buffer_shapes, enrol
from dpfl.strategy import Strategy

DELTA = 1e-5


def claims_of(epsilons: list[float], records: int = 400) -> dict[str, Claims]:
    return {
        f"c{i}": Claims(epsilon=epsilon, delta=DELTA, examples=records)
        for i, epsilon in enumerate(epsilons)
    }


def agreed(
    strategy: Strategy, epsilons: list[float], records: int = 400, size: int = 20
) -> Agreement:
    model = linear_head(make_features("table", (size,)), 3)
    strategy = strategy.for_model(model)
    shapes = buffer_shapes(model, strategy.releases)
    return enrol(strategy, claims_of(epsilons, records), None, Layout.of_module(model), shapes)


def who(epsilon: float, records: int = 400, accountant: str | None = None) -> Participant:
    budget = Budget(epsilon=epsilon, delta=DELTA, accountant=accountant)  # type: ignore[arg-type]
    return Participant(
        examples=records, client_settings=ClientSettings(), budget=budget, client="c0"
    )


EPSILONS = st.lists(st.floats(0.05, 12.0), min_size=4, max_size=6)


@settings(deadline=None, max_examples=15)
@given(epsilons=EPSILONS, records=st.integers(20, 5000), summed=st.booleans())
def test_a_plan_spends_its_budget_and_no_more(
    epsilons: list[float], records: int, summed: bool
) -> None:
    method = dpfl.preconditioned_sum if summed else dpfl.preconditioned
    agreement = agreed(method(force=True), epsilons, records)
    for epsilon in epsilons:
        own = who(epsilon, records)
        cost = agreement.plan(Observer.SERVER, own)
        history = cost.times(agreement.terms.rounds)
        total = math.fsum(event.steps / event.noise_multiplier**2 for event in history)
        mu = 1 / unsampled_multiplier(epsilon, DELTA)
        assert 0.999 * mu**2 <= total <= mu**2 * (1 + 1e-9)
        assert spend(history, DELTA, adjacency=cost.adjacency).epsilon <= epsilon


def test_a_renyi_ledger_is_planned_with_its_own_curve() -> None:
    agreement = agreed(dpfl.preconditioned(), [1.0, 2.0])
    cost = agreement.plan(Observer.SERVER, who(1.0, accountant="renyi"))
    history = cost.times(agreement.terms.rounds)
    by = {"delta": DELTA, "adjacency": cost.adjacency}
    assert 0.99 <= spend(history, accountant="renyi", **by).epsilon <= 1.0  # type: ignore[arg-type]
    assert spend(history, **by).epsilon < 0.95  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["allotments", "renyi", "gaussian"])
@pytest.mark.parametrize("summed", [False, True])
def test_every_filter_admits_the_whole_plan(rule: str, summed: bool) -> None:
    """A plan that uses its budget to the last digit leaves what a ledger keeps for itself."""
    method = dpfl.preconditioned_sum if summed else dpfl.preconditioned
    agreement = agreed(method(force=True), [0.3, 1.0, 4.0, 9.0])
    for epsilon in (0.3, 1.0, 4.0, 9.0):
        own = who(epsilon, accountant="renyi" if rule == "renyi" else None)
        cost, rounds = agreement.plan(Observer.SERVER, own), agreement.terms.rounds
        limit = Limit(epsilon=epsilon, delta=DELTA, adjacency=cost.adjacency)
        assert filter_named(rule).most([], Portion(cost=cost, count=rounds), limit) == rounds


def test_one_client_at_rate_one_has_the_noise_of_individual_clips() -> None:
    """Equal rounds and no statistics: the two are the same mechanism."""
    rounds, layout = 10, Layout.of_module(linear_head(make_features("table", (20,)), 3))
    claims = {"c0": Claims(epsilon=1.0, delta=DELTA, examples=400)}
    bare = Strategy(
        **{
            name: getattr(dpfl.preconditioned(), name)
            for name in ("name", "unit", "observer", "adjacency")
        },
        local=FullGradient(clip=1.0),
    )
    full = enrol(bare, claims, rounds, layout).phases(who(1.0))[0].noise_multiplier
    clips = dpfl.individual_clips(lr=1.0, clip=1.0, batch_size=400, colluders=0)
    both = claims | {"c1": claims["c0"]}  # a sum of one would hide nothing
    sampled = enrol(clips, both, rounds, layout).phases(who(1.0))[0].noise_multiplier
    assert sampled == pytest.approx(full, rel=0.01)


def test_equal_clients_of_a_sum_leave_one_nth_of_the_variance() -> None:
    clients, own = 8, who(1.0)
    alone = agreed(dpfl.preconditioned(), [1.0] * clients)
    summed = agreed(dpfl.preconditioned_sum(colluders=0), [1.0] * clients)
    rounds = alone.terms.rounds / summed.terms.rounds  # their plans differ in rounds
    (phase,) = alone.phases(own)
    of_mean = (phase.noise_multiplier / own.examples) ** 2 / clients  # of equal weights
    # The sum has a noise of std clip, over clip x sum of n / z.
    of_sum = (summed.strategy.local.clip / summed.terms.denominator) ** 2  # type: ignore[attr-defined]
    assert of_sum == pytest.approx(of_mean / clients / rounds, rel=0.01)


def test_a_larger_budget_adds_more_and_costs_nobody_else() -> None:
    before = agreed(dpfl.preconditioned_sum(force=True), [1.0, 1.0, 1.0, 1.0])
    after = agreed(dpfl.preconditioned_sum(force=True), [2.0, 1.0, 1.0, 1.0])
    rounds = math.sqrt(after.terms.rounds / before.terms.rounds)
    first = before.phases(who(1.0))[0].noise_multiplier
    second = after.phases(who(2.0))[0].noise_multiplier
    mus = [1 / unsampled_multiplier(epsilon, DELTA) for epsilon in (1.0, 2.0)]
    assert first / second * rounds == pytest.approx(mus[1] / mus[0], rel=1e-3)
    for agreement in (before, after):
        cost = agreement.plan(Observer.SERVER, who(1.0))
        spent = spend(cost.times(agreement.terms.rounds), DELTA, adjacency=cost.adjacency)
        assert 0.999 <= spent.epsilon <= 1.0


@pytest.mark.parametrize("claim", [1e9, float("nan"), -1.0, 0.0])
def test_false_claims_of_others_change_no_cost(claim: float) -> None:
    agreement = agreed(dpfl.preconditioned_sum(force=True), [1.0, 1.0, 1.0, claim])
    cost = agreement.plan(Observer.SERVER, who(1.0))
    spent = spend(cost.times(agreement.terms.rounds), DELTA, adjacency=cost.adjacency)
    assert 0.999 <= spent.epsilon <= 1.0


def test_clips_go_with_budgets_and_have_the_mean_that_was_asked_for() -> None:
    epsilons = [0.5, 1.0, 2.0, 8.0]
    strategy = dpfl.individual_clips(lr=1.0, clip=0.7, batch_size=40)
    layout = Layout.of_module(linear_head(make_features("table", (20,)), 3))
    agreement = enrol(strategy, claims_of(epsilons), 20, layout)
    phases = [agreement.phases(who(epsilon))[0] for epsilon in epsilons]
    clips = [phase.clip or 0.0 for phase in phases]
    assert clips == sorted(clips)
    assert sum(clips) / 4 == pytest.approx(0.7, rel=1e-6)
    noises = {round((phase.clip or 0.0) * phase.noise_multiplier, 9) for phase in phases}
    assert len(noises) == 1  # one noise for everybody
    for epsilon in epsilons:
        cost = agreement.plan(Observer.SERVER, who(epsilon))
        spent = spend(cost.times(20), DELTA, adjacency=cost.adjacency)
        assert 0.97 * epsilon <= spent.epsilon <= epsilon
