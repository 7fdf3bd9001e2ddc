"""A strategy folded over an exposure: what a round releases of one unit, and to whom.

Noise, sensitivity and sampling are asked of the plugs that enforce them, so what is charged is what
is done.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Self

from dpfl.core.checks import check
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.types import Claims, Observer, Phase, Terms, Unit
from dpfl.plugs.base import NoiseMaker
from dpfl.plugs.channels import Channel
from dpfl.plugs.stages import Stage
from dpfl.privacy.accountant import SMALLEST_DELTA
from dpfl.privacy.calibrate import calibrate
from dpfl.privacy.costs import PrivacyCost
from dpfl.privacy.events import Sampling
from dpfl.privacy.exposure import Exposure
from dpfl.strategy.slots import MANY, Slots


class Accounting(Slots):
    """What the slots cost: the strategy folded over an exposure.

    An exposure says how much of one unit a message still shows: the largest norm of its
    contribution and the noise that is on it. Local work begins it, every stage changes it, the
    channel says what the server sees of it, and weights, central noise and the secrecy of the draw
    what the world sees.
    """

    # -- one round ---------------------------------------------------------------------------------

    def cost(
        self, observer: Observer, phases: Sequence[Phase], examples: int, terms: Terms
    ) -> PrivacyCost:
        """What one round of this work releases of one unit of a client to this adversary.

        ``phases`` and ``examples`` describe the client's local work; client-level costs do not
        depend on them. Where the secrecy of the draw is counted on, the event is that of a sampled
        mechanism, at the largest rate that the selection ever has.
        """
        exposure = self.exposure(observer, terms, phases, examples)
        events = exposure.events(*self._sampling(observer, terms))
        return PrivacyCost(unit=self.unit, adjacency=self.adjacency, events=events)

    def exposure(
        self, observer: Observer, terms: Terms, phases: Sequence[Phase] = (), examples: int = 1
    ) -> Exposure:
        """Fold the pieces over what local work shows, as far as the adversary can see.

        The server sees what the channel delivers. The world sees less where the published model
        depends on the rows through a sum with constant weights only: then the noise of all shares
        that are counted on, and central noise, protect every contribution to that sum. A curator
        of pooled records has the records themselves.
        """
        if self.local.pooled and observer is not Observer.WORLD:
            return Exposure(unit=self.unit, numbers=terms.parameters)
        drawn = self._drawn(terms)
        exposure = self.sent(drawn, terms, phases, examples)
        shared = self.local.shares_noise
        seen = (self.channel.shared_exposure if shared else self.channel.exposure)(exposure, drawn)
        if observer is not Observer.WORLD or seen.paid:
            return seen
        if not self.sums_only:
            return seen.processed()
        # Where nothing but a sum is delivered, the world sees no more than the server.
        summing = not self.channel.sees_rows
        total = seen if summing else exposure.summed(1.0, self.shares(terms))
        if self.central_noise is not None:
            total = total.noised(self.central_noise.std(total.bound), summands=terms.population)
        return total.scaled(self.weights.value(terms))

    def sent(
        self, drawn: int, terms: Terms, phases: Sequence[Phase] = (), examples: int = 1
    ) -> Exposure:
        """Fold local work and the client stages: what leaves one of ``drawn`` clients."""
        exposure = self.local.exposure(phases, examples, terms.parameters)
        for stage in self.stages:
            exposure = stage.exposure(exposure, drawn)
        return exposure

    def _drawn(self, terms: Terms) -> int:
        """How many clients are drawn, or expected where that number is random."""
        drawn = self.selection.cohort_size(terms.population) or round(terms.expected_cohort)
        return max(1, drawn)

    def contribution_bound(self, terms: Terms) -> float:
        """Return the largest norm of what one client adds to the sum: what central noise is scaled
        by.
        """
        return self.sent(self._drawn(terms), terms).bound

    # -- whose noise, and whose draw, is counted on ------------------------------------------------

    def shares(self, terms: Terms) -> int:
        """How many clients' noise the cost against the world counts on: a fixed cohort's, else
        one's own alone.
        """
        size = self.selection.cohort_size(terms.population)
        return 1 if size is None else max(1, size - self.tolerated_dropouts)

    def shares_needed(self, terms: Terms, drawn: int) -> int:
        """Uploads without which a published sum carries less noise than was charged, or which a
        secure sum needs before it is unmasked.
        """
        return max(self.channel.least(drawn), self._noise_shares_needed(terms, drawn))

    def _noise_shares_needed(self, terms: Terms, drawn: int) -> int:
        if self.unit.of_data or self.observer is Observer.NOBODY or not self.sums_only:
            return 0
        if self.channel.shares_noise or any(stage.shares_noise for stage in self.stages):
            return max(1, drawn - self.tolerated_dropouts)  # shares were made for those drawn
        return self.shares(terms) if self.sent(drawn, terms).noise > 0 else 0

    def amplifies(self, observer: Observer) -> bool:
        """Whether the sampling of clients hides who took part: from the world, never from the
        server that drew them.

        Not where clients remember something between rounds: what one of them does later may tell
        that it was drawn, and so who was not; each round would have to be a fresh function of the
        models published before. Nor where the channel makes the noise out of those who take part:
        how much of it there is would tell who they are.
        """
        world = observer is Observer.WORLD and self.selection.sampling != "none"
        return world and self.hides_the_draw

    def _sampling(self, observer: Observer, terms: Terms) -> tuple[Sampling, float]:
        """How clients are sampled, and at which rate, as far as it may be counted on."""
        if not self.amplifies(observer):
            return "none", 1.0
        return self.selection.sampling, self.selection.charged_rate(terms.population)

    @property
    def hides_the_draw(self) -> bool:
        """Whether nothing that is published tells who was drawn."""
        # Clients' own noise over a cohort of random size: how much noise is published would tell
        # how many were drawn.
        telling: list[Channel | Stage] = [self.channel]
        telling += self.stages if self.selection.sampling == "poisson" else ()
        bounded = Exposure(unit=Unit.CLIENT, bound=1.0)
        tells = any(
            isinstance(plug, NoiseMaker) or plug.exposure(bounded, MANY).noise > 0
            for plug in telling
        )
        fresh = self.personal is None and not self.releases
        return self.unit is Unit.CLIENT and self.sums_only and fresh and not tells

    # -- noise from budgets ------------------------------------------------------------------------

    def settle(self, terms: Terms, claims: Mapping[str, Claims]) -> tuple[Self, Terms]:
        """Plan what was left open: noise from the smallest budget anyone claims, denominators from
        the population.
        """
        if self.secure:
            terms = self.local.plan_sum(terms, claims)
        if self.noise_makers():
            given = self.noise_multiplier
            terms = terms.with_noise(self._planned(terms, claims) if given is None else given)
        return self.resolve(terms), terms

    def _planned(self, terms: Terms, claims: Mapping[str, Claims]) -> float:
        """The least noise with which all planned rounds cost no more than the smallest claim.

        Found for an ideal mechanism first, then raised until the grid's rounding, which grows with
        the noise, is covered as well.
        """
        usable = [claim for claim in claims.values() if claim.usable]
        check(
            bool(usable),
            self.name,
            "neither a noise_multiplier nor a usable budget was given",
            "give one of the two",
            PrivacyRefusal,
        )
        sampling, rate = self._sampling(self.observer, terms)
        exposure = self._seen_with(1.0, terms)
        steps = terms.participations if sampling == "none" else terms.rounds
        delta = min(claim.delta for claim in usable) - exposure.failure * steps
        check(
            delta >= SMALLEST_DELTA,
            self.name,
            f"bounds that fail at {exposure.failure:g} in {steps} rounds use up all of delta",
            "plan fewer rounds, raise delta, or use bounds that do not fail",
            PrivacyRefusal,
        )
        least = partial(calibrate, adjacency=self.adjacency, sampling=sampling, steps=steps)
        least = partial(least, delta=delta, sampling_rate=rate, numbers=exposure.draws)
        falling = sorted(usable, key=lambda claim: -claim.epsilon)
        smallest = {claim.accountant: claim.epsilon for claim in falling}  # the last one counts
        wanted = max(least(epsilon, accountant=kind) for kind, epsilon in smallest.items())
        multiplier = wanted * exposure.bound / exposure.noise
        for _ in range(50):  # more noise has a coarser grid, which needs a little more noise again
            exposure = self._seen_with(multiplier, terms)
            if exposure.noise / exposure.bound >= wanted:
                return multiplier
            multiplier *= wanted * exposure.bound / exposure.noise * (1 + 1e-9)
        raise PrivacyRefusal(
            self.name,
            f"a noise multiplier of {wanted:.4g} is too much for the grid",
            "plan fewer rounds",
        )

    def _seen_with(self, noise_multiplier: float, terms: Terms) -> Exposure:
        """What the strategy's adversary sees of a client at this noise level."""
        return self.resolve(terms.with_noise(noise_multiplier)).exposure(self.observer, terms)
