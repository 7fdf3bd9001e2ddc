"""Smoothing the aggregate."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from dpfl.core.types import (
    Aggregate,
    Metrics,
)
from dpfl.plugs.base import Plug


class Denoiser(Plug):
    """Smooths the aggregate (Laplacian smoothing, the low-rank mean).

    Laws: pure, keeps the length, finite in gives finite out. A ``linear`` one acts on noise as it
    does on the rest, so that what it leaves of the noise can be told.
    """

    linear: ClassVar[bool] = False

    def __call__(self, aggregate: Aggregate) -> tuple[Tensor, Metrics]:
        """Return the smoothed vector, and what a person would ask about."""
        raise NotImplementedError
