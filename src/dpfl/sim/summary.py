"""What a simulation ends with: a summary, the flags it must carry, and what every client spent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dpfl.core.types import Observer
from dpfl.engine.stacked import assumptions_of
from dpfl.privacy.flags import Flag, RaisedFlag, public_note
from dpfl.privacy.statement import Statement, statement
from dpfl.rounds.members import data_flags
from dpfl.runs.model_card import ModelCard, save_model
from dpfl.runs.result import EpsilonSpread, ModelTested, RoundCount, Summary, total_bytes
from dpfl.sim.finish import finish_scores

if TYPE_CHECKING:
    from dpfl.sim.loop import Simulation


def summarise(
    simulation: Simulation, rounds: RoundCount, left: frozenset[str], seconds: float
) -> Summary:
    """Condense a run; in a folder, write the summary and the published model.

    ``left`` names clients that could not afford a round that was never opened.
    """
    state = simulation.state
    history = simulation.history
    strategy = simulation.strategy
    model = simulation.model
    layout = simulation.layout
    lines = statements_of(simulation)
    task = simulation.federation.task
    summary = Summary(
        method=strategy.name,
        run=simulation.run.name,
        promise=strategy.promise_with(simulation.accounted is not None),
        flags=flags_of(simulation, played=True),
        assumptions=assumptions_of(strategy, model, layout, simulation.device, task),
        clients=len(simulation.members),
        parameters=layout.size,
        rounds=rounds,
        scores=simulation.evaluate(details=True),
        tested=ModelTested.COMMON if strategy.personal is None else ModelTested.PERSONAL,
        finish=finish_scores(simulation) if simulation.personal_finish else {},
        epsilon=EpsilonSpread.of(lines),
        epsilon_against=_epsilon_against(simulation, lines),
        clients_left=tuple(sorted(left.union(*(line.left for line in history)))),
        **total_bytes(history),
        statements=tuple(lines),
        seconds=round(seconds, 3),
    )
    if (folder := simulation.folder) is not None:
        # The model file is for the world: no count of rounds, no name, nothing measured.
        card = card_of(simulation, summary.flags)
        vector = simulation.published()
        save_model(folder, model, card, layout, vector=vector, buffers=state.buffers)
        folder.save_summary(summary)
    return summary


def card_of(simulation: Simulation, flags: Iterable[RaisedFlag]) -> ModelCard:
    """Say what the model is, for whoever predicts with it; of the ``flags`` those that are
    public.
    """
    model = simulation.model
    federation = simulation.federation
    built = simulation.built
    return ModelCard.of(model, federation, built=built, note=public_note(flags))


def statements_of(simulation: Simulation, observer: Observer | None = None) -> list[Statement]:
    """What each client spent against an adversary: its own budget's, else the strategy's, if none
    is named.
    """
    ledger = simulation.run.ledger
    protects = simulation.protects
    found = []
    usual = simulation.strategy.observer if protects else Observer.SERVER
    for client, member in simulation.members.items():
        own = member.budget.observer if member.budget and protects else None
        found.append(statement(ledger, client, observer or own or usual))
    return [line for line in found if line is not None]


def _epsilon_against(
    simulation: Simulation, known: Sequence[Statement]
) -> dict[Observer, EpsilonSpread]:
    """What was spent against each adversary that is charged apart."""
    found = {}
    charged = (Observer.SERVER, Observer.WORLD) if simulation.agreement.charges_world else ()
    for observer in charged:
        complete = len(known) == len(simulation.members)
        same = complete and all(line.observer == observer for line in known)
        spread = EpsilonSpread.of(known if same else statements_of(simulation, observer))
        if spread is not None:
            found[observer] = spread
    return found


def flags_of(simulation: Simulation, *, played: bool) -> tuple[RaisedFlag, ...]:
    """What must be said of a run: of everything that it leaves behind, or before it is ``played``.

    Flags follow from how the run was made: seeded noise, a method that protects nobody, budgets
    that were raised, clients that misreport, deltas that are too large, what was read off the
    records, records and batches that count otherwise than asked, scores that only a simulation may
    measure, and rounds that published nothing.
    """
    named = (f"{client} (x {factor:g})" for client, factor in simulation.misreports.items())
    misreports = ", ".join(sorted(named))
    weak = _weak_deltas(simulation)
    lacking = simulation.work.evaluation.lacking if played else None
    silent = sum(line.silent for line in simulation.history)
    federation = simulation.federation
    counted = federation.inferred if simulation.protects else ""
    raised: dict[RaisedFlag, object] = {
        # this run, or an earlier one from the same accounts
        RaisedFlag(Flag.SEEDED): played and simulation.run.ledger.seeded_runs(),
        **dict.fromkeys(map(RaisedFlag, simulation.strategy.flags), True),
        RaisedFlag(Flag.FALSE_CLAIMS, misreports): misreports,
        RaisedFlag(Flag.WEAK_DELTA, weak): weak,
        RaisedFlag(Flag.UNACCOUNTED): played,
        RaisedFlag(Flag.STRATIFIED): federation.stratified and simulation.protects,
        RaisedFlag(Flag.INFERRED, f"declare {counted}"): counted,
        **dict.fromkeys(data_flags(simulation.members, simulation.strategy.local), True),
        RaisedFlag(Flag.ONE_SIDED, f"no {lacking} record"): lacking is not None,
        RaisedFlag(Flag.UNPUBLISHED, f"{silent} of {len(simulation.history)} rounds"): silent,
    }
    return (*simulation.flags, *(flag for flag, holds in raised.items() if holds))


def _weak_deltas(simulation: Simulation) -> str:
    """Whose delta allows to give a whole unit away; empty if nobody's does."""
    members = simulation.members
    by_client = not simulation.strategy.unit.of_data
    hidden = {c: len(members) if by_client else m.shard.examples for c, m in members.items()}
    weak = [c for c, m in members.items() if m.budget and m.budget.delta * hidden[c] >= 1]
    if not weak or not simulation.protects:
        return ""
    many = f"{simulation.strategy.unit}s"
    return f"at or above 1 / {many} for {len(weak)} client(s), '{weak[0]}' among them"
