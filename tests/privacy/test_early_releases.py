"""Plans that release something once, before round one: priced, charged and filtered with it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from tests.privacy.ledgers import DELTA, SERVER, charge, cost, exact_epsilon, plan

from dpfl.core.errors import LedgerError, PrivacyRefusal
from dpfl.core.types import Adjacency, Budget, Unit
from dpfl.privacy.accountant import spend
from dpfl.privacy.costs import PrivacyCost
from dpfl.privacy.events import Event, merged
from dpfl.privacy.filters import FilterName
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.statement import statement

FILTERS: tuple[FilterName, ...] = ("allotments", "renyi", "gaussian")
EARLY = ((Event(noise_multiplier=20.0, numbers=3),), (Event(noise_multiplier=15.0, steps=2),))
PLANNED = replace(cost(10.0), before=EARLY)


def ledger_with(epsilon: float, filter_: FilterName = "allotments") -> Ledger:
    ledger = Ledger.create(":memory:", "test", filter=filter_)
    ledger.register("run", seeded=True, title="t")
    budget = Budget(epsilon=epsilon, delta=DELTA)
    ledger.set_budgets({"a": budget}, unit=Unit.CLIENT, observer=SERVER)
    return ledger


def test_a_cost_without_early_releases_is_written_as_before() -> None:
    text = cost(10.0).to_json()
    assert text == (
        '{"adjacency": "add_remove", "events": [{"failure": 0.0, "noise_multiplier": 10.0, '
        '"numbers": 0, "sampling": "none", "sampling_rate": 1.0, "steps": 1}], "unit": "client"}'
    )
    assert hashlib.sha256(text.encode()).hexdigest().startswith("c71afe65")
    assert "before" in PLANNED.to_json()


@given(st.lists(st.lists(st.floats(0.1, 50.0), min_size=1, max_size=3), max_size=3))
def test_a_cost_reads_back_as_it_was_written(noises: list[list[float]]) -> None:
    before = tuple(tuple(Event(noise_multiplier=z) for z in part) for part in noises)
    written = replace(cost(10.0), before=before)
    assert PrivacyCost.from_json(written.to_json()) == written
    assert written.of_round == cost(10.0)
    assert [one.events for one in written.of_releases] == list(before)
    assert all(not one.before for one in written.of_releases)


@pytest.mark.parametrize("rounds", [0, 1, 7])
def test_the_price_of_a_plan_is_that_of_its_whole_history(rounds: int) -> None:
    apart = [*EARLY[0], *EARLY[1], Event(noise_multiplier=10.0, steps=rounds)]
    assert PLANNED.times(rounds) == merged(apart)


def test_a_committed_plan_is_stated_with_its_early_releases() -> None:
    ledger = ledger_with(5.0)
    assert not ledger.commit("run", [plan(what=PLANNED, releases=4, delta=DELTA)])
    line = statement(ledger, "a", SERVER)
    assert line is not None
    price = spend(PLANNED.times(4), DELTA, adjacency=Adjacency.ADD_REMOVE)
    assert line.epsilon == price.epsilon > exact_epsilon(4, 10.0)


@pytest.mark.parametrize("filter_", FILTERS)
def test_releases_and_then_rounds_stay_within_the_budget(filter_: FilterName) -> None:
    ledger = ledger_with(2.0, filter_)
    most = ledger.affordable_releases("a", PLANNED, [SERVER], 100, delta=DELTA)
    alone = ledger.affordable_releases("a", cost(10.0), [SERVER], 100, delta=DELTA)
    assert 0 < most < alone < 100
    assert not ledger.commit("run", [plan(what=PLANNED, releases=most, delta=DELTA)])
    for number, release in zip((-2, -1), PLANNED.of_releases, strict=True):
        assert ledger.can_release("run", number, "a", SERVER, release)
        assert not ledger.charge("run", number, [charge(what=release)])
    assert (ledger.last_charged("run"), ledger.studies()[0].last_round) == (-1, None)
    for round_ in range(most):
        assert ledger.can_release("run", round_, "a", SERVER, cost(10.0))
        assert not ledger.charge("run", round_, [charge(what=cost(10.0))])
    assert not ledger.can_release("run", most, "a", SERVER, cost(10.0))
    assert ledger.charge("run", most, [charge(what=cost(10.0))]) == {"a"}
    assert (ledger.last_charged("run"), ledger.participations("a", SERVER)) == (most, most)
    line = statement(ledger, "a", SERVER)
    assert line is not None
    assert (
        spend(PLANNED.times(most), DELTA, adjacency=Adjacency.ADD_REMOVE).epsilon
        <= line.epsilon + 1e-12
    )
    assert line.epsilon <= 2.0
    assert ledger.history("a", SERVER) == PLANNED.times(most)


@pytest.mark.parametrize("filter_", ["renyi", "gaussian"])
def test_one_early_release_counts_with_all_of_them(filter_: FilterName) -> None:
    """Where studies pay as they go, nothing counts before the first charge, then all of them."""
    ledger = ledger_with(2.0, filter_)
    ledger.commit("run", [plan(what=PLANNED, releases=4)])
    line = statement(ledger, "a", SERVER)
    assert line is not None
    assert (line.epsilon, line.studies) == (0.0, 0)
    ledger.charge("run", -1, [charge(what=PLANNED.of_releases[0])])
    line = statement(ledger, "a", SERVER)
    assert line is not None
    price = spend(PLANNED.times(0), DELTA, adjacency=Adjacency.ADD_REMOVE)
    assert price.epsilon <= line.epsilon < 2.0
    assert (line.studies, line.rounds) == (1, 0)


@pytest.mark.parametrize("filter_", FILTERS)
def test_a_budget_below_the_early_releases_affords_nothing(filter_: FilterName) -> None:
    early = spend(PLANNED.times(0), DELTA, adjacency=Adjacency.ADD_REMOVE).epsilon
    ledger = ledger_with(0.99 * early, filter_)
    assert ledger.affordable_releases("a", PLANNED, [SERVER], 10) == 0
    assert ledger.affordable_releases("a", cost(200.0), [SERVER], 10) == 10
    assert ledger.commit("run", [plan(what=PLANNED, releases=1)]) == {"a"}


def planned_run() -> Ledger:
    ledger = ledger_with(5.0)
    assert not ledger.commit("run", [plan(what=PLANNED, releases=3)])
    return ledger


def test_each_early_release_is_charged_once() -> None:
    ledger, (first, second) = planned_run(), PLANNED.of_releases
    assert not ledger.charge("run", -2, [charge(what=first, draw="x")])
    head = ledger.head()
    assert not ledger.charge("run", -2, [charge(what=first, draw="x")])
    assert ledger.head() == head  # a replay with the same draw is free
    for draw in ("", "y"):
        with pytest.raises(LedgerError):
            ledger.charge("run", -2, [charge(what=first, draw=draw)])
    assert ledger.charge("run", -1, [charge(what=first, draw="x")]) == {"a"}
    assert not ledger.charge("run", -1, [charge(what=second)])
    assert ledger.charge("run", -3, [charge(what=second)]) == {"a"}
    assert ledger.charged("run") == {(-2, "a"), (-1, "a")}


def test_rounds_and_early_releases_do_not_stand_in_for_each_other() -> None:
    ledger = planned_run()
    assert ledger.charge("run", 0, [charge(what=PLANNED.of_releases[0])]) == {"a"}
    assert ledger.charge("run", -1, [charge(what=cost(10.0))]) == {"a"}
    assert ledger.charge("run", 0, [charge(what=PLANNED)]) == {"a"}
    assert ledger.charged("run") == set()


def test_equal_early_releases_count_as_often_as_they_are_planned() -> None:
    twice = replace(cost(10.0), before=(EARLY[0], EARLY[0]))
    ledger = ledger_with(5.0)
    ledger.commit("run", [plan(what=twice, releases=3)])
    release = twice.of_releases[0]
    refused = [ledger.charge("run", -n, [charge(what=release)]) for n in (3, 2, 1)]
    assert refused == [frozenset(), frozenset(), {"a"}]


def test_the_gaussian_filter_looks_at_early_releases_as_well() -> None:
    sampled = Event(noise_multiplier=5.0, sampling="poisson", sampling_rate=0.1)
    ledger = ledger_with(2.0, "gaussian")

    with pytest.raises(PrivacyRefusal):
        ledger.commit("run", [plan(what=replace(cost(10.0), before=((sampled,),)))])


def test_the_chain_holds_after_early_releases(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger.create(path, "test")
    ledger.register("run", seeded=False, title="t")
    ledger.commit("run", [plan(what=PLANNED, releases=2)])
    ledger.charge("run", -1, [charge(what=PLANNED.of_releases[1])])
    ledger.charge("run", 0, [charge(what=cost(10.0))])
    ledger.close()
    opened = Ledger.open(path, "test", read_only=True)
    assert [(one.used, one.early) for one in opened.plans("a")] == [(1, 1)]
    assert [run.last_round for run in opened.studies()] == [0]
    opened.close()


@pytest.mark.parametrize("filter_", FILTERS)
def test_a_population_uses_its_early_releases_together(filter_: FilterName) -> None:
    ledger = ledger_with(3.0, filter_)
    everyone = ledger.population(["a", "b"])
    ledger.commit("run", [plan(everyone, PLANNED, releases=2)])
    release = PLANNED.of_releases[0]
    assert not ledger.charge("run", -2, [charge(everyone, release)])
    assert ledger.charge("run", -1, [charge(everyone, release)]) == {everyone}
    assert ledger.charge("run", -1, [charge("a", release)]) == {"a"}
