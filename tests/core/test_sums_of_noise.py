"""The noise of a secure sum: rounded shares add up to one rounded Gaussian, as the proof says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import ndtr


def share(std: float, reach: int) -> np.ndarray:
    """The law of round(N(0, std^2)) on -reach..reach."""
    k = np.arange(-reach, reach + 1)
    # From the nearer tail, where differences keep their digits.
    low, high = (np.abs(k) - 0.5) / std, (np.abs(k) + 0.5) / std
    return ndtr(-low) - ndtr(-high)


def one_rounded_gaussian(std: float, shares: int, reach: int) -> np.ndarray:
    """The law of round(N(0, shares std^2) + U_1 + ... + U_(shares - 1)), by quadrature over U."""
    k = np.arange(-reach, reach + 1)
    fine = 200
    u = (np.arange(fine) + 0.5) / fine - 0.5
    law = np.ones(1)
    for _ in range(shares):  # rounding adds one more uniform to the density
        law = np.convolve(law, np.full(fine, 1 / fine))
    offsets = np.linspace(shares * u[0], shares * u[-1], len(law))
    wide = math.sqrt(shares) * std
    density = np.exp(-(((k[:, None] - offsets) / wide) ** 2) / 2) / wide / math.sqrt(2 * math.pi)
    return density @ law


@pytest.mark.parametrize("shares", [2, 3, 5])
@pytest.mark.parametrize("std", [0.6, 0.8, 1.0])
def test_the_law_of_a_sum_of_shares_is_the_one_proven(std: float, shares: int) -> None:
    reach = 12
    one = share(std, reach)
    total = one
    for _ in range(shares - 1):
        total = np.convolve(total, one)
    middle = len(total) // 2
    found = total[middle - 3 : middle + 4]
    stated = one_rounded_gaussian(std, shares, 3)
    error = np.abs(found / stated - 1).max()
    bound = 3 * (shares - 1) * math.exp(-(math.pi**2) * std**2)
    quadrature = 2e-5
    assert error <= bound + quadrature
    assert std > 0.7 or error > 10 * quadrature  # the error is there, and the bound not idle
