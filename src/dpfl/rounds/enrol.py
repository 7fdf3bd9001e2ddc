"""What enrolment settles, and the nouns that pass between the functions of a round."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Claims, Cohort, Observer, Phase, Shared, State, Terms, Unit
from dpfl.plugs.base import Participant
from dpfl.plugs.releases import Release, release_history
from dpfl.privacy.costs import PrivacyCost
from dpfl.privacy.ledger import Ledger
from dpfl.strategy import Strategy

Seen = tuple[PrivacyCost, frozenset[Observer]]
"""A cost, and the adversaries who see what it pays for."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What enrolment settles: the strategy, its terms, the layout of the model, and what everyone
    said of themselves.
    """

    strategy: Strategy
    terms: Terms
    layout: Layout
    claims: Mapping[str, Claims]
    buffer_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    _plans: dict[Participant, tuple[Phase, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _costs: dict[tuple[Observer, Participant], PrivacyCost] = field(
        default_factory=dict, compare=False, repr=False
    )

    def phases(self, participant: Participant) -> tuple[Phase, ...]:
        """Plan a participant's local work for one round: the same every round, so it is planned
        once.
        """
        if participant not in self._plans:
            self._plans[participant] = self.strategy.local.phases(self.terms, participant)
        return self._plans[participant]

    @property
    def first_round(self) -> int:
        """The number of the first thing that is released: 0, or less where there are releases."""
        return -len(self.strategy.releases)

    def release(self, round_: int) -> Release:
        """The release that has this (negative) round number."""
        return self.strategy.releases[round_ - self.first_round]

    def release_noise(self, round_: int, participant: Participant) -> float:
        """The noise multiplier of a release, planned within the participant's own budget."""
        noise = self.strategy.local.release_noise(self.terms, participant)
        return noise[round_ - self.first_round]

    def cost(self, observer: Observer, participant: Participant, round_: int = 0) -> PrivacyCost:
        """What a round, or a release before round one, costs this participant against this
        adversary.
        """
        whole = self.plan(observer, participant)
        if round_ < 0:
            return whole.of_releases[round_ - self.first_round]
        return whole.of_round if whole.before else whole

    def plan(self, observer: Observer, participant: Participant) -> PrivacyCost:
        """What a round costs, and before it all releases: what a participant commits to."""
        key = (observer, participant)
        if key not in self._costs:
            phases, examples = self.phases(participant), participant.examples
            cost = self.strategy.cost(observer, phases, examples, self.terms)
            if self.terms.releases:
                noise = self.strategy.local.release_noise(self.terms, participant)
                history = release_history(self.terms.releases, noise, examples)
                cost = replace(cost, before=tuple((event,) for event in history))
            self._costs[key] = cost
        return self._costs[key]

    @cached_property
    def charges_world(self) -> bool:
        """Whether the world is charged apart: not where the guarantee is made before anything
        leaves a client.
        """
        return self.strategy.unit is Unit.CLIENT and self.strategy.observer is not Observer.NOBODY

    @cached_property
    def amplified(self) -> bool:
        """Whether the world's cost counts on the secrecy of who was drawn: then everyone eligible
        pays it.
        """
        return self.charges_world and self.strategy.amplifies(Observer.WORLD)

    def plans(self, participant: Participant) -> list[Seen]:
        """All that a participant commits to, each part with those who see what it pays for."""
        server = self.plan(Observer.SERVER, participant)
        if not self.charges_world:
            return [(server, frozenset({Observer.SERVER, Observer.WORLD}))]
        world = self.plan(Observer.WORLD, participant)
        return [(server, frozenset({Observer.SERVER})), (world, frozenset({Observer.WORLD}))]

    def plan_against_server(self, participant: Participant) -> Seen:
        """What the server sees, and who else sees it."""
        return next(plan for plan in self.plans(participant) if Observer.SERVER in plan[1])


@dataclass(frozen=True, kw_only=True)
class Run:
    """Which run this is, where it is charged, and where its randomness comes from (None: the
    operating system).

    ``populations`` names the account under which each client is charged against the world,
    ``covered`` whose plans cover all rounds; the rest are answers of the ledger, asked for once.
    """

    name: str
    ledger: Ledger
    seed: PublicSeed | None
    public: PublicSeed
    populations: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    covered: set[str] = field(default_factory=set, compare=False, repr=False)
    _planned: dict[Observer, dict[str, int]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _answers: dict[tuple[object, ...], bool] = field(
        default_factory=dict, compare=False, repr=False
    )

    def planned(self, observer: Observer) -> dict[str, int]:
        """How many rounds each account has committed to at most, against an adversary; read once,
        then kept up to date.
        """
        if observer not in self._planned:
            self._planned[observer] = self.ledger.planned(self.name, observer)
        return self._planned[observer]

    def affordable_at_first(
        self, client: str, cost: PrivacyCost, seen_by: frozenset[Observer]
    ) -> bool:
        """Whether the budget of a client that has committed to nothing yet covers one round: asked
        once.
        """
        key = (client, seen_by)
        if key not in self._answers:
            releases = self.ledger.affordable_releases(client, cost, seen_by, 1)
            self._answers[key] = releases > 0
        return self._answers[key]

    def still_planned(
        self, round_: int, account: str, observer: Observer, cost: PrivacyCost
    ) -> bool:
        """Whether an account's plan covers this round: asked once a round."""
        key = (round_, account, observer)
        if key not in self._answers:
            covered = self.ledger.can_release(self.name, round_, account, observer, cost)
            self._answers[key] = covered
        return self._answers[key]

    def secret(self, *labels: str | int) -> SecretRng:
        """Make the secret generator for a named purpose: seeded in a simulation, fresh from the
        system otherwise.
        """
        return secret_for(self.seed, *labels)

    def round_seed(self, round_: int) -> PublicSeed:
        """The public randomness of a round (projections, channel gains): shared, but known to
        nobody before the round.

        Without a seed it comes from the operating system, so that no data can have been chosen with
        it in mind.
        """
        if self.seed is None:
            return SecretRng.from_system().secret_seed()
        return self.public.child("round", round_)

    def draw_token(self, *labels: str | int) -> str:
        """Name the randomness a charge pays for; empty where it cannot be repeated."""
        return "" if self.seed is None else f"{self.seed.child(*labels).value:x}"


def secret_for(seed: PublicSeed | None, *labels: str | int) -> SecretRng:
    """A secret generator: from a simulation's seed, or from the operating system if there is
    none.
    """
    return SecretRng.from_system() if seed is None else SecretRng.simulated(seed.child(*labels))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the server decided when it opened the round; ``over`` says why there is none, and no
    further one.
    """

    round: int
    cohort: Cohort = field(default_factory=lambda: Cohort(ids=(), claims={}))
    downloads: Mapping[str, bytes] = field(default_factory=dict)
    shared: Mapping[str, Shared] = field(default_factory=dict)
    starts: Mapping[str, Tensor] = field(default_factory=dict)
    unwilling: tuple[str, ...] = ()
    over: str = ""


@dataclass(frozen=True, kw_only=True)
class Uplink:
    """What came back from a client: bytes, or the reason why there are none.

    A client that abstains, fails, is late or sends something that was not agreed on is an ordinary
    outcome of a round.
    """

    client: str
    payload: bytes | None
    reason: str = ""


def enrol(
    strategy: Strategy,
    claims: Mapping[str, Claims],
    rounds: int,
    layout: Layout,
    buffer_shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Agreement:
    """Settle the terms once, from claims alone.

    ``buffer_shapes`` are those of the model's buffers that releases before round one write.
    """
    shapes = dict(buffer_shapes or {})
    population = len(claims)
    rate = strategy.selection.rate(population)
    epsilons = [claim.epsilon for claim in claims.values() if claim.usable] or [math.inf]
    terms = Terms(
        rounds=rounds,
        population=population,
        expected_cohort=rate * population,
        participations=math.ceil(rounds * rate - 1e-9),
        smallest_epsilon=min(epsilons),
        largest_epsilon=max(epsilons),
        parameters=layout.size,
        releases=tuple((r.share, r.numbers(shapes[r.into])) for r in strategy.releases),
    )
    for _, plug in strategy.slots():
        terms = plug.resolve_terms(terms, claims)
    strategy, terms = strategy.settle(terms, claims)
    # What could not be sent, or a model that cannot be parted, is refused before anyone pays for
    # it.
    strategy.upload_grid(strategy.selection.cohort_size(population) or 1)
    if strategy.personal is not None:
        strategy.personal.merge(torch.zeros(layout.size), None, layout)
    return Agreement(
        strategy=strategy, terms=terms, layout=layout, claims=dict(claims), buffer_shapes=shapes
    )


def first_state(agreement: Agreement, model: Tensor) -> State:
    """Return the state before the first round.

    Every plug begins with its own state. With releases before round one the round number is
    negative, and the model's buffers are still those that it was built with.
    """
    slots = agreement.strategy.slots()
    plugs = {slot: plug.start(agreement.terms, agreement.layout) for slot, plug in slots}
    return State(round=agreement.first_round, model=model, plugs=plugs)
