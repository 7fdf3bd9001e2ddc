"""Going on after an interruption: ledger, record and checkpoint must belong together."""

from dataclasses import replace

from dpfl.core.errors import LedgerError
from dpfl.core.types import State
from dpfl.rounds.record import RoundRecord
from dpfl.runs.folder import Checkpoint
from dpfl.sim.loop import Simulation


def resume(simulation: Simulation, found: Checkpoint) -> tuple[State, list[RoundRecord]]:
    """Check that ledger, record and checkpoint belong together, and say from where to go on.

    Seeded: a round that was charged but not checkpointed is repeated, bit for bit, without a
    new charge. Otherwise its noise is gone: the round is lost, its number and its charge are
    not.
    """
    folder = simulation.folder
    assert folder is not None
    state, simulation.private = found.state, dict(found.private)
    charged = simulation.run_.ledger.last_round(simulation.run_.name)
    before = simulation.agreement.first_round - 1
    if (before if charged is None else charged) < state.round - 1:
        raise LedgerError(
            str(folder.ledger),
            f"ends at round {charged}, the checkpoint at {state.round - 1}",
            "restore the newest ledger",
        )
    history = folder.cut_back(simulation.agreement.first_round, state.round)
    charged_to = simulation.run_.ledger.charged(simulation.run_.name)
    for line in history:
        unpaid = [client for client in line.arrived if (line.round, client) not in charged_to]
        if unpaid:
            raise LedgerError(
                str(folder.ledger),
                f"does not hold round {line.round}'s charge to '{unpaid[0]}', who took part",
                "restore the ledger this run has written",
            )
    while simulation.run_.seed is None and charged is not None and state.round <= charged:
        reason = "charged, but interrupted before it was published"
        history.append(RoundRecord(round=state.round, lost=reason))
        folder.append_round(history[-1])
        state = replace(state, round=state.round + 1)
        simulation.checkpoint(state)
    return state, history
