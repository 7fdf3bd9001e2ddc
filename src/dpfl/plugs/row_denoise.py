"""Cleaning the rows against each other, before they are weighed (PFA, FedCEO)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from dpfl.core.types import Metrics, PlugState, Rows
from dpfl.plugs.base import Plug


class RowDenoiser(Plug):
    """Cleans the rows against each other.

    Laws: the matrix keeps its shape; unless ``ordered``, permuting clients permutes rows. After a
    round of which ``personal_starts`` is True each client of the cohort starts the next one from its
    own cleaned row.
    """

    ordered: ClassVar[bool]

    def personal_starts(self, round_: int) -> bool:
        """Whether clients start the next round from their own rows."""
        return False

    def __call__(
        self, state: PlugState, rows: Rows, round_: int
    ) -> tuple[Tensor, PlugState, Metrics]:
        """Return the cleaned matrix, the next state, and metrics for the operator."""
        raise NotImplementedError
