"""Smoothing the aggregate (Laplacian smoothing, the low-rank mean)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from dpfl.core.types import Aggregate, Metrics, PlugState
from dpfl.plugs.base import Plug


class Denoiser(Plug):
    """Smooths the aggregate.

    Laws: pure, keeps the length, finite in gives finite out. A ``linear`` one acts on noise as it
    does on the rest, so that what it leaves of the noise can be reported.
    """

    linear: ClassVar[bool] = False

    def __call__(self, state: PlugState, aggregate: Aggregate) -> tuple[Tensor, PlugState, Metrics]:
        """Return the smoothed vector, the next state, and metrics for the operator."""
        raise NotImplementedError
