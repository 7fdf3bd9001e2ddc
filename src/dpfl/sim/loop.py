"""The simulator: a federation in one process (or a few), through the same three functions a
deployment calls.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn

from dpfl.core.checks import check
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.layout import Layout
from dpfl.core.types import Budget, Observer, State
from dpfl.data.federation import Federation
from dpfl.engine.evaluation import Evaluation, Scores
from dpfl.models import check_model
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
from dpfl.runs.result import RoundCount, Summary
from dpfl.sim.clock import Clock
from dpfl.sim.ray_workers import RayWorkers
from dpfl.sim.summary import summarise
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
    """Where a simulation stopped.

    ``scores`` are those of the model at that point. ``summary`` is None if the simulation was
    halted, to go on another time.
    """

    state: State
    history: list[RoundRecord]
    scores: Scores
    summary: Summary | None


class Simulation:
    """A prepared federation: members, agreement, budgets. :meth:`run` plays the rounds.

    ``run`` says which run this is, where it is charged and where randomness comes from. ``engine``
    names how local work is executed, ``workers`` how many processes do it; neither changes a
    result. ``evaluate_every`` so many rounds the model is tried on test records. ``misreports``
    are clients that claim a multiple of their epsilon; noise and costs rest on the true one.
    ``dropout`` is the probability with which an upload gets lost. ``folder`` keeps checkpoints,
    the operator's record and results; ``digest`` names the experiment that a checkpoint belongs
    to.
    """

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
        check(0 <= dropout <= 1, "dropout", f"rate = {dropout}", "give a probability")
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
        if self.protects:
            budgets = {c: m.budget for c, m in self.members.items() if m.budget is not None}
            run.ledger.set_budgets(budgets, unit=strategy.unit, observer=strategy.observer)

    @property
    def protects(self) -> bool:
        """Whether the strategy promises anything to anyone."""
        return self.strategy.observer is not Observer.NOBODY

    # -- the loop ----------------------------------------------------------------------------------

    def start(self) -> State:
        """Return the state before the first round; in a folder, it is the first checkpoint."""
        state = first_state(self.agreement, self.layout.read(self.model))
        self.checkpoint(state)
        return state

    def run(
        self,
        state: State,
        history: list[RoundRecord],
        progress: Progress | None = None,
        until: int | None = None,
    ) -> Outcome:
        """Play the rounds that are left.

        ``state`` and ``history`` are where to begin: those of :meth:`start`, or of a checkpoint.
        ``history`` is extended in place. ``progress`` is called after every round. With ``until``
        the simulation halts at that round, as a search does that compares candidates early.
        """
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
        summary = summarise(self, state, history, count, left, time.perf_counter() - began)
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
            self.checkpoint(state)

    def checkpoint(self, state: State) -> None:
        """Write the state to go on from, where there is a folder."""
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
        """The model that is evaluated and handed out: the current one, unless the step averages."""
        return self.strategy.step.published(dict(state.plugs["step"]), state.model)

    def evaluate(self, state: State) -> Scores:
        """Accuracy and loss on test records: for simulations only, and not accounted."""
        write_buffers(self.model, state.buffers)
        return self.evaluation(self.published(state), self.strategy.personal, self.private)


def _planned_by(budgets: Mapping[str, Budget], accountant: Literal["renyi"]) -> dict[str, Budget]:
    return {client: replace(budget, accountant=accountant) for client, budget in budgets.items()}
