"""What was charged stays charged, nothing is charged that was not planned, and no budget is
exceeded.

The ledger here has the Gaussian filter, under which a study pays release by release and the end of
a budget is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as st
from tests.privacy.ledgers import (
    DELTA,
    SERVER,
    WORLD,
    cap_for,
    charge,
    cost,
    history,
    pay,
    plan,
    set_budgets,
)

from dpfl.core.errors import LedgerError, PrivacyRefusal
from dpfl.core.types import Adjacency, Budget, Observer, Unit
from dpfl.privacy.accountant import spend
from dpfl.privacy.costs import Charge, PrivacyCost, adjacency_of, speak_of
from dpfl.privacy.events import Event, merged
from dpfl.privacy.filters import FilterName
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.statement import statements


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    made = Ledger.create(":memory:", "test", filter="gaussian")
    made.register("run", seeded=False, title="a test")
    made.register("other", seeded=False, title="another test")
    yield made
    made.close()


# ---- charging ------------------------------------------------------------------------------------


def test_the_events_derived_from_storage_are_those_charged() -> None:
    ledger = Ledger.create(":memory:", "test")
    for run in ("run", "other"):
        ledger.register(run, seeded=False, title=run)
    sampled = Event(
        noise_multiplier=1.5, sampling="poisson", sampling_rate=0.125, steps=7, failure=1e-9
    )
    several = PrivacyCost(
        unit=Unit.CLIENT,
        adjacency=Adjacency.ADD_REMOVE,
        events=(Event(noise_multiplier=3.0), sampled),
    )
    for round_ in range(4):
        assert pay(ledger, "run", round_, [charge("a", several), charge("b")]) == frozenset()
    pay(ledger, "other", 0, [charge("a")])
    assert history(ledger, "a") == merged([*several.events * 4, Event(noise_multiplier=10.0)])
    assert history(ledger, "b") == merged(cost().events * 4)
    assert ledger.participations("a", SERVER) == 5
    assert ledger.history("nobody", SERVER) == ()


def test_charging_stops_exactly_where_the_grant_ends(ledger: Ledger) -> None:
    set_budgets(ledger, 6)
    refusals = [pay(ledger, "run", round_, [charge()]) for round_ in range(9)]
    assert refusals == [frozenset()] * 6 + [frozenset({"a"})] * 3
    assert history(ledger) == (Event(noise_multiplier=10.0, steps=6),)


def test_the_cap_spans_runs(ledger: Ledger) -> None:
    set_budgets(ledger, 5)
    refused = [
        pay(ledger, run, round_, [charge()]) != frozenset()
        for round_ in range(4)
        for run in ("run", "other")
    ]
    assert refused == [False] * 5 + [True] * 3


def test_one_who_cannot_pay_does_not_stop_the_others(ledger: Ledger) -> None:
    set_budgets(ledger, 2, "poor")
    set_budgets(ledger, 5, "rich")
    for round_ in range(4):
        refused = pay(ledger, "run", round_, [charge("poor"), charge("rich"), charge("free")])
        assert refused == (frozenset() if round_ < 2 else frozenset({"poor"}))
    assert [ledger.participations(account, SERVER) for account in ("poor", "rich", "free")] == [
        2,
        4,
        4,
    ]


def test_a_cheaper_study_may_fit_where_an_expensive_one_did_not(ledger: Ledger) -> None:
    set_budgets(ledger, 3)
    for round_ in range(3):
        pay(ledger, "run", round_, [charge()])
    assert pay(ledger, "run", 3, [charge()]) == {"a"}
    assert pay(ledger, "other", 3, [charge(what=cost(100.0))]) == frozenset()
    assert history(ledger) == merged(
        [Event(noise_multiplier=10.0, steps=3), Event(noise_multiplier=100.0)]
    )


def test_no_noise_at_all_fits_no_grant(ledger: Ledger) -> None:
    set_budgets(ledger, 100)
    assert pay(ledger, "run", 0, [charge(what=cost(0.0))]) == {"a"}
    assert history(ledger) == ()


def test_a_run_must_be_named_before_it_plans_or_charges(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="is not known"):
        ledger.commit("never registered", [plan()])
    with pytest.raises(LedgerError, match="was not planned"):
        ledger.charge("never registered", 0, [charge()])
    assert history(ledger) == ()


def test_a_run_without_a_name_is_refused_or_counted(ledger: Ledger) -> None:
    set_budgets(ledger, 2)
    try:
        ledger.register("", seeded=False, title="no name")
    except LedgerError:
        return
    refused = [pay(ledger, "", round_, [charge()]) for round_ in range(3)]
    assert history(ledger) == (Event(noise_multiplier=10.0, steps=2),)
    assert refused == [frozenset(), frozenset(), frozenset({"a"})]


def test_a_run_keeps_its_kind_of_randomness(ledger: Ledger) -> None:
    ledger.register("run", seeded=False, title="again")
    with pytest.raises(LedgerError, match="another kind of randomness"):
        ledger.register("run", seeded=True, title="again")
    ledger.register("simulated", seeded=True, title="seeded")
    assert ledger.seeded_runs() == ["simulated"]


@pytest.mark.parametrize("rule", ["allotments", "renyi", "gaussian"])
def test_a_plan_that_no_accountant_can_price_leaves_no_trace(rule: FilterName) -> None:
    ledger = Ledger.create(":memory:", "test", filter=rule)
    ledger.register("run", seeded=False, title="a test")
    set_budgets(ledger, 10, "b")
    fixed = Event(noise_multiplier=10.0, sampling="uniform", sampling_rate=0.1)
    unreadable = PrivacyCost(unit=Unit.CLIENT, adjacency=Adjacency.ADD_REMOVE, events=(fixed,))
    with pytest.raises(PrivacyRefusal):
        ledger.commit("run", [plan("a"), plan("b", unreadable)])
    assert ledger.plans("a") == ledger.plans("b") == []
    assert ledger.last_charged("run") is None
    assert ledger.commit("run", [plan("a", releases=5), plan("b", releases=5)]) == frozenset()
    assert ledger.charge("run", 0, [charge("a"), charge("b")]) == frozenset()


def test_the_last_round_is_that_of_the_run_asked_for(ledger: Ledger) -> None:
    assert ledger.last_charged("run") is None
    for round_ in (0, 1, 5):
        pay(ledger, "run", round_, [charge()])
    pay(ledger, "other", 9, [charge()])
    assert ledger.last_charged("run") == 5


# ---- replays -------------------------------------------------------------------------------------


def test_a_replay_with_the_same_bill_and_draw_is_free(ledger: Ledger) -> None:
    set_budgets(ledger, 2)
    for _ in range(3):
        assert pay(ledger, "run", 0, [charge(draw="seed 1")]) == frozenset()
    assert pay(ledger, "run", 1, [charge(draw="seed 2")]) == frozenset()
    assert (
        pay(ledger, "run", 1, [charge(draw="seed 2")]) == frozenset()
    )  # though nothing more could be afforded
    assert history(ledger) == (Event(noise_multiplier=10.0, steps=2),)
    assert pay(ledger, "run", 2, [charge(draw="seed 3")]) == {"a"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (charge(draw=""), charge(draw="")),
        (charge(draw=""), charge(draw="x")),
        (charge(draw="x"), charge(draw="")),
        (charge(draw="x"), charge(draw="y")),
        (charge(draw="x"), charge(what=cost(9.0), draw="x")),
        (charge(draw="x"), charge(what=cost(1000.0), draw="x")),
        (charge(draw="x"), charge(what=cost(unit=Unit.RECORD), draw="x")),
        (charge(draw="x"), charge(what=cost(adjacency=Adjacency.REPLACE_ONE), draw="x")),
    ],
    ids=[
        "both fresh",
        "fresh first",
        "fresh second",
        "other draw",
        "dearer",
        "cheaper",
        "other unit",
        "other adjacency",
    ],
)
def test_another_release_under_the_same_key_is_refused_and_changes_nothing(
    ledger: Ledger, first: Charge, second: Charge
) -> None:
    pay(ledger, "run", 0, [first])
    before = ledger.history("a", SERVER)
    ledger.commit("run", [plan("z")])
    with pytest.raises(LedgerError, match="already charged to 'a'"):
        ledger.charge("run", 0, [charge("z", draw="x"), second])
    assert ledger.history("a", SERVER) == before
    assert ledger.history("z", SERVER) == ()


def test_the_same_round_of_another_run_account_or_observer_is_another_key(ledger: Ledger) -> None:
    for what in (charge(observer=WORLD, draw="x"), charge(draw="x"), charge("b", draw="x")):
        assert pay(ledger, "run", 0, [what]) == frozenset()
    pay(ledger, "other", 0, [charge(draw="x")])
    assert history(ledger) == (Event(noise_multiplier=10.0, steps=2),)
    assert history(ledger, "b") == (Event(noise_multiplier=10.0),)


# ---- grants --------------------------------------------------------------------------------------


def test_the_same_budget_may_be_written_again(ledger: Ledger) -> None:
    set_budgets(ledger, 3, "a", "b")
    set_budgets(ledger, 3, "b", "a")
    assert ledger.accounts() == ["a", "b"]
    assert ledger.budget_of("a") == Budget(
        epsilon=cap_for(3), delta=DELTA, unit=Unit.CLIENT, observer=SERVER
    )


@pytest.mark.parametrize(
    "other",
    [
        Budget(epsilon=1.1, delta=DELTA),
        Budget(epsilon=0.9, delta=DELTA),
        Budget(epsilon=1.0, delta=2 * DELTA),
        Budget(epsilon=1.0, delta=DELTA, unit=Unit.RECORD),
        Budget(epsilon=1.0, delta=DELTA, observer=WORLD),
    ],
    ids=["more", "less", "delta", "unit", "observer"],
)
def test_a_different_grant_for_a_known_account_is_refused_and_changes_nothing(
    ledger: Ledger, other: Budget
) -> None:
    ledger.set_budgets({"a": Budget(epsilon=1.0, delta=DELTA)}, unit=Unit.CLIENT, observer=SERVER)
    before = ledger.budget_of("a")
    with pytest.raises(LedgerError, match=r"the budget of .a. is epsilon 1\.0"):
        ledger.set_budgets({"0": other, "a": other, "z": other}, unit=Unit.CLIENT, observer=SERVER)
    assert (ledger.accounts(), ledger.budget_of("a")) == (["a"], before)


def test_a_budget_that_names_its_own_unit_and_observer_keeps_them(ledger: Ledger) -> None:
    own = Budget(epsilon=1.0, delta=DELTA, unit=Unit.RECORD, observer=WORLD)
    ledger.set_budgets({"a": own}, unit=Unit.CLIENT, observer=SERVER)
    assert ledger.budget_of("a") == own


# ---- observers -----------------------------------------------------------------------------------


def test_what_the_server_sees_covers_the_world_where_the_world_was_not_planned_apart(
    ledger: Ledger,
) -> None:
    pay(ledger, "run", 0, [charge(what=cost(5.0))])
    pay(ledger, "other", 1, [charge(what=cost(5.0)), charge(what=cost(50.0), observer=WORLD)])
    assert history(ledger, "a", SERVER) == (Event(noise_multiplier=5.0, steps=2),)
    assert history(ledger, "a", WORLD) == merged(
        [Event(noise_multiplier=5.0), Event(noise_multiplier=50.0)]
    )
    assert ledger.observers("a") == [SERVER, WORLD]


@pytest.mark.parametrize("late", ["a", "crowd"])
@pytest.mark.parametrize("charged", ["a", "crowd"])
def test_a_world_plan_after_releases_to_the_server_is_refused(
    ledger: Ledger, late: str, charged: str
) -> None:
    """It would lower what the world was already taken to have seen."""
    names = {"a": "a", "crowd": ledger.population(["a", "b"])}
    pay(ledger, "run", 0, [charge(names[charged], cost(5.0))])
    with pytest.raises(LedgerError, match="already charged"):
        ledger.commit("run", [plan(names[late], cost(50.0), WORLD)])
    assert history(ledger, "a", WORLD) == (Event(noise_multiplier=5.0),)
    assert ledger.commit("other", [plan(names[late], cost(50.0), WORLD)]) == frozenset()


def test_a_server_plan_that_released_nothing_may_still_get_a_world_plan(ledger: Ledger) -> None:
    ledger.commit("run", [plan(what=cost(5.0))])
    assert ledger.commit("run", [plan(what=cost(50.0), observer=WORLD)]) == frozenset()
    ledger.charge("run", 0, [charge(what=cost(50.0), observer=WORLD), charge(what=cost(5.0))])
    assert history(ledger, "a", WORLD) == (Event(noise_multiplier=50.0),)


def test_a_bill_against_the_world_tells_nothing_of_the_server(ledger: Ledger) -> None:
    pay(ledger, "run", 0, [charge(observer=WORLD)])
    assert ledger.history("a", SERVER) == ()
    assert history(ledger, "a", WORLD) == (Event(noise_multiplier=10.0),)


def test_a_grant_against_the_world_also_pays_for_what_only_the_server_was_billed_for(
    ledger: Ledger,
) -> None:
    set_budgets(ledger, 3, observer=WORLD)
    refused = [pay(ledger, "run", round_, [charge()]) for round_ in range(4)]
    assert refused == [frozenset()] * 3 + [frozenset({"a"})]


def test_a_budget_against_the_world_does_not_pay_for_a_trusted_server(ledger: Ledger) -> None:
    set_budgets(ledger, 3, observer=WORLD)
    assert ledger.commit("run", [plan(what=cost(0.1)), plan(observer=WORLD)]) == frozenset()
    for round_ in range(3):
        assert (
            ledger.charge("run", round_, [charge(observer=WORLD)]) == frozenset()
        )  # as the server opens the round
        assert (
            ledger.charge("run", round_, [charge(what=cost(0.1))]) == frozenset()
        )  # as the client is admitted
    assert ledger.charge("run", 3, [charge(observer=WORLD)]) == {"a"}
    assert history(ledger, "a", WORLD) == (Event(noise_multiplier=10.0, steps=3),)


def test_a_grant_against_the_server_is_not_touched_by_the_worlds_bills(ledger: Ledger) -> None:
    set_budgets(ledger, 1, observer=SERVER)
    for round_ in range(5):
        assert pay(ledger, "run", round_, [charge(observer=WORLD)]) == frozenset()


@pytest.mark.parametrize("against", [SERVER, WORLD])
@pytest.mark.parametrize("first", [SERVER, WORLD])
def test_an_account_refused_against_one_observer_is_charged_against_none(
    ledger: Ledger, against: Observer, first: Observer
) -> None:
    """It takes no part in the round; and a server's bill left alone would be read as
    the world's.
    """
    set_budgets(ledger, 1, observer=against)
    costs = {SERVER: cost(10.0 if against is SERVER else 2.0), WORLD: cost(10.0)}
    order = [first, WORLD if first is SERVER else SERVER]
    for round_ in range(3):
        both = [charge(what=costs[observer], observer=observer) for observer in order]
        assert pay(ledger, "run", round_, both) == (frozenset() if round_ == 0 else {"a"})
    assert ledger.participations("a", SERVER) == ledger.participations("a", WORLD) == 1
    spent = spend(history(ledger, "a", against), DELTA, adjacency=Adjacency.ADD_REMOVE)
    assert spent.epsilon <= ledger.budget_of("a").epsilon


# ---- populations ---------------------------------------------------------------------------------


def test_one_row_bills_every_member_of_a_population(ledger: Ledger) -> None:
    crowd = [f"c{i}" for i in range(50)]
    name = ledger.population(crowd)
    for round_ in range(3):
        pay(ledger, "run", round_, [charge(name, observer=WORLD)])
    pay(ledger, "run", 3, [charge("c7", cost(3.0), observer=WORLD)])
    assert history(ledger, "c0", WORLD) == (Event(noise_multiplier=10.0, steps=3),)
    assert history(ledger, "c7", WORLD) == merged(
        [Event(noise_multiplier=10.0, steps=3), Event(noise_multiplier=3.0)]
    )
    assert ledger.history("stranger", WORLD) == ()
    assert ledger.accounts() == sorted(crowd)
    assert ledger.observers("c0") == [WORLD]


def test_a_population_is_named_by_its_members_and_not_by_their_order(ledger: Ledger) -> None:
    assert ledger.population(["a", "b"]) == ledger.population(["b", "a"])
    assert ledger.population(["a", "b"]) != ledger.population(["a", "c"])
    assert ledger.population(["a"]) != ledger.population(["a", "b"])


def test_populations_whose_names_contain_the_separator_bill_their_own_members(
    ledger: Ledger,
) -> None:
    """Membership is stored once under a digest: of two crowds with one digest, one
    would go free.
    """
    for number, crowd in enumerate((["a", "b"], ["a\x1fb"])):
        pay(ledger, "run", number, [charge(ledger.population(crowd))])
    assert (
        history(ledger, "a") == history(ledger, "b") == history(ledger, "a\x1fb") == cost().events
    )


def test_a_member_of_two_populations_pays_for_both(ledger: Ledger) -> None:
    one, other = ledger.population(["a", "b"]), ledger.population(["b", "c"])
    pay(ledger, "run", 0, [charge(one)])
    pay(ledger, "run", 1, [charge(other, cost(5.0))])
    assert history(ledger, "b") == merged(
        [Event(noise_multiplier=10.0), Event(noise_multiplier=5.0)]
    )
    assert history(ledger, "c") == (Event(noise_multiplier=5.0),)


def test_what_a_population_was_charged_counts_against_a_members_own_budget(ledger: Ledger) -> None:
    set_budgets(ledger, 4, "a")
    crowd = ledger.population(["a", "b"])
    ledger.commit("run", [plan(crowd)])
    for round_ in range(3):
        ledger.charge("run", round_, [charge(crowd)])
    assert ledger.affordable_releases("a", cost(), [SERVER], 10) == 1
    assert (
        ledger.charge("run", 3, [charge("a"), charge("b")]) == frozenset()
    )  # members use the crowd's plan
    assert ledger.affordable_releases("a", cost(), [SERVER], 10) == 0
    assert ledger.charge("run", 4, [charge("a"), charge("b")]) == {"a"}


def test_a_crowd_and_its_member_in_one_call_are_counted_together(ledger: Ledger) -> None:
    set_budgets(ledger, 1, "a")
    crowd = ledger.population(["a", "b"])
    ledger.commit("run", [plan(crowd)])
    assert ledger.charge("run", 0, [charge(crowd), charge("a")]) == {"a"}
    assert history(ledger, "a") == (Event(noise_multiplier=10.0),)


def test_a_population_is_never_charged_beyond_a_members_grant(ledger: Ledger) -> None:
    """Checking and inserting are one transaction for a crowd too, or two runs exceed a budget
    together.
    """
    set_budgets(ledger, 2, "a")
    crowd = ledger.population(["a", "b"])
    for round_ in range(4):
        pay(ledger, "run", round_, [charge(crowd)])
    spent = spend(history(ledger, "a"), DELTA, adjacency=Adjacency.ADD_REMOVE).epsilon
    assert spent <= ledger.budget_of("a").epsilon


def test_the_worlds_plan_of_a_population_stands_in_for_a_members_server_plan(
    ledger: Ledger,
) -> None:
    crowd = ledger.population(["a", "b"])
    ledger.commit("run", [plan(crowd, observer=WORLD), plan("a", cost(1.0))])
    ledger.charge("run", 0, [charge(crowd, observer=WORLD)])
    ledger.charge("run", 0, [charge("a", cost(1.0))])
    assert history(ledger, "a", WORLD) == (Event(noise_multiplier=10.0),)
    assert history(ledger, "a", SERVER) == (Event(noise_multiplier=1.0),)
    assert history(ledger, "b", WORLD) == (Event(noise_multiplier=10.0),)


@pytest.mark.parametrize("apart", ["a", "z"])
def test_a_member_with_a_world_plan_of_its_own_does_not_stand_for_the_others(
    ledger: Ledger, apart: str
) -> None:
    """Its history against the world is another one, although it was charged nothing by itself."""
    set_budgets(ledger, 2, "a", "m", "z", observer=WORLD)
    crowd = ledger.population(["a", "m", "z"])
    ledger.commit("run", [plan(apart, cost(500.0), WORLD), plan(crowd)])
    refused = [ledger.charge("run", round_, [charge(crowd)]) for round_ in range(4)]
    assert refused == [frozenset()] * 2 + [frozenset({crowd})] * 2


# ---- units and adjacencies -----------------------------------------------------------------------


def test_a_history_is_read_under_the_strongest_adjacency_any_bill_states(ledger: Ledger) -> None:
    for round_, adjacency in enumerate(
        (Adjacency.ADD_REMOVE, Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE)
    ):
        ledger.register(adjacency, seeded=False, title=adjacency)
        pay(ledger, adjacency, round_, [charge(what=cost(adjacency=adjacency))])
    (line,) = statements(ledger, DELTA)
    assert line.adjacency == Adjacency.REPLACE_ONE
    assert ledger.history("a", SERVER) == (Event(noise_multiplier=10.0, steps=3),)


def test_a_record_level_bill_never_fits_a_client_level_grant(ledger: Ledger) -> None:
    set_budgets(ledger, 50, unit=Unit.CLIENT)
    assert pay(ledger, "run", 0, [charge(what=cost(1000.0, unit=Unit.RECORD))]) == {"a"}
    assert ledger.affordable_releases("a", cost(1000.0, unit=Unit.RECORD), [SERVER], 5) == 0
    assert pay(ledger, "run", 0, [charge()]) == frozenset()


def test_units_meet_only_as_records_under_replace_one() -> None:
    """Changing one record replaces a client's contribution by another; it does not take it away."""
    costs = [cost(unit=Unit.CLIENT), cost(unit=Unit.RECORD)]
    assert speak_of(costs, Unit.RECORD) and not speak_of(costs, Unit.CLIENT)
    assert adjacency_of(costs) is adjacency_of(costs, Unit.RECORD) is Adjacency.REPLACE_ONE


def test_a_client_level_history_also_protects_records_under_replace_one() -> None:
    """As the docstring of adjacency_of says; whether it stands alone or beside a
    record-level bill.
    """
    alone = [cost(unit=Unit.CLIENT)]
    assert speak_of(alone, Unit.CLIENT) and speak_of(alone, Unit.RECORD)
    assert adjacency_of(alone, Unit.CLIENT) is alone[0].adjacency is Adjacency.ADD_REMOVE
    assert adjacency_of(alone, Unit.RECORD) is Adjacency.REPLACE_ONE


def test_a_record_level_history_says_nothing_of_clients() -> None:
    costs = [cost(unit=Unit.RECORD)]
    assert speak_of(costs, Unit.RECORD) and not speak_of(costs, Unit.CLIENT)
    assert adjacency_of(costs, Unit.RECORD) is Adjacency.ADD_REMOVE


@given(
    st.lists(
        st.tuples(st.sampled_from([2.0, 7.0]), st.sampled_from(list(Unit)), st.integers(1, 3)),
        max_size=4,
    )
)
def test_a_bill_reads_back_as_it_was_written(parts: list[tuple[float, Unit, int]]) -> None:
    for noise, unit, steps in parts:
        event = Event(noise_multiplier=noise, steps=steps, sampling="poisson", sampling_rate=1 / 3)
        what = PrivacyCost(
            unit=unit, adjacency=Adjacency.ZERO_OUT, events=(event, Event(noise_multiplier=1.0))
        )
        assert PrivacyCost.from_json(what.to_json()) == what


# ---- pre-checks ----------------------------------------------------------------------------------


def test_the_pre_check_charges_nothing_and_agrees_with_the_charge(ledger: Ledger) -> None:
    set_budgets(ledger, 3)
    ledger.commit("run", [plan()])
    for round_ in range(5):
        can = ledger.can_release("run", round_, "a", SERVER, cost())
        assert can == (round_ < 3)
        assert (ledger.charge("run", round_, [charge()]) == frozenset()) == can


def test_the_pre_check_of_a_replayed_round_leaves_out_what_it_already_paid(ledger: Ledger) -> None:
    set_budgets(ledger, 3)
    ledger.commit("run", [plan()])
    ledger.commit("other", [plan(what=cost(1000.0))])
    for round_ in range(3):
        ledger.charge("run", round_, [charge(draw=f"seed {round_}")])
    assert not ledger.can_release("run", 3, "a", SERVER, cost())
    assert ledger.can_release("run", 2, "a", SERVER, cost())
    assert not ledger.can_release("run", 2, "a", SERVER, cost(11.0))
    ledger.charge("other", 0, [charge(what=cost(1000.0))])
    assert ledger.can_release("run", 0, "a", SERVER, cost())
    assert ledger.charge("run", 2, [charge(draw="seed 2")]) == frozenset()


@settings(max_examples=15)
@given(
    st.sampled_from([1, 2, 4]),
    st.lists(
        st.tuples(st.sampled_from([7.0, 10.0, 30.0]), st.integers(1, 6)), min_size=1, max_size=7
    ),
)
@pytest.mark.parametrize("rule", ["renyi", "gaussian"])
def test_no_sequence_of_releases_exceeds_a_budget(
    rule: FilterName, rounds: int, wanted: list[tuple[float, int]]
) -> None:
    limit = cap_for(rounds)
    ledger = Ledger.create(":memory:", "test", filter=rule)
    ledger.set_budgets({"a": Budget(epsilon=limit, delta=DELTA)}, unit=Unit.CLIENT, observer=SERVER)
    expected: list[Event] = []
    for number, (noise, tries) in enumerate(wanted):
        ledger.register(f"run {number}", seeded=False, title="random")
        for round_ in range(tries):
            if not pay(ledger, f"run {number}", round_, [charge(what=cost(noise))]):
                expected.append(Event(noise_multiplier=noise))
    assert history(ledger) == merged(expected)
    exact_mu = math.sqrt(sum(event.noise_multiplier**-2 for event in expected))
    assert (
        exact_mu <= math.sqrt(rounds + 1) / 10.0
    )  # the exact cost of any mixture, by its total signal to noise
    if expected:
        assert spend(expected, DELTA, adjacency=Adjacency.ADD_REMOVE).epsilon <= limit
    ledger.close()
