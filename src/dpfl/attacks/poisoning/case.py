"""One method with one seed and its dishonest client: played under attacks, and tested.

A run is the simulation that :func:`dpfl.train` plays, in memory. What it leaves is tested on the
honest clients' test records alone: what the model is worth to a client that poisons it does not
count. The same records with the trigger tell how often a backdoor works.

The others' epsilons are read from the ledger of the run, where every client charges its own
account. They are compared with those of the same run without an attack, and must be equal.
"""

import copy
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor, nn

from dpfl.attacks.poisoning.dishonest import Attack, Tampered, Trigger
from dpfl.attacks.poisoning.results import DishonestClient, PoisonedRun
from dpfl.core.checks import check
from dpfl.core.errors import did_you_mean
from dpfl.core.layout import Layout
from dpfl.data.federation import Federation
from dpfl.data.records import Shard
from dpfl.engine.evaluation import Scores
from dpfl.plugs.robust import AGGREGATIONS
from dpfl.rounds import write_buffers
from dpfl.rounds.record import RoundRecord
from dpfl.runs.result import Summary
from dpfl.sim.loop import Simulation
from dpfl.sim.opening import Setup, in_memory
from dpfl.sim.trained_part import TrainedPart
from dpfl.strategy import Strategy

DIVERGED = 10.0
"""A run has diverged where its loss is more than so many times that of the first model."""

_NEVER = 10**9  # rounds between two evaluations on all clients' test records


@dataclass(frozen=True, kw_only=True)
class Played:
    """A run that was played: its ``simulation`` and ``summary``, and what was ``tampered`` with.

    ``epsilons`` are those of the honest clients, and ``within`` says that none is above a budget.
    """

    simulation: Simulation
    summary: Summary
    tampered: Tampered
    epsilons: Mapping[str, float]
    within: bool

    def change(self, plain: Mapping[str, float]) -> float:
        """By how much any honest client's epsilon differs from that of the ``plain`` run.

        A client that is charged in one of the two runs only differs by infinity.
        """
        both = self.epsilons.keys() | plain.keys()
        pairs = [(self.epsilons.get(one, math.inf), plain.get(one, math.inf)) for one in both]
        return max((abs(a - b) for a, b in pairs if a != b), default=0.0)

    @property
    def weight(self) -> float | None:
        """The dishonest client's mean share of all weights; None where clients have none.

        Clients that scale what they add to a sum by their own budgets have no weights, nor have
        rows that a coordinate-wise aggregation has mixed.
        """
        strategy = self.simulation.strategy
        client = self.tampered.client
        if strategy.local.own_noise or type(strategy.clean) in AGGREGATIONS.values():
            return None
        rounds = [line.weights for line in self.simulation.history if client in line.weights]
        shares = [own[client] / total for own in rounds if (total := math.fsum(own.values())) > 0]
        return statistics.mean(shares) if shares else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """What is attacked: a method with one seed (``setup``), and its dishonest ``client``.

    ``tested`` holds the honest clients' test records, ``marked`` the same with the trigger (None
    where records have no classes). Both test a ``model`` that no run trains: one whose plan writes
    no buffer must not find that of another run. ``buffers`` and ``loss`` are the first model's.
    """

    setup: Setup
    client: str
    trigger: Trigger
    model: nn.Module
    tested: TrainedPart
    marked: TrainedPart | None
    buffers: Mapping[str, Tensor]
    loss: float

    @classmethod
    def of(cls, setup: Setup, client: str | None = None) -> Self:
        """Prepare a case; a ``client`` that is left out is the one with the largest budget.

        Test records are laid out once, and public features of them are computed once, for all runs
        of the case.
        """
        federation = setup.federation
        model = copy.deepcopy(setup.model)
        dishonest = dishonest_client(federation, client)
        trigger = Trigger.of(federation, dishonest)
        layout = Layout.of_module(model)

        def part(marked: Trigger | None) -> TrainedPart:
            own = honest_tests(federation, dishonest, marked)
            return TrainedPart(model=model, layout=layout, federation=own, device="cpu")

        tested = part(None)
        first = tested.evaluation(layout.read(model), setup.strategy.personal, {})
        return cls(
            setup=setup,
            client=dishonest,
            trigger=trigger,
            model=model,
            tested=tested,
            marked=part(trigger) if federation.task.targets == "classes" else None,
            buffers={name: one.clone() for name, one in model.named_buffers()},
            loss=first.loss,
        )

    def about(self, seed: int) -> DishonestClient:
        """Who is dishonest, in the results."""
        budget = self.setup.federation.budgets.get(self.client)
        return DishonestClient(
            seed=seed,
            client=self.client,
            epsilon=None if budget is None else budget.epsilon,
            records=self.setup.federation.shards[self.client].examples,
        )

    def attacked(self, strategy: Strategy, attack: Attack) -> Setup:
        """The setup with a defended ``strategy``, in which the client does what ``attack`` says.

        It has a model of its own: buffers that one run writes are not there in the next.
        """
        setup = self.setup
        settings = {**setup.settings, "evaluate_every": _NEVER}
        if attack.claim != 1:
            claims = {**settings.get("misreports", {}), self.client: attack.claim}
            settings["misreports"] = claims
        return replace(
            setup,
            model=copy.deepcopy(setup.model),
            strategy=strategy,
            federation=attack.on_records(setup.federation, self.client, self.trigger),
            settings=settings,
        )

    def play(
        self, strategy: Strategy, attack: Attack, report: Callable[[int], None] | None = None
    ) -> Played:
        """Play a run under an attack; ``report`` is told the number of rounds that are done."""

        def progress(done: int, total: int, record: RoundRecord) -> None:
            if report is not None and done > 0:
                report(done)

        with in_memory(self.attacked(strategy, attack)) as simulation:
            run = simulation.run.name
            agreement = simulation.agreement
            factor = attack.upload
            tampered = Tampered(agreement=agreement, run=run, client=self.client, factor=factor)
            simulation.tap = tampered
            summary = simulation.play(progress)
        assert summary is not None
        lines = [line for line in summary.statements if line.account != self.client]
        epsilons = {line.account: line.epsilon for line in lines}
        return Played(
            simulation=simulation,
            summary=summary,
            tampered=tampered,
            epsilons=epsilons,
            within=all(line.budget is None or line.epsilon <= line.budget for line in lines),
        )

    def measured(self, played: Played, plain: Mapping[str, float], seed: int) -> PoisonedRun:
        """Test what came of a run; ``plain`` are the others' epsilons without an attack."""
        scores = self._scores(self.tested, played.simulation)
        tampered = played.tampered
        diverged = scores.loss < 0 or (self.loss > 0 and scores.loss > DIVERGED * self.loss)
        epsilons = played.epsilons if played.simulation.protects else {}
        return PoisonedRun(
            seed=seed,
            score=scores.value,
            backdoor=self._backdoor(played.simulation),
            weight=played.weight,
            diverged=diverged,
            cut=tampered.cut / max(1, tampered.sent),
            epsilon=max(epsilons.values(), default=None),
            epsilon_change=played.change(plain),
            within_budgets=played.within,
        )

    def _scores(self, part: TrainedPart, simulation: Simulation) -> Scores:
        """Test the model that a run published."""
        write_buffers(self.model, {**self.buffers, **simulation.state.buffers})
        personal = simulation.strategy.personal
        private = simulation.private
        return part.evaluation(simulation.published(), personal, private, details=True)

    def _backdoor(self, simulation: Simulation) -> float | None:
        """The share of records with the trigger, of another class, that are taken for its target.

        None where records have no classes.
        """
        if self.marked is None:
            return None
        rows = self._scores(self.marked, simulation).confusion
        others = [row for number, row in enumerate(rows) if number != self.trigger.target]
        return sum(row[self.trigger.target] for row in others) / max(1, sum(map(sum, others)))


def dishonest_client(federation: Federation, client: str | None) -> str:
    """The client that was named, by id or by number; else the one with the largest budget, of
    equal ones the one with the most records.
    """
    ids = federation.ids
    shards = federation.shards
    epsilons = {one: budget.epsilon for one, budget in federation.budgets.items()}
    check(len(ids) > 1, "federation", "has one client, and nobody is left", "use two or more")
    if client is None:
        return max(ids, key=lambda one: (epsilons.get(one, 0.0), shards[one].examples))
    numbered = {str(number): one for number, one in enumerate(ids)}
    found = client if client in ids else numbered.get(client)
    if found is None:
        check(False, "client", f"there is no client '{client}'", did_you_mean(client, ids))
    return str(found)


def honest_tests(federation: Federation, dishonest: str, trigger: Trigger | None) -> Federation:
    """The honest clients' test records, with a trigger on all of them if one is given.

    Each client keeps one training record, which a federation needs and nobody looks at.
    """
    shards = {}
    for client in federation.ids:
        if client == dishonest:
            continue
        shard = federation.shards[client]
        if trigger is not None:
            marked = trigger.on(shard.test_features)
            first = shard.features[:1], shard.labels[:1]
            shard = Shard.of(*first, marked, shard.test_labels)
        start = shard.span[0]
        shards[client] = replace(shard, span=(start, start + 1))  # nobody is trained here
    return Federation(shards=shards, task=federation.task, inputs=federation.inputs)
