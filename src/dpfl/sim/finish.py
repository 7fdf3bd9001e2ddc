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


def finish_scores(simulation: Simulation) -> dict[str, FinishScores]:
    """What clients get from their own records alone, from the common model and from both.

    Empty where nothing can be compared. The simulation is left as it is.
    """
    state = simulation.state
    if simulation.strategy.personal is not None:
        return {}
    model = copy.deepcopy(simulation.work.model)
    simulation.layout.write(simulation.published(), model)
    write_buffers(model, state.buffers)
    members = simulation.work.members(simulation.members)
    task = simulation.federation.task
    found = {}
    for client, own in sorted(members.items()):
        finish = personal_finish(model, own.shard, own.inputs, task, released=state.buffers)
        if finish is not None:
            found[client] = finish.scores
    return found
