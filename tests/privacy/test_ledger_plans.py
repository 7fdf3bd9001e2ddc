"""A plan is committed before its first release; a release uses up one entry of it, or
is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

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
    plan,
    set_budgets,
)

from dpfl.core.errors import ConfigurationError, LedgerError
from dpfl.core.types import Adjacency, Budget, Unit
from dpfl.privacy import filters
from dpfl.privacy.accountant import spend
from dpfl.privacy.costs import PrivacyCost
from dpfl.privacy.events import Event
from dpfl.privacy.filters import FilterName, plan_price
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.statement import statement

RULES: tuple[FilterName, ...] = ("allotments", "renyi", "gaussian")


def made(rule: FilterName, *runs: str) -> Ledger:
    ledger = Ledger.create(":memory:", "test", filter=rule)
    for run in runs or ("run", "other"):
        ledger.register(run, seeded=False, title=run)
    return ledger


@pytest.fixture(params=RULES)
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    with closing(made(request.param)) as ledger:
        yield ledger


# ---- under any filter ----------------------------------------------------------------------------


def test_a_release_without_a_plan_is_an_error_and_changes_nothing(ledger: Ledger) -> None:
    ledger.commit("run", [plan("a", releases=3)])
    for unplanned in (charge("b"), charge("a", observer=WORLD)):
        with pytest.raises(LedgerError, match="was not planned"):
            ledger.charge("run", 0, [charge("a"), unplanned])
    with pytest.raises(LedgerError, match="was not planned"):
        ledger.charge("other", 0, [charge("a")])
    assert ledger.history("a", SERVER) == ()
    assert ledger.last_charged("run") is None
    assert not ledger.can_release("run", 0, "b", SERVER, cost())


def test_no_more_is_released_than_was_planned(ledger: Ledger) -> None:
    ledger.commit("run", [plan(releases=3)])
    answers = []
    for round_ in (0, 7, 2, 3, 9):  # which rounds take place may depend on outputs
        can = ledger.can_release("run", 99, "a", SERVER, cost())
        refused = ledger.charge("run", round_, [charge()])
        assert can == (not refused)
        answers.append(refused)
    assert answers == [frozenset()] * 3 + [frozenset({"a"})] * 2
    assert history(ledger) == (Event(noise_multiplier=10.0, steps=3),)


@pytest.mark.parametrize(
    "other",
    [cost(9.0), cost(1000.0), cost(unit=Unit.RECORD), cost(adjacency=Adjacency.REPLACE_ONE)],
)
def test_another_release_than_the_planned_one_is_refused(
    ledger: Ledger, other: PrivacyCost
) -> None:
    ledger.commit("run", [plan(releases=3)])
    assert ledger.charge("run", 0, [charge(what=other)]) == {"a"}
    assert not ledger.can_release("run", 0, "a", SERVER, other)
    assert ledger.history("a", SERVER) == ()


def test_the_same_plan_again_is_free_and_another_one_is_an_error(ledger: Ledger) -> None:
    set_budgets(ledger, 10)
    first = plan(releases=6, delta=DELTA)
    assert ledger.commit("run", [first]) == frozenset()
    for round_ in range(6):
        assert not ledger.charge("run", round_, [charge()])
    assert ledger.commit("run", [first]) == frozenset()  # though nothing more could be afforded
    for other in (
        replace(first, releases=7),
        replace(first, releases=1),
        replace(first, cost=cost(1000.0)),
        replace(first, delta=None),
    ):
        with pytest.raises(LedgerError, match="has another plan for 'a'"):
            ledger.commit("run", [plan("z"), other])
    assert ledger.plans("z") == []
    assert ledger.charge("run", 6, [charge()]) == {"a"}


def test_a_replay_uses_no_entry_of_the_plan(ledger: Ledger) -> None:
    ledger.commit("run", [plan(releases=2)])
    for _ in range(3):
        assert ledger.charge("run", 0, [charge(draw="seed")]) == frozenset()
    assert ledger.can_release("run", 0, "a", SERVER, cost())
    assert ledger.charge("run", 1, [charge(draw="seed")]) == frozenset()
    assert ledger.can_release(
        "run", 1, "a", SERVER, cost()
    )  # a round being replayed does not count against itself
    assert not ledger.can_release("run", 2, "a", SERVER, cost())
    assert ledger.charge("run", 1, [charge(draw="seed")]) == frozenset()


def test_members_use_a_populations_plan_each_for_itself(ledger: Ledger) -> None:
    crowd = ledger.population(["a", "b", "c"])
    ledger.commit("run", [plan(crowd, releases=3)])
    assert not ledger.charge("run", 0, [charge("a"), charge("b")])
    assert not ledger.charge("run", 1, [charge("a")])
    assert not ledger.charge("run", 2, [charge(crowd)])  # the third of a's, the second of b's
    assert ledger.charge("run", 3, [charge("a"), charge("b")]) == {"a"}
    assert ledger.charge("run", 4, [charge(crowd)]) == {crowd}
    assert ledger.charge("run", 5, [charge("c")]) == frozenset()
    assert [sum(e.steps for e in history(ledger, who)) for who in "abc"] == [3, 3, 2]


def test_an_own_plan_is_used_before_a_populations(ledger: Ledger) -> None:
    crowd = ledger.population(["a", "b"])
    ledger.commit("run", [plan(crowd, releases=1), plan("a", releases=1)])
    assert not ledger.charge("run", 0, [charge("a")])
    assert not ledger.charge("run", 1, [charge(crowd)])
    assert ledger.charge("run", 2, [charge("a"), charge("b")]) == {"a", "b"}


@pytest.mark.parametrize(
    ("releases", "delta"), [(0, None), (-1, None), (1.5, None), (1, 0.0), (1, 1.0), (1, math.nan)]
)
def test_a_plan_that_makes_no_sense_is_refused(releases: int, delta: float | None) -> None:
    with pytest.raises(ConfigurationError):
        plan(releases=releases, delta=delta)


def test_a_late_budget_stops_what_was_planned_beyond_it(ledger: Ledger) -> None:
    ledger.commit("run", [plan(releases=50)])
    assert not ledger.charge("run", 0, [charge()])
    set_budgets(ledger, 1)
    assert ledger.charge("run", 1, [charge()]) == {"a"}
    assert not ledger.can_release("run", 1, "a", SERVER, cost())


def test_the_number_that_is_affordable_can_be_committed_and_one_more_cannot(ledger: Ledger) -> None:
    set_budgets(ledger, 12)
    most = ledger.affordable_releases("a", cost(), [SERVER], 1000)
    assert (4 <= most <= 12) if ledger.filter == "renyi" else (most == 12)
    assert (
        ledger.affordable_releases("a", cost(), [WORLD], 1000) == 1000
    )  # not seen by the budget's adversary
    assert ledger.affordable_releases("nobody", cost(), [SERVER], 1000) == 1000
    assert ledger.affordable_releases("a", cost(), [SERVER], 3) == 3
    assert ledger.affordable_releases("a", cost(), [SERVER], 0) == 0
    if ledger.filter == "allotments":
        assert ledger.commit("other", [plan(releases=most + 1)]) == {"a"}
    assert ledger.commit("run", [plan(releases=most)]) == frozenset()
    for round_ in range(most):
        assert not ledger.charge("run", round_, [charge()])
    assert ledger.affordable_releases("a", cost(), [SERVER], 1000) == 0
    line = statement(ledger, "a", SERVER)
    assert line is not None and line.budget is not None
    assert line.epsilon <= line.budget


# ---- whole prices --------------------------------------------------------------------------------


def test_an_allotment_is_taken_at_once_and_never_given_back() -> None:
    with closing(made("allotments")) as ledger:
        ledger.set_budgets(
            {"a": Budget(epsilon=3.0, delta=DELTA)}, unit=Unit.CLIENT, observer=SERVER
        )
        assert not ledger.commit("run", [plan(releases=30, delta=DELTA / 2)])
        left = ledger.affordable_releases("a", cost(), [SERVER], 1000, delta=DELTA / 2)
        price = spend(cost().times(30), DELTA / 2, adjacency=Adjacency.ADD_REMOVE).epsilon
        prices = [
            spend(cost().times(n), DELTA / 2, adjacency=Adjacency.ADD_REMOVE).epsilon
            for n in (left, left + 1)
        ]
        assert prices[0] <= 3.0 - price < prices[1]
        assert (
            ledger.affordable_releases("a", cost(), [SERVER], 1000) == 0
        )  # at the whole delta nothing fits beside it
        assert ledger.commit("other", [plan(releases=left + 1, delta=DELTA / 2)]) == {"a"}
        assert ledger.commit("other", [plan(releases=1)]) == {"a"}
        assert ledger.commit("other", [plan(releases=left, delta=DELTA / 2)]) == frozenset()


@pytest.mark.parametrize("studies", [3, 7, 10])
def test_equal_shares_of_a_delta_fit_into_it(studies: int) -> None:
    runs = [str(number) for number in range(studies + 1)]
    with closing(made("allotments", *runs)) as ledger:
        ledger.set_budgets(
            {"a": Budget(epsilon=50.0, delta=DELTA)}, unit=Unit.CLIENT, observer=SERVER
        )
        refused = [ledger.commit(run, [plan(releases=1, delta=DELTA / studies)]) for run in runs]
        assert refused == [frozenset()] * studies + [frozenset({"a"})]


@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([6.0, 10.0, 40.0]),
            st.integers(1, 30),
            st.sampled_from([0.1, 0.25, 0.5, None]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.floats(0.5, 4.0),
)
def test_whatever_is_committed_the_sums_stay_within_the_budget(
    wanted: list[tuple[float, int, float | None]], epsilon: float
) -> None:
    with closing(made("allotments", *map(str, range(6)))) as ledger:
        ledger.set_budgets(
            {"a": Budget(epsilon=epsilon, delta=DELTA)}, unit=Unit.CLIENT, observer=SERVER
        )
        for number, (noise, releases, share) in enumerate(wanted):
            delta = None if share is None else share * DELTA
            ledger.commit(str(number), [plan("a", cost(noise), SERVER, releases, delta)])
        prices = [(one.epsilon, one.priced_at or 1.0) for one in ledger.plans("a")]
        assert math.fsum(price for price, _ in prices) <= epsilon
        assert math.fsum(delta for _, delta in prices) <= DELTA * (1 + 1e-9)
        line = statement(ledger, "a", SERVER)
        assert line is not None
        assert line.epsilon == math.fsum(price for price, _ in prices)


def test_a_stronger_adjacency_reprices_every_study_of_the_account() -> None:
    with closing(made("allotments")) as ledger:
        ledger.set_budgets(
            {"a": Budget(epsilon=4.0, delta=DELTA)}, unit=Unit.CLIENT, observer=SERVER
        )
        assert not ledger.commit("run", [plan(releases=40, delta=DELTA / 2)])
        strong = cost(1000.0, adjacency=Adjacency.REPLACE_ONE)
        assert ledger.commit("other", [plan("a", strong, releases=1, delta=DELTA / 2)]) == {"a"}
        price = plan_price(cost(), 40, DELTA / 2, Adjacency.ADD_REMOVE)
        assert [one.epsilon for one in ledger.plans("a")] == [price.epsilon]


def test_a_population_is_committed_only_if_every_member_can_pay() -> None:
    with closing(made("allotments")) as ledger:
        set_budgets(ledger, 5, "a")
        set_budgets(ledger, 20, "b")
        crowd = ledger.population(["a", "b", "c"])
        assert ledger.commit("run", [plan(crowd, releases=6)]) == {crowd}
        assert ledger.commit("run", [plan(crowd, releases=5)]) == frozenset()
        assert ledger.commit("other", [plan("a", releases=1), plan("c", releases=1)]) == {"a"}


# ---- the world and the server --------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_world_plan_of_the_same_commit_stands_in_whatever_the_order(
    ledger: Ledger, order: tuple[int, ...]
) -> None:
    set_budgets(ledger, 6, "a", "b", observer=WORLD)
    crowd = ledger.population(["a", "b"])
    plans = [plan(crowd, observer=WORLD, releases=3), plan("a", cost(0.5)), plan("b", cost(0.5))]
    assert ledger.commit("run", [plans[i] for i in order]) == frozenset()


def test_without_the_refused_world_plan_the_server_plans_count_against_the_world() -> None:
    with closing(made("allotments")) as ledger:
        set_budgets(ledger, 6, "a", "b", observer=WORLD)
        crowd = ledger.population(["a", "b"])
        plans = [
            plan("a", cost(0.5)),
            plan(crowd, observer=WORLD, releases=7),
            plan("c", cost(0.5)),
        ]
        assert ledger.commit("run", plans) == {"a", crowd}
        assert [one.run for one in ledger.plans("c")] == ["run"]


def test_an_account_refused_against_one_adversary_is_planned_against_none() -> None:
    with closing(made("allotments")) as ledger:
        set_budgets(ledger, 6, observer=SERVER)
        assert ledger.commit("run", [plan(releases=7), plan(releases=7, observer=WORLD)]) == {"a"}
        assert ledger.plans("a") == []


# ---- effort --------------------------------------------------------------------------------------


def test_accounts_with_equal_questions_share_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real_price, real_quick = filters.spend, filters.quick_epsilon

    def counted_price(*rest: object, **more: object) -> object:
        asked.append(1)
        return real_price(*rest, **more)  # type: ignore[arg-type]

    def counted_quick(*rest: object, **more: object) -> float:
        asked.append(1)
        return real_quick(*rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(filters, "spend", counted_price)
    monkeypatch.setattr(filters, "quick_epsilon", counted_quick)
    filters.plan_price.cache_clear()
    names = [f"c{i}" for i in range(200)]
    sampled = Event(noise_multiplier=1.1, sampling="poisson", sampling_rate=0.05)
    what = PrivacyCost(unit=Unit.CLIENT, adjacency=Adjacency.ADD_REMOVE, events=(sampled,))
    with closing(made("allotments")) as ledger:
        ledger.set_budgets(
            {n: Budget(epsilon=1.5, delta=DELTA) for n in names}, unit=Unit.CLIENT, observer=SERVER
        )
        found = {ledger.affordable_releases(name, what, [SERVER], 1000) for name in names}
        assert len(found) == 1
        assert 1 < min(found) < 1000
        assert not ledger.commit("run", [plan(name, what, releases=min(found)) for name in names])
        for round_ in range(3):
            assert not ledger.charge("run", round_, [charge(name, what) for name in names])
    assert len(asked) <= 16


def test_a_snapshot_does_not_see_what_is_written_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with (
        closing(Ledger.create(path, "test")) as ledger,
        closing(Ledger.open(path, read_only=True)) as reader,
    ):
        ledger.register("run", seeded=False, title="t")
        with reader.snapshot():
            assert reader.titles() == {"run": "t"}
            ledger.register("other", seeded=False, title="u")
            ledger.set_budgets(
                {"a": Budget(epsilon=cap_for(2), delta=DELTA)}, unit=Unit.CLIENT, observer=SERVER
            )
            with reader.snapshot():
                assert reader.titles() == {"run": "t"}
            assert reader.accounts() == []
            assert reader.head().number == 1
        assert reader.accounts() == ["a"]
        assert reader.head() == ledger.head()


def test_a_budget_that_another_process_sets_is_seen_at_once(tmp_path: Path) -> None:
    """What was found affordable is remembered only until plans or budgets change, whoever changes
    them.
    """
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger.create(path, "test")) as ledger, closing(Ledger.open(path)) as other:
        ledger.register("run", seeded=False, title="t")
        ledger.commit("run", [plan(releases=50)])
        assert not ledger.charge("run", 0, [charge()])
        set_budgets(other, 1)
        assert not ledger.can_release("run", 1, "a", SERVER, cost())
        assert ledger.charge("run", 1, [charge()]) == {"a"}
