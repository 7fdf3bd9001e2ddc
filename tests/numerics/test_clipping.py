"""A clipped vector lies within its bound, whatever went in."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, strategies as st
from torch import Tensor

from dpfl.numerics.clipping import CLIP_MARGIN, clip, clip_factor, squared_norms

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
    matrix = torch.tensor(
        [[3.0, 4.0], [math.nan, 1.0], [0.0, 0.0], [0.3, 0.4], [math.inf, 0.0], [3e38, 3e38]]
    )
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
def test_the_factor_is_zero_where_a_norm_is_not_finite_and_one_where_it_is_zero(
    dtype: torch.dtype,
) -> None:
    norms = torch.tensor(
        [math.nan, math.inf, 0.0, torch.finfo(dtype).smallest_normal / 4], dtype=dtype
    )
    bounds = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype)
    assert clip_factor(norms, bounds).tolist() == [0.0, 0.0, 1.0, 1.0]


# ---- squared norms -------------------------------------------------------------------------------

LENGTHS = [0, 1, 2, 255, 256, 257, 511, 512, 513, 1000, 70_000]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(x: Tensor, *, within: float = 1e-5) -> None:
    """To the squares added up in double precision, every one on its own."""
    found, exact = squared_norms(x), x.double().square().sum(dim=-1)
    assert found.dtype == torch.float64 and found.shape == exact.shape
    assert bool(((found - exact).abs() <= within * exact).all())


@pytest.mark.parametrize(
    "scale",
    [1e-30, 1e-22, 1e-21, 1e-20, 1e-10, 1e-9, 1e-3, 1.0, 1e10, 1e18, 1e19, 1e20, 1e30, 1e37],
)
@pytest.mark.parametrize("length", LENGTHS)
def test_squared_norms_are_those_of_double_precision_at_every_length_and_scale(
    length: int, scale: float
) -> None:
    close(normal(3, length) * scale)
    close(torch.full((3, length), scale))


@given(
    st.sampled_from(LENGTHS[:-1]),
    st.lists(st.tuples(st.integers(0, 999), st.sampled_from([0.0, 1e-45, 1e-38, 1e-23, 1e-19, 1e-9, 1.0, 1e9, 1e19, 1e38]))),
)  # fmt: skip
def test_entries_of_any_size_may_stand_side_by_side(
    length: int, entries: list[tuple[int, float]]
) -> None:
    x = torch.zeros(2, length)
    x[1] = 1e-4
    for place, value in entries:
        if place < length:
            x[:, place] = value
    close(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("length", [3, 256, 1000])
def test_squared_norms_of_other_precisions_are_taken_in_double(
    length: int, dtype: torch.dtype
) -> None:
    close(normal(4, length).to(dtype), within=1e-12)


@pytest.mark.parametrize("length", [256, 257, 1024, 70_000])
@pytest.mark.parametrize("small", [1e-4, 2.4e-4, 2.44e-4, 2.5e-4, 1e-3])
@pytest.mark.parametrize("large", [[0], [255], [7, 100, 200], list(range(0, 256, 16))], ids=str)
def test_many_small_entries_beside_few_large_ones_are_not_lost(
    length: int, small: float, large: list[int]
) -> None:
    """Just below the rounding of one, where adding them one by one to it would change nothing."""
    x = torch.full((3, length), small)
    x[1] = -small
    x[:, large] = 1.0
    close(x)


@given(st.integers(0, 10**6), st.sampled_from([256, 300, 1000]), st.integers(1, 4))
def test_squared_norms_of_numbers_of_every_size_at_once(
    seed: int, length: int, spread: int
) -> None:
    close(
        normal(4, length, seed=seed)
        * torch.pow(10.0, spread * normal(4, length, seed=seed + 1).clamp(-4, 4))
    )


@pytest.mark.parametrize("length", [100, 256, 1000])
@pytest.mark.parametrize("odd", [0.0, 1e-30, 1e30, 3e38, math.nan, math.inf, -math.inf])
def test_an_odd_row_changes_no_bit_of_the_others(length: int, odd: float) -> None:
    x = normal(5, length)
    before = squared_norms(x)
    x[2] = odd
    after = squared_norms(x)
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(after[others], before[others])
    exact = length * odd**2
    assert after[2].item() == pytest.approx(exact, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("place", [0, 255, 256, 599])
@pytest.mark.parametrize("bad", BAD)
def test_one_entry_that_is_no_finite_number_shows_wherever_it_stands(
    place: int, bad: float
) -> None:
    x = normal(3, 600)
    x[1, place] = bad
    found = squared_norms(x)
    assert torch.isfinite(found).tolist() == [True, False, True]
    assert math.isnan(found[1]) == math.isnan(bad)


def test_what_is_not_a_number_is_not_hidden_by_an_infinity() -> None:
    x = normal(1, 600)
    x[0, 3], x[0, 400] = math.inf, math.nan
    assert math.isnan(squared_norms(x)[0])


@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("length", [0, 5, 256, 600])
def test_squared_norms_keep_leading_axes(lead: tuple[int, ...], length: int) -> None:
    x = normal(*lead, length)
    close(x)
    if lead and length:
        x[(-1,) * len(lead)] = 1e30
        close(x)
        rows = squared_norms(x.reshape(-1, length))
        assert torch.equal(squared_norms(x).flatten(), rows)
    if length:
        close(x * 1e-30)


@pytest.mark.parametrize("lead", [(0,), (2, 0)])
def test_no_rows_have_no_squared_norms(lead: tuple[int, ...]) -> None:
    assert squared_norms(torch.zeros(*lead, 600)).shape == lead


@pytest.mark.parametrize("small", [1e-4, 2.4e-4, 1.0])
def test_norms_hold_wherever_numbers_lie_in_memory(small: float) -> None:
    """Strided rows are added up one by one: 8e-6 of the norm is lost at most, twice that of its
    square.
    """
    x = torch.full((600, 5), small)
    x[0] = x[300] = 1.0
    views = [
        x.T,
        x.T.contiguous(),
        torch.stack([x.T, x.T], dim=2)[..., 0],
        x.T[:, torch.arange(600)],
    ]
    for view in views:
        close(view, within=1.6e-5)
    close(torch.full((1, 1), small).expand(4, 600))


def test_squared_norms_leave_what_they_are_given_alone() -> None:
    x = torch.cat([normal(2, 600), torch.full((1, 600), 1e30), torch.zeros(1, 600)])
    before = x.clone()
    squared_norms(x)
    assert torch.equal(x, before)
