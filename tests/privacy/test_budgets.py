"""Where budgets come from, and which epsilon a client's noise is planned for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from dpfl.core.errors import ConfigurationError
from dpfl.core.random import PublicSeed
from dpfl.core.types import Budget, Terms
from dpfl.privacy.budgets import DISTRIBUTIONS, SPENDINGS, make_budgets, planned_epsilon

IDS = ["a", "b", "c"]
SEED = PublicSeed(0)


def epsilons(budgets: dict[str, Budget]) -> list[float]:
    return [budget.epsilon for budget in budgets.values()]


# ---- distributions -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_every_distribution_draws_positive_budgets_above_its_floor(name: str, seed: int) -> None:
    values = DISTRIBUTIONS[name].draw(50, PublicSeed(seed))
    assert len(values) == 50
    assert min(values) > DISTRIBUTIONS[name].floor >= 0
    assert all(math.isfinite(value) for value in values)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_distribution_is_reproduced_by_its_seed_and_by_no_other(name: str) -> None:
    law = DISTRIBUTIONS[name]
    assert law.draw(20, PublicSeed(3)) == law.draw(20, PublicSeed(3))
    assert law.draw(20, PublicSeed(3)) != law.draw(20, PublicSeed(4))
    budgets = make_budgets(name.upper(), 1e-5, [f"c{i}" for i in range(20)], PublicSeed(3))
    assert epsilons(budgets) == law.draw(20, PublicSeed(3))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("name", "clients", "above", "count"),
    [
        ("mixgauss1", 20, 5.0, 2),
        ("mixgauss2", 20, 5.0, 2),
        ("mixgauss3", 10, 5.0, 1),
        ("mixgauss4", 20, 5.0, 2),
        ("mixgauss4", 20, 0.4, 10),
        ("mixgauss1", 50, 5.0, 5),
        ("dist2", 20, 0.5, 16),
    ],
)
def test_a_mixture_has_exactly_its_shares(
    name: str, clients: int, above: float, count: int, seed: int
) -> None:
    """Shares are counts, not probabilities: two of twenty hospitals are generous, in every draw."""
    values = DISTRIBUTIONS[name].draw(clients, PublicSeed(seed))
    assert sum(value > above for value in values) == count


@given(st.sampled_from(sorted(DISTRIBUTIONS)), st.integers(1, 60), st.integers(0, 100))
def test_no_client_is_lost_or_invented_by_rounding_the_shares(
    name: str, clients: int, seed: int
) -> None:
    assert len(DISTRIBUTIONS[name].draw(clients, PublicSeed(seed))) == clients


def test_the_parts_of_a_mixture_come_in_shuffled_order() -> None:
    orders = {
        tuple(value > 5 for value in DISTRIBUTIONS["mixgauss1"].draw(20, PublicSeed(seed)))
        for seed in range(10)
    }
    assert len(orders) > 5


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_shares_of_every_mixture_add_up_to_one(name: str) -> None:
    assert math.fsum(share for share, *_ in DISTRIBUTIONS[name].parts) == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "low", "high", "mean"),
    [
        ("uniform", 1, 10, 5.5),
        ("gauss", 0, 8, 3),
        ("dist5", 0.2, 2, 1.1),
        ("dist9", 0.2, 0.5, 0.35),
        ("pareto", 1, 1e6, 2),
    ],
)
def test_a_distribution_has_the_range_and_mean_it_is_named_for(
    name: str, low: float, high: float, mean: float
) -> None:
    values = DISTRIBUTIONS[name].draw(4000, PublicSeed(1))
    assert low <= min(values) and max(values) <= high
    assert sum(values) / len(values) == pytest.approx(mean, rel=0.15)


# ---- numbers, lists, mappings --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (2, [2.0, 2.0, 2.0]),
        (0.5, [0.5, 0.5, 0.5]),
        ("0.5", [0.5, 0.5, 0.5]),
        ("0.5, 2, 3", [0.5, 2.0, 3.0]),
        (" 0.5 2  3 ", [0.5, 2.0, 3.0]),
        ([1, 2.5, 3], [1.0, 2.5, 3.0]),
        ((1, 2.5, 3), [1.0, 2.5, 3.0]),
        ({"c": 3, "a": 1, "b": 2.5}, [1.0, 2.5, 3.0]),
    ],
    ids=str,
)
def test_numbers_lists_and_mappings_are_matched_to_clients(
    source: object, expected: list[float]
) -> None:
    budgets = make_budgets(source, 1e-5, IDS, SEED)
    assert list(budgets) == IDS
    assert epsilons(budgets) == expected
    assert all(budget.delta == 1e-5 for budget in budgets.values())


@pytest.mark.parametrize("delta", [[1e-5, 1e-6, 1e-7], {"c": 1e-7, "b": 1e-6, "a": 1e-5}])
def test_deltas_may_differ_between_clients(delta: object) -> None:
    budgets = make_budgets(1.0, delta, IDS, SEED)
    assert [budgets[client].delta for client in IDS] == [1e-5, 1e-6, 1e-7]


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("b.csv", "id,epsilon\nb,2\na,1\nc,3\n"),
        ("b.CSV", "epsilon,id\n2,b\n1,a\n3,c\n"),
        ("b.json", '{"b": 2, "a": 1.0, "c": 3}'),
        ("b.json", '{"b": [2], "a": [1.0], "c": 3}'),
    ],
)
def test_a_file_gives_each_client_its_epsilon(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    budgets = make_budgets(str(tmp_path / name), 1e-5, IDS, SEED)
    assert epsilons(budgets) == [1.0, 2.0, 3.0]
    assert {budget.delta for budget in budgets.values()} == {1e-5}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("b.csv", "id,epsilon,delta\nb,2,1e-6\na,1,\nc,3,1e-7\n"),
        ("b.json", '{"b": [2, 1e-6], "a": 1.0, "c": [3, 1e-7]}'),
    ],
)
def test_a_delta_in_the_file_wins_over_the_common_one(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    budgets = make_budgets(str(tmp_path / name), 1e-5, IDS, SEED)
    assert [budgets[client].delta for client in IDS] == [1e-5, 1e-6, 1e-7]


# ---- refusals: one configuration error each ------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "delta", "says"),
    [
        ([1.0, 2.0], 1e-5, "2 values for 3 clients"),
        ("1, 2, 3, 4", 1e-5, "4 values for 3 clients"),
        ("", 1e-5, "0 values for 3 clients"),
        (1.0, [1e-5, 1e-5], "2 values for 3 clients"),
        ({"a": 1.0, "b": 1.0}, 1e-5, "no value for client 'c'"),
        ({"a": 1.0, "b": 1.0, "c": 1.0, "cc": 1.0}, 1e-5, "there is no client 'cc'"),
        (1.0, {"a": 1e-5}, "no value for client 'b'"),
        (math.nan, 1e-5, "epsilon = nan"),
        ([1.0, math.nan, 1.0], 1e-5, "budget of 'b'"),
        ([1.0, 1.0, -1.0], 1e-5, "budget of 'c'"),
        ("0", 1e-5, "budget of 'a'"),
        ("inf", 1e-5, "epsilon = inf"),
        ("nan", 1e-5, "epsilon = nan"),
        (1.0, 0.0, "delta"),
        (1.0, [1e-5, 1.0, 1e-5], "budget of 'b'"),
        (1.0, math.nan, "delta"),
        ("mixgaus1", 1e-5, "did you mean 'mixgauss1'"),
        ("zipf", 1e-5, "choose one of dist1, "),
        ("1.0 two 3", 1e-5, "there is no distribution"),
        ("nowhere/at/all.csv", 1e-5, "cannot be read"),
        ("nowhere/at/all.json", 1e-5, "cannot be read"),
    ],
)
def test_a_budget_that_cannot_be_is_one_clear_error(
    source: object, delta: object, says: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_budgets(source, delta, IDS, SEED)
    assert says in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("b.csv", b"", "its columns are none"),
        ("b.csv", b"id,epsilon,dleta\na,1,1e-5\n", "dleta"),
        ("b.csv", b"id,epsilon\na,1,5\n", "line 2 has 3 cells"),
        ("b.csv", b"id,epsilon\na,1\na,2\n", "names client 'a' twice"),
        ("b.csv", b"id,epsilon\na,1\nb,2\n", "no value for client 'c'"),
        ("b.csv", b"id,epsilon\na,1\nb,2\nc,3\nd,4\n", "there is no client 'd'"),
        ("b.csv", b"name,epsilon\na,1\nb,2\nc,3\n", "not as expected"),
        ("b.csv", b"id,eps\na,1\nb,2\nc,3\n", "not as expected"),
        ("b.csv", b"id,epsilon\na,1\nb\nc,3\n", "not as expected"),
        ("b.csv", b"id,epsilon\na,one\nb,2\nc,3\n", "not as expected"),
        ("b.csv", b"id,epsilon\na,nan\nb,2\nc,3\n", "budget of 'a'"),
        ("b.csv", b"id,epsilon,delta\na,1,2\nb,2,1e-5\nc,3,1e-5\n", "budget of 'a'"),
        ("b.csv", b"\xff\xfe\x00garbage\x80", "not as expected"),
        ("b.csv", b"id,epsilon\na," + b"1" * 200_000 + b"\nb,2\nc,3\n", "not as expected"),
        ("b.json", b"", "not as expected"),
        ("b.json", b"[1, 2, 3]", "not as expected"),
        ("b.json", b'{"a": 1, ', "not as expected"),
        ("b.json", b'{"a": "one", "b": 1, "c": 1}', "not as expected"),
        ("b.json", b'{"a": null, "b": 1, "c": 1}', "not as expected"),
        ("b.json", b'{"a": [], "b": 1, "c": 1}', "not as expected"),
        ("b.json", b'{"a": {"epsilon": 1}, "b": 1, "c": 1}', "not as expected"),
        ("b.json", b'{"a": -1, "b": 1, "c": 1}', "budget of 'a'"),
        ("b.json", b'{"a": 1, "b": 1}', "no value for client 'c'"),
        ("b.json", b"\xff\xfe", "not as expected"),
    ],
    ids=lambda value: (
        None if not isinstance(value, bytes) else value[:40].decode("latin-1").replace("\n", "/")
    ),
)
def test_a_file_that_is_not_as_agreed_is_one_clear_error(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        make_budgets(str(tmp_path / name), 1e-5, IDS, SEED)
    assert says in str(caught.value)


def test_a_folder_in_place_of_a_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "b.csv").mkdir()
    with pytest.raises(ConfigurationError, match="cannot be read"):
        make_budgets(str(tmp_path / "b.csv"), 1e-5, IDS, SEED)


# ---- spending plans ------------------------------------------------------------------------------


TERMS = Terms(
    rounds=10,
    population=3,
    expected_cohort=3.0,
    participations=10,
    smallest_epsilon=0.5,
    largest_epsilon=8.0,
    parameters=10,
)


@pytest.mark.parametrize("own", [0.5, 2.0, 8.0])
@pytest.mark.parametrize(
    ("spending", "planned"),
    [
        ("heterogeneous", lambda own: own),
        ("uniform", lambda own: own),
        ("smallest", lambda own: 0.5),
        ("largest", lambda own: 8.0),
    ],
)
def test_noise_is_planned_for_the_epsilon_of_the_spending_plan(
    spending: str, planned: Callable[[float], float], own: float
) -> None:
    assert planned_epsilon(spending, Budget(epsilon=own, delta=1e-5), TERMS) == planned(own)


@given(
    st.sampled_from(sorted(SPENDINGS)),
    st.floats(1e-3, 100),
    st.floats(1e-3, 100),
    st.floats(1e-3, 100),
)
def test_only_the_largest_plan_may_exceed_what_a_client_enforces(
    spending: str, own: float, one: float, other: float
) -> None:
    """Claims are only claims: a client whose true budget is below all of them still plans within
    its own.
    """
    terms = Terms(
        rounds=1,
        population=2,
        expected_cohort=2.0,
        participations=1,
        smallest_epsilon=min(one, other),
        largest_epsilon=max(one, other),
        parameters=10,
    )
    planned = planned_epsilon(spending, Budget(epsilon=own, delta=1e-5), terms)
    assert planned <= own or spending == "largest"
    assert planned <= max(own, one, other)


def test_the_json_of_a_budget_file_may_come_straight_from_python(tmp_path: Path) -> None:
    path = tmp_path / "budgets.json"
    path.write_text(json.dumps({client: [float(i + 1), 1e-6] for i, client in enumerate(IDS)}))
    assert epsilons(make_budgets(str(path), 1e-5, IDS, SEED)) == [1.0, 2.0, 3.0]
