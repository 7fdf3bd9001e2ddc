"""How much each row counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from dpfl.core.errors import ConfigurationError
from dpfl.core.types import (
    Metrics,
    PlugState,
    Rows,
    Terms,
    Total,
)
from dpfl.plugs.base import Plug

TRUE_NOISE = "true_noise/"
"""Under this prefix a simulator, and nobody else, tells weights that ask for it each client's true
noise.
"""


class Weights(Plug):
    """One weight per client.

    Laws: finite, non-negative; unless ``constant``, they sum to one; permuting clients permutes
    weights. ``constant`` weights depend on nothing but the terms, so that a bill may rest on them.
    ``needs_rows`` refuses a summing channel.
    """

    needs_rows: ClassVar[bool]
    constant: ClassVar[bool]

    def __call__(
        self, state: PlugState, received: Rows | Total, round_: int
    ) -> tuple[Tensor, PlugState, Metrics]:
        """Return the weights, the next state, and what a person would ask about."""
        raise NotImplementedError

    def value(self, terms: Terms) -> float:
        """Return the constant weight; only where ``constant``."""
        raise NotImplementedError

    @property
    def needs_true_noise(self) -> bool:
        """Whether the weights know the clients' true noise: in a simulation only, for comparison."""
        return False


def _number(value: float) -> float:
    """Return a claimed value if it is a positive number that a double can hold, else 0."""
    try:
        return float(value) if math.isfinite(value) and value > 0 else 0.0
    except OverflowError:  # an integer of hundreds of digits
        return 0.0


def _shares(values: Sequence[float]) -> Tensor:
    """Normalise claimed values; a claim that is no positive number weighs nothing, and if none is,
    all weigh alike.

    >>> _shares([1.0, 3.0, float("nan"), -2.0])
    tensor([0.2500, 0.7500, 0.0000, 0.0000])
    """
    usable = [_number(value) for value in values]
    if not any(usable):
        usable = [1.0] * len(values)
    weights = torch.tensor(usable, dtype=torch.float64)
    weights = weights / weights.max()  # before the sum, which could overflow
    return (weights / weights.sum()).to(torch.float32)


@dataclass(frozen=True, kw_only=True)
class UniformWeights(Weights):
    """1 / (number that arrived): the plain mean."""

    needs_rows: ClassVar[bool] = False
    constant: ClassVar[bool] = False

    def __call__(
        self, state: PlugState, received: Rows | Total, round_: int
    ) -> tuple[Tensor, PlugState, Metrics]:
        """Return equal weights."""
        return _shares([1.0] * len(received.cohort)), state, {}


@dataclass(frozen=True, kw_only=True)
class ExampleWeights(Weights):
    """Proportional to the claimed number of records (DPFedAvg)."""

    needs_rows: ClassVar[bool] = True
    constant: ClassVar[bool] = False

    def __call__(
        self, state: PlugState, received: Rows | Total, round_: int
    ) -> tuple[Tensor, PlugState, Metrics]:
        """Return examples_i / sum over the cohort."""
        cohort = received.cohort
        return _shares([cohort.claims[client].examples for client in cohort.ids]), state, {}


@dataclass(frozen=True, kw_only=True)
class EpsilonWeights(Weights):
    """Proportional to the claimed epsilon (WeiAvg, PFA). A lie moves the model, never anyone's
    bill.
    """

    needs_rows: ClassVar[bool] = True
    constant: ClassVar[bool] = False

    def __call__(
        self, state: PlugState, received: Rows | Total, round_: int
    ) -> tuple[Tensor, PlugState, Metrics]:
        """Return epsilon_i / sum over the cohort."""
        cohort = received.cohort
        return _shares([cohort.claims[client].epsilon for client in cohort.ids]), state, {}


@dataclass(frozen=True, kw_only=True)
class ExpectedCohortWeights(Weights):
    """1 / (expected cohort size), whoever arrives: the fixed, public denominator that noise on a
    sum needs.

    Left out, the size is settled at enrolment: sampling rate x population.
    """

    expected_cohort: float | None = None
    needs_rows: ClassVar[bool] = False
    constant: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.expected_cohort is not None and not (
            math.isfinite(self.expected_cohort) and self.expected_cohort > 0
        ):
            raise ConfigurationError(
                "weights", f"expected_cohort = {self.expected_cohort}", "give a positive number"
            )

    def resolve(self, terms: Terms) -> Self:
        """Take the size that was agreed on."""
        return (
            self
            if self.expected_cohort is not None
            else replace(self, expected_cohort=terms.expected_cohort)
        )

    def __call__(
        self, state: PlugState, received: Rows | Total, round_: int
    ) -> tuple[Tensor, PlugState, Metrics]:
        """Return the constant."""
        if self.expected_cohort is None:
            raise ConfigurationError(
                "weights", "the expected cohort was left open", "enrol first, or give a number"
            )
        return torch.full((len(received.cohort),), 1 / self.expected_cohort), state, {}

    def value(self, terms: Terms) -> float:
        """Return the constant."""
        return 1 / (self.expected_cohort or terms.expected_cohort)
