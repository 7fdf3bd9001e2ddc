"""The simulator: a federation in one process (or a few), through the same three functions a
deployment calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn

from dpfl.core.errors import LedgerError, PrivacyRefusal
from dpfl.core.layout import Layout
from dpfl.core.types import Budget, Observer, State, Unit
from dpfl.data.federation import Federation
from dpfl.engine.evaluation import Evaluation, Scores
from dpfl.engine.stacked import arithmetic_assumptions
from dpfl.models import check_model
from dpfl.privacy.flags import Flag, RaisedFlag, public_note
from dpfl.privacy.statement import Statement, statement
from dpfl.rounds import (
    Agreement,
    Run,
    Uplink,
    blocks_of,
    buffer_shapes,
    can_go_on,
    charging,
    close_round,
    enrol,
    first_state,
    open_round,
    write_buffers,
)
from dpfl.rounds.members import check_budget, false_claims, honest_members
from dpfl.rounds.record import RoundRecord
from dpfl.runs.folder import Checkpoint, RunFolder
from dpfl.runs.result import EpsilonSpread, RoundCount, Summary, Tested, total_bytes
from dpfl.sim.clock import Clock
from dpfl.sim.ray_workers import RayWorkers
from dpfl.sim.truth import (
    compared,
    lost_on_the_way,
    true_noise,
    with_largest_budget,
    with_true_noise,
)
from dpfl.sim.workers import WorkerContext, Workers
from dpfl.strategy import Strategy

Progress = Callable[[int, int, RoundRecord], None]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Where a simulation stopped; ``summary`` is None if it was halted, to go on another time."""

    state: State
    history: list[RoundRecord]
    scores: Scores
    summary: Summary | None


class Simulation:
    """A prepared federation: members, agreement, budgets. :meth:`run` plays the rounds."""

    def __init__(
        self,
        *,
        model: nn.Module,
        federation: Federation,
        strategy: Strategy,
        rounds: int,
        run: Run,
        engine: str = "stacked",
        device: str = "cpu",
        workers: int = 1,
        evaluate_every: int = 1,
        misreports: Mapping[str, float] | None = None,
        dropout: float = 0.0,
        folder: RunFolder | None = None,
        digest: str = "",
    ) -> None:
        check_model(model, federation.feature_shape, federation.classes, federation.inputs)
        if run.ledger.filter == "renyi":  # plan with the curve that the ledger will hold it against
            federation = replace(federation, budgets=_planned_by(federation.budgets, "renyi"))
        self.misreports = dict(misreports or {})
        self.members = honest_members(federation, false_claims(federation, self.misreports))
        if strategy.local.hypothetical:
            self.members = with_largest_budget(self.members)
        for member in self.members.values():
            check_budget(member, unit=strategy.unit, observer=strategy.observer)
            if member.budget is None and strategy.observer is not Observer.NOBODY:
                raise PrivacyRefusal(
                    f"client '{member.id}'",
                    "has no budget",
                    "give every client a Budget(epsilon, delta), or use a method without privacy",
                )
        self.model, self.layout = model, Layout.of_module(model)
        self.run_, self.folder, self.digest = run, folder, digest
        self.engine, self.device, self.workers = engine, device, workers
        self.evaluate_every, self.dropout = evaluate_every, dropout
        claims = {client: member.claims for client, member in self.members.items()}
        shapes = buffer_shapes(model, strategy.releases)
        self.agreement: Agreement = enrol(strategy, claims, rounds, self.layout, shapes)
        self._admit = charging(self.agreement, run)
        self.strategy = self.agreement.strategy  # with nothing left open
        self.evaluation = Evaluation(
            model=model, layout=self.layout, federation=federation, device=device
        )
        self.private: dict[str, Tensor] = {}  # what stays at clients, by client
        self.timings: list[dict[str, float]] = []
        if self._protects:
            budgets = {c: m.budget for c, m in self.members.items() if m.budget is not None}
            run.ledger.set_budgets(budgets, unit=strategy.unit, observer=strategy.observer)

    @property
    def _protects(self) -> bool:
        return self.strategy.observer is not Observer.NOBODY

    # -- the loop ----------------------------------------------------------------------------------

    def start(self) -> State:
        """Return the state before the first round; in a folder, it is the first checkpoint."""
        state = first_state(self.agreement, self.layout.read(self.model))
        self._checkpoint(state)
        return state

    def run(
        self,
        state: State,
        history: list[RoundRecord],
        progress: Progress | None = None,
        until: int | None = None,
    ) -> Outcome:
        """Play the rounds that are left; or halt at round ``until``, to go on another time."""
        began = time.perf_counter()
        rounds = self.agreement.terms.rounds
        ended_early: str | None = None
        left: tuple[str, ...] = ()
        halt = min(until or rounds, rounds)
        with self._workers() as workers:
            while state.round < halt:
                clock = Clock()
                plan = open_round(self.agreement, state, self.run_, self._willing(state.round))
                if plan.over:
                    left = plan.unwilling
                    ended_early = f"after {state.round} of {rounds} rounds: {plan.over}"
                    break
                clock.lap("open")
                # ---- clients: each charges its own account, then works ---------------------------
                members = {client: self.members[client] for client in plan.cohort.ids}
                abstaining = self._admit(state.round, members)
                active = {c: m for c, m in members.items() if c not in abstaining}
                blocks = blocks_of(self.agreement, active, workers.engine)
                uplinks = workers.run(plan.downloads, blocks, self.private)
                uplinks = lost_on_the_way(uplinks, self.dropout, self.run_, state.round)
                uplinks += [
                    Uplink(client=c, payload=None, reason=why)
                    for c, why in sorted(abstaining.items())
                ]
                clock.lap("clients")
                # ---- server: aggregate, evaluate, write down -------------------------------------
                noise = true_noise(self.agreement, active)
                if self.strategy.weights.needs_true_noise:
                    state = with_true_noise(state, noise)
                state, record = close_round(self.agreement, state, plan, uplinks, self.run_)
                clock.lap("close")
                record = compared(self.agreement, record, noise)
                trained = state.round > 0
                if trained and (state.round % self.evaluate_every == 0 or state.round == rounds):
                    record = replace(record, scores=self.evaluate(state))
                clock.lap("evaluate")
                history.append(record)
                self._keep(state, record, clock)
                if progress is not None:
                    progress(state.round, rounds, record)
        if halt < rounds and ended_early is None:
            return self._halted(state, history)
        count = RoundCount(planned=rounds, done=state.round, ended_early=ended_early)
        summary = self._summary(state, history, count, left, time.perf_counter() - began)
        return Outcome(state=state, history=history, scores=summary.scores, summary=summary)

    def _workers(self) -> Workers | RayWorkers:
        context = WorkerContext(
            agreement=self.agreement,
            members=self.members,
            model=self.model,
            engine=self.engine,
            device=self.device,
            run=self.run_.name,
            seed=self.run_.seed,
        )
        kind = RayWorkers if self.engine == "ray" else Workers
        return kind(context, self.workers)

    def _halted(self, state: State, history: list[RoundRecord]) -> Outcome:
        scores = self.evaluate(state)
        if self.folder is not None:
            self.folder.append_halt(state.round, scores)
        return Outcome(state=state, history=history, scores=scores, summary=None)

    def _keep(self, state: State, record: RoundRecord, clock: Clock) -> None:
        timing = {"round": record.round, "seconds": sum(clock.laps.values()), **clock.laps}
        self.timings.append(timing)
        if self.folder is not None:
            self.folder.append_round(record)
            self.folder.append(self.folder.timings, timing)
            self._checkpoint(state)

    def _checkpoint(self, state: State) -> None:
        if self.folder is not None:
            self.folder.save_state(
                Checkpoint(
                    state=state, run=self.run_.name, experiment=self.digest, private=self.private
                )
            )

    def _willing(self, round_: int) -> Callable[[str], bool]:
        """Ask a member whether its own ledger covers this round."""

        def willing(client: str) -> bool:
            participant = self.members[client].participant
            return can_go_on(self.agreement, self.run_, round_, client, participant)

        return willing

    def published(self, state: State) -> Tensor:
        """The model that is evaluated and handed out."""
        return self.strategy.step.published(dict(state.plugs["step"]), state.model)

    def evaluate(self, state: State) -> Scores:
        """Accuracy and loss on test records: for simulations only, and not accounted."""
        write_buffers(self.model, state.buffers)
        return self.evaluation(self.published(state), self.strategy.personal, self.private)

    # -- going on after an interruption ------------------------------------------------------------

    def resume(self, found: Checkpoint) -> tuple[State, list[RoundRecord]]:
        """Check that ledger, record and checkpoint belong together, and say from where to go on.

        Seeded: a round that was charged but not checkpointed is repeated, bit for bit, without a
        new charge. Otherwise its noise is gone: the round is lost, its number and its charge are
        not.
        """
        assert self.folder is not None
        state, self.private = found.state, dict(found.private)
        charged = self.run_.ledger.last_round(self.run_.name)
        before = self.agreement.first_round - 1
        if (before if charged is None else charged) < state.round - 1:
            raise LedgerError(
                str(self.folder.ledger),
                f"ends at round {charged}, the checkpoint at {state.round - 1}",
                "restore the newest ledger",
            )
        history = self.folder.cut_back(self.agreement.first_round, state.round)
        charged_to = self.run_.ledger.charged(self.run_.name)
        for line in history:
            unpaid = [client for client in line.arrived if (line.round, client) not in charged_to]
            if unpaid:
                raise LedgerError(
                    str(self.folder.ledger),
                    f"does not hold round {line.round}'s charge to '{unpaid[0]}', who took part",
                    "restore the ledger this run has written",
                )
        while self.run_.seed is None and charged is not None and state.round <= charged:
            reason = "charged, but interrupted before it was published"
            history.append(RoundRecord(round=state.round, lost=reason))
            self.folder.append_round(history[-1])
            state = replace(state, round=state.round + 1)
            self._checkpoint(state)
        return state, history

    # -- the end -----------------------------------------------------------------------------------

    def _summary(
        self,
        state: State,
        history: list[RoundRecord],
        rounds: RoundCount,
        left: tuple[str, ...],
        seconds: float,
    ) -> Summary:
        lines = self._statements(self._stated_against)
        last = history[-1].scores if history else None
        private = self.strategy.local.private
        arithmetic = arithmetic_assumptions(self.model, self.layout, self.device) if private else ()
        summary = Summary(
            method=self.strategy.name,
            run=self.run_.name,
            promise=self.strategy.promise,
            flags=(*self.flags(), *_unpublished(history)),
            assumptions=(*self.strategy.assumptions, *arithmetic),
            clients=len(self.members),
            parameters=self.layout.size,
            rounds=rounds,
            scores=last or self.evaluate(state),
            tested=Tested.COMMON if self.strategy.personal is None else Tested.PERSONAL,
            epsilon=EpsilonSpread.of(lines.values()),
            epsilon_against=self._epsilon_against(lines),
            clients_left=tuple(sorted({*left, *(c for line in history for c in line.left)})),
            **total_bytes(history),
            statements=tuple(lines.values()),
            seconds=round(seconds, 3),
        )
        if self.folder is not None:
            # The model file is for the world: no count of rounds, no name, nothing measured.
            note = public_note(summary.flags)
            self.folder.save_model(self.published(state), self.layout, note, state.buffers)
            self.folder.save_summary(summary)
        return summary

    def _stated_against(self, client: str) -> Observer:
        """Against whom a client's spend is stated: its own budget's adversary, else the
        strategy's.
        """
        budget = self.members[client].budget
        if not self._protects:
            return Observer.SERVER
        return (budget.observer if budget else None) or self.strategy.observer

    def _statements(self, against: Callable[[str], Observer]) -> dict[str, Statement]:
        lines = {c: statement(self.run_.ledger, c, against(c)) for c in self.members}
        return {client: line for client, line in lines.items() if line is not None}

    def _epsilon_against(self, known: Mapping[str, Statement]) -> dict[Observer, EpsilonSpread]:
        """What was spent against each adversary that is charged apart."""
        found: dict[Observer, EpsilonSpread] = {}
        for observer in (Observer.SERVER, Observer.WORLD) if self.agreement.charges_world else ():
            same = all(line.observer == observer for line in known.values()) and len(known) == len(
                self.members
            )
            lines = known if same else self._statements(lambda _, against=observer: against)  # type: ignore[misc]
            spread = EpsilonSpread.of(lines.values())
            if spread is not None:
                found[observer] = spread
        return found

    def flags(self) -> tuple[RaisedFlag, ...]:
        """What must be said of everything this run leaves behind."""
        raised = []
        if self.run_.ledger.seeded_runs():  # this run, or an earlier one from the same accounts
            raised.append(RaisedFlag(Flag.SEEDED))
        if not self._protects:
            raised.append(RaisedFlag(Flag.UNPROTECTED))
        if self.strategy.local.hypothetical:
            raised.append(RaisedFlag(Flag.HYPOTHETICAL))
        if self.misreports:
            named = (f"{client} (x {factor:g})" for client, factor in self.misreports.items())
            raised.append(RaisedFlag(Flag.FALSE_CLAIMS, ", ".join(sorted(named))))
        if self._protects and (weak := self._weak_deltas()):
            raised.append(RaisedFlag(Flag.WEAK_DELTA, weak))
        return (*raised, RaisedFlag(Flag.UNACCOUNTED))

    def _weak_deltas(self) -> str:
        by_client = self.strategy.unit is Unit.CLIENT
        weak = [
            client
            for client, member in self.members.items()
            if member.budget is not None
            and member.budget.delta * (len(self.members) if by_client else member.shard.examples)
            >= 1
        ]
        if not weak:
            return ""
        many = "clients" if by_client else "records"
        return f"at or above 1 / {many} for {len(weak)} client(s), '{weak[0]}' among them"


def _unpublished(history: list[RoundRecord]) -> tuple[RaisedFlag, ...]:
    silent = sum(line.silent for line in history)
    detail = f"{silent} of {len(history)} rounds"
    return (RaisedFlag(Flag.UNPUBLISHED, detail),) if silent else ()


def _planned_by(budgets: Mapping[str, Budget], accountant: Literal["renyi"]) -> dict[str, Budget]:
    return {client: replace(budget, accountant=accountant) for client, budget in budgets.items()}
