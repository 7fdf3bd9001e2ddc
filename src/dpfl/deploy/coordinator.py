"""The server of a real federation: enrol the sites, run the rounds, deliver the model.

It calls the same functions as a simulation. It knows no budget and sees no record. Whatever a site
sends is a declaration, or an upload that is checked. A site that is silent, late, broken or refuses
is missed in that round, with the reason, and the round continues. Everything needed to resume after
a kill is on disk before the next message leaves. A round that was cut off is asked for again: its
sites answer with the same bytes, and nothing is charged twice.

The folder of a study holds, beside what every run folder holds ::

    study.toml       what sites are offered
    enrolment.json   who takes part, and their tokens: secret
    nodes.json       which registered key belongs to which site
    opened.bin       the round that was opened last, and what its sites were sent
    sum.json         how far the secure sum of a round has come, where uploads are masked
    failed.txt       why the server app ended, for the process that started it
"""

import uuid
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from dpfl.core.checks import LONGEST_NAME, check
from dpfl.core.errors import CheckpointError, FolderError
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.core.types import Claims, Observer, State
from dpfl.deploy.asking import Uploads, ask_uploads, check_answers, deliver, summarise
from dpfl.deploy.connections import Connections
from dpfl.deploy.enrolment import (
    ENROLMENT,
    EnrolmentFile,
    accepting_sites,
    enrolled,
    gather,
    settle,
)
from dpfl.deploy.measuring import measure
from dpfl.deploy.opened import OpenedRound
from dpfl.deploy.summary import DeploymentSummary, effective_noise
from dpfl.deploy.transport import Transport, limit_parts
from dpfl.privacy.ledger import Ledger
from dpfl.rounds import (
    Agreement,
    Plan,
    Run,
    close_round,
    first_state,
    open_round,
)
from dpfl.rounds.record import RoundRecord
from dpfl.runs.deployment import StudyFile
from dpfl.runs.folder import Checkpoint, RunFolder
from dpfl.runs.model_card import ModelCard, save_model
from dpfl.runs.result import RoundCount

ORPHAN_SECONDS = 30
_PART_SECONDS, _PART_RATE = 20.0, 1 << 17  # how long an answer may take to arrive once it began
ALL_HAVE_IT = "holds a study that has ended, and every site has the model"
_NOTHING_TO_DO = "start another study in a new folder"


class Coordinator:
    """One study in its folder; :meth:`begin` starts it, or resumes it where it was cut off.

    ``folder`` holds the study; ``transport`` carries messages to the sites.

    *Formal guarantees.* Before a round's first message leaves, all of its messages are on disk:
    after a kill it is repeated with the same bytes, never with other randomness. Where the secrecy
    of the draw is counted on, everyone is asked before the draw, and what comes of the draw never
    changes who may be drawn.
    """

    def __init__(self, folder: Path, transport: Transport) -> None:
        self.folder = RunFolder(folder)
        self.study = StudyFile.in_folder(folder)
        self.model, self.strategy = self.study.trained()
        self.layout = Layout.of_module(self.model)
        self.sites = Connections(self.study, transport, folder)
        limit = self.study.run.round_timeout
        limit_parts(min(limit, _PART_SECONDS + 4 * self.layout.size / _PART_RATE))

    def begin(self) -> None:
        """Start the study, or resume it if it was cut off.

        Where it has ended, the model is delivered to those who did not get it.
        """
        with ExitStack() as stack:
            self._hold_folder(stack)
            if self.folder.summary.exists():
                self._deliver_again()
            elif (self.folder.path / ENROLMENT).exists():
                self._resume()
            else:
                self._start()
            self.sites.progress.expect("")

    def _hold_folder(self, stack: ExitStack) -> None:
        """Lock the folder; wait for a server app that was orphaned by a kill, and is ending."""
        for left in range(ORPHAN_SECONDS, -1, -1):
            try:
                stack.enter_context(self.folder.locked())
                return
            except FolderError:
                if left == 0:
                    raise
                self.sites.transport.wait(1.0)

    def _start(self) -> None:
        """Enrol the sites, write down who takes part, and begin with the first round."""
        unique = f"-{uuid.uuid4().hex[:12]}"
        self.sites.run = self.study.study.name[: LONGEST_NAME - len(unique)] + unique
        gather(self.sites)
        self.sites.members = accepting_sites(self.sites, self._enrol)
        EnrolmentFile(
            run=self.sites.run,
            study=self.study.digest(),
            claims=self.sites.members,
            tokens=self.sites.tokens,
        ).write(self.folder.path)
        agreement = self._agreement()
        self._play(agreement, self._checkpoint(self._first_state(agreement)), [])

    def _resume(self) -> None:
        """Continue from what is on disk; sites introduce themselves again, and must be the same."""
        sites = self.sites
        agreement = self._read_members()
        if not self.folder.checkpoint.exists():
            self._checkpoint(self._first_state(agreement))
        found = self.folder.load_state(self.study.digest())
        check(
            found.run == sites.run,
            str(self.folder.checkpoint),
            "belongs to another run",
            "restore the right one",
            CheckpointError,
        )
        found.check_follows(self._first_state(agreement), self.folder.checkpoint)
        history = self.folder.cut_back(agreement.first_round, found.state.round)
        gather(sites)
        self._play(agreement, found.state, history)

    def _read_members(self) -> Agreement:
        """Read who takes part, and return what was agreed on with them."""
        enrolled = EnrolmentFile.read(self.folder.path)
        sites = self.sites
        sites.run = enrolled.run
        sites.members = enrolled.claims
        sites.tokens = enrolled.tokens
        return self._agreement()

    def _deliver_again(self) -> None:
        """Deliver the model to the members who did not get it when the study ended."""
        summary = DeploymentSummary.load(self.folder)
        assert summary is not None
        agreement = self._read_members()
        absent = set(summary.undelivered)
        check(bool(absent), str(self.folder.path), ALL_HAVE_IT, _NOTHING_TO_DO, FolderError)
        gather(self.sites, absent, least=1, then="the model is sent to")
        undelivered = deliver(self.sites, agreement, self.folder.model.read_bytes(), absent)
        got = {*summary.delivered, *(absent - set(undelivered))}
        replace(summary, undelivered=undelivered, delivered=tuple(sorted(got))).save(self.folder)

    def _enrol(self, claims: Mapping[str, Claims]) -> Agreement:
        """Settle the terms for these sites."""
        return enrolled(self.study, self.model, self.strategy, claims)

    def _agreement(self) -> Agreement:
        """Settle the terms for the members: the same at the start and after a restart."""
        return self._enrol(self.sites.members)

    def _first_state(self, agreement: Agreement) -> State:
        return first_state(agreement, self.layout.read(self.model))

    def _checkpoint(self, state: State) -> State:
        """Save a state to resume from, and return it."""
        digest = self.study.digest()
        self.folder.save_state(Checkpoint(state=state, run=self.sites.run, experiment=digest))
        return state

    # -- rounds ------------------------------------------------------------------------------------

    def _play(self, agreement: Agreement, state: State, history: list[RoundRecord]) -> None:
        """Run the rounds that are left, then deliver the model and write the summary.

        The study ends early when nobody, or fewer sites than ``least_sites``, can go on; the model
        as it is then is delivered all the same.
        """
        with closing(self._ledger()) as ledger:
            public = PublicSeed(self.study.run.seed)
            secret = public.child("secret") if self.study.seeded else None
            run = Run(name=self.sites.run, ledger=ledger, seed=secret, public=public.child("run"))
            ended = ""
            played = len(history)
            measure(self.sites, self.folder, agreement, state, history)  # where it was cut off
            while not ended and state.round < agreement.terms.rounds:
                self.sites.hello()  # sites may have come back under a new connection
                settle(self.sites, agreement)
                ended = self.sites.too_few()
                if not ended:
                    state, ended = self._round(agreement, state, run, history)
                    measure(self.sites, self.folder, agreement, state, history)
                    if not agreement.amplified:  # there, nothing may follow from the draw
                        check_answers(self.study, history[played:])
            self._finish(agreement, state, history, ended, ledger)

    def _ledger(self) -> Ledger:
        """Open the server's ledger; a new one is made only where nothing was ever charged."""
        path = self.folder.ledger
        name = self.sites.run
        if not path.exists() and not self.folder.rounds.exists():
            Ledger.create(path, name).close()
        ledger = Ledger.open(path, name)
        ledger.register(name, seeded=self.study.seeded, title=self.study.title)
        return ledger

    def _round(
        self, agreement: Agreement, state: State, run: Run, history: list[RoundRecord]
    ) -> tuple[State, str]:
        """Play one round; return the new state, or why there is no further round."""
        sites = self.sites
        opened = OpenedRound.read(self.folder.path)
        if opened is not None and opened.round == state.round:
            plan = opened.plan(agreement, state)
        elif self._charged(run, state.round):
            return self._lose(state, history), ""
        else:
            plan = open_round(agreement, state, run, sites.can_be_drawn)
            if plan.over:
                return state, plan.over.replace("client", "site")
            OpenedRound.of(plan).write(self.folder.path)
        uplinks, total = self._ask(agreement, state, plan)
        state, record = close_round(agreement, state, plan, uplinks, run, total=total)
        record = replace(record, effective_noise=effective_noise(agreement, plan, record))
        if total is not None:  # masked uploads are integers without a frame
            record = replace(record, payload_bytes_up=record.bytes_up)
        self.folder.append_round(record)
        history.append(record)
        return self._checkpoint(state), ""

    def _ask(self, agreement: Agreement, state: State, plan: Plan) -> Uploads:
        """Ask the sites that were drawn for their uploads; ``state`` is that before the round."""
        return ask_uploads(self.sites, self.folder, agreement, plan)

    def _charged(self, run: Run, round_: int) -> bool:
        """Whether the world was charged for a round that was drawn, and cut off before it left."""
        return any(charged == round_ for charged, _ in run.ledger.charged(run.name, Observer.WORLD))

    def _lose(self, state: State, history: list[RoundRecord]) -> State:
        """Skip a round that was charged and never sent: another draw would be another release."""
        reason = "the server was cut off between the draw and the first message"
        history.append(RoundRecord(round=state.round, lost=reason))
        self.folder.append_round(history[-1])
        return self._checkpoint(replace(state, round=state.round + 1))

    def _finish(
        self,
        agreement: Agreement,
        state: State,
        history: list[RoundRecord],
        ended: str,
        ledger: Ledger,
    ) -> None:
        """Save the model, send it to every member, and write the summary."""
        planned = agreement.terms.rounds
        done = state.round
        vector = agreement.strategy.step.published(dict(state.plugs["step"]), state.model)
        card = ModelCard.of_study(self.study)
        save_model(self.folder, self.model, card, self.layout, vector=vector, buffers=state.buffers)
        everyone = set(agreement.claims)
        absent = deliver(self.sites, agreement, self.folder.model.read_bytes(), everyone)
        early = f"after {max(done, 0)} of {planned} rounds: {ended}" if ended else None
        rounds = RoundCount(planned=planned, done=max(done, 0), ended_early=early)
        summarise(self.sites, agreement, rounds, history, absent, ledger).save(self.folder)
