"""Noise on the sum, by a trusted server, and the step of the global model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dpfl.core.errors import ConfigurationError
from dpfl.core.grid import Grid
from dpfl.core.random import SecretRng
from dpfl.core.types import Terms


@dataclass(frozen=True, kw_only=True)
class CentralNoise:
    """Gaussian noise of std ``noise_multiplier`` x (the bound of one client's contribution), on a
    grid, on the sum.

    The bound is asked of the exposure, that is of the object that clips: noise and sensitivity
    cannot drift apart. A multiplier left out is settled at enrolment, from the smallest budget
    anyone claims.
    """

    noise_multiplier: float | None
    makes_noise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        multiplier = self.noise_multiplier
        if multiplier is not None and not (multiplier > 0 and math.isfinite(multiplier)):
            raise ConfigurationError(
                "central noise",
                f"noise_multiplier = {self.noise_multiplier}",
                "give a positive number",
            )

    def resolve(self, terms: Terms) -> CentralNoise:
        """Take the noise level that was agreed on."""
        return (
            self
            if self.noise_multiplier is not None
            else CentralNoise(noise_multiplier=terms.noise_multiplier)
        )

    def std(self, bound: float) -> float:
        """Standard deviation for contributions of at most ``bound``."""
        if self.noise_multiplier is None:
            raise ConfigurationError(
                "central noise", "its multiplier was left open", "enrol first, or give a number"
            )
        return self.noise_multiplier * bound

    def add(self, total: Tensor, bound: float, rng: SecretRng) -> Tensor:
        """Round the sum of all contributions onto the grid and add the noise."""
        return Grid.of(self.std(bound)).noised(total, rng)
