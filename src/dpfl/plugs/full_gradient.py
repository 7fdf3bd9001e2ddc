"""One gradient of all records a round, without sampling: A of our own methods, and B over a sum.

Gaussian releases without sampling compose exactly, adaptively too: with mu = 1 / z the largest
parameter that a client's (epsilon, delta) allows, all of its releases together cost it no more as
long as the sum of 1 / z_k^2 over them is at most mu^2. A share s of a budget is a share of mu^2::

    releases before round one   z = 1 / (mu sqrt(s)) each
    T rounds                    z = sqrt(T / (1 - sum of s)) / mu each

Over a secure sum all clients' noise is one noise, and everyone adds z_i times less of its own sum
(:class:`SharedFullGradient`), so that each client's sensitivity over that noise is its own mu_i.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from dpfl.core.checks import check
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.grid import DOUBLE_SUM
from dpfl.core.grid_noise import SCALE
from dpfl.core.phases import Phase
from dpfl.core.types import Claims, ClientSettings, Terms, Unit
from dpfl.plugs.base import SUM_DELTA, Participant, claiming
from dpfl.plugs.local_work import DpSgd
from dpfl.plugs.sampling import ALL
from dpfl.plugs.shared_gradient import SharedGradient
from dpfl.privacy.exposure import Exposure
from dpfl.privacy.unsampled import unsampled_multiplier

RESERVED = 1.2e-3
"""The share of delta that plans leave: more than a filter keeps (Renyi's part is in its curve)."""


@dataclass(frozen=True, kw_only=True)
class FullGradient(DpSgd):
    """The mean of all clipped gradients, in units of the clip, with noise of one's own.

    ``whole``: the client's mean gradient is clipped as one and a whole client is protected, not
    each record. Clients have no settings of their own.

    *Formal guarantees.* All releases and rounds of a client cost at most its own (epsilon, delta)
    per record (or per client) under zero-out adjacency, by the exact composition of Gaussians.
    Noise levels follow from the budget, the terms and the number of records, which is public.
    """

    client_settings: ClientSettings = field(
        default_factory=lambda: ClientSettings(lr=1.0, batch_size=ALL, local_steps=1)
    )
    whole: bool = False

    @property
    def unit(self) -> Unit:  # type: ignore[override]
        """What is protected: a record, or a whole client."""
        return Unit.CLIENT if self.whole else Unit.RECORD

    def phases(self, terms: Terms, participant: Participant) -> tuple[Phase, ...]:
        """Plan one step with the noise that the releases leave of the budget."""
        left = 1 - math.fsum(share for share, _ in terms.releases)
        effective = math.sqrt(terms.participations / left) / self.mu(terms, participant)
        return (
            Phase(
                steps=1,
                batch_size=ALL,
                sampling="full",
                lr=1 / self.clip,
                clip=self.clip,
                clipping=self.clipping,
                noise_multiplier=self._raised(effective, terms.parameters, terms, participant),
                whole=self.whole,
            ),
        )

    def release_noise(self, terms: Terms, participant: Participant) -> tuple[float, ...]:
        """Plan each release with its share of the client's own mu^2."""
        mu = self.mu(terms, participant)
        return tuple(
            self._raised(1 / (mu * math.sqrt(share)), numbers, terms, participant)
            for share, numbers in terms.releases
        )

    def mu(self, terms: Terms, participant: Participant) -> float:
        """The Gaussian-DP parameter that the participant's budget allows in all."""
        budget, target = self._target(terms, participant)
        numbers = sum(numbers for _, numbers in terms.releases)
        numbers += terms.participations * terms.parameters
        if self.shares_noise:  # everyone draws noise
            numbers *= terms.population
        # A hair less than there is: filters keep a reserve of their own, and a sum costs something
        # beside its noise.
        target = target * (1 - 1e-6) - 3e-7
        delta = budget.delta * (1 - RESERVED)
        return 1 / unsampled_multiplier(target, delta, budget.accountant, numbers)

    def _can_plan(self, terms: Terms, participant: Participant) -> bool:
        """Whether claims lead to a plan: a client without one takes no part, and stops nobody."""
        try:
            return bool(self.phases(terms, participant))
        except PrivacyRefusal:
            return False

    def _units(self, participant: Participant) -> int:
        """How many contributions the participant adds up."""
        return 1 if self.whole else participant.examples

    def _raised(
        self, effective: float, numbers: int, terms: Terms, participant: Participant
    ) -> float:
        """The multiplier whose effective one, after adding up and rounding, is this one."""
        units = self._units(participant)
        coarse = effective * math.sqrt(numbers) / SCALE * self._roundings(terms)
        check(
            coarse < 0.5,
            "noise",
            f"noise of {effective:.4g} on {numbers} numbers makes the grid too coarse",
            "use smaller features or fewer rounds, or raise the budget",
            PrivacyRefusal,
        )
        summed = 1 + units * (units + 3) * DOUBLE_SUM
        return effective * summed / (1 - coarse) * (1 + 1e-12)

    def _roundings(self, terms: Terms) -> float:
        """How often rounding onto the grid of the whole noise is charged."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class SharedFullGradient(FullGradient, SharedGradient):
    """The same over a secure sum: clients share one noise, scaled by their own budgets.

    Every client adds a share of a noise whose std is the clip, and 1 / z_i times its sum of clipped
    gradients, where z_i is the multiplier that its own budget asks for. The sum of all, over the
    clip and the sum of n_i / z_i, is the mean gradient weighted by mu_i n_i.

    *Formal guarantees.* Against the server with the colluders that are planned for, the noise of
    the honest shares protects every record as its client's own multiplier would. A client derives
    z_i from its own budget: no claim of others changes its cost. Shares of those who are missing
    are not counted on. Integers are cut off as in :class:`SharedGradient`.
    """

    own_scale: ClassVar[bool] = True
    own_noise: ClassVar[bool] = True

    def plan_sum(self, terms: Terms, claims: Mapping[str, Claims]) -> Terms:
        """Settle the common noise, one clip, and what the sum is divided by, from all claims.

        Releases have a common noise of their bound; measurements one that every claim allows.
        """
        members = [who for who in claiming(claims) if self._can_plan(terms, who)]
        check(
            bool(members),
            "secure sum",
            "no client can plan its noise",
            "one noise level for all needs one",
            PrivacyRefusal,
        )
        measured = [self.release_noise(terms, who)[: terms.measured] for who in members]
        common = tuple(map(max, zip(*measured, strict=True)))
        ones = (1.0,) * (len(terms.releases) - terms.measured)
        counted = (
            self._units(who) / self.phases(terms, who)[0].noise_multiplier for who in members
        )
        total = self.clip * math.fsum(counted)
        return replace(
            terms, release_noise=(*common, *ones), noise_multiplier=1.0, denominator=total
        )

    def release_noise(self, terms: Terms, participant: Participant) -> tuple[float, ...]:
        """Plan releases with the client's own budget, measurements with the common noise."""
        own = super().release_noise(terms, participant)
        known = terms.release_noise
        common = known[: terms.measured]
        return (*common, *own[len(common) :])

    def phases(self, terms: Terms, participant: Participant) -> tuple[Phase, ...]:
        """Plan one step whose sum leaves the client as integers."""
        return tuple(replace(one, sum_only=True) for one in super().phases(terms, participant))

    def exposure(self, phases: Sequence[Phase], examples: int, parameters: int) -> Exposure:
        """A unit's bound and the noise of all shares, in units of the client's own sum."""
        if not phases:
            return Exposure(unit=self.unit, numbers=parameters)
        ((clip, noise),) = [(one.clip or 0.0, one.noise_multiplier) for one in phases]
        bounded = Exposure(unit=self.unit, numbers=parameters).clipped(clip)
        return bounded.noised(noise * clip, summands=1 if self.whole else examples)

    def _roundings(self, terms: Terms) -> float:
        # The channel charges for the coarsest grid beside that of a share.
        return 2.0 - self._share(terms.expected_cohort)


@dataclass(frozen=True, kw_only=True)
class IndividualClips(SharedGradient):
    """One step of DP-SGD a round over a secure sum, with clips that follow from the budgets.

    All clients share one noise of std Z; records of client i are clipped at C_i = Z / z_i, where
    z_i is the multiplier that its own budget asks for at its own sampling rate. ``clip`` is the
    mean of the clips, over all records (Boenisch, Muhl, Dziedzic, Rinberg, Papernot, *Have it your
    way*, NeurIPS 2023, there for single records of one curator).

    *Formal guarantees.* As :class:`SharedGradient`, with the client's own clip and multiplier.
    """

    own_noise: ClassVar[bool] = True

    def plan_sum(self, terms: Terms, claims: Mapping[str, Claims]) -> Terms:
        """Settle the common noise over the mean clip, and the expected batch of all clients."""
        levels: list[tuple[float, float]] = []
        expected = 0.0
        for who in claiming(claims):
            with suppress(PrivacyRefusal):  # a client that cannot plan stops nobody
                levels.append((who.examples, self._own_noise(terms, who)))
                expected += self.batches(who).expected_size
        check(
            bool(levels),
            "secure sum",
            "no client can plan its noise",
            "one noise level for all needs one",
            PrivacyRefusal,
        )
        records = math.fsum(count for count, _ in levels)
        whole = records / math.fsum(count / noise for count, noise in levels)
        return replace(terms, noise_multiplier=whole, denominator=expected)

    def _own_noise(self, terms: Terms, participant: Participant) -> float:
        """The least noise with which all rounds fit into the participant's own budget."""
        batches = self.batches(participant)
        budget = participant.budget
        if budget is not None:
            budget = replace(budget, delta=budget.delta * (1 - SUM_DELTA))
        participant = replace(participant, budget=budget)
        plan = batches.event(1.0, terms.participations, terms.parameters)
        plan = replace(plan, numbers=plan.numbers * terms.population)
        # One part more: the channel charges for the coarsest grid again.
        return self._least_noise(terms, participant, plan, batches.parts + 1)

    def phases(self, terms: Terms, participant: Participant) -> tuple[Phase, ...]:
        """Plan one step with the client's own clip and noise multiplier."""
        noise = self._own_noise(terms, participant)
        common = terms.noise_multiplier or 1.0
        own: dict[str, Any] = {"clip": common * self.clip / noise, "noise_multiplier": noise}
        return (replace(self._one_step(participant), sum_only=True, **own),)
