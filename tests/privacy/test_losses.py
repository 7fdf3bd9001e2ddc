"""Discretised losses and their composition, against dp-accounting's, which are built in another
way.
"""

from __future__ import annotations

import math
from fractions import Fraction

import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation, pld
from hypothesis import given, settings, strategies as st

from dpfl.core.types import Adjacency
from dpfl.privacy.accountant import FINE, QUICK, quick_epsilon, spend
from dpfl.privacy.composition import Pair, Step, composed, one_step
from dpfl.privacy.events import Event

RELATIONS = {
    Adjacency.ADD_REMOVE: NeighboringRelation.ADD_OR_REMOVE_ONE,
    Adjacency.ZERO_OUT: NeighboringRelation.ADD_OR_REMOVE_ONE,
    Adjacency.REPLACE_ONE: NeighboringRelation.REPLACE_ONE,
}


def library_epsilon(events: list[Event], delta: float, adjacency: Adjacency) -> float:
    """dp-accounting's pessimistic epsilon, at an interval that makes it accurate to about 1e-4."""
    accountant = pld.PLDAccountant(RELATIONS[adjacency], value_discretization_interval=5e-4)
    for event in events:
        gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier)
        sampled = event.sampling_rate < 1
        made = (
            dp_accounting.PoissonSampledDpEvent(event.sampling_rate, gaussian)
            if sampled
            else gaussian
        )
        accountant.compose(made, event.steps)
    return float(accountant.get_epsilon(delta))


@st.composite
def poisson_events(draw: st.DrawFn) -> Event:
    return Event(
        noise_multiplier=draw(st.floats(0.7, 4.0)),
        sampling="poisson",
        sampling_rate=10 ** draw(st.floats(-2, -0.05)),
        steps=draw(st.integers(1, 40)),
    )


@given(
    st.lists(poisson_events(), min_size=1, max_size=2),
    st.sampled_from([(), (Event(noise_multiplier=6.0, steps=3),)]),
    st.sampled_from(list(Adjacency)),
)
@settings(max_examples=12)
def test_histories_cost_what_dp_accounting_finds(
    events: list[Event], whole: tuple[Event, ...], adjacency: Adjacency
) -> None:
    expected = library_epsilon([*events, *whole], 1e-5, adjacency)
    found = spend([*events, *whole], 1e-5, adjacency=adjacency).epsilon
    assert found == pytest.approx(expected, rel=3 * FINE, abs=1e-3)


@given(poisson_events(), st.sampled_from(list(Adjacency)))
@settings(max_examples=15)
def test_the_quick_bound_lies_a_little_above_the_fine_one(
    event: Event, adjacency: Adjacency
) -> None:
    fine = spend((event,), 1e-6, adjacency=adjacency).epsilon
    quick = quick_epsilon((event,), 1e-6, adjacency=adjacency)
    assert fine * (1 - 3 * FINE) <= quick <= fine * (1 + 5 * QUICK) + 1e-8


@pytest.mark.parametrize("pair", ["sampled", "replaced", "mirrored"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("interval", [0.001, 0.05, 0.7])
@given(std=st.floats(0.1, 20), log_rate=st.floats(-4, -0.001))
@settings(max_examples=8)
def test_one_step_keeps_its_mass_and_dominates(
    pair: Pair, reverse: bool, interval: float, std: float, log_rate: float
) -> None:
    """The discretised hockey-stick divergence is never below the exact one, at the dots and between
    them.
    """
    step = Step(std=std, rate=10**log_rate, steps=1, pair=pair)
    losses = one_step(step, interval, 1e-14, reverse=reverse)
    assert losses.masses.min() >= 0
    assert losses.masses.sum() + losses.infinite == pytest.approx(1.0, abs=1e-12)
    grid = interval * np.arange(losses.first, losses.first + len(losses.masses))
    for epsilon in (0.0, interval / 3, interval, 3.3 * interval, 0.5, 2.0):
        above = grid > epsilon
        found = losses.infinite + float(
            np.sum(losses.masses[above] * -np.expm1(epsilon - grid[above]))
        )
        assert found >= exact_delta(step, epsilon, reverse=reverse) * (1 - 1e-9) - 1e-15


def exact_delta(step: Step, epsilon: float, *, reverse: bool) -> float:
    """The hockey-stick divergence of the pair by quadrature, for epsilon >= 0."""
    s, q = step.std, step.rate
    x = np.linspace(-40 * s - 1, 40 * s + 1, 400_001)

    def normal(mean: float) -> np.ndarray:
        return np.exp(-((x - mean) ** 2) / (2 * s * s)) / (s * math.sqrt(2 * math.pi))

    p = (1 - q) * normal(0) + q * normal(1)
    other = (1 - q) * normal(0) + q * normal(-1) if step.pair == "replaced" else normal(0)
    if reverse and step.pair == "sampled":
        p, other = other, p
    return float(np.trapezoid(np.maximum(p - math.exp(epsilon) * other, 0.0), x)) * (1 - 1e-6)


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9, 1e-12])
def test_very_small_deltas_are_not_lost_to_rounding(delta: float) -> None:
    """A rate of nearly 1 is nearly the Gaussian mechanism, whose epsilon is known in
    closed form.
    """
    nearly = Event(noise_multiplier=20.0, sampling="poisson", sampling_rate=1 - 1e-9, steps=1000)
    exact = spend(
        (Event(noise_multiplier=20.0, steps=1000),), delta, adjacency=Adjacency.ADD_REMOVE
    ).epsilon
    found = spend((nearly,), delta, adjacency=Adjacency.ADD_REMOVE).epsilon
    assert exact * (1 - 1e-8) <= found <= exact * (1 + 2 * FINE)


@given(poisson_events(), st.sampled_from([1e-2, 1e-5, 1e-10]))
@settings(max_examples=10)
def test_a_stretch_down_to_zero_changes_nothing(event: Event, delta: float) -> None:
    plan = [Step(std=event.noise_multiplier, rate=event.sampling_rate, steps=event.steps)]
    whole = composed(plan, delta, FINE, low=0.0).epsilon(delta)
    curve = composed(plan, delta, FINE)
    found = curve.epsilon(delta)
    assert whole is not None
    if found is not None and found >= curve.aim.low:
        assert found == pytest.approx(whole, rel=1e-5, abs=1e-9)
    else:
        assert whole < curve.aim.low


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize(
    ("noise", "rate", "steps", "delta"),
    [
        (0.81, 4.4e-4, 1, 1.8e-8),
        (1.08, 1.8e-3, 2, 1.1e-8),
        (0.63, 7e-3, 1, 6.5e-5),
        (1.37, 1.3e-2, 2, 5e-8),
    ],
)
def test_few_steps_with_rare_large_losses_have_a_tight_bound(
    noise: float, rate: float, steps: int, delta: float, adjacency: Adjacency
) -> None:
    """Epsilon lies far below what the moments suggest."""
    event = Event(noise_multiplier=noise, sampling="poisson", sampling_rate=rate, steps=steps)
    found = spend((event,), delta, adjacency=adjacency).epsilon
    assert found == pytest.approx(library_epsilon([event], delta, adjacency), rel=2e-3)


@pytest.mark.parametrize("steps", [10**5, 10**7])
def test_many_steps_stay_within_memory(steps: int) -> None:
    event = Event(
        noise_multiplier=5.0,
        sampling="poisson",
        sampling_rate=float(Fraction(1, 10**4)),
        steps=steps,
    )
    assert 0 < spend((event,), 1e-6, adjacency=Adjacency.ADD_REMOVE).epsilon < 10
