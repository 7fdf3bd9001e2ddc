"""How much each row counts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dpfl.core.checks import check, positive
from dpfl.core.layout import Layout
from dpfl.core.types import Claims, Cohort, PlugOutput, PlugState, Rows, Terms, Total
from dpfl.plugs.base import Plug, planned

_SUM_TOLERANCE = 1e-3  # float32 weights of many clients

TRUE_NOISE = "true_noise/"
"""Under this prefix a simulator, and nobody else, tells weights that ask for it each client's true
noise.
"""


class Weights(Plug):
    """One weight per client.

    Laws: finite, non-negative; unless ``constant``, they sum to one; permuting clients permutes
    weights. ``constant`` weights depend on nothing but the terms, so that a privacy cost may
    rest on them. ``needs_rows`` refuses a summing channel.
    """

    needs_rows: ClassVar[bool] = True
    constant: ClassVar[bool] = False

    def __call__(self, state: PlugState, received: Rows | Total, round_: int) -> PlugOutput:
        """Return the weights, the next state, and metrics for the operator."""
        raise NotImplementedError

    def value(self, terms: Terms) -> float:
        """Return the constant weight; only where ``constant``."""
        raise NotImplementedError

    @property
    def needs_true_noise(self) -> bool:
        """Whether the weights know the clients' true noise: in a simulation only, for
        comparison.
        """
        return False

    def expected_weights(
        self, claims: Mapping[str, Claims], noise: Mapping[str, float], layout: Layout
    ) -> dict[str, float]:
        """The weights these clients would get, by claims and by the variance of their noise.

        The default asks the rule itself about rows of zeros, which suits rules that look at claims
        only.
        """
        cohort = Cohort.of(claims)
        nothing = torch.zeros(1).expand(len(cohort), layout.size)
        rows = Rows(matrix=nothing, origin=nothing[0], cohort=cohort, layout=layout)
        return dict(zip(cohort.ids, self({}, rows, 0)[0].tolist(), strict=True))


class UniformWeights(Weights):
    """1 / (number that arrived): the plain mean."""

    needs_rows: ClassVar[bool] = False

    def __call__(self, state: PlugState, received: Rows | Total, round_: int) -> PlugOutput:
        """Return equal weights."""
        return shares([1.0] * len(received.cohort)), state, {}


class ClaimWeights(Weights):
    """Proportional to something that clients claim.

    A false claim moves the model, never what anyone is charged.
    """

    claim: ClassVar[str]

    def __call__(self, state: PlugState, received: Rows | Total, round_: int) -> PlugOutput:
        """Return claim_i / sum over the cohort."""
        claims = [received.cohort.claims[client] for client in received.cohort.ids]
        return shares([getattr(one, self.claim) for one in claims]), state, {}


class ExampleWeights(ClaimWeights):
    """Proportional to the claimed number of records (DPFedAvg)."""

    claim = "examples"


class EpsilonWeights(ClaimWeights):
    """Proportional to the claimed epsilon (WeiAvg, PFA)."""

    claim = "epsilon"


@dataclass(frozen=True, kw_only=True)
class ExpectedCohortWeights(Weights):
    """1 / (expected cohort size), whoever arrives: the fixed, public denominator that noise on a
    sum needs.

    Left out, the size is that of the terms: sampling rate x population.
    """

    expected_cohort: float | None = None
    needs_rows: ClassVar[bool] = False
    constant: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.expected_cohort is not None:
            positive("weights", expected_cohort=self.expected_cohort)

    def __call__(self, state: PlugState, received: Rows | Total, round_: int) -> PlugOutput:
        """Return the constant for everyone."""
        weight = 1 / planned(self.expected_cohort, "weights")
        return torch.full((len(received.cohort),), weight), state, {}

    def value(self, terms: Terms) -> float:
        """Return the constant."""
        return 1 / (self.expected_cohort or terms.expected_cohort)


def checked(rule: Weights, found: Tensor, clients: int) -> Tensor:
    """Return the weights that a rule found, or refuse those that break its laws."""
    where, total = f"weights {type(rule).__name__}", float(found.sum())
    good = found.shape == (clients,) and bool((torch.isfinite(found) & (found >= 0)).all())
    problem = "are not one number of at least 0 per client"
    check(good, where, problem, "return a tensor with one finite weight for each client")
    remedy = "divide them by their sum, as dpfl.plugs.weights.shares does, or make them constant"
    whole = rule.constant or not clients or abs(total - 1) < _SUM_TOLERANCE
    check(whole, where, f"sum to {total:g}, not to 1", remedy)
    return found


def shares(values: Sequence[float]) -> Tensor:
    """Normalise claimed values to sum to one.

    A claim that is not a positive number weighs nothing, and if none is, all weigh alike.

    >>> shares([1.0, 3.0, float("nan"), -2.0])
    tensor([0.2500, 0.7500, 0.0000, 0.0000])
    """
    usable = [_number(value) for value in values]
    if not any(usable):
        usable = [1.0] * len(values)
    weights = torch.tensor(usable, dtype=torch.float64)
    weights = weights / weights.max()  # before the sum, which could overflow
    return (weights / weights.sum()).to(torch.float32)


def _number(value: float) -> float:
    """Return a claimed value if it is a positive number that a double can hold, else 0."""
    try:
        return float(value) if math.isfinite(value) and value > 0 else 0.0
    except OverflowError:  # an integer of hundreds of digits
        return 0.0
