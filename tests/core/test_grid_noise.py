"""The sampler of noise on the integers: the same numbers however it is asked, the right moments, no
structure.
"""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats

from dpfl.core.grid_noise import CELL, COUNTS, LARGEST, SCALE, GridNoise, fill_rows, ideal

KEY = bytes(range(32))


def drawn(count: int, key: bytes = KEY) -> np.ndarray:
    return fill_rows([GridNoise(key)], np.empty((1, count), np.float32))[0].astype(np.float64)


@pytest.fixture(scope="module")
def many() -> np.ndarray:
    return drawn(4_000_000, os.urandom(32))


def test_the_table_has_65536_entries() -> None:
    assert COUNTS[0] + 2 * sum(COUNTS[1:]) == 65536


@given(st.lists(st.integers(0, 40_000), min_size=1, max_size=6))
def test_the_same_numbers_however_a_request_is_split(sizes: list[int]) -> None:
    source = GridNoise(KEY)
    parts = [fill_rows([source], np.empty((1, size), np.float32))[0] for size in sizes]
    assert np.array_equal(np.concatenate(parts), drawn(sum(sizes)))


@given(st.integers(1, 7), st.integers(1, 40_000))
def test_rows_filled_together_are_rows_filled_alone(rows: int, length: int) -> None:
    keys = [bytes([i]) * 32 for i in range(rows)]
    together = fill_rows([GridNoise(key) for key in keys], np.empty((rows, length), np.float32))
    for key, row in zip(keys, together, strict=True):
        assert np.array_equal(row, drawn(length, key))


def test_other_keys_give_other_numbers() -> None:
    assert not np.array_equal(drawn(100), drawn(100, bytes(32)))


def test_all_numbers_are_whole_and_exact_in_single_precision(many: np.ndarray) -> None:
    assert np.array_equal(many, np.rint(many))
    assert np.abs(many).max() <= LARGEST < 2**24


def test_moments_have_power(many: np.ndarray) -> None:
    """Eight moments of a standard normal; the same check rejects a scale that is 0.3 % off."""
    expected, variance = [0, 1, 0, 3, 0, 15, 0, 105], [1, 2, 15, 96, 945, 10170, 135135, 2016000]

    def worst(z: np.ndarray) -> float:
        scores = [
            (np.mean(z ** (k + 1)) - expected[k]) / math.sqrt(variance[k] / len(z))
            for k in range(8)
        ]
        return max(map(abs, scores))

    assert worst(many / SCALE) < 5
    assert worst(many / SCALE * 1.003) > 5
    assert worst(many / SCALE * 0.997) > 5


def test_single_integers_near_zero_come_as_often_as_they_should(many: np.ndarray) -> None:
    """Cells of 64 integers around zero, where the fast path's pieces meet."""
    edges = np.arange(-2 * CELL, 2 * CELL + 1, 64)
    counts, _ = np.histogram(many, bins=edges - 0.5)
    expected = np.array(
        [ideal(np.arange(a, a + 64).astype(float)).sum() for a in edges[:-1]]
    ) * len(many)
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert stats.chi2.sf(chi, len(expected)) > 1e-6


def test_the_distribution_to_five_standard_deviations(many: np.ndarray) -> None:
    edges = np.linspace(-5, 5, 2001)
    counts, _ = np.histogram(many / SCALE, bins=edges)
    expected = np.diff(stats.norm.cdf(edges)) * len(many)
    keep = expected > 10
    chi = float((((counts - expected) ** 2 / expected)[keep]).sum())
    assert stats.chi2.sf(chi, int(keep.sum())) > 1e-6


def test_the_tail_is_there() -> None:
    """Beyond 5.77 standard deviations torch's own float32 noise has nothing."""
    tail = 0
    source, buffer = GridNoise(os.urandom(32)), np.empty((1, 4_000_000), np.float32)
    for _ in range(10):
        tail += int((np.abs(fill_rows([source], buffer)) > 4.5 * SCALE).sum())
    expected = 4e7 * 2 * stats.norm.sf(4.5)
    assert abs(tail - expected) < 6 * math.sqrt(expected)


@pytest.mark.parametrize("lag", [1, 2, 3, 7, 64, 7850, 32767, 32768, 32769, 65536])
def test_neighbours_and_distant_numbers_are_independent(many: np.ndarray, lag: int) -> None:
    z = many / SCALE
    for series in (z, z * z - 1):
        product = series[:-lag] * series[lag:]
        assert abs(product.mean()) < 5 * product.std() / math.sqrt(len(product))


def test_rows_of_different_keys_are_uncorrelated() -> None:
    rows = (
        fill_rows(
            [GridNoise(os.urandom(32)) for _ in range(20)], np.empty((20, 50_000), np.float32)
        )
        / SCALE
    )
    correlation = rows @ rows.T / rows.shape[1]
    off = correlation[np.triu_indices(20, 1)]
    assert np.abs(off).max() < 5 / math.sqrt(rows.shape[1])
