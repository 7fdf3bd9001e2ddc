"""A clipped vector lies within its bound, whatever went in."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from dpfl.core.linalg import CLIP_MARGIN, clip, clip_factor

SPECIAL = [0.0, -0.0, 1e-45, 1e-40, 1.2e-38, 1e-30, 1.0, -1.0, 1e19, 3e38, -3.4e38]
LARGE_64 = [5e-324, 1e-310, 1e-200, 1e154, 1e200, 1.7e308]
BAD = [math.nan, math.inf, -math.inf]
BOUNDS = st.one_of(st.sampled_from([1e-6, 0.1, 1.0, 7.5, 1e6]), st.floats(1e-6, 1e6))


@st.composite
def vectors(draw: st.DrawFn, *, finite: bool = False) -> Tensor:
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    special = SPECIAL + (LARGE_64 if dtype == torch.float64 else []) + ([] if finite else BAD)
    width = 32 if dtype == torch.float32 else 64
    ordinary = st.floats(-1e6, 1e6, width=32)
    anything = st.floats(width=width, allow_nan=not finite, allow_infinity=not finite)
    values = draw(st.lists(st.one_of(ordinary, st.sampled_from(special), anything), max_size=12))
    return torch.tensor(values, dtype=dtype)


def norm_of(vector: Tensor) -> float:
    """Norm in double precision, without the overflow or underflow of squares."""
    return math.hypot(*vector.to(torch.float64).tolist())


@given(vectors(), BOUNDS)
@example(torch.tensor([math.nan, 1.0]), 1.0)
@example(torch.tensor([math.inf, -math.inf]), 1.0)
@example(torch.tensor([1.7e308, 1.7e308], dtype=torch.float64), 1.0)
@example(torch.zeros(0), 1.0)
@example(torch.full((3,), 1e-45), 1e-6)
def test_a_clipped_vector_never_exceeds_its_bound(vector: Tensor, bound: float) -> None:
    clipped = clip(vector, bound)
    assert clipped.dtype == vector.dtype and clipped.shape == vector.shape
    assert torch.isfinite(clipped).all()
    assert norm_of(clipped) <= bound


@given(vectors(), st.sampled_from(BAD), st.data())
def test_one_value_that_is_not_finite_makes_the_whole_vector_zero(
    vector: Tensor, bad: float, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(vector)))
    poisoned = torch.cat([vector[:place], torch.tensor([bad], dtype=vector.dtype), vector[place:]])
    assert torch.equal(clip(poisoned, 1.0), torch.zeros_like(poisoned))


@given(vectors(finite=True), BOUNDS)
def test_clipping_keeps_the_direction(vector: Tensor, bound: float) -> None:
    length = norm_of(vector)
    if not math.isfinite(length * length) or length < 1e-100:
        return
    clipped = clip(vector, bound).to(torch.float64)
    wanted = vector.to(torch.float64) * min(1.0, bound / length)
    assert torch.allclose(clipped, wanted, rtol=2e-5, atol=1e-44)


@given(vectors(finite=True), BOUNDS)
def test_a_vector_well_inside_the_ball_is_unchanged(vector: Tensor, bound: float) -> None:
    if norm_of(vector) <= bound * (CLIP_MARGIN - 1e-9):
        assert torch.equal(clip(vector, bound), vector)


@given(vectors(finite=True), BOUNDS)
def test_clipping_gives_no_more_away_than_the_margin(vector: Tensor, bound: float) -> None:
    length = norm_of(vector)
    if bound < length and math.isfinite(length * length):
        assert norm_of(clip(vector, bound)) >= bound * (1 - 2e-5) - 1e-40


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e10])
def test_a_million_float32_terms_stay_within_the_bound(scale: float) -> None:
    vector = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)) * scale
    for bound in (0.1, 1.0, 3.0):
        exact = clip(vector, bound).to(torch.float64).square().sum().sqrt().item()
        assert exact <= bound


def test_rows_of_a_matrix_are_clipped_each_on_its_own() -> None:
    """A poisoned row changes no other row."""
    matrix = torch.tensor([[3.0, 4.0], [math.nan, 1.0], [0.0, 0.0], [0.3, 0.4], [math.inf, 0.0], [3e38, 3e38]])
    clipped = clip(matrix, 1.0)
    for row, alone in zip(clipped, matrix, strict=True):
        assert torch.equal(row, clip(alone, 1.0))
    assert torch.allclose(clipped[0], torch.tensor([0.6, 0.8]), rtol=2e-5)
    assert torch.equal(clipped[3], matrix[3])
    assert torch.equal(clipped[[1, 2, 4]], torch.zeros(3, 2))
    assert clipped[5].norm() > 0.99


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(1e-6, 1e6)), min_size=1, max_size=8))
def test_each_norm_is_brought_within_its_own_bound(pairs: list[tuple[float, float]]) -> None:
    norms, bounds = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    factors = clip_factor(norms, bounds)
    assert (factors * norms <= bounds).all()
    assert ((factors > 0) & (factors <= 1)).all()
    for norm, bound, factor in zip(norms.tolist(), bounds.tolist(), factors.tolist(), strict=True):
        alone = clip_factor(torch.tensor(norm, dtype=torch.float64), bound).item()
        assert factor == pytest.approx(alone, rel=1e-12)
        if norm <= bound * CLIP_MARGIN:
            assert factor == 1.0
        else:
            assert factor == pytest.approx(bound / norm, rel=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_factor_is_zero_where_a_norm_is_not_finite_and_one_where_it_is_zero(dtype: torch.dtype) -> None:
    norms = torch.tensor([math.nan, math.inf, 0.0, torch.finfo(dtype).smallest_normal / 4], dtype=dtype)
    bounds = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype)
    assert clip_factor(norms, bounds).tolist() == [0.0, 0.0, 1.0, 1.0]
