"""Local work described by data: plain SGD, and DP-SGD whose noise comes from the client's own
budget.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from dpfl.core.checks import check, clip_bound, one_of, positive
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.grid import Grid, multiplier_for
from dpfl.core.phases import CLIPPINGS, Clipping, Phase, check_optimiser
from dpfl.core.types import Budget, Claims, ClientSettings, Terms, Unit
from dpfl.plugs.base import Participant, Plug, claiming
from dpfl.plugs.release_costs import calibrate_rounds, release_noise
from dpfl.plugs.sampling import PoissonBatches, sampler, steps_per_epoch
from dpfl.privacy.budgets import SPENDINGS, Spending, planned_epsilon
from dpfl.privacy.events import Event
from dpfl.privacy.exposure import Exposure


class LocalWork(Plug):
    """What a client does with its data, as a list of phases.

    ``unit`` says whose presence the exposure is about, ``private`` whether the work itself carries
    noise. Laws: ``phases`` is pure. ``exposure`` describes exactly what those phases release, noise
    and sampling included: the sampler that the engine will use writes the event. ``private`` is
    True if that exposure is finite.
    """

    unit: Unit
    private: ClassVar[bool] = False
    pooled: ClassVar[bool] = False  # a trusted curator works on all clients' records at once
    shares_noise: ClassVar[bool] = False  # its noise is a share of that in a secure sum
    cut_off: ClassVar[int | None] = None  # where its integers are cut off, before noise
    own_scale: ClassVar[bool] = False  # in a sum, every client's own budget scales what it adds
    own_noise: ClassVar[bool] = False  # in a sum, every client has a multiplier of its own
    whole: bool = False  # one contribution a client is clipped, its mean

    @property
    def hypothetical(self) -> bool:
        """Whether the plan exceeds clients' budgets: then only a simulation may run it, with
        budgets raised and a flag that says so.
        """
        return False

    def phases(self, terms: Terms, participant: Participant) -> tuple[Phase, ...]:
        """Plan one round's work, calibrated to the participant's own budget."""
        raise NotImplementedError

    @property
    def batch_size(self) -> int:
        """How many of a client's records a step is meant to take; 0 where nobody says."""
        return 0

    def exposure(self, phases: Sequence[Phase], examples: int, parameters: int) -> Exposure:
        """What the result of these phases, on a model of so many parameters, shows of one unit.

        The default promises nothing.
        """
        return Exposure(unit=self.unit, numbers=parameters)

    def release_noise(self, terms: Terms, participant: Participant) -> tuple[float, ...]:
        """Plan the noise multiplier of each release before round one."""
        return ()

    def clipping_at(self, clip: float) -> Self:
        """Return the same work with another clip; only where it clips."""
        raise NotImplementedError

    # -- over a secure sum -------------------------------------------------------------------------

    @property
    def one_step(self) -> bool:
        """Whether it is one step of DP-SGD, whose noise clients of a sum can share."""
        return False

    def plan_sum(self, terms: Terms, claims: Mapping[str, Claims]) -> Terms:
        """Return the terms with the noise levels that all clients of a secure sum have in
        common.
        """
        return terms

    def grid(self, drawn: int) -> Grid | None:
        """The grid of what one of ``drawn`` clients sends, where its work ends in integers."""
        return None

    def in_cohort(self, phases: Sequence[Phase], drawn: int) -> tuple[Phase, ...]:
        """Return planned phases as they are run when so many clients are drawn: with a share of
        the noise, where it is shared.
        """
        return tuple(phases)


@dataclass(frozen=True, kw_only=True)
class _OnePhase(LocalWork):
    """Work in one phase: the client's own settings over those given here.

    ``momentum`` is heavy-ball momentum within a round, ``weight_decay`` and ``proximal`` (FedProx's
    mu) pull the weights towards zero and towards their start (:class:`dpfl.core.phases.Phase`).
    """

    client_settings: ClientSettings
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0

    def __post_init__(self) -> None:
        where = type(self).__name__
        given = self.client_settings
        check_optimiser(where, vars(self))
        check(
            given.batch_size is not None and given.lr is not None,
            where,
            "batch_size or lr is missing",
            "give both",
        )
        check(
            given.local_steps is not None or given.local_epochs is not None,
            where,
            "the length of local work is missing",
            "give local_steps or local_epochs",
        )

    @property
    def batch_size(self) -> int:
        """The setting of clients that have none of their own."""
        return 0 if self.pooled else self.client_settings.batch_size or 0

    def _phase(self, participant: Participant, **more: Any) -> Phase:
        """The participant's phase."""
        whole = participant.client_settings.over(self.client_settings)
        assert whole.batch_size is not None
        an_epoch = steps_per_epoch(participant.examples, whole.batch_size)
        epochs = (whole.local_epochs or 0) * an_epoch
        steps = whole.local_steps or epochs
        more |= {name: getattr(self, name) for name in ("momentum", "weight_decay", "proximal")}
        return Phase(steps=steps, batch_size=whole.batch_size, lr=whole.lr or 0.0, **more)


@dataclass(frozen=True, kw_only=True)
class Sgd(_OnePhase):
    """Plain SGD over shuffled batches, which hides nothing itself.

    ``ball`` keeps the model within that distance of its start after every step: in the model's own
    arithmetic, so that only a Clip stage is a bound to charge.
    """

    ball: float | None = None
    lr_decay: float = 1.0
    unit: Unit = Unit.CLIENT

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("sgd", lr_decay=self.lr_decay, ball=1.0 if self.ball is None else self.ball)

    def phases(self, terms: Terms, participant: Participant) -> tuple[Phase, ...]:
        """Plan one phase of shuffled batches, as the settings say."""
        kept = {"ball": self.ball, "lr_decay": self.lr_decay}
        return (self._phase(participant, sampling="shuffle", **kept),)


@dataclass(frozen=True, kw_only=True)
class DpSgd(_OnePhase):
    """DP-SGD: Poisson batches, per-record clipping, Gaussian noise on the sum, fixed denominator.

    ``clipping`` says how a record's gradient is brought within ``clip``: as a whole, every layer
    within clip / sqrt(layers), or normalised (:func:`dpfl.numerics.clipping.layer_factors`).
    ``spending`` says which epsilon the noise is planned for (:mod:`dpfl.privacy.budgets`).

    *Formal guarantees.* The planned participations of a client cost at most its planned (epsilon,
    delta) per record under zero-out adjacency (one record replaced by nothing; the number of
    records is public), against the server and so against everyone. The number of steps, the rate
    and the multiplier that are charged are those of the phase that runs. Every way of clipping
    bounds a record's gradient by ``clip``; momentum, weight decay and the proximal term are
    functions of noised sums and of the model received, and cost nothing. Releases before round
    one are part of the plan: the rounds get what they leave.
    """

    clip: float
    clipping: Clipping = "flat"
    spending: Spending = "heterogeneous"
    unit: ClassVar[Unit] = Unit.RECORD  # type: ignore[misc]
    private: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        clip_bound("dp-sgd", clip=self.clip)
        one_of("dp-sgd", CLIPPINGS, clipping=self.clipping)
        one_of("dp-sgd", SPENDINGS, spending=self.spending)

    def clipping_at(self, clip: float) -> Self:
        """Return the same work with another clip."""
        return replace(self, clip=clip)

    @property
    def hypothetical(self) -> bool:
        """Whether noise is planned for the largest claim, which exceeds the others' budgets."""
        return self.spending == "largest"

    def resolve_terms(self, terms: Terms, claims: Mapping[str, Claims]) -> Terms:
        """Plan one noise level for all, that of the client with the median claimed epsilon, where
        spending is uniform.
        """
        if self.spending != "uniform":
            return terms
        usable = {c: claim for c, claim in claims.items() if claim.usable}
        check(
            bool(usable),
            "dp-sgd",
            "no client claims a usable (epsilon, delta)",
            "one noise level for all needs one",
            PrivacyRefusal,
        )
        middle = statistics.median_low(claim.epsilon for claim in usable.values())
        claim = next(claim for _, claim in sorted(usable.items()) if claim.epsilon == middle)
        budget = Budget(epsilon=claim.epsilon, delta=claim.delta)
        own = ClientSettings()
        median = Participant(examples=claim.examples, client_settings=own, budget=budget)
        (phase,) = self.phases(replace(terms, noise_multiplier=None), median)
        return terms.with_noise(phase.noise_multiplier)

    def phases(self, terms: Terms, participant: Participant) -> tuple[Phase, ...]:
        """Plan one phase with the least noise that keeps the whole plan within the client's own
        budget.
        """
        kept = {"clip": self.clip, "clipping": self.clipping}
        phase = self._phase(participant, sampling="poisson", **kept)
        self._target(terms, participant)
        noise = terms.noise_multiplier
        if noise is None:
            batches = PoissonBatches(participant.examples, phase.batch_size)
            plan = batches.event(1.0, phase.steps * terms.participations, terms.parameters)
            noise = self._least_noise(terms, participant, plan, batches.parts)
        return (replace(phase, noise_multiplier=noise),)

    def _least_noise(
        self, terms: Terms, participant: Participant, plan: Event, parts: int
    ) -> float:
        """The least noise with which planned steps fit into the participant's budget."""
        budget, target = self._target(terms, participant)
        wanted = calibrate_rounds(terms, plan, target, budget, participant.examples)
        return multiplier_for(wanted, terms.parameters, parts)

    def _target(self, terms: Terms, participant: Participant) -> tuple[Budget, float]:
        """The participant's budget, and the epsilon that its noise is planned for."""
        if participant.budget is None:
            raise PrivacyRefusal(
                "dp-sgd",
                "a client without a budget cannot choose its noise",
                "give it a Budget(epsilon, delta)",
            )
        return participant.budget, planned_epsilon(self.spending, participant.budget, terms)

    def release_noise(self, terms: Terms, participant: Participant) -> tuple[float, ...]:
        """Plan each release with its share of the client's own budget, unless there is one level
        for all.
        """
        if terms.release_noise:
            return terms.release_noise
        plan = self._target(terms, participant)
        return release_noise(terms.releases, *plan, participant.examples)

    @property
    def one_step(self) -> bool:
        """Whether everyone takes one step a round."""
        return self.client_settings.local_steps == 1

    def plan_sum(self, terms: Terms, claims: Mapping[str, Claims]) -> Terms:
        """Plan each release with the noise that its share of the smallest claim asks for."""
        if not terms.releases:
            return terms
        own = [self.release_noise(terms, who) for who in claiming(claims)]
        return replace(terms, release_noise=tuple(map(max, zip(*own, strict=True))))

    def exposure(self, phases: Sequence[Phase], examples: int, parameters: int) -> Exposure:
        """Everything is paid step by step; what follows is post-processing."""
        paid = [
            sampler(phase, examples).event(phase.noise_multiplier, phase.steps, parameters)
            for phase in phases
        ]
        return Exposure(unit=self.unit, numbers=parameters, paid=tuple(paid))
