"""Who did best: paired over seeds, adjusted for several comparisons, and never across promises."""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given, strategies as st
from scipy import stats

from dpfl.core.errors import ConfigurationError
from dpfl.experiments.ranking import (
    Standing,
    grouped,
    holm,
    paired_p_value,
    remarks,
    standings as ranked,
)
from dpfl.experiments.results import CellResult

HYPOTHETICAL = "hypothetical"

accuracies = st.integers(0, 1000).map(lambda thousandths: thousandths / 1000)


def cell(
    label: str,
    *by_seed: float,
    unit: str = "record",
    adjacency: str = "zero_out",
    observer: str = "server",
    flags: tuple[str, ...] = (),
) -> dict[str, Any]:
    epsilon = {"unit": unit, "adjacency": adjacency, "observer": observer}
    runs = [
        {"seed": n, "accuracy": a, "epsilon": epsilon, "flags": [{"flag": flag} for flag in flags]}
        for n, a in enumerate(by_seed)
    ]
    return {"label": label, "runs": runs}


def spread(largest: float | str) -> dict[str, Any]:
    return {"smallest": 0.1, "median": 0.2, "largest": largest}


def standings(cells: Sequence[dict[str, Any]]) -> list[Standing]:
    """Cells as results.json holds them, ranked."""
    return ranked([CellResult.from_dict(one) for one in cells])


def by_label(*cells: dict[str, Any]) -> dict[str, Standing]:
    return {one.label: one for one in standings(cells)}


@given(st.lists(st.tuples(accuracies, accuracies), min_size=2, max_size=8))
def test_p_values_are_those_of_scipys_paired_t_test(pairs: list[tuple[float, float]]) -> None:
    one, other = [a for a, _ in pairs], [b for _, b in pairs]
    assume(statistics.stdev(a - b for a, b in pairs) > 1e-6)
    found = paired_p_value(one, other)
    assert found == pytest.approx(float(stats.ttest_rel(one, other).pvalue), rel=1e-9, abs=1e-300)
    assert found == paired_p_value(other, one)


def test_seeds_are_paired_and_not_pooled() -> None:
    one, other = [0.2, 0.5, 0.8], [0.19, 0.48, 0.79]
    paired = paired_p_value(one, other)
    assert paired is not None
    assert paired < 0.06 < 0.9 < float(stats.ttest_ind(one, other).pvalue)
    with pytest.raises(ValueError, match="zip"):
        paired_p_value([0.1, 0.2], [0.1, 0.2, 0.3])


def test_the_same_difference_twice_is_no_certainty() -> None:
    assert paired_p_value([0.5, 0.75], [0.25, 0.5]) == 0.5
    assert paired_p_value([0.9, 0.8], [0.8, 0.7]) == 0.5  # the same but for rounding
    assert paired_p_value([0.5] * 8, [0.25] * 8) == 2**-7
    assert paired_p_value([0.5, 0.75], [0.5, 0.75]) == 1.0


@pytest.mark.parametrize("seeds", [0, 1])
def test_without_two_seeds_there_is_no_p(seeds: int) -> None:
    assert paired_p_value([0.5] * seeds, [0.1] * seeds) is None


@given(st.lists(st.none() | st.floats(0, 1), max_size=5))
def test_holms_adjustment_is_the_closed_test_of_bonferronis(p_values: list[float | None]) -> None:
    known = [number for number, p in enumerate(p_values) if p is not None]
    by_hand: list[float | None] = [None] * len(p_values)
    for number in known:
        sets = [
            s
            for size in range(1, len(known) + 1)
            for s in itertools.combinations(known, size)
            if number in s
        ]
        by_hand[number] = max(min(1.0, len(s) * min(p_values[i] or 0.0 for i in s)) for s in sets)
    found = holm(p_values)
    assert [number for number, p in enumerate(found) if p is not None] == known
    assert [found[number] for number in known] == pytest.approx(
        [by_hand[number] for number in known], rel=1e-12
    )


def test_p_is_against_the_best_and_adjusted_for_all_the_others() -> None:
    best, near, far = (0.90, 0.85, 0.95), (0.88, 0.84, 0.91), (0.5, 0.6, 0.55)
    found = by_label(cell("near", *near), cell("best", *best), cell("far", *far))
    raw = {
        name: float(stats.ttest_rel(best, own).pvalue)
        for name, own in (("near", near), ("far", far))
    }
    assert raw["far"] < raw["near"]
    assert found["far"].p_value == pytest.approx(2 * raw["far"])
    assert found["near"].p_value == pytest.approx(max(raw["near"], 2 * raw["far"]))
    assert (found["best"].best, found["best"].gap, found["best"].p_value) == (True, 0.0, None)
    assert found["far"].gap == pytest.approx(statistics.mean(best) - statistics.mean(far))
    assert [one.label for one in standings([cell("near", *near), cell("best", *best)])] == [
        "near",
        "best",
    ]


def test_with_one_seed_there_is_a_best_and_no_p() -> None:
    found = by_label(cell("a", 0.5), cell("b", 0.75))
    assert (found["b"].best, found["a"].gap) == (True, 0.25)
    assert found["a"].p_value is found["b"].p_value is None


def test_a_method_that_is_alone_with_its_promise_is_not_called_best() -> None:
    found = by_label(cell("a", 0.5, 0.6), cell("b", 0.7, 0.8, observer="world"))
    assert not found["a"].best
    assert not found["b"].best
    assert found["a"].gap == found["b"].gap == 0.0


@pytest.mark.parametrize(
    "other", [{"unit": "client"}, {"adjacency": "replace_one"}, {"observer": "world"}]
)
def test_methods_that_promise_something_else_are_not_compared(other: dict[str, str]) -> None:
    mine = [cell("a", 0.5, 0.6, 0.55), cell("b", 0.4, 0.55, 0.5)]
    alone = by_label(*mine)
    with_others = by_label(
        *mine, cell("c", 0.9, 0.95, 0.99, **other), cell("d", 0.1, 0.2, 0.1, **other)
    )
    assert {name: with_others[name] for name in "ab"} == alone
    assert with_others["a"].best
    assert with_others["c"].best
    assert with_others["d"].gap == pytest.approx(0.9466666 - 0.1333333, abs=1e-5)
    assert with_others["d"].p_value == paired_p_value(
        (0.9, 0.95, 0.99), (0.1, 0.2, 0.1)
    )  # one comparison, not three


@given(st.lists(st.tuples(accuracies, accuracies), min_size=4, max_size=4))
def test_references_never_win_and_change_nothing(values: list[tuple[float, float]]) -> None:
    mine = [cell("a", *values[0]), cell("b", *values[1])]
    fedavg = cell("fedavg", *values[2], observer="nobody")
    maximum = cell("maximum", *values[3], flags=(HYPOTHETICAL,))
    found = by_label(fedavg, *mine, maximum)
    for name in ("fedavg", "maximum"):
        assert found[name].reference
        assert found[name].against == "nobody"
        assert (found[name].best, found[name].gap, found[name].p_value) == (False, None, None)
    assert {name: found[name] for name in "ab"} == by_label(*mine)


def test_methods_with_different_seeds_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="different seeds"):
        standings([cell("a", 0.5, 0.6), cell("b", 0.5)])


def test_there_is_one_table_a_unit_and_plain_averaging_stands_in_every_one() -> None:
    lines = standings(
        [
            cell("fedavg", 0.9, unit="client", observer="nobody"),
            cell("weiavg", 0.5),
            cell("maximum", 0.8, flags=(HYPOTHETICAL,)),
            cell("dp_fed", 0.4, unit="client", observer="world"),
        ]
    )
    tables = {unit: [one.label for one in own] for unit, own in grouped(lines).items()}
    assert tables == {"client": ["fedavg", "dp_fed"], "record": ["fedavg", "weiavg", "maximum"]}


@pytest.mark.parametrize("beside", ["dp_fed", "fedavg", None])
def test_no_method_falls_out_of_the_tables(beside: str | None) -> None:
    others = {
        "dp_fed": [cell("dp_fed", 0.4, unit="client", observer="world")],
        "fedavg": [cell("fedavg", 0.9, unit="client", observer="nobody")],
        None: [],
    }[beside]
    lines = standings([cell("maximum", 0.8, flags=(HYPOTHETICAL,)), *others])
    shown = {one.label for own in grouped(lines).values() for one in own}
    assert shown == {one.label for one in lines}


@given(st.lists(accuracies, min_size=2, max_size=5))
def test_nobody_is_behind_by_less_than_nothing(values: list[float]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = standings([cell(str(number), value, value) for number, value in enumerate(values)])
    assert sum(one.best for one in found) == 1
    assert all(one.gap is not None and one.gap >= 0 for one in found)
    assert max(found, key=lambda one: one.mean).mean == next(one for one in found if one.best).mean


def test_accuracies_of_clients_own_models_are_ranked_apart() -> None:
    common, own = (
        "the common model, on all clients' test records",
        "each client's own model, on its own test records",
    )
    cells = [cell("common", 0.6, 0.7), cell("other", 0.5, 0.6), cell("personal", 0.9, 0.95)]
    for one, tested in zip(cells, (common, common, own), strict=True):
        for run in one["runs"]:
            run["tested"] = tested
    found = by_label(*cells)
    assert found["common"].best
    assert not found["personal"].best
    assert found["other"].gap == pytest.approx(0.1)
    assert remarks(list(found.values())) == [f"personal: {own}; ranked apart"]


def test_what_the_server_itself_learns_stands_below_the_table() -> None:
    cells = [
        cell(label, 0.6, unit="client", observer="world") for label in ("shares", "central", "same")
    ]
    for one, server in zip(cells, (1.4539, "infinite", 0.5), strict=True):
        for run in one["runs"]:
            run["epsilon"] = {**run["epsilon"], "spent": spread(0.5)}
            run["epsilon_by_observer"] = {"server": {"spent": spread(server)}}
    assert remarks(standings(cells)) == [
        "shares: against the server itself epsilon is up to 1.454, per client, zero_out adjacency",
        "central: the server is trusted; against it nothing is guaranteed",
    ]
