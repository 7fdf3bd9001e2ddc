"""What a simulation ends with: a summary, the flags it must carry, and what every client spent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dpfl.core.types import Observer, State, Unit
from dpfl.engine.stacked import arithmetic_assumptions
from dpfl.privacy.flags import Flag, RaisedFlag, public_note
from dpfl.privacy.statement import Statement, statement
from dpfl.rounds.record import RoundRecord
from dpfl.runs.result import EpsilonSpread, ModelTested, RoundCount, Summary, total_bytes

if TYPE_CHECKING:
    from dpfl.sim.loop import Simulation


def summarise(
    simulation: Simulation,
    state: State,
    history: Sequence[RoundRecord],
    rounds: RoundCount,
    left: tuple[str, ...],
    seconds: float,
) -> Summary:
    """Condense a run; in a folder, write the summary and the published model.

    ``left`` names clients that could not afford a round that was never opened.
    """
    strategy, folder = simulation.strategy, simulation.folder
    lines = _statements(simulation, lambda client: _stated_against(simulation, client))
    arithmetic: tuple[str, ...] = ()
    if strategy.local.private:
        where = (simulation.model, simulation.layout, simulation.device)
        arithmetic = arithmetic_assumptions(*where)
    last = history[-1].scores if history else None
    summary = Summary(
        method=strategy.name,
        run=simulation.run_.name,
        promise=strategy.promise,
        flags=(*flags(simulation), *_unpublished(history)),
        assumptions=(*strategy.assumptions, *arithmetic),
        clients=len(simulation.members),
        parameters=simulation.layout.size,
        rounds=rounds,
        scores=last or simulation.evaluate(state),
        tested=ModelTested.COMMON if strategy.personal is None else ModelTested.PERSONAL,
        epsilon=EpsilonSpread.of(lines.values()),
        epsilon_against=_epsilon_against(simulation, lines),
        clients_left=tuple(sorted({*left, *(c for line in history for c in line.left)})),
        **total_bytes(history),
        statements=tuple(lines.values()),
        seconds=round(seconds, 3),
    )
    if folder is not None:
        # The model file is for the world: no count of rounds, no name, nothing measured.
        note, model = public_note(summary.flags), simulation.published(state)
        folder.save_model(model, simulation.layout, note, state.buffers)
        folder.save_summary(summary)
    return summary


def _stated_against(simulation: Simulation, client: str) -> Observer:
    """Against whom a client's spend is stated: its own budget's adversary, else the strategy's."""
    budget = simulation.members[client].budget
    if not simulation.protects:
        return Observer.SERVER
    return (budget.observer if budget else None) or simulation.strategy.observer


def _statements(simulation: Simulation, against: Callable[[str], Observer]) -> dict[str, Statement]:
    ledger = simulation.run_.ledger
    lines = {client: statement(ledger, client, against(client)) for client in simulation.members}
    return {client: line for client, line in lines.items() if line is not None}


def _epsilon_against(
    simulation: Simulation, known: Mapping[str, Statement]
) -> dict[Observer, EpsilonSpread]:
    """What was spent against each adversary that is charged apart."""
    found: dict[Observer, EpsilonSpread] = {}
    if not simulation.agreement.charges_world:
        return found
    for observer in (Observer.SERVER, Observer.WORLD):
        complete = len(known) == len(simulation.members)
        same = complete and all(line.observer == observer for line in known.values())
        against = dict.fromkeys(simulation.members, observer)
        lines = known if same else _statements(simulation, against.__getitem__)
        if (spread := EpsilonSpread.of(lines.values())) is not None:
            found[observer] = spread
    return found


def flags(simulation: Simulation) -> tuple[RaisedFlag, ...]:
    """What must be said of everything a run leaves behind.

    Flags follow from how the run was made: seeded noise, a method that protects nobody, budgets
    that were raised, clients that misreport, deltas that are too large, and scores that only a
    simulation may measure.
    """
    raised, strategy = [], simulation.strategy
    if simulation.run_.ledger.seeded_runs():  # this run, or an earlier one from the same accounts
        raised.append(RaisedFlag(Flag.SEEDED))
    if not simulation.protects:
        raised.append(RaisedFlag(Flag.UNPROTECTED))
    if strategy.local.hypothetical:
        raised.append(RaisedFlag(Flag.HYPOTHETICAL))
    if simulation.misreports:
        named = (f"{client} (x {factor:g})" for client, factor in simulation.misreports.items())
        raised.append(RaisedFlag(Flag.FALSE_CLAIMS, ", ".join(sorted(named))))
    if simulation.protects and (weak := _weak_deltas(simulation)):
        raised.append(RaisedFlag(Flag.WEAK_DELTA, weak))
    return (*raised, RaisedFlag(Flag.UNACCOUNTED))


def _weak_deltas(simulation: Simulation) -> str:
    """Whose delta allows to give a whole unit away; empty if nobody's does."""
    members, by_client = simulation.members, simulation.strategy.unit is Unit.CLIENT
    hidden = {c: len(members) if by_client else m.shard.examples for c, m in members.items()}
    weak = [c for c, m in members.items() if m.budget and m.budget.delta * hidden[c] >= 1]
    if not weak:
        return ""
    many = "clients" if by_client else "records"
    return f"at or above 1 / {many} for {len(weak)} client(s), '{weak[0]}' among them"


def _unpublished(history: Sequence[RoundRecord]) -> tuple[RaisedFlag, ...]:
    silent = sum(line.silent for line in history)
    detail = f"{silent} of {len(history)} rounds"
    return (RaisedFlag(Flag.UNPUBLISHED, detail),) if silent else ()
