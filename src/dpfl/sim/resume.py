"""Go on with a run that was interrupted, if its ledger and its record belong together."""

from dataclasses import replace

from dpfl.core.checks import check
from dpfl.core.errors import LedgerError
from dpfl.rounds.record import RoundRecord
from dpfl.runs.folder import Checkpoint
from dpfl.sim.loop import Simulation


def resume(simulation: Simulation, found: Checkpoint) -> None:
    """Go on with a ``simulation`` from a checkpoint (``found``), if ledger and record belong to it.

    Seeded: a round that was charged but not checkpointed is repeated, bit for bit, without a
    new charge. Otherwise its noise is gone: the round is lost, its number and its charge are
    not.
    """
    folder = simulation.folder
    assert folder is not None
    found.check_follows(simulation.state, folder.checkpoint)
    simulation.state, simulation.private, done = found.state, dict(found.private), found.state.round
    where = str(folder.ledger)
    first = simulation.agreement.first_round
    ledger = simulation.run.ledger
    name = simulation.run.name
    charged = ledger.last_charged(name)
    check(
        (first - 1 if charged is None else charged) >= done - 1,
        where,
        f"ends at round {charged}, the checkpoint at {done - 1}",
        "restore the newest ledger",
        LedgerError,
    )
    simulation.history, charged_to = folder.cut_back(first, done), ledger.charged(name)
    seconds = {line["round"]: line for line in folder.read_timings()}
    simulation.timings = [own for round_, own in seconds.items() if round_ < done]
    for line in simulation.history:
        for client in line.arrived:
            check(
                (line.round, client) in charged_to,
                where,
                f"does not hold round {line.round}'s charge to '{client}', who took part",
                "restore the ledger this run has written",
                LedgerError,
            )
    while simulation.run.seed is None and charged is not None and simulation.state.round <= charged:
        reason = "charged, but interrupted before it was published"
        simulation.history.append(RoundRecord(round=simulation.state.round, lost=reason))
        folder.append_round(simulation.history[-1])
        simulation.state = replace(simulation.state, round=simulation.state.round + 1)
        simulation.keep_state()
