"""The largest number of releases that fits, found with few questions."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, strategies as st

from dpfl.core.types import Adjacency
from dpfl.privacy.accountant import spend
from dpfl.privacy.budget_check import largest_that_fits, most_releases
from dpfl.privacy.events import Event


@given(st.floats(0.2, 2.0), st.floats(1e-3, 1.0), st.integers(0, 3000), st.floats(0.01, 5.0))
def test_the_answer_is_that_of_brute_force_on_any_power_law(
    power: float, scale: float, most: int, limit: float
) -> None:
    def epsilon(count: int) -> float:
        return scale * count**power

    expected = sum(1 for count in range(1, most + 1) if epsilon(count) <= limit)
    assert most_releases(epsilon, limit, most) == expected
    assert largest_that_fits(lambda count: epsilon(count) <= limit, most) == expected


@example([0.0, 4.5e-168, 0.0, 2.0], 1.0)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=60), st.floats(0.01, 10))
def test_the_answer_is_that_of_brute_force_on_any_growing_curve(
    steps: list[float], limit: float
) -> None:
    curve = [math.fsum(steps[:count]) for count in range(len(steps) + 1)]
    curve[-1] = math.inf if len(steps) % 3 == 0 else curve[-1]
    expected = sum(1 for value in curve[1:] if value <= limit)
    assert most_releases(lambda count: curve[count], limit, len(steps)) == expected


@pytest.mark.parametrize(
    "event",
    [
        Event(noise_multiplier=12.0),
        Event(noise_multiplier=1.2, sampling="poisson", sampling_rate=0.02),
        Event(noise_multiplier=0.8, sampling="poisson", sampling_rate=0.01),
    ],
)
def test_an_accountants_curve_takes_a_handful_of_evaluations(event: Event) -> None:
    asked: list[int] = []

    def epsilon(count: int) -> float:
        asked.append(count)
        return spend((event.times(count),), 1e-5, adjacency=Adjacency.ADD_REMOVE).epsilon

    most = most_releases(epsilon, 1.5, 2000)
    assert 1 <= most < 2000
    assert len(asked) <= 9
    assert epsilon(most) <= 1.5 < epsilon(most + 1)
