"""Noise on the sum of all contributions, added by a trusted server."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from dpfl.core.checks import positive
from dpfl.core.grid import Grid
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import PlugOutput, PlugState, Terms
from dpfl.plugs.base import Plug, chosen_noise
from dpfl.plugs.figures import FigureSpec, by_round


@dataclass(frozen=True, kw_only=True)
class CentralNoise(Plug):
    """Gaussian noise of std ``noise_multiplier`` x (the bound of one client's contribution), on a
    grid, on the sum.

    The bound is asked of the exposure, that is of the object that clips: noise and sensitivity
    cannot drift apart. A multiplier left out is planned at enrolment, from the smallest budget
    anyone claims.

    Laws: at a sum of zero, what is added has the std that ``std`` states; it comes from ``rng`` and
    from nowhere else; the length stays.
    """

    noise_multiplier: float | None
    makes_noise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.noise_multiplier is not None:
            positive("central noise", noise_multiplier=self.noise_multiplier)

    def resolve(self, terms: Terms) -> Self:
        """Take the noise level of the terms."""
        open_ = self.noise_multiplier is None
        return replace(self, noise_multiplier=terms.noise_multiplier) if open_ else self

    def std(self, bound: float) -> float:
        """Standard deviation for contributions of at most ``bound``."""
        return chosen_noise(self.noise_multiplier, "central noise") * bound

    def noise_in_sum(self, ids: tuple[str, ...], terms: Terms, seed: PublicSeed) -> float | None:
        """Return the multiplier: it is about the sum already."""
        return self.noise_multiplier

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
