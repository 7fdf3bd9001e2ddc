"""Local work described by data: plain SGD, and DP-SGD whose noise comes from the client's own
budget.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.grid import multiplier_for
from dpfl.core.types import (
    Adjacency,
    Budget,
    Claims,
    ClientSettings,
    Phase,
    Terms,
    Unit,
)
from dpfl.plugs.base import Participant
from dpfl.plugs.sampling import PoissonBatches, sampler, steps_per_epoch
from dpfl.privacy.budgets import SPENDINGS, Spending, planned_epsilon
from dpfl.privacy.calibrate import calibrate
from dpfl.privacy.exposure import Exposure


@runtime_checkable
class LocalWork(Protocol):
    """What a client does with its data, as a list of phases.

    Laws: ``phases`` is pure. ``exposure`` describes exactly what those phases release, noise and
    sampling included: the sampler that the engine will use writes the event. ``private`` is True if
    that exposure is finite. ``hypothetical`` work plans beyond what clients grant: only a
    simulation may run it, with budgets raised and a stamp that says so.
    """

    @property
    def unit(self) -> Unit:
        """Whose presence the exposure is about."""
        ...

    @property
    def private(self) -> bool:
        """Whether the work itself carries noise."""
        ...

    @property
    def hypothetical(self) -> bool:
        """Whether the plan exceeds what clients grant."""
        ...

    def agree(self, terms: Terms, claims: Mapping[str, Claims]) -> Terms:
        """Settle what all clients share (one noise level, for instance)."""
        ...

    def phases(self, terms: Terms, participant: Participant) -> tuple[Phase, ...]:
        """Plan one round's work, calibrated to the participant's own budget."""
        ...

    def exposure(self, phases: Sequence[Phase], examples: int, parameters: int) -> Exposure:
        """What the result of these phases, on a model of so many parameters, shows of one unit."""
        ...


def _complete(where: str, client_settings: ClientSettings) -> None:
    if client_settings.batch_size is None or client_settings.lr is None:
        raise ConfigurationError(where, "batch_size or lr is missing", "give both")
    if client_settings.local_steps is None and client_settings.local_epochs is None:
        raise ConfigurationError(
            where, "the length of local work is missing", "give local_steps or local_epochs"
        )


@dataclass(frozen=True, kw_only=True)
class _Habits:
    """A practice with nothing left open, for a client with this many records."""

    batch_size: int
    steps: int
    lr: float

    @classmethod
    def of(cls, client_settings: ClientSettings, default: ClientSettings, examples: int) -> _Habits:
        whole = client_settings.over(default)
        assert whole.batch_size is not None
        assert whole.lr is not None
        steps = whole.local_steps or (whole.local_epochs or 0) * steps_per_epoch(
            examples, whole.batch_size
        )
        return cls(batch_size=whole.batch_size, steps=steps, lr=whole.lr)


def noise_variance(phases: Sequence[Phase], examples: int, parameters: int) -> float:
    """Variance of the noise in an update, summed over its coordinates: steps x lr^2 x p x (clip z /
    b)^2 a phase.

    Robust-HDP's Eq. 3 and 7; with a fixed expected batch size b it is exact for what DP-SGD adds.
    """
    total = 0.0
    for phase in phases:
        size = PoissonBatches(examples, phase.batch_size).expected_size
        total += (
            phase.steps
            * parameters
            * (phase.lr * phase.noise_multiplier * (phase.clip or 0.0) / size) ** 2
        )
    return total


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Plain SGD over shuffled batches; ``ball`` keeps the model near its start after every step.
    Hides nothing itself.
    """

    client_settings: ClientSettings
    ball: float | None = None
    weight_decay: float = 0.0
    lr_decay: float = 1.0
    unit: Unit = Unit.CLIENT
    private: ClassVar[bool] = False
    hypothetical: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _complete("sgd", self.client_settings)
        for name, value, least in (
            ("weight_decay", self.weight_decay, 0.0),
            ("lr_decay", self.lr_decay, 1e-300),
        ):
            if not (math.isfinite(value) and value >= least):
                raise ConfigurationError("sgd", f"{name} = {value}", "give a number above 0")
        if self.ball is not None and not (math.isfinite(self.ball) and self.ball > 0):
            raise ConfigurationError("sgd", f"ball = {self.ball}", "give a radius above 0")

    def agree(self, terms: Terms, claims: Mapping[str, Claims]) -> Terms:
        """Nothing to settle."""
        return terms

    def phases(self, terms: Terms, participant: Participant) -> tuple[Phase, ...]:
        """Plan one phase."""
        habits = _Habits.of(participant.client_settings, self.client_settings, participant.examples)
        return (
            Phase(
                steps=habits.steps,
                batch_size=habits.batch_size,
                sampling="shuffle",
                lr=habits.lr,
                ball=self.ball,
                weight_decay=self.weight_decay,
                lr_decay=self.lr_decay,
            ),
        )

    def exposure(self, phases: Sequence[Phase], examples: int, parameters: int) -> Exposure:
        """Nothing is promised: a ball is kept in the model's own arithmetic, only a Clip stage is a
        bound to charge.
        """
        return Exposure(unit=self.unit, numbers=parameters)


@dataclass(frozen=True, kw_only=True)
class DpSgd:
    """DP-SGD: Poisson batches, per-record clipping, Gaussian noise on the sum, fixed denominator.

    *Formal guarantees.* The planned participations of a client cost at most its planned (epsilon,
    delta) per record under zero-out adjacency (one record replaced by nothing; the number of
    records is public), against the server and so against everyone. The number of steps, the rate
    and the multiplier that are billed are those of the phase that runs.
    """

    client_settings: ClientSettings
    clip: float
    spending: Spending = "heterogeneous"
    unit: ClassVar[Unit] = Unit.RECORD
    private: ClassVar[bool] = True

    @property
    def hypothetical(self) -> bool:
        """Planning for the largest claim exceeds what the others grant."""
        return self.spending == "largest"

    def __post_init__(self) -> None:
        _complete("dp-sgd", self.client_settings)
        if not (math.isfinite(self.clip) and self.clip > 0):
            raise ConfigurationError(
                "dp-sgd", f"clip = {self.clip} is not a positive number", "give a clip above 0"
            )
        if self.spending not in SPENDINGS:
            raise ConfigurationError(
                "dp-sgd", f"spending = '{self.spending}'", f"choose one of {', '.join(SPENDINGS)}"
            )

    def agree(self, terms: Terms, claims: Mapping[str, Claims]) -> Terms:
        """Settle one noise level for all, that of the client with the median claimed epsilon, where
        the plan is uniform.
        """
        if self.spending != "uniform":
            return terms
        usable = {c: claim for c, claim in claims.items() if claim.usable}
        if not usable:
            raise PrivacyRefusal(
                "dp-sgd",
                "no client claims a usable (epsilon, delta)",
                "one noise level for all needs one",
            )
        middle = statistics.median_low(claim.epsilon for claim in usable.values())
        claim = next(claim for _, claim in sorted(usable.items()) if claim.epsilon == middle)
        budget = Budget(epsilon=claim.epsilon, delta=claim.delta)
        return terms.with_noise(
            self._multiplier(
                terms,
                budget,
                _Habits.of(ClientSettings(), self.client_settings, claim.examples),
                claim.examples,
            )
        )

    def phases(self, terms: Terms, participant: Participant) -> tuple[Phase, ...]:
        """Plan one phase with the least noise that keeps the whole plan within the client's own
        budget.
        """
        if participant.budget is None:
            raise PrivacyRefusal(
                "dp-sgd",
                "a client without a budget cannot choose its noise",
                "give it a Budget(epsilon, delta)",
            )
        habits = _Habits.of(participant.client_settings, self.client_settings, participant.examples)
        multiplier = terms.noise_multiplier
        if multiplier is None:
            multiplier = self._multiplier(terms, participant.budget, habits, participant.examples)
        return (
            Phase(
                steps=habits.steps,
                batch_size=habits.batch_size,
                sampling="poisson",
                lr=habits.lr,
                clip=self.clip,
                noise_multiplier=multiplier,
            ),
        )

    def _multiplier(self, terms: Terms, budget: Budget, habits: _Habits, examples: int) -> float:
        rate = PoissonBatches(examples, habits.batch_size).rate
        target = planned_epsilon(self.spending, budget, terms)
        steps = habits.steps * terms.participations
        wanted = calibrate(
            target,
            budget.delta,
            rate,
            steps,
            adjacency=Adjacency.ZERO_OUT,
            accountant=budget.accountant,
            numbers=terms.parameters,
        )
        return multiplier_for(
            wanted, terms.parameters, PoissonBatches(examples, habits.batch_size).parts
        )

    def exposure(self, phases: Sequence[Phase], examples: int, parameters: int) -> Exposure:
        """Everything is paid step by step; what follows is post-processing."""
        paid = tuple(
            sampler(phase, examples).event(phase.noise_multiplier, phase.steps, parameters)
            for phase in phases
        )
        return Exposure(unit=self.unit, numbers=parameters, paid=paid)
