"""The step of the global model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from dpfl.core.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Step:
    """model <- model + lr x aggregate."""

    lr: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ConfigurationError(
                "server step", f"lr = {self.lr}", "give a positive learning rate"
            )

    def __call__(self, model: Tensor, aggregate: Tensor) -> Tensor:
        """Return the next model."""
        return model + self.lr * aggregate
