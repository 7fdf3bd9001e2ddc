"""What was charged stays charged, and no account is charged beyond its grant."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special

from dpfl.core.errors import LedgerError, PrivacyRefusal
from dpfl.core.types import Adjacency, Budget, Observer, Unit
from dpfl.privacy.accountant import spend
from dpfl.privacy.bills import Bill, Charge, Tab, tab_of
from dpfl.privacy.events import Event, merged
from dpfl.privacy.ledger import FORMAT, Ledger, backup

SERVER, WORLD = Observer.SERVER, Observer.WORLD
DELTA = 1e-5


def bill(noise: float = 10.0, unit: Unit = Unit.CLIENT, adjacency: Adjacency = Adjacency.ADD_REMOVE) -> Bill:
    return Bill(unit=unit, adjacency=adjacency, events=(Event(noise_multiplier=noise),))


def charge(account: str = "a", what: Bill | None = None, observer: Observer = SERVER, draw: str = "") -> Charge:
    return Charge(account=account, observer=observer, bill=what or bill(), draw=draw)


def cap_for(rounds: int, noise: float = 10.0) -> float:
    """An epsilon between the exact costs of ``rounds`` and of one more Gaussian release, by an independent formula."""

    def exact(n: int) -> float:
        mu = math.sqrt(n) / noise

        def excess(value: float) -> float:
            return float(
                special.ndtr(mu / 2 - value / mu) - math.exp(value + special.log_ndtr(-mu / 2 - value / mu)) - DELTA
            )

        return float(optimize.brentq(excess, 0, 100))

    return (exact(rounds) + exact(rounds + 1)) / 2


def grant(ledger: Ledger, rounds: int, *accounts: str, observer: Observer = SERVER, unit: Unit = Unit.CLIENT) -> None:
    budget = Budget(epsilon=cap_for(rounds), delta=DELTA)
    ledger.grant(dict.fromkeys(accounts or ("a",), budget), unit=unit, observer=observer)


def history(ledger: Ledger, account: str = "a", observer: Observer = SERVER) -> tuple[Event, ...]:
    tab = ledger.tab(account, observer)
    return () if tab is None else tab.history


def charged_rounds(path: Path) -> list[tuple[str, int, str, str]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT run, round, account, observer FROM charges ORDER BY 1, 2, 3, 4").fetchall()


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    made = Ledger.create(":memory:", "test")
    made.register("run", seeded=False, title="a test")
    made.register("other", seeded=False, title="another test")
    yield made
    made.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed ledger file with three charges."""
    where = tmp_path / "ledger.sqlite"
    made = Ledger.create(where, "test")
    made.register("run", seeded=False, title="a test")
    for round_ in range(3):
        made.charge("run", round_, [charge("a"), charge("b", bill(20.0))])
    made.close()
    return where


# ---- charging -------------------------------------------------------------------------------------------------------


def test_the_events_derived_from_storage_are_those_charged(ledger: Ledger) -> None:
    sampled = Event(noise_multiplier=1.5, sampling="poisson", sampling_rate=0.125, steps=7, failure=1e-9)
    several = Bill(unit=Unit.CLIENT, adjacency=Adjacency.ADD_REMOVE, events=(Event(noise_multiplier=3.0), sampled))
    for round_ in range(4):
        assert ledger.charge("run", round_, [charge("a", several), charge("b")]) == frozenset()
    ledger.charge("other", 0, [charge("a")])
    assert history(ledger, "a") == merged([*several.events * 4, Event(noise_multiplier=10.0)])
    assert history(ledger, "b") == merged(bill().events * 4)
    assert ledger.participations("a", SERVER) == 5
    assert ledger.tab("nobody", SERVER) is None


def test_charging_stops_exactly_where_the_grant_ends(ledger: Ledger) -> None:
    grant(ledger, 6)
    refusals = [ledger.charge("run", round_, [charge()]) for round_ in range(9)]
    assert refusals == [frozenset()] * 6 + [frozenset({"a"})] * 3
    assert history(ledger) == (Event(noise_multiplier=10.0, steps=6),)


def test_the_cap_spans_runs(ledger: Ledger) -> None:
    grant(ledger, 5)
    refused = [ledger.charge(run, round_, [charge()]) != frozenset() for round_ in range(4) for run in ("run", "other")]
    assert refused == [False] * 5 + [True] * 3


def test_one_who_cannot_pay_does_not_stop_the_others(ledger: Ledger) -> None:
    grant(ledger, 2, "poor")
    grant(ledger, 5, "rich")
    for round_ in range(4):
        refused = ledger.charge("run", round_, [charge("poor"), charge("rich"), charge("free")])
        assert refused == (frozenset() if round_ < 2 else frozenset({"poor"}))
    assert [ledger.participations(account, SERVER) for account in ("poor", "rich", "free")] == [2, 4, 4]


def test_a_cheaper_bill_may_fit_where_a_dear_one_did_not(ledger: Ledger) -> None:
    grant(ledger, 3)
    for round_ in range(3):
        ledger.charge("run", round_, [charge()])
    assert ledger.charge("run", 3, [charge()]) == {"a"}
    assert ledger.charge("run", 3, [charge(what=bill(100.0))]) == frozenset()
    assert history(ledger) == merged([Event(noise_multiplier=10.0, steps=3), Event(noise_multiplier=100.0)])


def test_no_noise_at_all_fits_no_grant(ledger: Ledger) -> None:
    grant(ledger, 100)
    assert ledger.charge("run", 0, [charge(what=bill(0.0))]) == {"a"}
    assert history(ledger) == ()


def test_a_run_must_be_named_before_it_charges(ledger: Ledger) -> None:
    with pytest.raises(LedgerError):
        ledger.charge("never registered", 0, [charge()])
    assert history(ledger) == ()


def test_a_run_without_a_name_is_refused_or_counted(ledger: Ledger) -> None:
    grant(ledger, 2)
    try:
        ledger.register("", seeded=False, title="no name")
    except LedgerError:
        return
    refused = [ledger.charge("", round_, [charge()]) for round_ in range(3)]
    assert history(ledger) == (Event(noise_multiplier=10.0, steps=2),)
    assert refused == [frozenset(), frozenset(), frozenset({"a"})]


def test_a_run_keeps_its_kind_of_randomness(ledger: Ledger) -> None:
    ledger.register("run", seeded=False, title="again")
    with pytest.raises(LedgerError, match="another kind of randomness"):
        ledger.register("run", seeded=True, title="again")
    ledger.register("simulated", seeded=True, title="seeded")
    assert ledger.seeded_runs() == ["simulated"]


def test_a_bill_no_accountant_can_read_leaves_no_trace(ledger: Ledger) -> None:
    grant(ledger, 10, "b")
    fixed = Event(noise_multiplier=10.0, sampling="uniform", sampling_rate=0.1)
    unreadable = Bill(unit=Unit.CLIENT, adjacency=Adjacency.ADD_REMOVE, events=(fixed,))
    with pytest.raises(PrivacyRefusal):
        ledger.charge("run", 0, [charge("a"), charge("b", unreadable)])
    assert history(ledger, "a") == history(ledger, "b") == ()
    assert ledger.last_round("run") is None
    assert ledger.charge("run", 0, [charge("a"), charge("b")]) == frozenset()


def test_the_last_round_is_that_of_the_run_asked_for(ledger: Ledger) -> None:
    assert ledger.last_round("run") is None
    for round_ in (0, 1, 5):
        ledger.charge("run", round_, [charge()])
    ledger.charge("other", 9, [charge()])
    assert ledger.last_round("run") == 5


# ---- replays --------------------------------------------------------------------------------------------------------


def test_a_replay_with_the_same_bill_and_draw_is_free(ledger: Ledger) -> None:
    grant(ledger, 2)
    for _ in range(3):
        assert ledger.charge("run", 0, [charge(draw="seed 1")]) == frozenset()
    assert ledger.charge("run", 1, [charge(draw="seed 2")]) == frozenset()
    assert ledger.charge("run", 1, [charge(draw="seed 2")]) == frozenset()  # though nothing more could be afforded
    assert history(ledger) == (Event(noise_multiplier=10.0, steps=2),)
    assert ledger.charge("run", 2, [charge(draw="seed 3")]) == {"a"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (charge(draw=""), charge(draw="")),
        (charge(draw=""), charge(draw="x")),
        (charge(draw="x"), charge(draw="")),
        (charge(draw="x"), charge(draw="y")),
        (charge(draw="x"), charge(what=bill(9.0), draw="x")),
        (charge(draw="x"), charge(what=bill(1000.0), draw="x")),
        (charge(draw="x"), charge(what=bill(unit=Unit.RECORD), draw="x")),
        (charge(draw="x"), charge(what=bill(adjacency=Adjacency.REPLACE_ONE), draw="x")),
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
    ledger.charge("run", 0, [first])
    before = ledger.tab("a", SERVER)
    with pytest.raises(LedgerError, match="already charged to 'a'"):
        ledger.charge("run", 0, [charge("z", draw="x"), second])
    assert ledger.tab("a", SERVER) == before
    assert ledger.tab("z", SERVER) is None


def test_the_same_round_of_another_run_account_or_observer_is_another_key(ledger: Ledger) -> None:
    for what in (charge(observer=WORLD, draw="x"), charge(draw="x"), charge("b", draw="x")):
        ledger.charge("run", 0, [what])
    ledger.charge("other", 0, [charge(draw="x")])
    assert history(ledger) == (Event(noise_multiplier=10.0, steps=2),)
    assert history(ledger, "b") == (Event(noise_multiplier=10.0),)


# ---- grants ---------------------------------------------------------------------------------------------------------


def test_the_same_grant_may_be_written_again(ledger: Ledger) -> None:
    grant(ledger, 3, "a", "b")
    grant(ledger, 3, "b", "a")
    assert set(ledger.grants()) == {"a", "b"}
    assert ledger.grants()["a"] == Budget(epsilon=cap_for(3), delta=DELTA, unit=Unit.CLIENT, observer=SERVER)


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
def test_a_different_grant_for_a_known_account_is_refused_and_changes_nothing(ledger: Ledger, other: Budget) -> None:
    ledger.grant({"a": Budget(epsilon=1.0, delta=DELTA)}, unit=Unit.CLIENT, observer=SERVER)
    before = ledger.grants()
    with pytest.raises(LedgerError, match=r"account 'a' was granted epsilon 1\.0"):
        ledger.grant({"0": other, "a": other, "z": other}, unit=Unit.CLIENT, observer=SERVER)
    assert ledger.grants() == before


def test_a_budget_that_names_its_own_unit_and_observer_keeps_them(ledger: Ledger) -> None:
    own = Budget(epsilon=1.0, delta=DELTA, unit=Unit.RECORD, observer=WORLD)
    ledger.grant({"a": own}, unit=Unit.CLIENT, observer=SERVER)
    assert ledger.grants() == {"a": own}


# ---- observers ------------------------------------------------------------------------------------------------------


def test_what_the_server_sees_covers_the_world_where_the_world_was_not_billed_apart(ledger: Ledger) -> None:
    ledger.charge("run", 0, [charge(what=bill(5.0))])
    ledger.charge("run", 1, [charge(what=bill(5.0)), charge(what=bill(50.0), observer=WORLD)])
    assert history(ledger, "a", SERVER) == (Event(noise_multiplier=5.0, steps=2),)
    assert history(ledger, "a", WORLD) == merged([Event(noise_multiplier=5.0), Event(noise_multiplier=50.0)])
    assert ledger.observers("a") == [SERVER, WORLD]


def test_a_bill_against_the_world_tells_nothing_of_the_server(ledger: Ledger) -> None:
    ledger.charge("run", 0, [charge(observer=WORLD)])
    assert ledger.tab("a", SERVER) is None
    assert history(ledger, "a", WORLD) == (Event(noise_multiplier=10.0),)


def test_a_grant_against_the_world_also_pays_for_what_only_the_server_was_billed_for(ledger: Ledger) -> None:
    grant(ledger, 3, observer=WORLD)
    refused = [ledger.charge("run", round_, [charge()]) for round_ in range(4)]
    assert refused == [frozenset()] * 3 + [frozenset({"a"})]


def test_a_grant_against_the_world_does_not_pay_for_a_trusted_server(ledger: Ledger) -> None:
    grant(ledger, 3, observer=WORLD)
    for round_ in range(3):
        ledger.charge("run", round_, [charge(observer=WORLD)])  # as the server opens the round
        assert ledger.charge("run", round_, [charge(what=bill(0.1))]) == frozenset()  # as the client is admitted
    assert ledger.charge("run", 3, [charge(observer=WORLD)]) == {"a"}
    assert history(ledger, "a", WORLD) == (Event(noise_multiplier=10.0, steps=3),)


def test_a_grant_against_the_server_is_not_touched_by_the_worlds_bills(ledger: Ledger) -> None:
    grant(ledger, 1, observer=SERVER)
    for round_ in range(5):
        assert ledger.charge("run", round_, [charge(observer=WORLD)]) == frozenset()


@pytest.mark.parametrize("against", [SERVER, WORLD])
@pytest.mark.parametrize("first", [SERVER, WORLD])
def test_an_account_refused_against_one_observer_is_charged_against_none(
    ledger: Ledger, against: Observer, first: Observer
) -> None:
    """It takes no part in the round; and a server's bill left alone would be read as the world's."""
    grant(ledger, 1, observer=against)
    costs = {SERVER: bill(10.0 if against is SERVER else 2.0), WORLD: bill(10.0)}
    order = [first, WORLD if first is SERVER else SERVER]
    for round_ in range(3):
        both = [charge(what=costs[observer], observer=observer) for observer in order]
        assert ledger.charge("run", round_, both) == (frozenset() if round_ == 0 else {"a"})
    assert ledger.participations("a", SERVER) == ledger.participations("a", WORLD) == 1
    spent = spend(history(ledger, "a", against), DELTA, adjacency=Adjacency.ADD_REMOVE)
    assert spent.epsilon <= ledger.grants()["a"].epsilon


# ---- populations ----------------------------------------------------------------------------------------------------


def test_one_row_bills_every_member_of_a_population(ledger: Ledger) -> None:
    crowd = [f"c{i}" for i in range(50)]
    name = ledger.population(crowd)
    for round_ in range(3):
        ledger.charge("run", round_, [charge(name, observer=WORLD)])
    ledger.charge("run", 3, [charge("c7", bill(3.0), observer=WORLD)])
    assert history(ledger, "c0", WORLD) == (Event(noise_multiplier=10.0, steps=3),)
    assert history(ledger, "c7", WORLD) == merged([Event(noise_multiplier=10.0, steps=3), Event(noise_multiplier=3.0)])
    assert ledger.tab("stranger", WORLD) is None
    assert ledger.accounts() == sorted(crowd)
    assert ledger.observers("c0") == [WORLD]


def test_a_population_is_named_by_its_members_and_not_by_their_order(ledger: Ledger) -> None:
    assert ledger.population(["a", "b"]) == ledger.population(["b", "a"])
    assert ledger.population(["a", "b"]) != ledger.population(["a", "c"])
    assert ledger.population(["a"]) != ledger.population(["a", "b"])


def test_populations_whose_names_contain_the_separator_bill_their_own_members(ledger: Ledger) -> None:
    """Membership is stored once under a digest: two crowds with one digest would leave the second unbilled."""
    for number, crowd in enumerate((["a", "b"], ["a\x1fb"])):
        ledger.charge("run", number, [charge(ledger.population(crowd))])
    assert history(ledger, "a") == history(ledger, "b") == history(ledger, "a\x1fb") == bill().events


def test_a_member_of_two_populations_pays_for_both(ledger: Ledger) -> None:
    one, other = ledger.population(["a", "b"]), ledger.population(["b", "c"])
    ledger.charge("run", 0, [charge(one)])
    ledger.charge("run", 1, [charge(other, bill(5.0))])
    assert history(ledger, "b") == merged([Event(noise_multiplier=10.0), Event(noise_multiplier=5.0)])
    assert history(ledger, "c") == (Event(noise_multiplier=5.0),)


def test_what_a_population_was_billed_counts_against_a_members_own_grant(ledger: Ledger) -> None:
    grant(ledger, 4, "a")
    crowd = ledger.population(["a", "b"])
    for round_ in range(3):
        ledger.charge("run", round_, [charge(crowd)])
    assert ledger.affordable("a", bill(), [SERVER])
    assert ledger.charge("run", 3, [charge("a"), charge("b")]) == frozenset()
    assert not ledger.affordable("a", bill(), [SERVER])
    assert ledger.charge("run", 4, [charge("a"), charge("b")]) == {"a"}


def test_a_population_is_never_charged_beyond_a_members_grant(ledger: Ledger) -> None:
    """Checking and inserting are one transaction for a crowd too, or two runs pass a member's cap together."""
    grant(ledger, 2, "a")
    crowd = ledger.population(["a", "b"])
    for round_ in range(4):
        ledger.charge("run", round_, [charge(crowd)])
    spent = spend(history(ledger, "a"), DELTA, adjacency=Adjacency.ADD_REMOVE).epsilon
    assert spent <= ledger.grants()["a"].epsilon


def test_the_worlds_bill_of_a_population_stands_in_for_a_members_server_bill(ledger: Ledger) -> None:
    crowd = ledger.population(["a", "b"])
    ledger.charge("run", 0, [charge(crowd, observer=WORLD)])
    ledger.charge("run", 0, [charge("a", bill(1.0))])
    assert history(ledger, "a", WORLD) == (Event(noise_multiplier=10.0),)
    assert history(ledger, "a", SERVER) == (Event(noise_multiplier=1.0),)
    assert history(ledger, "b", WORLD) == (Event(noise_multiplier=10.0),)


# ---- units and adjacencies ------------------------------------------------------------------------------------------


def test_a_history_is_read_under_the_strongest_adjacency_any_bill_states(ledger: Ledger) -> None:
    for round_, adjacency in enumerate((Adjacency.ADD_REMOVE, Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE)):
        ledger.charge("run", round_, [charge(what=bill(adjacency=adjacency))])
    tab = ledger.tab("a", SERVER)
    assert tab is not None
    assert tab.adjacency is Adjacency.REPLACE_ONE
    assert tab.history == (Event(noise_multiplier=10.0, steps=3),)


def test_a_record_level_bill_never_fits_a_client_level_grant(ledger: Ledger) -> None:
    grant(ledger, 50, unit=Unit.CLIENT)
    assert ledger.charge("run", 0, [charge(what=bill(1000.0, unit=Unit.RECORD))]) == {"a"}
    assert ledger.charge("run", 0, [charge()]) == frozenset()


def test_units_meet_only_as_records_under_replace_one() -> None:
    """Changing one record replaces a client's contribution by another; it does not take it away."""
    tab = tab_of([(bill(unit=Unit.CLIENT), 2), (bill(unit=Unit.RECORD), 3)])
    assert tab == Tab(
        unit=Unit.RECORD,
        adjacency=Adjacency.REPLACE_ONE,
        history=(Event(noise_multiplier=10.0, steps=5),),
        mixed=True,
    )
    assert tab.adjacency_as(Unit.RECORD) and not tab.adjacency_as(Unit.CLIENT)


def test_a_client_level_history_also_protects_records() -> None:
    """As the docstring of adjacency_as says; whether it stands alone or beside a record-level bill."""
    alone = tab_of([(bill(unit=Unit.CLIENT), 2)])
    assert alone is not None and alone.adjacency_as(Unit.CLIENT)
    assert alone.adjacency_as(Unit.RECORD)


def test_a_record_level_history_says_nothing_of_clients() -> None:
    tab = tab_of([(bill(unit=Unit.RECORD), 2)])
    assert tab is not None and tab.adjacency_as(Unit.RECORD)
    assert not tab.adjacency_as(Unit.CLIENT)


@given(st.lists(st.tuples(st.sampled_from([2.0, 7.0]), st.sampled_from(list(Unit)), st.integers(1, 3)), max_size=4))
def test_a_bill_reads_back_as_it_was_written(parts: list[tuple[float, Unit, int]]) -> None:
    for noise, unit, steps in parts:
        event = Event(noise_multiplier=noise, steps=steps, sampling="poisson", sampling_rate=1 / 3)
        what = Bill(unit=unit, adjacency=Adjacency.ZERO_OUT, events=(event, Event(noise_multiplier=1.0)))
        assert Bill.from_json(what.to_json()) == what


# ---- pre-checks -----------------------------------------------------------------------------------------------------


def test_the_pre_check_charges_nothing_and_agrees_with_the_charge(ledger: Ledger) -> None:
    grant(ledger, 3)
    for round_ in range(5):
        can = ledger.affordable("a", bill(), [SERVER, WORLD], horizon=5 - round_)
        assert can == (round_ < 3)
        assert (ledger.charge("run", round_, [charge()], horizon=5 - round_) == frozenset()) == can


def test_the_pre_check_of_a_replayed_round_leaves_out_what_it_already_paid(ledger: Ledger) -> None:
    grant(ledger, 3)
    for round_ in range(3):
        ledger.charge("run", round_, [charge(draw=f"seed {round_}")])
    assert not ledger.affordable("a", bill(), [SERVER])
    assert ledger.affordable("a", bill(), [SERVER], before=("run", 2))
    assert not ledger.affordable("a", bill(), [SERVER], before=("other", 0))
    ledger.charge("other", 0, [charge(what=bill(1000.0))])
    assert ledger.affordable("a", bill(), [SERVER], before=("run", 0))


@settings(max_examples=15)
@given(
    st.sampled_from([1, 2, 4]),
    st.lists(st.tuples(st.sampled_from([7.0, 10.0, 30.0]), st.integers(1, 6)), min_size=1, max_size=7),
)
def test_no_sequence_of_bills_passes_a_budget(rounds: int, wanted: list[tuple[float, int]]) -> None:
    limit = cap_for(rounds)
    ledger = Ledger.create(":memory:", "test")
    ledger.register("run", seeded=False, title="random")
    ledger.grant({"a": Budget(epsilon=limit, delta=DELTA)}, unit=Unit.CLIENT, observer=SERVER)
    expected: list[Event] = []
    for round_, (noise, horizon) in enumerate(wanted):
        refused = ledger.charge("run", round_, [charge(what=bill(noise))], horizon=horizon)
        if not refused:
            expected.append(Event(noise_multiplier=noise))
    assert history(ledger) == merged(expected)
    exact_mu = math.sqrt(sum(event.noise_multiplier**-2 for event in expected))
    assert exact_mu <= math.sqrt(rounds + 1) / 10.0  # the exact cost of any mixture, by its total signal to noise
    if expected:
        assert spend(expected, DELTA, adjacency=Adjacency.ADD_REMOVE).epsilon <= limit
    ledger.close()


# ---- the file -------------------------------------------------------------------------------------------------------


def test_a_ledger_is_found_as_it_was_left(path: Path) -> None:
    reopened = Ledger.open(path, "test")
    assert history(reopened, "a") == (Event(noise_multiplier=10.0, steps=3),)
    assert reopened.last_round("run") == 2
    assert reopened.identity() == "test"
    reopened.charge("run", 3, [charge("a")])
    reopened.close()
    assert len(charged_rounds(path)) == 7


def test_an_existing_ledger_is_never_overwritten(path: Path) -> None:
    with pytest.raises(LedgerError, match="already exists"):
        Ledger.create(path, "test")
    assert len(charged_rounds(path)) == 6


def test_a_missing_ledger_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="there is no ledger"):
        Ledger.open(tmp_path / "ledger.sqlite")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"garbage", b"SQLite format 3\x00", b"\x00" * 8192], ids=len)
def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path, content: bytes) -> None:
    where = tmp_path / "ledger.sqlite"
    where.write_bytes(content)
    with pytest.raises(LedgerError):
        Ledger.open(where)


@pytest.mark.parametrize("kept", [0.05, 0.3, 0.6, 0.95])
def test_a_truncated_ledger_is_refused(path: Path, kept: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(LedgerError):
        Ledger.open(path)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_page_of_noise_in_the_middle_is_refused(path: Path, read_only: bool) -> None:
    content = bytearray(path.read_bytes())
    pages = len(content) // 4096
    for page in range(1, pages):
        content[page * 4096 : page * 4096 + 512] = bytes(range(256)) * 2
    path.write_bytes(bytes(content))
    with pytest.raises(LedgerError):
        Ledger.open(path, read_only=read_only)


def test_another_runs_ledger_is_refused(path: Path) -> None:
    with pytest.raises(LedgerError, match="belongs to another run"):
        Ledger.open(path, "another identity")
    Ledger.open(path).close()


def test_a_ledger_of_a_future_format_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE meta SET value = 'dpfl-ledger-2' WHERE key = 'format'")
    with pytest.raises(LedgerError, match="dpfl-ledger-2") as caught:
        Ledger.open(path, "test")
    assert FORMAT in caught.value.remedy


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE bills SET body = replace(body, '10.0', '99.0')",
        "UPDATE bills SET body = '{}'",
        "DELETE FROM bills",
    ],
)
def test_a_bill_that_was_tampered_with_is_refused(path: Path, change: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(change)
    changed = Ledger.open(path, "test")
    with pytest.raises(LedgerError, match="missing or was changed"):
        changed.tab("a", SERVER)
    changed.close()


def test_a_read_only_ledger_shows_everything_and_charges_nothing(path: Path) -> None:
    viewed = Ledger.open(path, read_only=True)
    assert history(viewed, "a") == (Event(noise_multiplier=10.0, steps=3),)
    with pytest.raises(LedgerError):
        viewed.charge("run", 3, [charge("a")])
    viewed.close()
    assert len(charged_rounds(path)) == 6


def test_a_ledger_made_where_an_old_one_left_its_write_ahead_log_is_empty_and_whole(tmp_path: Path) -> None:
    """A killed run leaves its -wal file behind; whoever deletes only the ledger and starts anew must not inherit it."""
    where, aside = tmp_path / "ledger.sqlite", tmp_path / "aside"
    old = Ledger.create(where, "old")
    old.register("run", seeded=False, title="old")
    old.charge("run", 0, [charge("a")])
    aside.write_bytes((tmp_path / "ledger.sqlite-wal").read_bytes())
    old.close()
    where.unlink()
    aside.rename(tmp_path / "ledger.sqlite-wal")
    try:
        fresh = Ledger.create(where, "new")
    except LedgerError:
        return
    assert fresh.identity() == "new"
    assert fresh.accounts() == []
    fresh.close()


# ---- backups --------------------------------------------------------------------------------------------------------


def test_a_backup_of_a_ledger_in_use_holds_everything_charged_so_far(tmp_path: Path) -> None:
    source, target = tmp_path / "ledger.sqlite", tmp_path / "copy.sqlite"
    live = Ledger.create(source, "test")
    live.register("run", seeded=False, title="a test")
    grant(live, 9, "a")
    for round_ in range(4):
        live.charge("run", round_, [charge("a")])
    backup(source, target)
    live.charge("run", 4, [charge("a")])
    copy = Ledger.open(target, "test")
    assert history(copy, "a") == (Event(noise_multiplier=10.0, steps=4),)
    assert copy.grants() == live.grants()
    assert history(live, "a") == (Event(noise_multiplier=10.0, steps=5),)
    copy.close()
    live.close()


def test_a_backup_of_nothing_or_to_nowhere_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(LedgerError):
        backup(tmp_path / "absent.sqlite", tmp_path / "copy.sqlite")
    with pytest.raises(LedgerError):
        backup(path, tmp_path / "no folder" / "copy.sqlite")
    assert len(charged_rounds(path)) == 6


def test_a_ledger_made_meanwhile_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes start together: the second finds nothing, and by the time it is ready the first has charged."""
    path = tmp_path / "ledger.sqlite"
    original = Ledger._set_up

    def overtaken(self: Ledger, identity: str) -> None:
        original(self, identity)
        if identity == "second":
            first = Ledger.create(path, "first")
            first.register("run", seeded=False, title="t")
            first.charge("run", 0, [charge()])
            first.close()

    monkeypatch.setattr(Ledger, "_set_up", overtaken)
    with pytest.raises(LedgerError, match="already exists"):
        Ledger.create(path, "second")
    assert Ledger.open(path, "first").participations("a", SERVER) == 1
    assert not list(tmp_path.glob("*.new"))
