"""How much each row counts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dpfl.core.checks import check, positive
from dpfl.core.errors import PeerError
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

    def check_terms(self, terms: Terms, client: str) -> None:
        """Refuse terms under which this client could not weigh what it sends."""

    def by_clients(self) -> "EnrolledWeights | None":
        """Return the rule as constants with which clients weigh what they send; None if they would
        have to know of others' uploads.
        """
        return None

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

    def by_clients(self) -> "EnrolledWeights | None":
        """Return 1 / population for everyone."""
        return EnrolledWeights()


class ClaimWeights(Weights):
    """Proportional to something that clients claim.

    A false claim moves the model, never what anyone is charged.
    """

    claim: ClassVar[str]

    def __call__(self, state: PlugState, received: Rows | Total, round_: int) -> PlugOutput:
        """Return claim_i / sum over the cohort."""
        claims = [received.cohort.claims[client] for client in received.cohort.ids]
        return shares([getattr(one, self.claim) for one in claims]), state, {}

    def by_clients(self) -> "EnrolledWeights | None":
        """Return claim_i / sum over the population."""
        return EnrolledWeights(claim=self.claim)


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


@dataclass(frozen=True, kw_only=True)
class EnrolledWeights(Weights):
    """Constants that are settled at enrolment, and by which clients weigh what they send.

    In proportion to a ``claim`` ("epsilon" or "examples") over all enrolled clients; without one
    all weigh alike. A claim that is not a positive number weighs nothing. The server adds up, and
    multiplies the sum by population / cohort where only some are drawn. A weight scales no more
    than the client's own contribution, and what it costs is accounted for with it.
    """

    claim: str | None = None
    population: int | None = None
    expected_cohort: float | None = None
    needs_rows: ClassVar[bool] = False
    constant: ClassVar[bool] = True

    def resolve_terms(self, terms: Terms, claims: Mapping[str, Claims]) -> Terms:
        """Settle every client's weight."""
        return replace(terms, weights=tuple(self._constants(claims).items()))

    def check_terms(self, terms: Terms, client: str) -> None:
        """Refuse weights that are not shares of one, or hold none of the client."""
        own_weight(terms.weights, client)

    def _constants(self, claims: Mapping[str, Claims]) -> dict[str, float]:
        ids = sorted(claims)
        given = [getattr(claims[c], self.claim) if self.claim else 1.0 for c in ids]
        return dict(zip(ids, _normalised(given).tolist(), strict=True))

    def __call__(self, state: PlugState, received: Rows | Total, round_: int) -> PlugOutput:
        """Return the constant for everyone: messages are weighed already."""
        population = planned(self.population, "weights")
        weight = population / planned(self.expected_cohort, "weights")
        return torch.full((len(received.cohort),), weight), state, {}

    def value(self, terms: Terms) -> float:
        """Return what the sum is multiplied by."""
        return terms.population / terms.expected_cohort

    def expected_weights(
        self, claims: Mapping[str, Claims], noise: Mapping[str, float], layout: Layout
    ) -> dict[str, float]:
        """Return the constants."""
        return self._constants(claims)


def own_weight(weights: Sequence[tuple[str, float]], client: str) -> float:
    """Look up a client's own weight; weights that no enrolment can have settled are refused.

    >>> own_weight((("north", 0.25), ("south", 0.75)), "south")
    0.75
    """
    known = dict(weights)
    real = all(math.isfinite(one) and 0 <= one <= 1 for one in known.values())
    remedy = "enrol again"
    check(
        real and len(known) == len(weights) and math.fsum(known.values()) <= 1 + 1e-6,
        "terms",
        "hold weights that are not shares of one",
        remedy,
        PeerError,
    )
    check(client in known, "terms", f"hold no weight of '{client}'", remedy, PeerError)
    return known[client]


def checked(rule: Weights, found: Tensor, clients: int) -> Tensor:
    """Return the weights that a rule found, or refuse those that break its laws."""
    where = f"weights {type(rule).__name__}"
    total = float(found.sum())
    check(
        found.shape == (clients,) and bool((torch.isfinite(found) & (found >= 0)).all()),
        where,
        "are not one number of at least 0 per client",
        "return a tensor with one finite weight for each client",
    )
    check(
        rule.constant or not clients or abs(total - 1) < _SUM_TOLERANCE,
        where,
        f"sum to {total:g}, not to 1",
        "divide them by their sum, as dpfl.plugs.weights.shares does, or make them constant",
    )
    return found


def shares(values: Sequence[float]) -> Tensor:
    """Normalise claimed values to sum to one.

    A claim that is not a positive number weighs nothing, and if none is, all weigh alike.

    >>> shares([1.0, 3.0, float("nan"), -2.0])
    tensor([0.2500, 0.7500, 0.0000, 0.0000])
    """
    return _normalised(values).to(torch.float32)


def _normalised(values: Sequence[float]) -> Tensor:
    usable = [_number(value) for value in values]
    if not any(usable):
        usable = [1.0] * len(values)
    weights = torch.tensor(usable, dtype=torch.float64)
    weights = weights / weights.max()  # before the sum, which could overflow
    return weights / weights.sum()


def _number(value: float) -> float:
    """Return a claimed value if it is a positive number that a double can hold, else 0."""
    try:
        return float(value) if math.isfinite(value) and value > 0 else 0.0
    except OverflowError:  # an integer of hundreds of digits
        return 0.0
