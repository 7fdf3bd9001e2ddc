"""The simulator: a federation in one process (or a few), through the same three functions a
deployment calls.

A round is opened, computed by the clients of its cohort (each charges its own account first), and
closed. Its record, its seconds and a checkpoint are on disk before the next round is opened.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from torch import Tensor, nn

from dpfl.core.checks import check
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.layout import Layout
from dpfl.core.types import Observer, Plain, State
from dpfl.data.federation import Federation
from dpfl.engine.evaluation import Scores
from dpfl.models import check_model
from dpfl.plugs.accounted_metric import AccountedMetric
from dpfl.plugs.release_costs import Shares
from dpfl.privacy.flags import RaisedFlag
from dpfl.rounds import (
    Plan,
    Run,
    Uplink,
    Workshop,
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
from dpfl.rounds.enrol import planned_rounds, secret_for
from dpfl.rounds.measure import planned_measurement
from dpfl.rounds.members import check_budget, false_claims, honest_members
from dpfl.rounds.record import RoundRecord
from dpfl.runs.folder import Checkpoint, RunFolder
from dpfl.runs.result import RoundCount, Summary
from dpfl.sim import truth
from dpfl.sim.ray_workers import RayWorkers, run_secret
from dpfl.sim.summary import summarise
from dpfl.sim.trained_part import TrainedPart
from dpfl.sim.workers import Pool, Worker, Workers
from dpfl.strategy import Strategy

Progress = Callable[[int, int, RoundRecord], None]
"""Called after every round with its number, how many there are, and its record."""
After = Callable[["Simulation"], str | None]
"""Called after every round; a sentence that it returns ends the run, and says why."""
Tap = Callable[[State, Plan, Sequence[Uplink]], Sequence[Uplink]]
"""Sees what clients send before the server does, and returns what arrives."""
_STAGES = ("open", "clients", "close", "evaluate")


@dataclass(kw_only=True, eq=False)
class Simulation:
    """A prepared federation: members, agreement, budgets. :meth:`play` plays the rounds, from the
    first one or from a checkpoint (:func:`dpfl.sim.resume.resume`); ``state`` and ``history`` are
    what came out.

    ``run`` says which run this is, where it is charged and where randomness comes from. ``engine``
    names how local work is executed, ``workers`` how many processes do it; neither changes a
    result. ``evaluate_every`` so many rounds the model is tried on test records. ``misreports``
    are clients that claim a multiple of their epsilon; noise and costs rest on the true one.
    ``dropout`` is the probability with which an upload gets lost. ``folder`` keeps checkpoints,
    the operator's record and results; ``digest`` names the experiment that a checkpoint belongs
    to. ``accounted`` is a metric that is measured on test records within the plan. ``built`` are
    the name and settings of a model that dpfl built. ``flags`` are raised beside those that follow
    from the run itself. ``tap`` is an adversary between clients and server. ``personal_finish``
    asks for what clients could make of their own records, in the summary. ``tried`` says that the
    model was found to fit these records before.
    """

    model: nn.Module
    federation: Federation
    strategy: Strategy
    rounds: int | None
    run: Run
    engine: str = "stacked"
    device: str = "cpu"
    workers: int = 1
    evaluate_every: int = 1
    misreports: Mapping[str, float] = field(default_factory=dict)
    dropout: float = 0.0
    folder: RunFolder | None = None
    digest: str = ""
    accounted: AccountedMetric | None = None
    built: Plain | None = None
    flags: tuple[RaisedFlag, ...] = ()
    tap: Tap | None = None
    personal_finish: bool = False
    tried: bool = False

    def __post_init__(self) -> None:
        federation = self.federation
        run = self.run
        task = self.federation.task
        strategy = self.strategy.protecting(federation.unit, single=task.plain)
        shape = federation.feature_shape
        wanted = federation.target_shape
        if not self.tried:
            check_model(self.model, shape, task, federation.inputs, wanted)
        self.strategy = strategy = strategy.for_model(self.model)
        check(0 <= self.dropout <= 1, "dropout", f"rate = {self.dropout}", "give a probability")
        if run.ledger.filter == "renyi":  # plan with the curve that the ledger will hold it against
            budgets = {c: replace(b, accountant="renyi") for c, b in federation.budgets.items()}
            federation = replace(federation, budgets=budgets)
        self.members = honest_members(federation, false_claims(federation, self.misreports))
        if strategy.local.hypothetical:
            self.members = truth.with_largest_budget(self.members)
        for client, member in self.members.items():
            check_budget(member, unit=strategy.unit, observer=strategy.observer)
            check(
                member.budget is not None or not self.protects,
                f"client '{client}'",
                "has no budget",
                "give every client a Budget(epsilon, delta), or use a method without privacy",
                PrivacyRefusal,
            )
        self.layout = Layout.of_module(self.model)
        claims = {client: member.claims for client, member in self.members.items()}
        buffers = buffer_shapes(self.model, strategy.releases)
        planned: Shares = ()
        if self.accounted:
            most = planned_rounds(strategy, claims, self.rounds)
            planned = self.accounted.shares(federation.task, most)
        self.agreement = enrol(strategy, claims, self.rounds, self.layout, buffers, planned)
        self.planned = self.agreement.terms.rounds
        self.strategy = self.agreement.strategy  # with nothing left open
        self._admit = charging(self.agreement, run)
        self.work = TrainedPart(
            model=self.model, layout=self.layout, federation=federation, device=self.device
        )
        self.state: State = first_state(self.agreement, self.layout.read(self.model))
        self.private: dict[str, Tensor] = {}  # what stays at clients, by client
        self.history: list[RoundRecord] = []
        self.timings: list[dict[str, float]] = []
        if self.protects:
            budgets = {c: m.budget for c, m in self.members.items() if m.budget is not None}
            run.ledger.set_budgets(budgets, unit=strategy.unit, observer=strategy.observer)

    @property
    def protects(self) -> bool:
        """Whether the strategy promises anything to anyone."""
        return self.strategy.observer is not Observer.NOBODY

    def play(
        self,
        progress: Progress | None = None,
        until: int | None = None,
        after: After | None = None,
        *,
        summary: bool = True,
    ) -> Summary | None:
        """Play the rounds that are left, and return the summary.

        ``progress`` is called after every round, then ``after``, which may end the run. With
        ``until`` the simulation halts at that round, as a search does that compares candidates
        early; there is no summary yet, nor where none is asked for.
        """
        began = time.perf_counter()
        rounds = self.planned
        ended_early = self._stopped(after)
        halt = min(until or rounds, rounds)
        left = frozenset[str]()
        self.keep_state()
        with self._workers() as workers:
            while self.state.round < halt and ended_early is None:
                marks = [time.perf_counter()]
                round_ = self.state.round
                willing = partial(self._willing, round_)
                plan = open_round(self.agreement, self.state, self.run, willing)
                if plan.over:
                    left = frozenset(plan.unwilling)
                    ended_early = f"after {round_} of {rounds} rounds: {plan.over}"
                    break
                self._keep(self._round(plan, workers, marks), marks)
                if progress is not None:
                    progress(self.state.round, rounds, self.history[-1])
                ended_early = self._stopped(after)
        if not summary or (halt < rounds and ended_early is None):
            return None
        count = RoundCount(planned=rounds, done=self.state.round, ended_early=ended_early)
        return summarise(self, count, left, time.perf_counter() - began)

    def _stopped(self, after: After | None) -> str | None:
        """Say why the run ends early after the newest round; a resumed run asks again."""
        done = self.state.round
        if after is None or not self.history or not (reason := after(self)):
            return None
        return f"after {done} of {self.planned} rounds: {reason}" if done < self.planned else None

    def _workers(self) -> Workers:
        """Who computes the clients' part: this process, a pool of processes, or a Ray cluster."""
        seed = self.run.seed
        on_ray = self.engine == "ray"
        count = self.workers
        secret = partial(secret_for, run_secret(seed) if on_ray else seed, "client")
        agreement = self.agreement
        name = self.run.name
        model = self.work.model
        workshop = partial(Workshop, agreement=agreement, run=name, model=model, secret=secret)
        worker = Worker(workshop, self.engine, self.device, self.work.members(self.members))
        if on_ray:
            return RayWorkers(worker, count)
        return Pool(worker, count) if count > 1 else Workers(worker)

    def _willing(self, round_: int, client: str) -> bool:
        """Ask a member whether its own ledger covers this round."""
        participant = self.members[client].participant
        return can_go_on(self.agreement, self.run, round_, client, participant)

    def _round(self, plan: Plan, workers: Workers, marks: list[float]) -> RoundRecord:
        """A round that was opened; ``marks`` are the moments at which its stages end."""
        marks.append(time.perf_counter())
        # ---- clients: each charges its own account, then works -----------------------------------
        state = self.state
        members = {client: self.members[client] for client in plan.cohort.ids}
        abstaining = self._admit(state.round, members)
        active = {client: own for client, own in members.items() if client not in abstaining}
        blocks = blocks_of(self.agreement, active, workers.engine)
        uplinks = workers.run(plan.downloads, blocks, self.private)
        uplinks = truth.lost_on_the_way(uplinks, self.dropout, self.run, state.round)
        silent = sorted(abstaining.items())
        uplinks += [Uplink(client=client, payload=None, reason=why) for client, why in silent]
        uplinks = uplinks if self.tap is None else list(self.tap(state, plan, uplinks))
        marks.append(time.perf_counter())
        # ---- server: aggregate, evaluate ---------------------------------------------------------
        noise = truth.true_noise(self.agreement, active)
        if self.strategy.weights.needs_true_noise:
            state = truth.with_true_noise(state, noise)
        self.state, record = close_round(self.agreement, state, plan, uplinks, self.run)
        marks.append(time.perf_counter())
        record = truth.compared(self.agreement, record, noise)
        done = self.state.round
        if done > 0 and (done % self.evaluate_every == 0 or done == self.planned):
            record = replace(record, scores=self.evaluate())
        if self.accounted is not None and self.accounted.is_due(done):
            own = self._admit, self.work.members(self.members), self.work.model
            asked = self.agreement, self.state, self.run, *own
            record = replace(record, measured=planned_measurement(self.accounted, *asked))
        marks.append(time.perf_counter())
        return record

    def _keep(self, record: RoundRecord, marks: list[float]) -> None:
        """Write a round down. Seconds differ from run to run, so they are kept apart from it."""
        laps = {stage: b - a for stage, (a, b) in zip(_STAGES, pairwise(marks), strict=True)}
        self.timings.append({"round": record.round, "seconds": sum(laps.values()), **laps})
        self.history.append(record)
        if self.folder is not None:
            self.folder.append_round(record)
            self.folder.append(self.folder.timings, self.timings[-1])
            self.keep_state()

    def keep_state(self) -> None:
        """Write the state to go on from, where there is a folder."""
        if self.folder is not None:
            run = self.run.name
            digest = self.digest
            own = Checkpoint(state=self.state, run=run, experiment=digest, private=self.private)
            self.folder.save_state(own)

    def published(self) -> Tensor:
        """The model that is evaluated and handed out: the current one, unless the step averages."""
        return self.strategy.step.published(dict(self.state.plugs["step"]), self.state.model)

    def evaluate(self, *, details: bool = False) -> Scores:
        """Scores on test records: for simulations only, and not accounted.

        ``details`` asks for all metrics, and for each client's value.
        """
        write_buffers(self.model, self.state.buffers)
        personal = self.strategy.personal
        private = self.private
        return self.work.evaluation(self.published(), personal, private, details=details)
