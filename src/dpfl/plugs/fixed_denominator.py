"""A public denominator for sums to which clients add what their own budgets allow."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from dpfl.core.checks import check
from dpfl.core.errors import PeerError
from dpfl.core.types import PlugOutput, PlugState, Rows, Terms, Total
from dpfl.plugs.base import planned
from dpfl.plugs.weights import Weights


@dataclass(frozen=True, kw_only=True)
class FixedDenominator(Weights):
    """1 / (a public number that claims settle), whoever arrives: clients scale what they add.

    Left out, ``denominator`` is that of the terms.
    """

    denominator: float | None = None
    needs_rows: ClassVar[bool] = False
    constant: ClassVar[bool] = True

    def check_terms(self, terms: Terms, client: str) -> None:
        """Refuse a denominator that nothing can be divided by."""
        check(
            math.isfinite(terms.denominator) and terms.denominator > 0,
            "terms",
            f"hold a denominator of {terms.denominator}",
            "enrol again",
            PeerError,
        )

    def __call__(self, state: PlugState, received: Rows | Total, round_: int) -> PlugOutput:
        """Return the constant for everyone."""
        weight = 1 / planned(self.denominator, "weights")
        return torch.full((len(received.cohort),), weight), state, {}

    def value(self, terms: Terms) -> float:
        """Return what the sum is multiplied by."""
        return 1 / (terms.denominator or 1.0)
