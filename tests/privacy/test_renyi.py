"""The Renyi filter: never more than the exact one admits, and what its orders are worth."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

from dpfl.core.errors import PrivacyRefusal
from dpfl.core.types import Adjacency
from dpfl.privacy.accountant import gaussian_mu, spend
from dpfl.privacy.events import Event
from dpfl.privacy.renyi import ORDERS, renyi_admits, renyi_costs, renyi_epsilon

ADD_REMOVE, REPLACE_ONE = Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE
BUDGETS = [(epsilon, delta) for epsilon in (0.1, 0.3, 1.0, 3.0, 10.0) for delta in (1e-5, 1e-7)]


def gaussian_costs(mu: float) -> tuple[float, ...]:
    return renyi_costs((Event(noise_multiplier=1 / mu),), ADD_REMOVE)


def largest_mu(epsilon: float, delta: float, *, known: bool) -> float:
    """The most that the filter admits of Gaussian releases, by bisection."""
    low, high = 1e-6, 10.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        costs = gaussian_costs(middle)
        fits = (
            renyi_admits(costs, epsilon, delta) if known else renyi_epsilon(costs, delta) <= epsilon
        )
        low, high = (middle, high) if fits else (low, middle)
    return low


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
def test_the_filter_admits_less_than_the_exact_one_and_not_much_less(
    epsilon: float, delta: float
) -> None:
    exact = gaussian_mu(epsilon, delta)
    assert 0.73 * exact < largest_mu(epsilon, delta, known=False) < exact
    assert 0.88 * exact < largest_mu(epsilon, delta, known=True) < exact


def test_what_a_budget_of_one_admits() -> None:
    """One order, the best, admits 0.2472; the filter with a main order is within 1 % of it. The
    exact one: 0.268.
    """
    assert gaussian_mu(1.0, 1e-5) == pytest.approx(0.268, abs=5e-4)
    assert largest_mu(1.0, 1e-5, known=True) >= 0.99 * 0.247
    assert largest_mu(1.0, 1e-5, known=False) == pytest.approx(
        largest_mu(1.0, 1e-5, known=True), rel=1e-6
    )


def test_the_orders_are_a_fixed_increasing_tuple_above_one() -> None:
    assert 12 <= len(ORDERS) <= 20
    assert list(ORDERS) == sorted(set(ORDERS))
    assert ORDERS[0] > 1


def test_the_conversion_is_the_stated_formula() -> None:
    """Nine tenths of delta for one order, the rest for the others: the smallest budget whose own
    split admits the costs.
    """
    costs, delta, j = gaussian_costs(0.3), 1e-6, len(ORDERS)

    def bound(main: float) -> float:
        return min(
            cost
            + math.log((a - 1) / a)
            - (math.log(delta * (0.9 if a == main else 0.1 / (j - 1))) + math.log(a)) / (a - 1)
            for cost, a in zip(costs, ORDERS, strict=True)
        )

    found = renyi_epsilon(costs, delta)
    assert any(found == pytest.approx(bound(main), rel=1e-10) for main in ORDERS)
    assert renyi_admits(costs, found, delta)
    assert not renyi_admits(costs, 0.99 * found, delta)
    assert renyi_epsilon([0.0] * j, 0.9) == 0.0
    assert renyi_epsilon([math.inf] * j, delta) == math.inf


@given(st.floats(0.5, 50), st.integers(1, 500))
def test_gaussian_costs_are_exact_and_fourfold_under_replace_one(noise: float, steps: int) -> None:
    event = Event(noise_multiplier=noise, steps=steps)
    for order, one, two in zip(
        ORDERS, renyi_costs((event,), ADD_REMOVE), renyi_costs((event,), REPLACE_ONE), strict=True
    ):
        assert order * steps / (2 * noise**2) <= one * (1 + 1e-14)
        assert one == pytest.approx(order * steps / (2 * noise**2), rel=1e-9)
        assert two == pytest.approx(4 * one, rel=1e-9)


def test_costs_of_histories_add_up() -> None:
    one = (Event(noise_multiplier=2.0, sampling="poisson", sampling_rate=0.1, steps=20),)
    other = (Event(noise_multiplier=7.0, steps=3), Event(noise_multiplier=1.0, steps=0))
    both = renyi_costs(one + other, ADD_REMOVE)
    parts = zip(renyi_costs(one, ADD_REMOVE), renyi_costs(other, ADD_REMOVE), strict=True)
    assert both == pytest.approx([a + b for a, b in parts], rel=1e-9)


@pytest.mark.parametrize(
    ("event", "adjacency"),
    [
        (
            Event(noise_multiplier=1.5, sampling="poisson", sampling_rate=0.05, steps=100),
            ADD_REMOVE,
        ),
        (
            Event(noise_multiplier=8.0, sampling="poisson", sampling_rate=0.5, steps=50),
            Adjacency.ZERO_OUT,
        ),
        (Event(noise_multiplier=4.0, sampling="uniform", sampling_rate=0.1, steps=20), REPLACE_ONE),
        (Event(noise_multiplier=6.0, steps=5), REPLACE_ONE),
    ],
)
def test_the_filter_costs_more_than_the_best_order_and_that_more_than_the_losses(
    event: Event, adjacency: Adjacency
) -> None:
    costs = [
        spend((event,), 1e-5, adjacency=adjacency, accountant=name)
        for name in ("pld", "rdp", "renyi")
    ]
    assert [cost.accountant for cost in costs] == ["PLD", "RDP", "RENYI"]
    values = [cost.epsilon for cost in costs]
    assert values == sorted(values)
    assert values[2] < 3 * values[0]


def test_a_fixed_size_sample_has_the_doubled_sensitivity() -> None:
    """At a rate near 1 its costs approach those of the whole: four times those of one clip."""
    nearly = Event(noise_multiplier=5.0, sampling="uniform", sampling_rate=0.999, steps=1)
    assert renyi_costs((nearly,), REPLACE_ONE)[0] > 0.95 * 4 * ORDERS[0] / (2 * 25.0)


def test_combinations_without_a_proof_are_refused() -> None:
    poisson = Event(noise_multiplier=2.0, sampling="poisson", sampling_rate=0.1)
    uniform = Event(noise_multiplier=2.0, sampling="uniform", sampling_rate=0.1)
    with pytest.raises(PrivacyRefusal, match="Poisson"):
        renyi_costs((poisson,), REPLACE_ONE)
    with pytest.raises(PrivacyRefusal, match="fixed-size"):
        renyi_costs((uniform,), ADD_REMOVE)


def test_no_noise_is_infinite_and_nothing_released_is_free() -> None:
    assert set(renyi_costs((Event(noise_multiplier=0.0),), ADD_REMOVE)) == {math.inf}
    nothing = Event(noise_multiplier=0.0, sampling="poisson", sampling_rate=0.0, steps=9)
    assert set(renyi_costs((nothing,), REPLACE_ONE)) == {0.0}


@given(st.floats(0.2, 8.0), st.floats(-8, -3))
@settings(max_examples=15)
def test_a_larger_budget_never_admits_less(epsilon: float, log_delta: float) -> None:
    delta = 10.0**log_delta
    costs = gaussian_costs(largest_mu(epsilon, delta, known=False))
    assert renyi_epsilon(costs, delta) <= epsilon
    assert renyi_epsilon(costs, delta * 2) <= epsilon
