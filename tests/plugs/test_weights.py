from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from dpfl.core.errors import ConfigurationError
from dpfl.core.layout import Layout
from dpfl.core.types import Claims, Cohort, Rows, Terms, Total
from dpfl.plugs.weights import (
    EpsilonWeights,
    ExampleWeights,
    ExpectedCohortWeights,
    UniformWeights,
    Weights,
)

SIZE = 3
LAYOUT = Layout.of({"weight": torch.zeros(SIZE)})
NORMALISED: list[Weights] = [UniformWeights(), ExampleWeights(), EpsilonWeights()]

epsilons = st.floats(1e-6, 1e6)
examples = st.integers(1, 10**9)
claims = st.builds(Claims, epsilon=epsilons, delta=st.just(1e-5), examples=examples)
honest = st.lists(claims, min_size=1, max_size=30)


def rows(said: list[Claims]) -> Rows:
    cohort = Cohort.of({f"c{i:03d}": claim for i, claim in enumerate(said)})
    return Rows(
        matrix=torch.zeros(len(said), SIZE), origin=torch.zeros(SIZE), cohort=cohort, layout=LAYOUT
    )


def weigh(weights: Weights, said: list[Claims]) -> list[float]:
    values, state, _ = weights({}, rows(said), 0)
    assert state == {}
    return values.tolist()


def claim(epsilon: float = 1.0, examples_: float = 10) -> Claims:
    return Claims(epsilon=epsilon, delta=1e-5, examples=examples_)  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", NORMALISED, ids=lambda w: type(w).__name__)
@given(said=honest)
def test_weights_are_shares_of_one(weights: Weights, said: list[Claims]) -> None:
    values = weigh(weights, said)
    assert len(values) == len(said)
    assert min(values) >= 0
    assert math.isclose(sum(values), 1, abs_tol=1e-6)


@pytest.mark.parametrize("weights", NORMALISED, ids=lambda w: type(w).__name__)
@given(said=honest, random=st.randoms(use_true_random=False))
def test_permuting_clients_permutes_weights(
    weights: Weights, said: list[Claims], random: object
) -> None:
    order = list(range(len(said)))
    random.shuffle(order)  # type: ignore[attr-defined]
    values = weigh(weights, said)
    permuted = weigh(weights, [said[i] for i in order])
    assert permuted == pytest.approx([values[i] for i in order], rel=1e-5, abs=1e-12)


@given(said=honest)
def test_weights_are_in_proportion_to_what_they_are_named_after(said: list[Claims]) -> None:
    total = sum(c.epsilon for c in said)
    assert weigh(EpsilonWeights(), said) == pytest.approx(
        [c.epsilon / total for c in said], rel=1e-5, abs=1e-30
    )
    records = sum(c.examples for c in said)
    assert weigh(ExampleWeights(), said) == pytest.approx(
        [c.examples / records for c in said], rel=1e-5, abs=1e-30
    )
    assert weigh(UniformWeights(), said) == pytest.approx([1 / len(said)] * len(said), rel=1e-6)


@given(epsilon=st.floats(1e-300, 1e300), said=honest)
def test_identical_epsilons_weigh_alike_whatever_else_is_claimed(
    epsilon: float, said: list[Claims]
) -> None:
    alike = [Claims(epsilon=epsilon, delta=c.delta, examples=c.examples) for c in said]
    assert weigh(EpsilonWeights(), alike) == pytest.approx([1 / len(said)] * len(said), rel=1e-6)


LIES = [
    *(0, -1, math.nan, 1e9, math.inf, -math.inf, 5e-324, 1.7e308),
    pytest.param(10**400, id="beyond floats"),  # JSON has no largest integer
    pytest.param(-(10**400), id="below floats"),
]


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("weights", NORMALISED, ids=lambda w: type(w).__name__)
def test_a_lie_breaks_nothing_and_leaves_the_others_in_proportion(
    weights: Weights, lie: float
) -> None:
    said = [claim(1.0, 10), claim(lie, lie), claim(3.0, 30)]
    values = weigh(weights, said)
    assert all(math.isfinite(value) and value >= 0 for value in values)
    assert math.isclose(sum(values), 1, abs_tol=1e-6)
    if not isinstance(weights, UniformWeights) and values[0] > 1e-6:
        assert values[2] / values[0] == pytest.approx(3, rel=1e-5)


@pytest.mark.parametrize("lie", [0, -1, math.nan, math.inf])
@pytest.mark.parametrize(
    "weights", [ExampleWeights(), EpsilonWeights()], ids=lambda w: type(w).__name__
)
def test_a_claim_that_is_no_positive_number_weighs_nothing(weights: Weights, lie: float) -> None:
    assert weigh(weights, [claim(1.0, 10), claim(lie, lie)]) == [1.0, 0.0]


@pytest.mark.parametrize(
    "weights", [ExampleWeights(), EpsilonWeights()], ids=lambda w: type(w).__name__
)
def test_if_nobody_claims_anything_usable_all_weigh_alike(weights: Weights) -> None:
    said = [claim(lie, lie) for lie in (0, -1, math.nan, math.inf)]
    assert weigh(weights, said) == [0.25] * 4


# ---- constants -------------------------------------------------------------------------------------------------------

TERMS = Terms(
    rounds=5,
    population=10,
    expected_cohort=4.0,
    participations=2,
    smallest_epsilon=1,
    largest_epsilon=1,
    parameters=10,
)


@given(said=st.lists(claims, min_size=0, max_size=30), expected=st.floats(0.1, 1000))
def test_a_fixed_denominator_depends_neither_on_who_came_nor_on_what_they_said(
    said: list[Claims], expected: float
) -> None:
    weights = ExpectedCohortWeights(expected_cohort=expected)
    assert weigh(weights, said) == pytest.approx([1 / expected] * len(said), rel=1e-6)
    assert weights.value(TERMS) == 1 / expected


@pytest.mark.parametrize("lie", LIES)
def test_no_lie_moves_a_fixed_denominator(lie: float) -> None:
    said = [claim(), claim(lie, lie), claim()]
    assert weigh(ExpectedCohortWeights(expected_cohort=4.0), said) == [0.25] * 3


def test_a_sum_is_weighed_by_the_same_constant() -> None:
    cohort = Cohort.of({"a": claim(), "b": claim()})
    total = Total(vector=torch.zeros(SIZE), cohort=cohort, layout=LAYOUT)
    values, _, _ = ExpectedCohortWeights(expected_cohort=4.0)({}, total, 0)
    assert values.tolist() == [0.25, 0.25]


@pytest.mark.parametrize("expected", [0.0, -4.0, math.nan, math.inf])
def test_a_denominator_that_is_no_positive_number_is_refused(expected: float) -> None:
    with pytest.raises(ConfigurationError):
        ExpectedCohortWeights(expected_cohort=expected)


def test_only_weights_fixed_before_sampling_call_themselves_constant() -> None:
    """What depends on claims or on who arrived must not carry a bill."""
    assert not any(weights.constant for weights in NORMALISED)
    assert ExpectedCohortWeights(expected_cohort=4.0).constant
    assert ExampleWeights().needs_rows
    assert EpsilonWeights().needs_rows
