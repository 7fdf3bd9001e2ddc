"""Noise must reach as far as delta demands: a bounded support tells two neighbours apart with certainty."""

from __future__ import annotations

import numpy as np
import torch
from scipy import stats

from dpfl.core.random import PublicSeed, SecretRng


def test_noise_goes_beyond_what_24_bits_can_reach() -> None:
    """Box-Muller on 24-bit uniforms, torch's float32 way, never exceeds 5.768. 3e8 draws of a true normal exceed it
    2.4 times on average; here the tail is checked where it can be counted, and its law is compared beyond 4.5."""
    rng = SecretRng.simulated(PublicSeed(11))
    tail = []
    draws = 0
    for _ in range(60):
        block = torch.empty(1_000_000)
        values = rng.normal_(block).abs()
        tail.append(values[values > 4.0].numpy())
        draws += len(block)
    beyond = np.concatenate(tail)
    for level in (4.0, 4.5, 5.0):
        expected = draws * 2 * stats.norm.sf(level)
        assert abs((beyond > level).sum() - expected) < 5 * np.sqrt(expected)
    # Given that it is beyond 4, the excess has the normal's own tail law.
    uniform = stats.norm.sf(beyond) / stats.norm.sf(4.0)
    assert stats.kstest(uniform, "uniform").pvalue > 1e-3


def test_noise_is_drawn_in_double_precision() -> None:
    """A float32 source has at most 2^24 radii; a double one, rounded, repeats hardly ever."""
    rng = SecretRng.simulated(PublicSeed(3))
    values = rng.normal_(torch.empty(200_000, dtype=torch.float64)).numpy()
    assert len(np.unique(values)) == len(values)
    assert not np.array_equal(values, values.astype(np.float32))
    again = SecretRng.simulated(PublicSeed(3)).normal_(torch.empty(200_000))
    assert np.array_equal(again.numpy(), values.astype(np.float32))
