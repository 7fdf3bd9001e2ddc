"""Client stages that more than one paper uses: clip a whole update, add Gaussian noise to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dpfl.core import linalg
from dpfl.core.errors import ConfigurationError
from dpfl.core.random import SecretRng
from dpfl.core.types import Shared, Who
from dpfl.privacy.exposure import Exposure
from dpfl.protocols import Stage


@dataclass(frozen=True, kw_only=True)
class Clip(Stage):
    """Scale the whole update, all tensors jointly, into a ball; a non-finite update becomes zero."""

    clip: float
    linear: ClassVar[bool] = True  # the server half does nothing

    def __post_init__(self) -> None:
        if not (math.isfinite(self.clip) and self.clip > 0):
            raise ConfigurationError("clip", f"{self.clip} is not a positive number", "give a clip above 0")

    def client(self, x: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        """Clip."""
        return linalg.clip(x, self.clip)

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """The bound shrinks, unless there is noise already."""
        return exposure.clipped(self.clip)


@dataclass(frozen=True, kw_only=True)
class GaussianNoise(Stage):
    """Add noise of std ``noise_multiplier`` x ``clip`` to every coordinate, the client's own protection."""

    noise_multiplier: float
    clip: float
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.std) and self.noise_multiplier >= 0 and self.clip > 0):
            raise ConfigurationError(
                "gaussian noise",
                f"noise_multiplier = {self.noise_multiplier}, clip = {self.clip}",
                "give positive numbers",
            )

    @property
    def std(self) -> float:
        """Standard deviation of what is added."""
        return self.noise_multiplier * self.clip

    def client(self, x: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        """Add noise."""
        return x + self.std * rng.normal_(torch.empty_like(x))

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """Variances add."""
        return exposure.noised(self.std)
