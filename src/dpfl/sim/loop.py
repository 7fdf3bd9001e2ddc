"""The simulator: a federation in one process (or a few), through the same three functions a
deployment calls.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from torch import Tensor, nn

from dpfl.core.checks import check
from dpfl.core.errors import LedgerError, PrivacyRefusal
from dpfl.core.layout import Layout
from dpfl.core.types import Observer, State
from dpfl.data.federation import Federation
from dpfl.engine.evaluation import Evaluation, Scores
from dpfl.models import check_model
from dpfl.rounds import (
    Plan,
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
from dpfl.sim import truth
from dpfl.sim.ray_workers import RayWorkers
from dpfl.sim.summary import summarise
from dpfl.sim.workers import Pool, WorkerContext, Workers
from dpfl.strategy import Strategy

Progress = Callable[[int, int, RoundRecord], None]
_STAGES = ("open", "clients", "close", "evaluate")


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


@dataclass(kw_only=True, eq=False)
class Simulation:
    """A prepared federation: members, agreement, budgets. :meth:`play` plays the rounds.

    ``run`` says which run this is, where it is charged and where randomness comes from. ``engine``
    names how local work is executed, ``workers`` how many processes do it; neither changes a
    result. ``evaluate_every`` so many rounds the model is tried on test records. ``misreports``
    are clients that claim a multiple of their epsilon; noise and costs rest on the true one.
    ``dropout`` is the probability with which an upload gets lost. ``folder`` keeps checkpoints,
    the operator's record and results; ``digest`` names the experiment that a checkpoint belongs
    to.
    """

    model: nn.Module
    federation: Federation
    strategy: Strategy
    rounds: int
    run: Run
    engine: str = "stacked"
    device: str = "cpu"
    workers: int = 1
    evaluate_every: int = 1
    misreports: Mapping[str, float] = field(default_factory=dict)
    dropout: float = 0.0
    folder: RunFolder | None = None
    digest: str = ""

    def __post_init__(self) -> None:
        federation, strategy, run = self.federation, self.strategy, self.run
        check_model(self.model, federation.feature_shape, federation.classes, federation.inputs)
        check(0 <= self.dropout <= 1, "dropout", f"rate = {self.dropout}", "give a probability")
        if run.ledger.filter == "renyi":  # plan with the curve that the ledger will hold it against
            own = federation.budgets.items()
            budgets = {client: replace(budget, accountant="renyi") for client, budget in own}
            federation = replace(federation, budgets=budgets)
        self.members = honest_members(federation, false_claims(federation, self.misreports))
        if strategy.local.hypothetical:
            self.members = truth.with_largest_budget(self.members)
        for client, member in self.members.items():
            check_budget(member, unit=strategy.unit, observer=strategy.observer)
            given = member.budget is not None or not self.protects
            remedy = "give every client a Budget(epsilon, delta), or use a method without privacy"
            check(given, f"client '{client}'", "has no budget", remedy, PrivacyRefusal)
        self.layout = Layout.of_module(self.model)
        claims = {client: member.claims for client, member in self.members.items()}
        shapes = buffer_shapes(self.model, strategy.releases)
        self.agreement = enrol(strategy, claims, self.rounds, self.layout, shapes)
        self.strategy = self.agreement.strategy  # with nothing left open
        self._admit = charging(self.agreement, run)
        self._evaluation = Evaluation(
            model=self.model, layout=self.layout, federation=federation, device=self.device
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

    def start(self) -> State:
        """Return the state before the first round; in a folder, it is the first checkpoint."""
        state = first_state(self.agreement, self.layout.read(self.model))
        self._checkpoint(state)
        return state

    def resume(self, found: Checkpoint) -> tuple[State, list[RoundRecord]]:
        """Check that ledger, record and checkpoint belong together, and say from where to go on.

        Seeded: a round that was charged but not checkpointed is repeated, bit for bit, without a
        new charge. Otherwise its noise is gone: the round is lost, its number and its charge are
        not.
        """
        assert self.folder is not None
        state, self.private = found.state, dict(found.private)
        where, first = str(self.folder.ledger), self.agreement.first_round
        ledger, name = self.run.ledger, self.run.name
        charged = ledger.last_round(name)
        good = (first - 1 if charged is None else charged) >= state.round - 1
        problem = f"ends at round {charged}, the checkpoint at {state.round - 1}"
        check(good, where, problem, "restore the newest ledger", LedgerError)
        history, charged_to = self.folder.cut_back(first, state.round), ledger.charged(name)
        for line in history:
            for client in line.arrived:
                problem = f"does not hold round {line.round}'s charge to '{client}', who took part"
                remedy = "restore the ledger this run has written"
                check((line.round, client) in charged_to, where, problem, remedy, LedgerError)
        while self.run.seed is None and charged is not None and state.round <= charged:
            reason = "charged, but interrupted before it was published"
            history.append(RoundRecord(round=state.round, lost=reason))
            self.folder.append_round(history[-1])
            state = replace(state, round=state.round + 1)
            self._checkpoint(state)
        return state, history

    def play(
        self,
        state: State,
        history: list[RoundRecord],
        progress: Progress | None = None,
        until: int | None = None,
    ) -> Outcome:
        """Play the rounds that are left.

        ``state`` and ``history`` are where to begin: those of :meth:`start` or :meth:`resume`.
        ``history`` is extended in place. ``progress`` is called after every round. With ``until``
        the simulation halts at that round, as a search does that compares candidates early.
        """
        began, rounds = time.perf_counter(), self.rounds
        halt, ended_early = min(until or rounds, rounds), None
        left: tuple[str, ...] = ()
        with self._workers() as workers:
            while state.round < halt:
                marks, willing = [time.perf_counter()], partial(self._willing, state.round)
                plan = open_round(self.agreement, state, self.run, willing)
                if plan.over:
                    left = plan.unwilling
                    ended_early = f"after {state.round} of {rounds} rounds: {plan.over}"
                    break
                state, record = self._round(state, plan, workers, marks)
                history.append(record)
                self._keep(state, record, marks)
                if progress is not None:
                    progress(state.round, rounds, record)
        summary = None
        if halt == rounds or ended_early:
            count = RoundCount(planned=rounds, done=state.round, ended_early=ended_early)
            seconds = time.perf_counter() - began
            summary = summarise(self, state, history, count, left, seconds)
        scores = summary.scores if summary else self.evaluate(state)
        if summary is None and self.folder is not None:
            self.folder.append_halt(state.round, scores)
        return Outcome(state=state, history=history, scores=scores, summary=summary)

    def _workers(self) -> Workers:
        context = WorkerContext(
            agreement=self.agreement,
            members=self.members,
            model=self.model,
            engine=self.engine,
            device=self.device,
            run=self.run.name,
            seed=self.run.seed,
        )
        if self.engine == "ray":
            return RayWorkers(context, self.workers)
        return Pool(context, self.workers) if self.workers > 1 else Workers(context)

    def _willing(self, round_: int, client: str) -> bool:
        """Ask a member whether its own ledger covers this round."""
        participant = self.members[client].participant
        return can_go_on(self.agreement, self.run, round_, client, participant)

    def _round(
        self, state: State, plan: Plan, workers: Workers, marks: list[float]
    ) -> tuple[State, RoundRecord]:
        """A round that was opened; ``marks`` are the moments at which its stages end."""
        marks.append(time.perf_counter())
        # ---- clients: each charges its own account, then works -----------------------------------
        members = {client: self.members[client] for client in plan.cohort.ids}
        abstaining = self._admit(state.round, members)
        active = {client: own for client, own in members.items() if client not in abstaining}
        blocks = blocks_of(self.agreement, active, workers.engine)
        uplinks = workers.run(plan.downloads, blocks, self.private)
        uplinks = truth.lost_on_the_way(uplinks, self.dropout, self.run, state.round)
        for client, why in sorted(abstaining.items()):
            uplinks.append(Uplink(client=client, payload=None, reason=why))
        marks.append(time.perf_counter())
        # ---- server: aggregate, evaluate ---------------------------------------------------------
        noise = truth.true_noise(self.agreement, active)
        if self.strategy.weights.needs_true_noise:
            state = truth.with_true_noise(state, noise)
        state, record = close_round(self.agreement, state, plan, uplinks, self.run)
        marks.append(time.perf_counter())
        record = truth.compared(self.agreement, record, noise)
        due = state.round % self.evaluate_every == 0 or state.round == self.rounds
        if state.round > 0 and due:
            record = replace(record, scores=self.evaluate(state))
        marks.append(time.perf_counter())
        return state, record

    def _keep(self, state: State, record: RoundRecord, marks: list[float]) -> None:
        """Write a round down. Seconds differ from run to run, so they are kept apart from it."""
        laps = {stage: b - a for stage, (a, b) in zip(_STAGES, pairwise(marks), strict=True)}
        self.timings.append({"round": record.round, "seconds": sum(laps.values()), **laps})
        if self.folder is not None:
            self.folder.append_round(record)
            self.folder.append(self.folder.timings, self.timings[-1])
            self._checkpoint(state)

    def _checkpoint(self, state: State) -> None:
        """Write the state to go on from, where there is a folder."""
        if self.folder is not None:
            run, digest = self.run.name, self.digest
            own = Checkpoint(state=state, run=run, experiment=digest, private=self.private)
            self.folder.save_state(own)

    def published(self, state: State) -> Tensor:
        """The model that is evaluated and handed out: the current one, unless the step averages."""
        return self.strategy.step.published(dict(state.plugs["step"]), state.model)

    def evaluate(self, state: State) -> Scores:
        """Accuracy and loss on test records: for simulations only, and not accounted."""
        write_buffers(self.model, state.buffers)
        return self._evaluation(self.published(state), self.strategy.personal, self.private)
