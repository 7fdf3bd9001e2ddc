"""Client stages that more than one paper uses: clip a whole update, add Gaussian noise to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from dpfl.core import linalg
from dpfl.core.errors import ConfigurationError
from dpfl.core.random import SecretRng
from dpfl.core.types import Shared, Terms, Who
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

    def client_rows(self, rows: Tensor, shared: Shared) -> Tensor:
        """Clip every row on its own."""
        return linalg.clip(rows, self.clip)

    def client(self, x: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        """Clip."""
        return linalg.clip(x, self.clip)

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """The bound shrinks, unless there is noise already."""
        return exposure.clipped(self.clip)


@dataclass(frozen=True, kw_only=True)
class GaussianNoise(Stage):
    """Add noise of std ``noise_multiplier`` x ``clip`` to every coordinate, the client's own protection.

    ``distributed``: only a share of it, so that the shares of all drawn clients, less the ``tolerated_dropouts``, add up to
    that std. A multiplier left out is settled at enrolment, from the smallest budget anyone claims.
    """

    noise_multiplier: float | None
    clip: float
    distributed: bool = False
    tolerated_dropouts: int = 0
    linear: ClassVar[bool] = True
    makes_noise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        multiplier = 0.0 if self.noise_multiplier is None else self.noise_multiplier
        if not (math.isfinite(multiplier * self.clip) and multiplier >= 0 and self.clip > 0):
            raise ConfigurationError(
                "gaussian noise",
                f"noise_multiplier = {self.noise_multiplier}, clip = {self.clip}",
                "give positive numbers",
            )
        if self.tolerated_dropouts < 0:
            raise ConfigurationError(
                "gaussian noise", f"tolerated_dropouts = {self.tolerated_dropouts}", "give 0 or a number of clients"
            )

    @property
    def shares_noise(self) -> bool:
        """A share is not enough for anyone alone."""
        return self.distributed

    def settled(self, terms: Terms) -> Self:
        """Take the noise level that was agreed on."""
        return self if self.noise_multiplier is not None else replace(self, noise_multiplier=terms.noise_multiplier)

    def std(self, drawn: int) -> float:
        """Standard deviation of what one of ``drawn`` clients adds."""
        if self.noise_multiplier is None:
            raise ConfigurationError("gaussian noise", "its multiplier was left open", "enrol first, or give a number")
        shares = max(1, drawn - self.tolerated_dropouts) if self.distributed else 1
        return self.noise_multiplier * self.clip / math.sqrt(shares)

    def client(self, x: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        """Add noise."""
        return x + self.std(who.drawn) * rng.normal_(torch.empty_like(x))

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """Variances add."""
        return exposure.noised(self.std(drawn))
