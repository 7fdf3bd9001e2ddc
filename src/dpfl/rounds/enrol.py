"""What enrolment settles, and the nouns that pass between the functions of a round.

Which run this is, where it is charged, and where its randomness comes from.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from dpfl.core.errors import ConfigurationError
from dpfl.core.grid import Grid
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Claims, Observer, Phase, State, Terms, Unit, Who
from dpfl.plugs.base import Participant
from dpfl.plugs.release_costs import Shares, release_history
from dpfl.plugs.weights import own_weight
from dpfl.privacy.costs import PrivacyCost
from dpfl.privacy.ledger import Ledger
from dpfl.rounds.memory import Memory
from dpfl.rounds.sums import SumPlan, sum_plan, upload_grid
from dpfl.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Run(Memory):
    """Which run this is, where it is charged, and where its randomness comes from (None: the
    operating system).

    ``populations`` names the account under which each client is charged against the world,
    ``covered`` who can take part in every round, until it has another plan.
    """

    name: str
    ledger: Ledger
    seed: PublicSeed | None
    public: PublicSeed
    populations: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    covered: set[str] = field(default_factory=set, compare=False, repr=False)

    def planned(self, observer: Observer) -> dict[str, int]:
        """How many rounds each account has committed to at most, against an adversary; read once,
        then kept up to date.
        """
        return self.once(observer, self.ledger.planned, self.name, observer)

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


def secret_for(seed: PublicSeed | None, *labels: str | int) -> SecretRng:
    """A secret generator: from a simulation's seed, or from the operating system if there is
    none.
    """
    return SecretRng.from_system() if seed is None else SecretRng.simulated(seed.child(*labels))


Seen = tuple[PrivacyCost, frozenset[Observer]]
"""A cost, and the adversaries who see what it pays for."""


@dataclass(frozen=True, kw_only=True)
class Agreement(Memory):
    """What enrolment settles: the strategy, its terms, the layout of the model, and what everyone
    said of themselves.
    """

    strategy: Strategy
    terms: Terms
    layout: Layout
    claims: Mapping[str, Claims]
    buffer_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def phases(self, participant: Participant) -> tuple[Phase, ...]:
        """Plan a participant's local work for one round: the same every round, so it is planned
        once.
        """
        return self.once(participant, self.strategy.local.phases, self.terms, participant)

    def who(self, client: str, claims: Claims, drawn: int) -> Who:
        """What a stage may know of a client."""
        public = client in self.terms.public
        weight = self._weights.get(client, 1.0)
        return Who(id=client, claims=claims, drawn=drawn, public=public, weight=weight)

    @cached_property
    def _weights(self) -> dict[str, float]:
        """Constants by which clients weigh what they send; refused where they cannot be."""
        return {client: own_weight(self.terms.weights, client) for client, _ in self.terms.weights}

    def sum_plan(self, round_: int, drawn: int) -> SumPlan:
        """How the uploads of ``drawn`` clients are added up in a round over a secure sum."""
        round_ = min(round_, 0)
        return self.once((round_, drawn), sum_plan, self.strategy, self.terms, round_, drawn)

    def upload_grid(self, round_: int, drawn: int) -> Grid | None:
        """The grid on which uploads of ``drawn`` clients lie in a round, or in a release before
        round one; None where they are no multiples of one step.
        """
        return upload_grid(self.strategy, self.terms, round_, drawn)

    def most_drawn(self, round_: int) -> int:
        """How many clients a round asks at most; a release or a measurement asks everyone."""
        population = self.terms.population
        size = None if round_ < 0 else self.strategy.selection.cohort_size(population)
        return population if size is None else size

    @property
    def first_round(self) -> int:
        """The number of the first thing that is released: 0, or less where there are releases.

        Release k of n has the number k - n, which is also its (negative) index.
        """
        return -len(self.strategy.releases)

    @property
    def measurements(self) -> range:
        """The (negative) rounds under which measurements are charged, below the releases."""
        return range(-len(self.terms.releases), self.first_round)

    def measurement(self, number: int) -> int:
        """The (negative) round under which measurement ``number``, from 0, is charged."""
        return number - len(self.terms.releases)

    def release_noise(self, round_: int, participant: Participant) -> float:
        """The noise multiplier of a release, planned within the participant's own budget."""
        return self.strategy.local.release_noise(self.terms, participant)[round_]

    def cost(self, observer: Observer, participant: Participant, round_: int = 0) -> PrivacyCost:
        """What a round, or a release before round one, costs this participant against this
        adversary.
        """
        return in_round(self.plan(observer, participant), round_)

    def plan(self, observer: Observer, participant: Participant) -> PrivacyCost:
        """What a round costs, and before it all releases: what a participant commits to."""
        return self.once((observer, participant), self._whole_cost, observer, participant)

    def _whole_cost(self, observer: Observer, participant: Participant) -> PrivacyCost:
        phases = self.phases(participant)
        examples = participant.examples
        cost = self.strategy.cost(observer, phases, examples, self.terms)
        if not self.terms.releases:
            return cost
        noise = self.strategy.local.release_noise(self.terms, participant)
        seen = partial(self.strategy.channel.shared_exposure, drawn=self.terms.population)
        history = release_history(self.terms.releases, noise, examples, seen)
        return replace(cost, before=tuple((event,) for event in history))

    @cached_property
    def charges_world(self) -> bool:
        """Whether the world is charged apart: not where the guarantee is made before anything
        leaves a client.
        """
        client = self.strategy.unit is Unit.CLIENT and not self.strategy.local.private
        return (client or self.by_record) and self.strategy.observer is not Observer.NOBODY

    @cached_property
    def by_record(self) -> bool:
        """Whether what the world sees of a client follows from its own budget and records: where
        a trusted curator works on pooled records.
        """
        return self.strategy.local.pooled

    @cached_property
    def amplified(self) -> bool:
        """Whether the world's cost counts on the secrecy of who was drawn: then everyone eligible
        pays it.
        """
        return self.charges_world and self.strategy.amplifies(Observer.WORLD)

    def plans(self, participant: Participant) -> list[Seen]:
        """All that a participant commits to, each part with those who see what it pays for: what
        the server sees comes first.
        """
        server = self.plan(Observer.SERVER, participant)
        if not self.charges_world:
            return [(server, frozenset({Observer.SERVER, Observer.WORLD}))]
        world = self.plan(Observer.WORLD, participant)
        return [(server, frozenset({Observer.SERVER})), (world, frozenset({Observer.WORLD}))]


def in_round(plan: PrivacyCost, round_: int) -> PrivacyCost:
    """What a plan charges for a round, or for a release before round one."""
    return plan.of_releases[round_] if round_ < 0 else plan.of_round


def enrol(
    strategy: Strategy,
    claims: Mapping[str, Claims],
    rounds: int | None,
    layout: Layout,
    buffer_shapes: Mapping[str, tuple[int, ...]] | None = None,
    measured: Shares = (),
    *,
    noise: bool = True,
) -> Agreement:
    """Settle the terms once, from claims alone.

    ``buffer_shapes`` are those of the model's buffers that releases before round one write.
    ``measured`` are the planned measurements of an accounted metric. They are part of the plan as
    releases are, in front of those. ``rounds`` may be left to a strategy's recipe, which plans what
    else is open. Without ``noise`` no noise is planned, and nothing can be released.
    """
    recipe: Mapping[str, float] = {}
    if strategy.recipe is not None:
        recipe = strategy.recipe.plan(strategy, claims, rounds)
        strategy = strategy.recipe.apply(strategy, recipe)
        rounds = int(recipe["rounds"])
    rounds = planned_rounds(strategy, claims, rounds)
    strategy.check_measured(sum(part for part, _ in measured))
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
        releases=(*measured, *((r.share, r.numbers(shapes[r.into])) for r in strategy.releases)),
        measured=len(measured),
        recipe=tuple(recipe.items()),
    )
    for _, plug in strategy.slots():
        terms = plug.resolve_terms(terms, claims)
    # What cannot be sent, or a model that cannot be parted, is refused before anyone pays for it.
    if strategy.personal is not None:
        strategy.personal.merge(torch.zeros(layout.size), None, layout)
    drawn = strategy.selection.cohort_size(population) or 1
    if noise:
        strategy, terms = strategy.settle(terms, claims)
        strategy.upload_grid(drawn)
        if strategy.channel.group(drawn) is not None:
            for round_ in range(-len(terms.releases), 1):
                sum_plan(strategy, terms, round_, drawn if round_ == 0 else population)
    return Agreement(
        strategy=strategy, terms=terms, layout=layout, claims=dict(claims), buffer_shapes=shapes
    )


def planned_rounds(strategy: Strategy, claims: Mapping[str, Claims], rounds: int | None) -> int:
    """How many rounds there will be: those given, or as many as a recipe plans."""
    if rounds is not None:
        return rounds
    if strategy.recipe is None:
        raise ConfigurationError(strategy.name, "how many rounds there are is open", "give rounds")
    return int(strategy.recipe.plan(strategy, claims, rounds)["rounds"])


def first_state(agreement: Agreement, model: Tensor) -> State:
    """Return the state before the first round.

    Every plug begins with its own state. With releases before round one the round number is
    negative, and the model's buffers are still those that it was built with.
    """
    slots = agreement.strategy.slots()
    plugs = {slot: plug.start(agreement.terms, agreement.layout) for slot, plug in slots}
    return State(round=agreement.first_round, model=model, plugs=plugs)
