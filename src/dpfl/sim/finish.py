"""The personal finish of simulated clients: what each would see on its own records, and nobody
else.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from dpfl.engine.finish_scores import FinishScores
from dpfl.engine.personal_finish import personal_finish
from dpfl.rounds import write_buffers

if TYPE_CHECKING:
    from dpfl.sim.loop import Simulation

MOST_CLIENTS = 64
MOST_NUMBERS = 50_000_000
"""Of more clients, or more records x parameters of all of them, a fixed sample is looked at."""


def finish_scores(simulation: Simulation) -> dict[str, FinishScores]:
    """What clients get from their own records alone, from the common model and from both.

    Of more than :data:`MOST_CLIENTS` clients, or where they hold much data, every so many-th is
    looked at, in the order of their names. Empty where nothing can be compared. The simulation is
    left as it is.
    """
    state = simulation.state
    if simulation.strategy.personal is not None:
        return {}
    model = copy.deepcopy(simulation.work.model)
    simulation.layout.write(simulation.published(), model)
    write_buffers(model, state.buffers)
    members = simulation.work.members(simulation.members)
    task = simulation.federation.task
    clients, found = sorted(members), {}
    work = sum(own.shard.examples for own in members.values()) * simulation.layout.size
    most = max(1, min(MOST_CLIENTS, len(clients) * MOST_NUMBERS // max(1, work)))
    for client in clients[:: -(-len(clients) // most)]:
        own = members[client]
        finish = personal_finish(model, own.shard, own.inputs, task, released=state.buffers)
        if finish is not None:
            found[client] = finish.scores
    return found
