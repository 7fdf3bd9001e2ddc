"""The closed form of the Gaussian mechanism, against arithmetic with 60 digits."""

from __future__ import annotations

import math
import time

import mpmath
import pytest
from hypothesis import given, settings, strategies as st

from dpfl.core.types import Adjacency
from dpfl.privacy.accountant import gaussian_epsilon, gaussian_mu, spend
from dpfl.privacy.events import Event


def exact_delta(epsilon: float, mu: float) -> mpmath.mpf:
    """delta(epsilon, mu) with 60 digits."""
    with mpmath.workdps(60):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


@given(st.floats(-5, 1.5), st.floats(-12, -0.5))
@settings(max_examples=60)
def test_epsilon_is_an_upper_bound_and_tight(log_mu: float, log_delta: float) -> None:
    mu, delta = 10.0**log_mu, 10.0**log_delta
    found = gaussian_epsilon(mu, delta)
    assert exact_delta(found, mu) <= delta
    if found > 0:
        assert exact_delta(found * (1 - 1e-6), mu) > delta


@given(st.floats(-4, 2.5), st.floats(-12, -0.5))
@settings(max_examples=60)
def test_mu_is_a_lower_bound_and_tight(log_epsilon: float, log_delta: float) -> None:
    epsilon, delta = 10.0**log_epsilon, 10.0**log_delta
    found = gaussian_mu(epsilon, delta)
    assert exact_delta(epsilon, found) <= delta < exact_delta(epsilon, found * (1 + 1e-6))


@pytest.mark.parametrize("mu", [0.0, 1e-9, 1e-7])
def test_next_to_nothing_costs_nothing(mu: float) -> None:
    assert gaussian_epsilon(mu, 1e-6) == 0.0


def test_large_mu_is_no_overflow() -> None:
    assert gaussian_epsilon(1e3, 1e-6) == pytest.approx(1e6 / 2 + 4.7534 * 1e3, rel=1e-4)
    assert gaussian_epsilon(math.inf, 1e-6) == math.inf


def test_both_directions_agree() -> None:
    for epsilon in (0.1, 1.0, 8.0):
        assert gaussian_epsilon(gaussian_mu(epsilon, 1e-6), 1e-6) == pytest.approx(
            epsilon, rel=1e-9
        )


def test_a_history_without_sampling_takes_a_millisecond_however_long_it_is() -> None:
    began = time.process_time()
    for steps in range(1, 301):
        history = (
            Event(noise_multiplier=3.0, steps=steps),
            Event(noise_multiplier=20.0, steps=7 * steps, numbers=10),
        )
        spend(history, 1e-5, adjacency=Adjacency.ADD_REMOVE)
    assert time.process_time() - began < 3
