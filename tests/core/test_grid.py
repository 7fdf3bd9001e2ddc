"""The grid: what rounding onto it costs, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from dpfl.core.errors import PrivacyRefusal
from dpfl.core.grid import FLOAT_SUM, Grid, effective_multiplier, multiplier_for
from dpfl.core.grid_noise import LARGEST, SCALE
from dpfl.core.random import PublicSeed, SecretRng

STD = st.floats(1e-6, 1e6)


@given(STD, st.integers(0, 2**32))
def test_what_is_released_is_a_multiple_of_the_step(std: float, seed: int) -> None:
    grid = Grid.of(std)
    x = torch.randn(50, generator=PublicSeed(seed).generator()) * std
    noisy = grid.noised(x, SecretRng.simulated(PublicSeed(seed)))
    integers = grid.integers(noisy)
    assert torch.equal(integers * grid.step, noisy)
    assert torch.equal(grid.integers(integers * grid.step), integers)


@given(STD, st.integers(0, 2**32), st.integers(0, 2**32))
def test_rounding_moves_neighbours_apart_by_no_more_than_is_charged(
    std: float, one: int, other: int
) -> None:
    grid = Grid.of(std)
    a, b = (
        torch.randn(200, generator=PublicSeed(s).generator(), dtype=torch.float64) * std
        for s in (one, other)
    )
    apart = torch.linalg.vector_norm((grid.integers(a) - grid.integers(b)) * grid.step)
    assert float(apart) <= float(torch.linalg.vector_norm(a - b)) + grid.widening(200) * (1 + 1e-9)


@given(st.floats(0.05, 50), st.integers(1, 10**7), st.integers(1, 80))
def test_planning_inverts_charging(wanted: float, numbers: int, parts: int) -> None:
    if wanted * parts * math.sqrt(numbers) / SCALE >= 0.9:
        return
    planned = multiplier_for(wanted, numbers, parts)
    reached = effective_multiplier(planned, numbers, parts)
    assert wanted <= reached <= wanted * (1 + 1e-9)
    assert planned >= wanted * (1 + parts * FLOAT_SUM)


def test_more_coordinates_and_more_parts_cost_more() -> None:
    assert effective_multiplier(1.0, 10**6, 1) < effective_multiplier(1.0, 10**4, 1) < 1.0
    assert effective_multiplier(1.0, 10**4, 9) < effective_multiplier(1.0, 10**4, 1)


def test_a_grid_coarser_than_the_clip_is_refused() -> None:
    with pytest.raises(PrivacyRefusal, match="coarser than the clip"):
        multiplier_for(2.0, SCALE**2, 1)


@pytest.mark.parametrize("std", [0.0, 1e-40, float("nan"), float("inf"), -1.0])
def test_noise_without_a_grid_is_refused(std: float) -> None:
    with pytest.raises(PrivacyRefusal, match="has no grid"):
        Grid.of(std)


def test_a_value_that_the_grid_cannot_hold_is_clamped_and_moves_nobody_apart() -> None:
    grid = Grid.of(1.0)
    assert torch.isfinite(grid.integers(torch.tensor([3e38, -3e38]))).all()
    assert float(grid.integers(torch.tensor([3e38]))) == float(grid.integers(torch.tensor([2e38])))


def test_32_bits_hold_what_is_sent() -> None:
    assert Grid.of(1.0).holds(1.0)
    assert not Grid.of(1.0).holds((2**31 - LARGEST) / SCALE + 1)
