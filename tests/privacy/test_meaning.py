"""What an epsilon means for groups, for people at several sites and for attackers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import optimize, stats

from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.types import Adjacency
from dpfl.privacy.accountant import spend
from dpfl.privacy.events import Event
from dpfl.privacy.meaning import (
    epsilon_curve,
    group_delta,
    group_epsilon,
    sites_epsilon,
    sites_guarantee,
    trade_off_curve,
)
from dpfl.privacy.statement import Statement

ZERO_OUT, REPLACE_ONE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE
DELTA = 1e-5
GAUSSIANS = st.builds(Event, noise_multiplier=st.floats(0.7, 40.0), steps=st.integers(1, 20))
ADJACENCIES = st.sampled_from([ZERO_OUT, REPLACE_ONE])


def poisson(noise: float = 1.5, rate: float = 0.02, steps: int = 100) -> Event:
    return Event(noise_multiplier=noise, sampling="poisson", sampling_rate=rate, steps=steps)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The exact epsilon of a Gaussian pair, by scipy alone."""

    def excess(value: float) -> float:
        reached = stats.norm.cdf(mu / 2 - value / mu)
        return float(reached - math.exp(value + stats.norm.logcdf(-mu / 2 - value / mu)) - delta)

    return float(optimize.brentq(excess, 0, 400)) if excess(0) > 0 else 0.0


# -- groups ----------------------------------------------------------------------------------------


@given(GAUSSIANS, ADJACENCIES)
def test_a_group_of_one_has_the_stated_epsilon(event: Event, adjacency: Adjacency) -> None:
    stated = spend((event,), DELTA, adjacency=adjacency).epsilon
    assert group_epsilon((event,), 1, DELTA, adjacency=adjacency) == stated
    assert group_epsilon((poisson(),), 1, DELTA, adjacency=adjacency) == (
        spend((poisson(),), DELTA, adjacency=adjacency).epsilon
    )


@given(GAUSSIANS, st.integers(2, 12), ADJACENCIES)
def test_a_group_moves_gaussians_k_times_as_far(event: Event, k: int, adjacency: Adjacency) -> None:
    """Against the explicit pair N(0, 1), N(k mu, 1), which k units that agree do reach."""
    mu = (
        k * math.sqrt(event.steps) / event.noise_multiplier * (2 if adjacency is REPLACE_ONE else 1)
    )
    found = group_epsilon((event,), k, DELTA, adjacency=adjacency)
    assert found >= gaussian_epsilon(mu, DELTA) * (1 - 1e-9) if mu < 20 else found > 0
    if mu < 20:
        assert found <= gaussian_epsilon(mu, DELTA) * (1 + 1e-6) + 1e-9


def sampled_pair(k: int, noise: float, rate: float, delta: float) -> float:
    """Epsilon of one Poisson step with k units against none, integrated on a fine grid."""
    x = np.linspace(-12 * noise, 12 * noise + k, 400_001)
    base = stats.norm.pdf(x, 0, noise)
    mixture = sum(stats.binom.pmf(j, k, rate) * stats.norm.pdf(x, j, noise) for j in range(k + 1))

    def excess(value: float) -> float:
        return float(np.trapezoid(np.maximum(mixture - math.exp(value) * base, 0), x)) - delta

    return float(optimize.brentq(excess, 0, 60)) if excess(0) > 0 else 0.0


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize(("noise", "rate"), [(1.0, 0.1), (2.0, 0.02), (0.8, 0.5)])
def test_a_sampled_group_is_never_understated(k: int, noise: float, rate: float) -> None:
    found = group_epsilon((poisson(noise, rate, 1),), k, DELTA, adjacency=ZERO_OUT)
    assert found >= sampled_pair(k, noise, rate, DELTA)
    alone = spend((poisson(noise, rate, 1),), DELTA, adjacency=ZERO_OUT).epsilon
    assert found >= k * alone * 0.5  # and the pair is far enough from trivial to test something


@pytest.mark.parametrize("adjacency", [ZERO_OUT, REPLACE_ONE])
@pytest.mark.parametrize(
    "events",
    [(poisson(),), (poisson(0.8, 0.2, 50),), (Event(noise_multiplier=3.0), poisson(3.0, 0.1, 20))],
    ids=["small", "large", "mixed"],
)
def test_larger_groups_have_larger_epsilons(
    adjacency: Adjacency, events: tuple[Event, ...]
) -> None:
    found = [group_epsilon(events, k, DELTA, adjacency=adjacency) for k in (1, 2, 3, 4, 8, 32)]
    assert found == sorted(found)
    assert all(math.isfinite(value) for value in found)


def test_sampling_helps_small_groups() -> None:
    """The bound by the definition is the smaller one where epsilon is small."""
    unsampled = Event(noise_multiplier=1.5, steps=100)
    found = group_epsilon((poisson(),), 2, DELTA, adjacency=ZERO_OUT)
    assert found < 0.3 * group_epsilon((unsampled,), 2, DELTA, adjacency=ZERO_OUT)


@given(st.floats(0.0, 5.0), st.floats(1e-12, 1e-3), st.integers(1, 10))
def test_the_delta_of_a_group_is_that_of_the_definition(
    epsilon: float, delta: float, k: int
) -> None:
    ratio = math.expm1(k * epsilon) / math.expm1(epsilon) if epsilon > 1e-6 else float(k)
    assert group_delta(epsilon, delta, k) == pytest.approx(min(1.0, delta * ratio), rel=1e-4)


def test_failures_count_for_every_unit_of_a_group() -> None:
    event = Event(noise_multiplier=5.0, failure=4e-6)
    larger = replace(event, noise_multiplier=2.5 * (1 - 1e-14), failure=8e-6)
    assert group_epsilon((event,), 2, DELTA, adjacency=ZERO_OUT) == (
        spend((larger,), DELTA, adjacency=ZERO_OUT).epsilon
    )
    assert group_epsilon((event,), 3, DELTA, adjacency=ZERO_OUT) == math.inf


@pytest.mark.parametrize("k", [0, -1, 1.5, math.nan])
def test_a_group_is_a_whole_number_of_units(k: int) -> None:
    with pytest.raises(ConfigurationError):
        group_epsilon((poisson(),), k, DELTA, adjacency=ZERO_OUT)


@pytest.mark.parametrize("rate", [0.1, 1.0])
@pytest.mark.parametrize("k", [1, 2])
def test_what_has_no_proven_bound_has_none_for_groups(k: int, rate: float) -> None:
    event = Event(noise_multiplier=3.0, sampling="uniform", sampling_rate=rate)
    with pytest.raises(PrivacyRefusal):
        group_epsilon((event,), k, DELTA, adjacency=ZERO_OUT)
    assert group_epsilon((event,), k, DELTA, adjacency=REPLACE_ONE) > 0


# -- several sites ---------------------------------------------------------------------------------


def line(epsilon: float, delta: float | None = 1e-6, **changes: str) -> Statement:
    values = {"unit": "record", "adjacency": "zero_out", "observer": "server", **changes}
    return Statement(
        account="a", accountant="PLD", epsilon=epsilon, delta=delta, budget=None, rounds=1,
        filter="allotments", studies=1, **values,
    )  # fmt: skip


def test_statements_of_several_sites_add_up() -> None:
    found = sites_guarantee([line(0.5), line(1.25, 2e-6)])
    assert (found.epsilon, found.delta) == (1.75, pytest.approx(3e-6))
    assert (found.unit, found.adjacency, found.observer) == ("record", "zero_out", "server")
    assert sites_guarantee([line(0.5), line(1.0, None)]).epsilon == math.inf


def test_the_guarantee_of_a_site_counts_not_what_it_has_used() -> None:
    used = replace(line(0.5), filter="renyi", budget=2.0)
    assert sites_guarantee([used, line(1.0)]).epsilon == 3.0


@pytest.mark.parametrize("field", ["unit", "adjacency", "observer"])
def test_statements_about_different_things_are_not_added_up(field: str) -> None:
    with pytest.raises(PrivacyRefusal):
        sites_guarantee([line(0.5), line(0.5, **{field: "other"})])
    with pytest.raises(PrivacyRefusal):
        sites_guarantee([])


@given(GAUSSIANS, GAUSSIANS, ADJACENCIES)
def test_fixed_plans_of_several_sites_compose(
    one: Event, other: Event, adjacency: Adjacency
) -> None:
    found = sites_epsilon([(one,), (other,)], 2 * DELTA, adjacency=adjacency)
    assert found == spend((one, other), 2 * DELTA, adjacency=adjacency).epsilon
    parts = [spend((event,), DELTA, adjacency=adjacency).epsilon for event in (one, other)]
    assert found <= sum(parts) * (1 + 1e-9)
    assert sites_epsilon([(one,)], DELTA, adjacency=adjacency) == parts[0]


# -- curves ----------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(GAUSSIANS, st.lists(st.floats(1e-10, 0.5), min_size=1, max_size=6), ADJACENCIES)
def test_epsilon_falls_as_delta_grows(
    event: Event, deltas: list[float], adjacency: Adjacency
) -> None:
    for events in ((event,), (event, poisson())):
        curve = epsilon_curve(events, adjacency, deltas)
        assert [delta for delta, _ in curve] == sorted(deltas)
        values = [epsilon for _, epsilon in curve]
        assert values == sorted(values, reverse=True)
        assert all(
            epsilon <= spend(events, delta, adjacency=adjacency).epsilon for delta, epsilon in curve
        )


POINTS = [i / 40 for i in range(41)] + [1e-6, 1e-3, 1 - 1e-3]


@settings(max_examples=30, deadline=None)
@given(GAUSSIANS, ADJACENCIES)
def test_the_trade_off_of_gaussians_is_the_closed_form(event: Event, adjacency: Adjacency) -> None:
    mu = math.sqrt(event.steps) / event.noise_multiplier * (2 if adjacency is REPLACE_ONE else 1)
    for rate, misses in trade_off_curve((event,), adjacency, POINTS):
        exact = stats.norm.cdf(stats.norm.isf(rate) - mu)
        assert exact - 1e-6 <= misses <= exact


@pytest.mark.parametrize("adjacency", [ZERO_OUT, REPLACE_ONE])
@pytest.mark.parametrize(
    "event", [poisson(), Event(noise_multiplier=2.0, numbers=10**6, failure=1e-7)], ids=["q", "z"]
)
def test_a_trade_off_is_convex_and_falls(event: Event, adjacency: Adjacency) -> None:
    curve = trade_off_curve((event,), adjacency, POINTS)
    rates, misses = np.array(curve).T
    assert list(rates) == sorted(POINTS)
    assert misses[0] == pytest.approx(1.0, abs=2e-6)
    assert misses[-1] == 0.0
    assert np.all(np.diff(misses) <= 0)
    slopes = np.diff(misses) / np.diff(rates)
    assert np.all(np.diff(slopes) >= -1e-9)
    assert np.all(misses <= 1 - rates)
    assert misses[len(misses) // 2] > 0.01


def test_a_sampled_trade_off_is_below_that_of_its_explicit_pair() -> None:
    noise, rate = 1.0, 0.3
    x = np.linspace(-8, 9, 2001)
    false_positives = stats.norm.sf(x, 0, noise)
    missed = (1 - rate) * stats.norm.cdf(x, 0, noise) + rate * stats.norm.cdf(x, 1, noise)
    curve = dict(trade_off_curve((poisson(noise, rate, 1),), ZERO_OUT, false_positives))
    for a, b in zip(false_positives, missed, strict=True):
        assert curve[a] <= b + 1e-12
        assert curve[a] >= b - 0.05  # the bound holds in both directions of the pair


def test_nothing_released_and_nothing_hidden_are_the_two_ends() -> None:
    points = [0.0, 0.25, 1.0]
    nothing = trade_off_curve((), ZERO_OUT, points)
    assert [b for _, b in nothing] == pytest.approx([1.0, 0.75, 0.0], abs=1e-9)
    open_ = trade_off_curve((Event(noise_multiplier=0.0),), ZERO_OUT, points)
    assert [b for _, b in open_] == [0.0, 0.0, 0.0]


def test_points_are_rates() -> None:
    with pytest.raises(ConfigurationError):
        trade_off_curve((poisson(),), ZERO_OUT, [0.5, 1.5])
