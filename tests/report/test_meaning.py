"""What an epsilon means: never better than what is guaranteed, and on the page as computed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from dpfl.core.types import Adjacency, Observer, Promise, Unit
from dpfl.privacy.accountant import gaussian_epsilon, spend
from dpfl.privacy.meaning import group_delta, least_misses
from dpfl.privacy.statement import Statement, statements
from dpfl.report.meaning import DELTAS, Meaning, Point, largest_of, meaning_in_run, meaning_of
from dpfl.report.page import full_page
from dpfl.report.reading import of_folders
from tests.report.conftest import copied
from tests.report.test_ledger_page import DELTA, EVENT, _ledger

PROMISE = Promise(unit=Unit.RECORD, adjacency=Adjacency.ZERO_OUT, observer=Observer.SERVER)


def gaussian(mu: float, delta: float = 1e-5) -> Meaning:
    """The meaning of one Gaussian release whose curve is known exactly."""
    curve = [Point(epsilon=gaussian_epsilon(mu, one), delta=one) for one in DELTAS]
    point = Point(epsilon=gaussian_epsilon(mu, delta), delta=delta)
    return Meaning(name="n", account="north", promise=PROMISE, point=point, curve=curve)


def normal(value: float) -> float:
    return 0.5 * math.erfc(-value / math.sqrt(2))


@pytest.mark.parametrize("mu", [0.1, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("threshold", [-2.0, -0.5, 0.0, 1.0, 3.0])
def test_the_best_test_makes_no_fewer_errors_than_the_curve_says(
    mu: float, threshold: float
) -> None:
    """Telling N(0, 1) from N(mu, 1) at a threshold is the best that any adversary can do."""
    alarms, misses = 1 - normal(threshold), normal(threshold - mu)
    assert gaussian(mu).missed(alarms) <= misses + 1e-9


def test_the_curve_is_not_empty_talk() -> None:
    assert gaussian(0.1).missed(0.1) > 0.75  # of at most 0.9


@pytest.mark.parametrize("size", [2, 5, 10])
@pytest.mark.parametrize("mu", [0.05, 0.2, 0.5])
def test_a_group_is_never_promised_more_than_is_true(size: int, mu: float) -> None:
    """``size`` records move a Gaussian release ``size`` times as far."""
    stated = gaussian(mu).for_group(size)
    assert stated >= gaussian_epsilon(size * mu, 1e-5)


@given(st.floats(min_value=0, max_value=60), st.floats(min_value=1e-12, max_value=0.5))
def test_a_group_of_one_is_the_guarantee_itself(epsilon: float, delta: float) -> None:
    assert group_delta(epsilon, delta, 1) == pytest.approx(delta)
    assert group_delta(epsilon, delta, 3) >= delta
    assert 0 <= least_misses(0.3, [(delta, epsilon)]) <= 0.7
    assert least_misses(1.0, [(delta, epsilon)]) == 0


@pytest.mark.parametrize("rounds", [1, 3])
def test_other_deltas_are_priced_by_the_ledger(tmp_path: Path, rounds: int) -> None:
    ledger = _ledger(tmp_path / "l.sqlite", "north", rounds, planned=5)
    (line,) = statements(ledger)
    meaning = meaning_of(line, "n", ledger)
    assert meaning is not None
    assert meaning.point == Point(epsilon=line.epsilon, delta=DELTA)
    assert [point.delta for point in meaning.curve] == sorted(DELTAS, reverse=True)
    for point in meaning.curve:  # all that is planned counts, whatever took place
        whole = spend((EVENT,) * 5, point.delta, adjacency=Adjacency.ZERO_OUT).epsilon
        assert point.epsilon == pytest.approx(whole, rel=1e-9)
    (over_delta, trade_off) = meaning.charts
    assert over_delta.series[1].y == [point.epsilon for point in meaning.curve]
    assert trade_off.series[1].kind == "dashes"


def test_what_is_charged_as_it_goes_is_guaranteed_at_its_budget_only(tmp_path: Path) -> None:
    ledger = _ledger(tmp_path / "l.sqlite", "north")
    (line,) = statements(ledger)
    meaning = meaning_of(replace(line, filter="renyi"), "n", ledger)
    assert meaning is not None
    assert meaning.curve == [meaning.point] == [Point(epsilon=2.0, delta=DELTA)]
    assert [chart.name for chart in meaning.charts] == ["trade-off-n"]


def test_what_bounds_nothing_has_no_meaning(tmp_path: Path) -> None:
    (line,) = statements(_ledger(tmp_path / "l.sqlite", "north"))
    for nothing in ({"epsilon": math.inf}, {"delta": None}, {"studies": 0}):
        assert meaning_of(replace(line, **nothing), "n") is None  # type: ignore[arg-type]


def _line(account: str, epsilon: float) -> Statement:
    return Statement(
        account=account,
        unit="record",
        observer="server",
        adjacency="zero_out",
        accountant="PLD",
        epsilon=epsilon,
        delta=1e-5,
        budget=None,
        rounds=1,
        filter="allotments",
        studies=1,
    )


def test_the_largest_finite_epsilon_is_explained() -> None:
    lines = [_line("a", 1.0), _line("b", 3.0), _line("c", math.inf)]
    assert largest_of(lines) == lines[1]
    assert largest_of(lines[2:]) is None


def test_a_run_without_its_ledger_is_explained_by_what_it_states(
    weiavg: Path, tmp_path: Path
) -> None:
    run = of_folders([copied(weiavg, tmp_path / "run")]).runs[0]
    alone = meaning_in_run(run.result.statements, tmp_path / "run" / "ledger.sqlite")
    whole = meaning_in_run(run.result.statements, weiavg / "ledger.sqlite")
    assert alone is not None and whole is not None
    assert alone.point == whole.point
    assert (len(alone.curve), len(whole.curve) > 3) == (1, True)
    assert all(whole.missed(a) >= alone.missed(a) for a in (0.0, 0.01, 0.5))


def test_the_section_is_on_the_page_of_a_run(weiavg: Path) -> None:
    page = full_page(of_folders([weiavg]))
    part, told = page.parts["meaning"], of_folders([weiavg]).runs[0].result
    assert "What the numbers mean" in part and "times as likely" in part
    assert told.epsilon is not None
    assert f'data-value="{told.epsilon.spent.largest}"' in part
    assert {"figure-epsilon-over-delta-run", "figure-trade-off-run"} <= {
        piece.split('"')[0] for piece in part.split('id="')[1:]
    }


def test_a_method_that_protects_nobody_has_no_such_section(fedavg: Path) -> None:
    assert "meaning" not in full_page(of_folders([fedavg])).parts
