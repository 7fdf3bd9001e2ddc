"""One step of DP-SGD a round over a secure sum: clients share the noise of the sum.

Every client of a round sends integers on one grid of step g, common to all::

    n_i = -(q_i + X_i),  q_i = round((w_i lr_i / b_i) S_i / g),  X_i = round(N(0, SCALE^2))

S_i is the sum of the clipped gradients of client i's Poisson batch, b_i its expected size and w_i a
constant weight. The sum of all n_i, times g, is the weighted mean of the clients' steps with the
noise of all shares. A share has the std g SCALE = sigma / sqrt(h), so that h of them carry sigma.
Without a secure sum every client adds noise for itself alone, and the mean pays for it n times.

Where clients take more than one step, later steps depend on the noise of earlier ones, and every
client keeps its own; :class:`OnCommonGrid` lets its update be added up.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

from torch import Tensor

from dpfl.core.checks import check, not_negative
from dpfl.core.grid import LARGEST_SUM, Grid, effective_multiplier
from dpfl.core.phases import Phase
from dpfl.core.random import SecretRng
from dpfl.core.types import Claims, Shared, Terms, Who
from dpfl.plugs.base import Participant, claiming, planned
from dpfl.plugs.local_work import DpSgd, LocalWork
from dpfl.plugs.sampling import PoissonBatches
from dpfl.plugs.stages import Stage
from dpfl.plugs.weights import own_weight
from dpfl.privacy.exposure import Exposure

SHARED = (
    "noise is shared: every client adds a share to its one local step of a round, and the shares "
    "of all honest clients protect each record",
    "each client draws its share from its own generator and keeps its record sample secret",
)
ALONE = (
    "every client's own noise counts alone: more than one local step; a secure sum hides single "
    "updates, and no epsilon is smaller for it"
)
_LEAST_WEIGHT = 1e-12  # a client without a weight still sends its share of the noise
_COMMON_STEP = 2.0**-24  # of updates that carry their noise already


@dataclass(frozen=True, kw_only=True)
class SharedGradient(DpSgd):
    """One step of DP-SGD whose noise is shared among the clients of a secure sum.

    ``tolerated_dropouts``: shares add up without so many of the drawn, dropouts and colluders
    together. ``noise_multiplier`` is the std of the noise in the sum over the clip, planned at
    enrolment: the least with which every claim is kept, by clients with the study's own learning
    rate and batch size.

    *Formal guarantees.* One record moves q_i by at most (w_i lr_i / b_i) clip / g, and by what
    rounding and adding up in floating point may lose, which is charged as in DP-SGD. Integers are
    cut off at ``LARGEST_SUM``, which moves no two neighbours apart. What is released is exactly the
    sum of integers; of h honest shares it is a Poisson-sampled Gaussian mechanism at the client's
    own rate, with the multiplier sigma over that bound. Rounding is charged for the coarsest grid
    that there can be, that of a single share. A client's cost follows from its own batch size,
    learning rate and weight, whoever chose the noise; batch sizes stay secret, and an empty batch
    sends noise. Momentum and the proximal term do nothing in a single step.
    """

    tolerated_dropouts: int = 0
    noise_multiplier: float | None = None
    shares_noise: ClassVar[bool] = True
    cut_off: ClassVar[int | None] = LARGEST_SUM

    def __post_init__(self) -> None:
        super().__post_init__()
        where = "shared gradient"
        not_negative(where, tolerated_dropouts=self.tolerated_dropouts)
        check(
            self.weight_decay == 0,
            where,
            f"weight_decay = {self.weight_decay} acts at every client, outside of the sum",
            "leave it out, or take more local steps",
        )
        check(
            self.spending != "uniform",
            where,
            "one noise level is shared by all, whatever the median client's is",
            "use spending = 'heterogeneous'",
        )

    @classmethod
    def of(cls, work: LocalWork, missing: int) -> Self:
        """The same step, with noise that is shared among all but ``missing`` of the drawn."""
        own = {field.name: getattr(work, field.name) for field in fields(DpSgd)}
        return cls(**own, tolerated_dropouts=missing)

    def _share(self, drawn: float) -> float:
        """How much of the noise one of ``drawn`` clients adds."""
        return 1 / math.sqrt(max(1, round(drawn) - self.tolerated_dropouts))

    def _one_step(self, participant: Participant) -> Phase:
        """The participant's step, without its noise."""
        kept = {"clip": self.clip, "clipping": self.clipping}
        phase = self._phase(participant, sampling="poisson", **kept)
        check(
            phase.steps == 1,
            f"client '{participant.client}'",
            f"it takes {phase.steps} local steps, and noise is shared in one a round",
            "use local_steps = 1 for every client, or more for all of them",
        )
        return phase

    def batches(self, participant: Participant) -> PoissonBatches:
        """How the participant's records are drawn for its step."""
        return PoissonBatches(participant.examples, self._one_step(participant).batch_size)

    def _factor(self, phase: Phase, terms: Terms, participant: Participant) -> float:
        """What the sum of gradients is multiplied by: w lr / b."""
        weight = max(own_weight(terms.weights, participant.client), _LEAST_WEIGHT)
        size = PoissonBatches(participant.examples, phase.batch_size).expected_size
        return weight * phase.lr / size

    def plan_sum(self, terms: Terms, claims: Mapping[str, Claims]) -> Terms:
        """Plan the least noise in the sum with which every claim is kept for all rounds."""
        terms = super().plan_sum(terms, claims)
        levels = []
        for who in claiming(claims):
            phase = self._one_step(who)
            batches = self.batches(who)
            plan = batches.event(1.0, terms.participations, terms.parameters)
            plan = replace(plan, numbers=plan.numbers * terms.population)
            # One part more: the channel charges for the coarsest grid again.
            noise = self._least_noise(terms, who, plan, batches.parts + 1)
            levels.append(noise * self._factor(phase, terms, who))
        return terms.with_noise(max(levels))

    def phases(self, terms: Terms, participant: Participant) -> tuple[Phase, ...]:
        """Plan one step with all of the common noise, as it is in the sum."""
        phase = self._one_step(participant)
        whole = planned(terms.noise_multiplier, "shared gradient")
        noise = whole / self._factor(phase, terms, participant)
        return (replace(phase, noise_multiplier=noise, sum_only=True),)

    def in_cohort(self, phases: Sequence[Phase], drawn: int) -> tuple[Phase, ...]:
        """Leave a share of the noise: a larger one, the fewer are drawn."""
        share = self._share(drawn)
        return tuple(replace(p, noise_multiplier=p.noise_multiplier * share) for p in phases)

    def grid(self, drawn: int) -> Grid | None:
        """The common grid, on which a share has the std of SCALE steps."""
        whole = planned(self.noise_multiplier, "shared gradient") * self.clip
        return Grid.of(whole * self._share(drawn))

    def exposure(self, phases: Sequence[Phase], examples: int, parameters: int) -> Exposure:
        """A record's bound and the noise of all shares, in units of the sum of gradients."""
        if not phases:
            return Exposure(unit=self.unit, numbers=parameters)
        (phase,) = phases
        whole = phase.noise_multiplier
        clip = phase.clip or 0.0
        batches = PoissonBatches(examples, phase.batch_size)
        return Exposure(
            unit=self.unit,
            bound=clip * whole / effective_multiplier(whole, parameters, batches.parts),
            noise=whole * clip,
            numbers=parameters,
            draws=parameters,
            sampling="poisson",
            sampling_rate=batches.rate,
        )


class OnCommonGrid(Stage):
    """Weigh an update that carries its noise already, and bring it onto a public grid.

    Rounding is deterministic, and so is cutting off at ``LARGEST_SUM`` steps, 64 in units of the
    model: all of it is post-processing. A number that is not finite becomes zero.
    """

    linear: ClassVar[bool] = True  # the server half does nothing
    cut_off: ClassVar[int | None] = LARGEST_SUM

    def grid(self, drawn: int) -> Grid | None:
        """Return the public grid."""
        return Grid(_COMMON_STEP)

    def client(self, x: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        """Multiply the update by the client's weight, and round it to multiples of the step."""
        weighed = x.double().nan_to_num(0.0, 0.0, 0.0) * who.weight
        steps = (weighed / _COMMON_STEP).round_().clamp_(-LARGEST_SUM, LARGEST_SUM)
        return steps.mul_(_COMMON_STEP)

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """Post-processing of what is noisy already."""
        return exposure.processed()
