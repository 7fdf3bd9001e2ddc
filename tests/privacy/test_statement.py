"""The page for an ethics board: every epsilon with its unit, adjacency, observer, delta and
accountant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from tests.privacy.ledgers import exact_epsilon

from dpfl.core.types import Adjacency, Budget, Observer, Unit
from dpfl.privacy.accountant import spend
from dpfl.privacy.costs import Charge, PrivacyCost, PrivacyPlan
from dpfl.privacy.events import Event
from dpfl.privacy.filters import FilterName
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.statement import Statement, statement, statements

SERVER, WORLD = Observer.SERVER, Observer.WORLD
GAUSSIAN = Event(noise_multiplier=8.0)
FIXED = Event(noise_multiplier=4.0, sampling="uniform", sampling_rate=0.1)
POISSON = Event(noise_multiplier=3.0, sampling="poisson", sampling_rate=0.05)


def cost(
    *events: Event, unit: Unit = Unit.CLIENT, adjacency: Adjacency = Adjacency.ADD_REMOVE
) -> PrivacyCost:
    return PrivacyCost(unit=unit, adjacency=adjacency, events=events or (GAUSSIAN,))


def pay(
    ledger: Ledger,
    run: str,
    rounds: int,
    what: PrivacyCost,
    account: str = "a",
    observer: Observer = SERVER,
    delta: float | None = None,
) -> None:
    """Plan so many rounds, and charge all of them."""
    ledger.register(run, seeded=False, title=run)
    plan = PrivacyPlan(account=account, observer=observer, cost=what, releases=rounds, delta=delta)
    assert not ledger.commit(run, [plan])
    for round_ in range(rounds):
        assert not ledger.charge(
            run, round_, [Charge(account=account, observer=observer, cost=what)]
        )


def price(*events: Event, at: float = 1e-5, adjacency: Adjacency = Adjacency.ADD_REMOVE) -> float:
    return spend(events, at, adjacency=adjacency).epsilon


def stated(
    ledger: Ledger, account: str = "a", observer: Observer = SERVER, delta: float | None = 1e-5
) -> Statement:
    line = statement(ledger, account, observer, delta)
    assert line is not None
    return line


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    made = Ledger.create(":memory:", "test")
    yield made
    made.close()


def test_a_statement_names_everything_an_epsilon_needs(ledger: Ledger) -> None:
    budget = Budget(epsilon=5.0, delta=1e-6)
    ledger.set_budgets({"a": budget}, unit=Unit.CLIENT, observer=SERVER)
    pay(ledger, "run", 4, cost())
    line = stated(ledger, delta=None)
    expected = spend((GAUSSIAN.times(4),), 1e-6, adjacency=Adjacency.ADD_REMOVE)
    assert line == Statement(
        account="a",
        unit="client",
        observer="server",
        adjacency="add_remove",
        accountant="PLD",
        epsilon=expected.epsilon,
        delta=1e-6,
        budget=5.0,
        rounds=4,
        filter="allotments",
        studies=1,
    )
    assert 0 < line.epsilon < 5.0


@pytest.mark.parametrize(
    ("events", "adjacency", "accountant"),
    [
        ((POISSON,), Adjacency.ADD_REMOVE, "PLD"),
        ((POISSON,), Adjacency.REPLACE_ONE, "PLD"),
        ((FIXED,), Adjacency.REPLACE_ONE, "PLD"),
        ((FIXED, POISSON), Adjacency.REPLACE_ONE, "PLD"),
    ],
)
def test_the_accountant_and_adjacency_are_those_that_made_the_number(
    ledger: Ledger, events: tuple[Event, ...], adjacency: Adjacency, accountant: str
) -> None:
    pay(ledger, "run", 2, cost(*events, adjacency=adjacency, unit=Unit.RECORD))
    line = stated(ledger)
    assert (line.accountant, line.adjacency, line.unit) == (accountant, str(adjacency), "record")
    assert line.epsilon == spend([e.times(2) for e in events], 1e-5, adjacency=adjacency).epsilon


def test_studies_of_a_budget_add_up_each_at_its_own_delta(ledger: Ledger) -> None:
    ledger.set_budgets({"a": Budget(epsilon=20.0, delta=1e-5)}, unit=Unit.CLIENT, observer=SERVER)
    pay(ledger, "first", 10, cost(), delta=7e-6)
    first = stated(ledger, delta=None)
    assert (first.epsilon, first.delta, first.accountant) == (
        price(GAUSSIAN.times(10), at=7e-6),
        7e-6,
        "PLD",
    )
    pay(ledger, "second", 10, cost(POISSON, GAUSSIAN), delta=2e-6)
    both = stated(ledger, delta=None)
    second = price(POISSON.times(10), GAUSSIAN.times(10), at=2e-6)
    assert both.epsilon == math.fsum([first.epsilon, second])
    assert both.delta == pytest.approx(9e-6)
    assert (both.accountant, both.studies, both.budget) == ("PLD per study, added up", 2, 20.0)
    assert [plan.epsilon for plan in ledger.plans("a")] == [first.epsilon, second]
    assert stated(ledger, delta=1e-5) == both  # the budget's own delta


def test_at_another_delta_every_study_gets_an_equal_share(ledger: Ledger) -> None:
    pay(ledger, "first", 10, cost())
    pay(ledger, "second", 10, cost(POISSON, GAUSSIAN))
    line = stated(ledger, delta=1e-6)
    expected = [
        price(GAUSSIAN.times(10), at=5e-7),
        price(POISSON.times(10), GAUSSIAN.times(10), at=5e-7),
    ]
    assert (line.epsilon, line.delta) == (math.fsum(expected), 1e-6)


def test_a_plan_is_priced_whole_however_few_of_its_rounds_took_place(ledger: Ledger) -> None:
    """Stopping early may depend on outputs: nothing is given back."""
    ledger.register("run", seeded=False, title="t")
    ledger.commit("run", [PrivacyPlan(account="a", observer=SERVER, cost=cost(), releases=30)])
    before = stated(ledger)
    assert (before.epsilon, before.rounds) == (price(GAUSSIAN.times(30)), 0)
    for round_ in (0, 4):
        ledger.charge("run", round_, [Charge(account="a", observer=SERVER, cost=cost())])
    assert stated(ledger) == replace(before, rounds=2)


@pytest.mark.parametrize("rule", ["renyi", "gaussian"])
def test_where_a_study_pays_as_it_goes_only_what_was_charged_is_stated(rule: FilterName) -> None:
    ledger = Ledger.create(":memory:", "test", filter=rule)
    ledger.set_budgets({"a": Budget(epsilon=5.0, delta=1e-5)}, unit=Unit.CLIENT, observer=SERVER)
    ledger.register("run", seeded=False, title="t")
    ledger.commit("run", [PrivacyPlan(account="a", observer=SERVER, cost=cost(), releases=1000)])
    assert stated(ledger, delta=None).epsilon == 0.0
    for round_ in range(3):
        assert not ledger.charge("run", round_, [Charge(account="a", observer=SERVER, cost=cost())])
    pay(ledger, "other", 2, cost(Event(noise_multiplier=30.0)))
    line = stated(ledger, delta=None)
    exact = exact_epsilon(1, (3 / 8**2 + 2 / 30**2) ** -0.5)
    if rule == "gaussian":
        assert (
            exact <= line.epsilon <= exact * (1 + 1e-3)
        )  # a thousandth of delta is kept for the sampler
        assert line.accountant == "Gaussian filter"
    else:
        assert exact < line.epsilon < 5.0
        assert line.accountant == "RDP filter"
    assert (line.delta, line.budget, line.rounds, line.studies, line.filter) == (
        1e-5,
        5.0,
        5,
        2,
        rule,
    )
    assert stated(ledger, delta=1e-7).epsilon > line.epsilon
    ledger.close()


def test_a_release_without_noise_is_stated_as_infinite_and_stays_so(ledger: Ledger) -> None:
    pay(ledger, "plain", 1, cost(Event(noise_multiplier=0.0)))
    pay(ledger, "private", 5, cost())
    line = stated(ledger)
    assert line.epsilon == math.inf
    assert "not private" in line.accountant
    written = line.to_dict()
    assert written["epsilon"] == "infinite"
    assert json.loads(json.dumps(written, allow_nan=False)) == written


def test_a_private_statement_is_written_with_plain_numbers(ledger: Ledger) -> None:
    pay(ledger, "run", 2, cost())
    line = stated(ledger)
    written = json.loads(json.dumps(line.to_dict(), allow_nan=False))
    assert written.pop("guarantee") == line.guarantee == line.epsilon
    assert Statement(**written) == line


@pytest.mark.parametrize("rule", ["renyi", "gaussian"])
def test_where_studies_pay_as_they_go_the_budget_is_what_is_guaranteed(rule: FilterName) -> None:
    """A study that stops when its loss is large exceeds what it has used so far, never
    the budget.
    """
    with closing(Ledger.create(":memory:", "test", filter=rule)) as ledger:
        ledger.set_budgets(
            {"a": Budget(epsilon=3.0, delta=1e-5)}, unit=Unit.CLIENT, observer=SERVER
        )
        pay(ledger, "run", 1, cost(Event(noise_multiplier=9.0)))
        line = stated(ledger)
        assert line.epsilon < line.guarantee == 3.0


def test_what_was_granted_is_shown_where_the_grant_covers_the_observer(ledger: Ledger) -> None:
    ledger.set_budgets({"a": Budget(epsilon=5.0, delta=1e-5)}, unit=Unit.CLIENT, observer=SERVER)
    ledger.set_budgets({"b": Budget(epsilon=4.0, delta=1e-5)}, unit=Unit.CLIENT, observer=WORLD)
    for account in ("a", "b", "c"):
        pay(ledger, "run " + account, 1, cost(), account)
    assert stated(ledger, "a", SERVER).budget == 5.0
    assert stated(ledger, "a", WORLD).budget == 5.0  # the world sees no more than the server
    assert stated(ledger, "b", WORLD).budget == 4.0
    assert stated(ledger, "b", SERVER).budget is None  # the server sees more than the world
    assert stated(ledger, "c", SERVER).budget is None


def test_a_record_level_history_says_nothing_of_a_client_level_grant(ledger: Ledger) -> None:
    pay(ledger, "run", 3, cost(POISSON, unit=Unit.RECORD))
    assert math.isfinite(stated(ledger).epsilon)
    ledger.set_budgets({"a": Budget(epsilon=5.0, delta=1e-5)}, unit=Unit.CLIENT, observer=SERVER)
    line = stated(ledger)
    assert (line.unit, line.epsilon) == ("client", math.inf)


def test_units_that_were_mixed_are_stated_as_records_under_replace_one(ledger: Ledger) -> None:
    pay(ledger, "records", 2, cost(unit=Unit.RECORD))
    pay(ledger, "clients", 2, cost(unit=Unit.CLIENT))
    line = stated(ledger)
    assert (line.unit, line.adjacency) == ("record", "replace_one")
    assert line.epsilon == 2 * price(GAUSSIAN.times(2), at=5e-6, adjacency=Adjacency.REPLACE_ONE)


def test_nothing_finite_is_stated_where_no_delta_is_known(ledger: Ledger) -> None:
    """Leaving the account out would hide whoever granted nothing: the worst accounts of all."""
    assert statement(ledger, "a", SERVER, 1e-5) is None
    pay(ledger, "run", 1, cost())
    (line,) = statements(ledger)
    assert (line.epsilon, line.delta, line.accountant) == (
        math.inf,
        None,
        "none: no delta is known",
    )
    assert math.isfinite(stated(ledger, delta=1e-5).epsilon)


def test_a_smaller_delta_states_a_larger_epsilon(ledger: Ledger) -> None:
    pay(ledger, "run", 3, cost())
    assert stated(ledger, delta=1e-9).epsilon > stated(ledger, delta=1e-5).epsilon


def test_every_account_is_stated_against_everyone_it_was_billed_against(ledger: Ledger) -> None:
    pay(ledger, "one", 2, cost(Event(noise_multiplier=80.0)), "a", WORLD)
    pay(ledger, "one", 2, cost(), "a", SERVER)
    pay(ledger, "two", 1, cost(), "b", SERVER)
    lines = {(line.account, line.observer): line for line in statements(ledger, 1e-5)}
    assert set(lines) == {("a", "server"), ("a", "world"), ("b", "server")}
    assert lines["a", "world"].epsilon < lines["a", "server"].epsilon


def test_every_member_of_a_population_is_stated_with_all_its_rounds(ledger: Ledger) -> None:
    crowd = [f"c{i}" for i in range(5)]
    ledger.register("run", seeded=False, title="crowd")
    name = ledger.population(crowd)
    ledger.commit(
        "run", [PrivacyPlan(account=name, observer=WORLD, cost=cost(POISSON), releases=3)]
    )
    for round_ in range(3):
        ledger.charge("run", round_, [Charge(account=name, observer=WORLD, cost=cost(POISSON))])
    lines = statements(ledger, 1e-5)
    assert [line.account for line in lines] == crowd
    expected = spend((POISSON.times(3),), 1e-5, adjacency=Adjacency.ADD_REMOVE).epsilon
    assert {line.epsilon for line in lines} == {expected}
    assert {line.rounds for line in lines} == {3}


def test_a_client_level_history_read_for_records_is_never_read_under_a_weaker_adjacency(
    ledger: Ledger,
) -> None:
    """One changed record replaces a client's whole contribution: twice the sensitivity of leaving
    it out.
    """
    pay(ledger, "clients", 4, cost(unit=Unit.CLIENT, adjacency=Adjacency.ADD_REMOVE))
    ledger.set_budgets({"a": Budget(epsilon=50.0, delta=1e-5)}, unit=Unit.RECORD, observer=SERVER)
    replaced = spend((GAUSSIAN.times(4),), 1e-5, adjacency=Adjacency.REPLACE_ONE).epsilon
    assert stated(ledger).epsilon >= replaced


def test_a_budget_is_never_shown_beside_deltas_that_exceed_its_own(ledger: Ledger) -> None:
    """Plans from before the budget, each at all of its delta: the sum is stated, and is not within
    it.
    """
    pay(ledger, "first", 2, cost())
    pay(ledger, "second", 2, cost())
    ledger.set_budgets({"a": Budget(epsilon=50.0, delta=1e-5)}, unit=Unit.CLIENT, observer=SERVER)
    line = stated(ledger, delta=None)
    assert line.delta == 2e-5
    assert line.budget is None


def test_plans_with_deltas_of_their_own_are_stated_without_a_budget(ledger: Ledger) -> None:
    pay(ledger, "run", 3, cost(), delta=1e-6)
    (line,) = statements(ledger)
    assert (line.epsilon, line.delta, line.budget) == (
        price(GAUSSIAN.times(3), at=1e-6),
        1e-6,
        None,
    )
    (plan,) = ledger.plans("a")
    assert (plan.epsilon, plan.priced_at, plan.releases, plan.used) == (line.epsilon, 1e-6, 3, 3)
