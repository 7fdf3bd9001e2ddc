"""Noise on the sum of all contributions, added by a trusted server."""

import math

import torch
from torch import Tensor

from dpfl.core.grid import Grid
from dpfl.core.random import SecretRng
from dpfl.core.types import PlugOutput, PlugState
from dpfl.plugs.base import FigureSpec, NoiseMaker, by_round


class CentralNoise(NoiseMaker):
    """Gaussian noise of std ``noise_multiplier`` x (the bound of one client's contribution), on a
    grid, on the sum.

    The bound is asked of the exposure, that is of the object that clips: noise and sensitivity
    cannot drift apart.

    Laws: at a sum of zero, what is added has the std that ``std`` states; it comes from ``rng`` and
    from nowhere else; the length stays.
    """

    def std(self, bound: float) -> float:
        """Standard deviation for contributions of at most ``bound``."""
        return self.planned_noise * bound

    def add(self, state: PlugState, total: Tensor, bound: float, rng: SecretRng) -> PlugOutput:
        """Round the sum of all contributions onto the grid and add the noise."""
        std = self.std(bound)
        noisy = Grid.of(std).noised(total, rng)
        norm = float(torch.linalg.vector_norm(noisy - total))
        return noisy, state, {"expected_norm": std * math.sqrt(len(total)), "norm": norm}

    def figures(self) -> tuple[FigureSpec, ...]:
        """Show the noise beside the update it hides."""
        metrics = {"norm": "noise", "norm_after": "noise after smoothing", "update_norm": "update"}
        caption = "Where the update is no longer than the noise in it, little is learned."
        return (by_round("central-noise", "noise and update", "norm", metrics, caption),)
