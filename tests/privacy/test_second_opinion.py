"""An independent computation of delta, without grids of losses and without FFT.

For a pair (P, Q) with loss L and  M(s) = E_P exp(s L),  T independent steps have

    delta(epsilon) = 1 / (2 pi i)  integral over Re s = c  of  M(s)^T exp(-s epsilon) / (s (s + 1))
    ds,    c > 0,

because  1 / (s (s + 1))  is the Laplace transform of  1 - exp(-x). The moments are Gauss-Legendre
quadratures over the noise, the outer integral a trapezoidal sum through the saddle point, where
both converge exponentially.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from scipy import special

from dpfl.core.types import Adjacency
from dpfl.privacy.accountant import spend
from dpfl.privacy.events import Event

Pair = tuple[NDArray[np.float64], NDArray[np.float64]]  # losses, and their weights under P
ADD_REMOVE, REPLACE_ONE = Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE
TOO_TIGHT, TOO_LOOSE = 1e-5, 0.01  # relative error of delta, of epsilon


@functools.cache
def legendre() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    nodes, weights = np.polynomial.legendre.leggauss(32)
    return nodes, weights


def panels(low: float, high: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Nodes and weights of composite Gauss-Legendre quadrature, panels of about a third of a
    standard deviation.
    """
    nodes, weights = legendre()
    edges = np.linspace(low, high, math.ceil((high - low) * 3) + 1)
    half = np.diff(edges)[:, None] / 2
    return (edges[:-1, None] + half * (nodes + 1)).ravel(), (half * weights).ravel()


def log_normal(x: NDArray[np.float64], mean: float) -> NDArray[np.float64]:
    return -((x - mean) ** 2) / 2 - math.log(2 * math.pi) / 2


def pairs(event: Event, adjacency: Adjacency) -> list[Pair]:
    """Both directions of the dominating pair of one step, with x in standard deviations of the
    noise.
    """
    rate, fixed = event.sampling_rate, event.sampling == "uniform" and event.sampling_rate < 1
    shift = (2 if fixed else 1) / event.noise_multiplier
    x, w = panels(shift / 2 if fixed else -13.0 - shift, 13.0 + shift)
    with np.errstate(divide="ignore"):
        none = np.log1p(-rate) + log_normal(x, 0)
    with_one = np.logaddexp(none, math.log(rate) + log_normal(x, shift))
    with_other = np.logaddexp(none, math.log(rate) + log_normal(x, -shift))
    without = log_normal(x, 0)
    if fixed:  # positive losses, their mirror image, and the rest at 0
        loss = with_one - without
        upper, lower = w * np.exp(with_one), w * np.exp(without)
        rest = 1 - upper.sum() - lower.sum()
        return [(np.concatenate([loss, -loss, [0.0]]), np.concatenate([upper, lower, [rest]]))]
    if adjacency is REPLACE_ONE:
        return [(with_one - with_other, w * np.exp(with_one))]
    return [(with_one - without, w * np.exp(with_one)), (without - with_one, w * np.exp(without))]


def log_moments(pair: Pair, s: NDArray[np.complex128]) -> NDArray[np.complex128]:
    loss, weights = pair
    keep = weights > 1e-290
    exponent = np.outer(s, loss[keep])
    top = exponent.real.max(axis=1, keepdims=True)
    return np.asarray(top[:, 0] + np.log((weights[keep] * np.exp(exponent - top)).sum(axis=1)))


def direction_delta(steps: list[tuple[Pair, int]], epsilon: float) -> float:
    """The contour integral for one direction."""

    def log_integrand(s: NDArray[np.complex128]) -> NDArray[np.complex128]:
        total = -s * epsilon - np.log(s) - np.log(s + 1)
        for pair, count in steps:
            total = total + count * log_moments(pair, s)
        return total

    candidates = np.geomspace(0.02, 2e3, 120)
    heights = log_integrand(candidates.astype(complex)).real
    c = 0.7 * float(
        candidates[np.argmin(heights)]
    )  # below the saddle point, where heavy tails do not alias
    top = float(log_integrand(np.array([c + 0j])).real[0])
    width, area = c / 12, 0.0
    for block in range(400):
        y = width * np.arange(64 * block, 64 * (block + 1))
        values = np.exp(log_integrand(c + 1j * y) - top)
        area += float(values.real.sum()) - (float(values.real[0]) / 2 if block == 0 else 0.0)
        if np.abs(values[-8:]).max() * 64 * (block + 1) < 1e-9:
            break
    return area * width / math.pi * math.exp(top)


def independent_delta(history: list[Event], epsilon: float, adjacency: Adjacency) -> float:
    directions = zip(
        *(made * (2 // len(made)) for made in (pairs(e, adjacency) for e in history)), strict=True
    )
    counts = [event.steps for event in history]
    return max(direction_delta(list(zip(d, counts, strict=True)), epsilon) for d in directions)


def agrees(claimed: float, history: list[Event], delta: float, adjacency: Adjacency) -> bool:
    """Whether an epsilon is an upper bound for a history, and not more than one per cent above the
    exact value.
    """
    safe = independent_delta(history, claimed, adjacency) <= delta * (1 + TOO_TIGHT)
    return safe and independent_delta(history, claimed * (1 - TOO_LOOSE), adjacency) > delta


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[Event], Adjacency, float]:
    adjacency = draw(st.sampled_from([ADD_REMOVE, REPLACE_ONE]))
    kinds = ["poisson", "uniform"] if adjacency is REPLACE_ONE else ["poisson"]
    history = []
    for _ in range(draw(st.integers(1, 2))):
        steps = draw(st.integers(20, 400))
        rate = draw(st.floats(0.02, 0.6))
        # Noise for an epsilon of about 0.3 to 6: q sqrt(T) / z between 0.15 and 1.2
        least = 1.6 if adjacency is REPLACE_ONE else 0.8
        noise = max(least, rate * math.sqrt(steps) / draw(st.floats(0.15, 1.2)))
        kind = draw(st.sampled_from(kinds))
        history.append(
            Event(noise_multiplier=noise, sampling=kind, sampling_rate=rate, steps=steps)
        )
    if draw(st.booleans()):
        history.append(
            Event(noise_multiplier=draw(st.floats(5, 30)), steps=draw(st.integers(1, 4)))
        )
    return history, adjacency, draw(st.sampled_from([1e-4, 1e-6, 1e-9]))


@given(plans())
@settings(max_examples=20)
def test_the_accountant_agrees(plan: tuple[list[Event], Adjacency, float]) -> None:
    history, adjacency, delta = plan
    claimed = spend(history, delta, adjacency=adjacency).epsilon
    assert agrees(claimed, history, delta, adjacency)


def scaled(history: list[Event], factor: float) -> list[Event]:
    return [
        Event(**{**vars(event), "noise_multiplier": event.noise_multiplier * factor})
        for event in history
    ]


@given(plans())
@settings(max_examples=10)
def test_three_per_cent_of_noise_more_or_less_would_be_noticed(
    plan: tuple[list[Event], Adjacency, float],
) -> None:
    history, adjacency, delta = plan
    for factor in (0.97, 1.03):
        claimed = spend(scaled(history, factor), delta, adjacency=adjacency).epsilon
        assert not agrees(claimed, history, delta, adjacency)


@given(plans())
@settings(max_examples=10)
def test_the_sensitivity_of_the_wrong_adjacency_would_be_noticed(
    plan: tuple[list[Event], Adjacency, float],
) -> None:
    history, adjacency, delta = plan
    factor = 0.5 if adjacency is ADD_REMOVE else 2.0
    claimed = spend(scaled(history, factor), delta, adjacency=adjacency).epsilon
    assert not agrees(claimed, history, delta, adjacency)
    poisson = [event for event in history if event.sampling != "uniform"]
    if poisson:
        other = REPLACE_ONE if adjacency is ADD_REMOVE else ADD_REMOVE
        assert not agrees(spend(poisson, delta, adjacency=other).epsilon, poisson, delta, adjacency)


@pytest.mark.parametrize(("mu", "epsilon"), [(1.0, 4.4), (0.25, 0.9), (2.0, 12.0), (0.05, 0.2)])
def test_the_independent_computation_knows_the_gaussian_mechanism(
    mu: float, epsilon: float
) -> None:
    delta = float(
        special.ndtr(mu / 2 - epsilon / mu)
        - math.exp(epsilon) * special.ndtr(-mu / 2 - epsilon / mu)
    )
    event = Event(noise_multiplier=3 / mu, steps=9)
    assert independent_delta([event], epsilon, ADD_REMOVE) == pytest.approx(delta, rel=1e-7)
    assert agrees(spend([event], delta, adjacency=ADD_REMOVE).epsilon, [event], delta, ADD_REMOVE)
