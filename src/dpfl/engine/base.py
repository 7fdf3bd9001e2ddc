"""What an engine is given and what it promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from dpfl.core.layout import Layout
from dpfl.core.random import SecretRng
from dpfl.core.types import (
    Phase,
)
from dpfl.data.inputs import NUMBERS, Inputs


@dataclass(frozen=True, kw_only=True)
class Job:
    """One client's local work: where it starts, its phases, its data and how to read them, its
    secret generator.
    """

    client: str
    start: Tensor
    phases: tuple[Phase, ...]
    features: Tensor
    labels: Tensor
    rng: SecretRng
    inputs: Inputs = NUMBERS


@runtime_checkable
class Engine(Protocol):
    """Runs phases.

    Laws: the result depends on the jobs only, not on how many workers there are; every engine
    agrees with ``one_by_one`` to 5e-5 relative error of the update with noise off, and in
    distribution with noise on.
    """

    def blocks(self, plans: Sequence[tuple[Phase, ...]]) -> list[list[int]]:
        """Group clients into blocks that one worker takes whole; a pure function of the plans in
        canonical order.
        """
        ...

    def run(self, model: nn.Module, layout: Layout, jobs: Sequence[Job]) -> list[Tensor]:
        """Return each client's model after its work, in the order of the jobs."""
        ...
