"""Cleaning what arrived: the rows against each other, before they are weighed (PFA, FedCEO), and
the aggregate (Laplacian smoothing, the low-rank mean).
"""

from typing import ClassVar

from dpfl.core.types import Aggregate, PlugOutput, PlugState, Rows
from dpfl.plugs.base import Plug


class RowDenoiser(Plug):
    """Cleans the rows against each other.

    Laws: the matrix keeps its shape; unless ``ordered``, permuting clients permutes rows. After a
    round of which ``personal_starts`` is True each client of the cohort starts the next one from
    its own cleaned row. ``without_rows`` says what to do where a channel delivers no rows.
    """

    ordered: ClassVar[bool] = False
    without_rows: ClassVar[str] = "use a method that needs nothing but the sum of the uploads"

    def personal_starts(self, round_: int) -> bool:
        """Whether clients start the next round from their own rows."""
        return False

    def __call__(self, state: PlugState, rows: Rows, round_: int) -> PlugOutput:
        """Return the cleaned matrix, the next state, and metrics for the operator."""
        raise NotImplementedError


class Denoiser(Plug):
    """Smooths the aggregate.

    Laws: pure, keeps the length, finite in gives finite out. A ``linear`` one acts on noise as it
    does on the rest, so that what it leaves of the noise can be reported.
    """

    linear: ClassVar[bool] = False

    def __call__(self, state: PlugState, aggregate: Aggregate) -> PlugOutput:
        """Return the smoothed vector, the next state, and metrics for the operator."""
        raise NotImplementedError
