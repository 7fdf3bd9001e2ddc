"""What adversaries see of a run, and runs in which somebody is missing.

The simulation is the one that :func:`dpfl.train` plays, with a tap between clients and server: what
is recorded are the bytes that leave clients after local work, stages and accounting.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from dpfl.core.checks import check
from dpfl.core.types import Observer, Rows, State, Total
from dpfl.data.federation import Federation
from dpfl.data.records import Shard
from dpfl.plugs.base import Participant
from dpfl.privacy.events import History
from dpfl.privacy.ledger import open_ledger
from dpfl.rounds import Agreement, Arrival, Plan, Run, SumOfUploads, Uplink
from dpfl.sim.loop import Simulation
from dpfl.sim.opening import Setup


@dataclass(frozen=True, kw_only=True)
class ObservedRound:
    """One round, or one release before round one: the server's state before it, what it sent, and
    what came back; ``total`` is a sum that was added up under masks.
    """

    state: State
    plan: Plan
    uplinks: tuple[Uplink, ...]
    total: SumOfUploads | None = None


@dataclass(kw_only=True, eq=False)
class Transcript:
    """All that left the clients of a run: ``rounds``, releases before round one included.

    ``agreement`` and ``run`` are those that it was played under; ``final`` is the server's state
    after the last round.
    """

    agreement: Agreement
    run: Run
    final: State
    rounds: list[ObservedRound] = field(default_factory=list)

    @property
    def training(self) -> list[ObservedRound]:
        """The rounds of training, without the releases before them."""
        return [one for one in self.rounds if one.state.round >= 0]

    @property
    def releases(self) -> list[ObservedRound]:
        """The releases before round one."""
        return [one for one in self.rounds if one.state.round < 0]

    def server_view(self, seen: ObservedRound) -> Rows | Total:
        """What the server sees of a round of training: rows, or a sum where it sees no more."""
        return self._arrival(seen).seen(seen.state)

    def released_view(self, seen: ObservedRound) -> Mapping[str, Tensor] | Tensor:
        """What the server sees of a release: each client's answer, or their sum."""
        return self._arrival(seen).released(seen.state)

    def _arrival(self, seen: ObservedRound) -> Arrival:
        return Arrival.of(self.agreement, seen.plan, seen.uplinks, self.run, seen.total)

    def world_view(self) -> list[Tensor]:
        """The global models that are published: before the first round, and after each."""
        return [*(one.state.model for one in self.training), self.final.model]

    def participant(self, client: str) -> Participant:
        """A client with its budget, as noise is planned for it."""
        raise NotImplementedError

    def history(self, client: str, observer: Observer) -> History:
        """What all planned releases and rounds cost a client against an adversary, as events."""
        plan = self.agreement.plan(observer, self.participant(client))
        amplified = observer is Observer.WORLD and self.agreement.amplified
        terms = self.agreement.terms
        return plan.times(terms.rounds if amplified else terms.participations)


@dataclass(kw_only=True, eq=False)
class Observation(Transcript):
    """A ``simulation`` that was played, and all that left its clients."""

    simulation: Simulation

    @classmethod
    def of(cls, simulation: Simulation) -> Self:
        """What is seen of a simulation: nothing yet."""
        return cls(
            simulation=simulation,
            agreement=simulation.agreement,
            run=simulation.run,
            final=simulation.state,
        )

    def participant(self, client: str) -> Participant:
        """A client with its budget, as noise is planned for it."""
        return self.simulation.members[client].participant


def observe(setup: Setup, **more: Any) -> Observation:
    """Play a simulation to its end, without a folder, and record what leaves its clients.

    ``more`` are arguments of :class:`~dpfl.sim.loop.Simulation` beside those of the ``setup``.
    """
    with closing(open_ledger(None, True, "renyi")) as ledger:
        simulation = setup.simulation(setup.new_name(), ledger, **more)
        observation = Observation.of(simulation)

        def record(state: State, plan: Plan, uplinks: Sequence[Uplink]) -> Sequence[Uplink]:
            seen = ObservedRound(state=state, plan=plan, uplinks=tuple(uplinks))
            observation.rounds.append(seen)
            return uplinks

        simulation.tap = record
        simulation.play(summary=False)
        observation.final = simulation.state
    return observation


def without(federation: Federation, absent: Mapping[str, Tensor]) -> Federation:
    """The federation with some training records replaced by nothing, as under zero-out adjacency.

    ``absent`` marks the records of each client that are missing. They become what is not a number:
    a record (or, where a client's update is clipped as a whole, a client) whose gradient is not
    finite contributes exactly zero, and the number of records, which is public, stays the same.
    """
    shards = dict(federation.shards)
    for client, missing in absent.items():
        shard = shards[client]
        check(
            missing.shape == (shard.examples,),
            f"client '{client}'",
            f"{len(missing)} marks for {shard.examples} records",
            "mark every training record",
        )
        check(
            shard.features.is_floating_point(),
            f"client '{client}'",
            "records are not numbers",
            "use a data set of numbers or images",
        )
        features = shard.features.clone()
        features[missing] = torch.nan
        kept = shard.labels, shard.test_features, shard.test_labels
        shards[client] = Shard.of(features, *kept)
    return replace(federation, shards=shards)
