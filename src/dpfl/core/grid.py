"""The grid on which noise is added, and what rounding onto it costs.

A mechanism with a bounded sum s, a noise std and d coordinates works in steps of g = std / SCALE::

    q = round(s / g)       integers
    n = q + X              X = round(N(0, SCALE^2)), added exactly: both are integers
    released = n g         whatever follows is post-processing

*Sensitivity.* Rounding moves each of two neighbours by at most g / 2 in every coordinate: the bound
C of one unit's contribution becomes C + g sqrt(d) for each separately rounded part, and grows by
what adding up in floating point may lose. The multiplier that is charged is std over that larger
bound (:func:`effective_multiplier`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dpfl.core.checks import check
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.grid_noise import LARGEST, SCALE

if TYPE_CHECKING:  # accounting reads the constants without torch
    from torch import Tensor


class NoiseSource(Protocol):
    """Whatever fills a tensor with integers of the law round(N(0, SCALE^2)), as SecretRng does."""

    def grid_noise_(self, out: Tensor) -> Tensor:
        """Fill a contiguous float32 tensor in place."""
        ...


SUMMANDS = 32
"""Most records whose clipped gradients are added up in single precision before rounding."""

WIDTHS = (8, 16, SUMMANDS)
"""How many records a part may hold. Powers of two: 24 records are a vector of 16 numbers and a
rest, which a processor may round differently.
"""


def part_width(batch_size: int) -> int:
    """Records of one part of a step: one of ``WIDTHS``, enough for most batches.

    It depends on nothing private: a record's place among those drawn decides its part.

    >>> [part_width(batch_size) for batch_size in (1, 8, 16, 1000)]
    [8, 16, 32, 32]
    """
    usual = batch_size + 2.5 * math.sqrt(batch_size)
    return next((width for width in WIDTHS if usual <= width), SUMMANDS)


FLOAT_SUM = 2 * SUMMANDS * (SUMMANDS + 3) * 2.0**-24
"""What a single-precision sum of so many contributions may lose, relative to the clip, for both
neighbours together.

b (b + 3) u for each (Casacuberta, Shoemate, Vadhan, Wagaman 2022), u = 2^-24.
"""

DOUBLE_SUM = 2 * 2.0**-53
"""The same for a sum of b contributions in double precision, over b (b + 3)."""

LARGEST_SUM = 1 << 30
"""Where the integers of a sum that clients add up are cut off, before noise: so that a sum of all
clients' integers has a public bound. It moves no two neighbours apart.
"""

LARGEST_RELEASE = 1 << 44
"""The same for a statistic over all records of a client: 2^24 times the noise of a share."""

_LEAST_STEP = 1e-36  # below, single precision could not hold a multiple of the step
_LARGEST_INTEGER = 2.0**52
_ON_WIRE = 2**31 - 1
_AT_ONCE = 1 << 15  # numbers that are noised at once


@dataclass(frozen=True)
class Grid:
    """Multiples of ``step``.

    >>> grid = Grid.of(2.0)
    >>> grid.step * SCALE
    2.0
    """

    step: float

    @classmethod
    def of(cls, std: float) -> Grid:
        """The grid on which noise of this standard deviation is drawn."""
        check(
            math.isfinite(std) and std / SCALE >= _LEAST_STEP,
            "noise",
            f"a standard deviation of {std:g} has no grid in single precision",
            "use a larger clip or more noise",
            PrivacyRefusal,
        )
        return cls(std / SCALE)

    def integers(self, vector: Tensor) -> Tensor:
        """Round onto the grid, in double precision.

        What the grid cannot hold is brought to its end, which moves no two neighbours apart.
        """
        steps = vector.double() / self.step
        return steps.clamp_(-_LARGEST_INTEGER, _LARGEST_INTEGER).round_()

    def noised(self, vector: Tensor, rng: NoiseSource, largest: float = _LARGEST_INTEGER) -> Tensor:
        """Round, add noise of SCALE steps, and return multiples of the step in double precision.

        Integers are brought within ``largest`` before noise is added.

        >>> import torch
        >>> from dpfl.core.random import PublicSeed, SecretRng
        >>> noisy = Grid.of(1.0).noised(torch.zeros(3), SecretRng.simulated(PublicSeed(1)))
        >>> bool((noisy * SCALE == (noisy * SCALE).round()).all())
        True
        """
        return self.noisy_integers(vector, rng, largest).mul_(self.step)

    def noisy_integers(self, vector: Tensor, rng: NoiseSource, largest: float) -> Tensor:
        """Round, bring integers within ``largest``, and add noise of SCALE steps: exact integers in
        double precision. A stretch at a time, which stays in the processor's cache.
        """
        import torch

        noise = rng.grid_noise_(torch.empty(vector.numel())).numpy()
        numbers = vector.detach().cpu().reshape(-1).numpy()
        noisy = np.empty(len(numbers))
        largest = min(largest, _LARGEST_INTEGER)
        for first in range(0, len(noisy), _AT_ONCE):
            some = slice(first, first + _AT_ONCE)
            steps = noisy[some]
            np.divide(numbers[some], self.step, out=steps, dtype=np.float64)
            np.rint(np.clip(steps, -largest, largest, out=steps), out=steps)
            np.add(steps, noise[some], out=steps)
        return torch.from_numpy(noisy).view(vector.shape).to(vector.device)

    def widening(self, numbers: int) -> float:
        """By how much rounding ``numbers`` coordinates may move two neighbours apart."""
        return self.step * math.sqrt(numbers)

    def holds(self, bound: float) -> bool:
        """Whether every noisy coordinate of a vector within ``bound`` fits into 32 bits."""
        return bound / self.step + LARGEST <= _ON_WIRE


def effective_multiplier(noise_multiplier: float, numbers: int, parts: int) -> float:
    """std over the sensitivity of a noisy sum that is rounded in ``parts``, each added up in single
    precision.

    >>> round(effective_multiplier(1.0, 7850, 2), 5)
    0.99956
    """
    widening = noise_multiplier * math.sqrt(numbers) / SCALE
    return noise_multiplier / (1 + parts * (FLOAT_SUM + widening))


def multiplier_for(effective: float, numbers: int, parts: int) -> float:
    """The noise multiplier whose effective one is at least ``effective``.

    >>> effective_multiplier(multiplier_for(1.5, 7850, 3), 7850, 3) >= 1.5
    True
    """
    lost = effective * parts * math.sqrt(numbers) / SCALE
    check(
        lost < 1,
        "noise",
        f"noise {effective:.4g} on {numbers} numbers makes the grid coarser than the clip",
        "plan fewer steps, use smaller batches or a smaller model, or raise the budget",
        PrivacyRefusal,
    )
    return effective * (1 + parts * FLOAT_SUM) / (1 - lost) * (1 + 1e-12)
