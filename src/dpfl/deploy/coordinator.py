"""The server of a real federation: enrol the sites, then rounds, through the same functions a
simulation calls.

It knows no budget and sees no record. Whatever a site sends is a declaration, or an upload that is
checked; a site that is silent, late, broken or refuses is missed, named with its reason, and the
round goes on. Everything it needs to go on after a kill is on disk before the next message leaves.
A round that was cut off is lost: its number is used up, and what sites paid for it stays paid.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from dpfl.core.errors import (
    CheckpointError,
    ConfigurationError,
    FolderError,
    PeerError,
    PrivacyRefusal,
)
from dpfl.core.files import write_safely
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.core.types import Claims, State
from dpfl.core.version import __version__
from dpfl.deploy.accounts import effective_noise, missed_rounds
from dpfl.deploy.messages import END, HELLO, TERMS, TRAIN, Introduction, Message, terms_to_dict
from dpfl.engine.stacked import arithmetic_assumptions
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.statement import statements
from dpfl.rounds import Agreement, Run, Uplink, close_round, enrol, first_state, open_round
from dpfl.rounds.codec import FRAME_BYTES
from dpfl.rounds.record import RoundRecord
from dpfl.runs.deployment import STUDY_FILE, StudyFile
from dpfl.runs.folder import Checkpoint, RunFolder
from dpfl.runs.result import total_bytes

ENROLMENT, OPENED, NODES, SUMMARY_FORMAT = (
    "enrolment.json",
    "opened.json",
    "nodes.json",
    "dpfl-deployment-1",
)
ORPHAN_SECONDS = 30
DELIVERY_SECONDS = 60.0  # whoever does not take the model by then is given it by hand
ASK_AGAIN = 30.0  # seconds after which a node that was refused is asked once more
SEEDED = "NOT PRIVATE: SEEDED (a rehearsal: anyone who knows the seed can subtract the noise)"
Progress = Callable[[int, int, RoundRecord], None]


class Transport(Protocol):
    """How messages travel. ``ask`` returns an answer, or the reason why there is none, for every
    node it was given.
    """

    def nodes(self) -> list[int]:
        """Who is connected."""

    def ask(self, letters: Mapping[int, Message], timeout: float) -> dict[int, Message | str]:
        """Send, and wait for answers."""

    def wait(self, seconds: float) -> None:
        """Let time pass."""


class Coordinator:
    """One study in its folder. :meth:`start` begins it, :meth:`resume` goes on with it, :meth:`run`
    plays its rounds.
    """

    def __init__(self, folder: Path, post: Transport, progress: Progress | None = None) -> None:
        self.place = RunFolder(folder)
        self.transport = post
        self.progress = progress
        if not (folder / STUDY_FILE).exists():
            raise FolderError(str(folder), "holds no study", "make one with dpfl server init")
        self.study = StudyFile.from_file(folder / STUDY_FILE)
        self.strategy = self.study.strategy()
        self.model = self.study.build_model()
        self.layout = Layout.of_module(self.model)
        self.name = ""
        self.said: dict[str, Claims] = {}  # while the list of members is open
        self.claims: dict[str, Claims] = {}
        self.tokens: dict[str, str] = {}
        self.nodes: dict[str, int] = {}  # where each site was last heard from
        self.willing: dict[str, bool] = {}
        self.refusals: dict[str, str] = {}
        self.greeted: set[int] = set()
        self.bound = _bound(folder)  # which node has the key that was registered for a site

    # -- enrolment ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the study, or go on with it if it was cut off."""
        with ExitStack() as stack:
            self._hold_folder(stack)
            if (self.place.path / ENROLMENT).exists():
                self._resume()
            else:
                self._start()

    def _hold_folder(self, stack: ExitStack) -> None:
        """Wait for a server app that was orphaned by a kill: it ends by itself once its SuperLink
        is gone.
        """
        for left in range(ORPHAN_SECONDS, -1, -1):
            try:
                stack.enter_context(self.place.locked())
                return
            except FolderError:
                if left == 0:
                    raise
                self.transport.wait(1.0)

    def _start(self) -> None:
        self.name = f"{self.study.study.name}-{uuid.uuid4().hex[:12]}"
        self._gather(self.study.run.enrol_timeout)
        self.claims = self._who_accepts()
        self._write_enrolment()
        agreement = self._agreement()
        state = first_state(agreement, self.layout.read(self.model))
        self._checkpoint(state)
        self._play(agreement, state, [])

    def _resume(self) -> None:
        """Everything agreed on comes from disk; sites introduce themselves again, and must be the
        same.
        """
        if self.place.summary.exists():
            raise FolderError(
                str(self.place.path),
                "holds a study that has ended",
                "start another one in a new folder",
            )
        try:
            told = json.loads((self.place.path / ENROLMENT).read_text())
            self.name, self.tokens = told["run"], dict(told["tokens"])
            self.claims = {site: Claims(**said) for site, said in told["claims"].items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                str(self.place.path / ENROLMENT), f"cannot be read ({error})", "restore it"
            ) from error
        agreement = self._agreement()
        if not self.place.checkpoint.exists():
            state = first_state(agreement, self.layout.read(self.model))
            self._checkpoint(state)
        found = self.place.load_state(self.study.digest())
        state = found.state
        if found.run != self.name:
            raise CheckpointError(
                str(self.place.checkpoint), "belongs to another run", "restore the right one"
            )
        history = self.place.cut_back(state.round)
        state, history = self._lose_cut_off_round(state, history)
        self._gather(self.study.run.enrol_timeout)
        self._play(agreement, state, history)

    def _lose_cut_off_round(
        self, state: State, history: list[RoundRecord]
    ) -> tuple[State, list[RoundRecord]]:
        opened = self.place.path / OPENED
        if opened.exists() and json.loads(opened.read_text())["round"] == state.round:
            reason = "the server was cut off; what sites paid for this round stays paid"
            history.append(RoundRecord(round=state.round, lost=reason))
            self.place.append_round(history[-1])
            state = State(
                round=state.round + 1, model=state.model, starts=state.starts, plugs=state.plugs
            )
            self._checkpoint(state)
        return state, history

    def _gather(self, timeout: float) -> None:
        """Wait until every site has introduced itself, or until time is up and there are enough."""
        began, waited, asked = time.monotonic(), 0.0, 0.0
        wanted = set(self.claims) or set(self.study.study.sites)
        while not wanted <= set(self.nodes):
            if waited - asked >= ASK_AGAIN:  # what was refused may have been mended
                self.greeted &= set(self.nodes.values())
                asked = waited
            self._greet()
            if wanted <= set(self.nodes) or max(waited, time.monotonic() - began) >= timeout:
                break
            self.transport.wait(1.0)
            waited += 1.0
        here = wanted & set(self.nodes)
        if len(here) < self.study.run.least_sites:
            absent = sorted(wanted - here)
            why = (
                "; ".join(f"{site}: {reason}" for site, reason in sorted(self.refusals.items()))
                or "not heard"
            )
            raise PeerError(
                f"study '{self.study.study.name}'",
                f"only {len(here)} of {len(wanted)} sites enrolled within {timeout:g} s, without {', '.join(absent)} ({why})",
                "start those sites, or lower least_sites",
            )

    def _greet(self) -> None:
        """Ask nodes that have not introduced themselves who they are."""
        new = [node for node in self.transport.nodes() if node not in self.greeted]
        letter = Message(header=self._header(HELLO))
        for node, answer in self.transport.ask(
            dict.fromkeys(new, letter), self.study.run.round_timeout
        ).items():
            self.greeted.add(node)
            if isinstance(answer, str) or not answer.accepted:
                why = answer if isinstance(answer, str) else answer.reason
                site = (
                    f"node {node}"
                    if isinstance(answer, str)
                    else str(answer.header.get("site", f"node {node}"))[:100]
                )
                self.refusals[site] = why
                continue
            self._welcome(node, answer)

    def _welcome(self, node: int, answer: Message) -> None:
        try:
            said = Introduction.from_header(answer.header)
        except PeerError as error:
            self.refusals[f"node {node}"] = str(error)
            return
        if said.site not in self.study.study.sites:
            self.refusals[said.site] = "is not named in the study"
        elif self.bound.get(said.site, node) != node:
            self.refusals[said.site] = "somebody with another key came under this name"
        elif self.tokens.get(said.site, said.token) != said.token:
            self.refusals[said.site] = "somebody else came under this name"
        elif self.enrolled and said.site not in self.claims:
            self.refusals[said.site] = "came after enrolment: it can join the next study"
        else:
            self.tokens[said.site] = said.token
            self.nodes[said.site] = node
            self.refusals.pop(said.site, None)
            if not self.enrolled:
                self.said[said.site] = said.claims

    @property
    def enrolled(self) -> bool:
        """Whether the list of members is closed."""
        return bool(self.claims)

    def _who_accepts(self) -> dict[str, Claims]:
        """Offer the terms until everyone who is left accepts them: a site that refuses is not in
        the population.

        Terms follow from who takes part, so those who are left are asked again. Nothing is binding
        yet.
        """
        accepting = dict(sorted(self.said.items()))
        while True:
            agreement = enrol(self.strategy, accepting, self.study.run.rounds, self.layout)
            answers = self._ask_terms(agreement, binding=False)
            refusing = {site: why for site in accepting if (why := _refused(answers[site]))}
            self.refusals |= refusing
            if not refusing:
                return accepting
            accepting = {site: claims for site, claims in accepting.items() if site not in refusing}
            if len(accepting) < self.study.run.least_sites:
                why = "; ".join(
                    f"{site}: {reason}" for site, reason in sorted(self.refusals.items())
                )
                raise PeerError(
                    f"study '{self.study.study.name}'",
                    f"only {len(accepting)} sites accept its terms ({why})",
                    "change the study or those sites' policies, or lower least_sites",
                )

    def _ask_terms(self, agreement: Agreement, *, binding: bool) -> dict[str, Message | str]:
        letter = Message(
            header=self._header(TERMS, terms=terms_to_dict(agreement.terms), binding=binding)
        )
        asked = {self.nodes[site]: letter for site in agreement.claims if site in self.nodes}
        answers = self.transport.ask(asked, self.study.run.round_timeout)
        return {
            site: answers.get(self.nodes.get(site, -1), "is not connected")
            for site in agreement.claims
        }

    def _write_enrolment(self) -> None:
        told = {
            "run": self.name,
            "dpfl": __version__,
            "study": self.study.digest(),
            "claims": {site: vars(claims) for site, claims in self.claims.items()},
            "tokens": self.tokens,
        }
        # Whoever has a token can answer for its site in this study.
        write_safely(
            self.place.path / ENROLMENT, (json.dumps(told, indent=1) + "\n").encode(), secret=True
        )

    def _agreement(self) -> Agreement:
        return enrol(self.strategy, self.claims, self.study.run.rounds, self.layout)

    def _header(self, kind: str, **more: Any) -> dict[str, Any]:
        return {
            "kind": kind,
            "dpfl": __version__,
            "study": self.study.offer(),
            "run": self.name,
            **more,
        }

    # -- rounds ------------------------------------------------------------------------------------

    def _play(self, agreement: Agreement, state: State, history: list[RoundRecord]) -> None:
        if (
            not self.place.ledger.exists() and not self.place.rounds.exists()
        ):  # nothing was ever charged here
            Ledger.create(self.place.ledger, self.name).close()
        ledger = Ledger.open(self.place.ledger, self.name)
        try:
            seeded = self.study.run.noise == "seeded"
            ledger.register(
                self.name, seeded=seeded, title=f"{self.study.study.name}: {self.study.method.name}"
            )
            public = PublicSeed(self.study.run.seed)
            run = Run(
                name=self.name,
                ledger=ledger,
                seed=public.child("secret") if seeded else None,
                public=public.child("run"),
            )
            self._settle(agreement)
            ended = None
            while state.round < agreement.terms.rounds:
                left = sum(self.willing.get(site, False) for site in agreement.claims)
                if 0 < left < self.study.run.least_sites:
                    few = f"only {left} of {len(agreement.claims)} sites can go on, and least_sites asks for more"
                    ended = f"after {state.round} of {agreement.terms.rounds} rounds: {few}"
                    break
                state, line = self._round(agreement, state, run)
                if isinstance(line, str):
                    ended = f"after {state.round} of {agreement.terms.rounds} rounds: {line}"
                    break
                history.append(line)
                if self.progress is not None:
                    self.progress(state.round, agreement.terms.rounds, line)
            self._finish(agreement, state, history, ended, ledger)
        finally:
            ledger.close()

    def _settle(self, agreement: Agreement) -> None:
        """Make the terms binding: each site commits to its plan; one that cannot takes no part, and
        says why.
        """
        for site, answer in self._ask_terms(agreement, binding=True).items():
            why = self._note(site, answer)
            if agreement.amplified and isinstance(answer, str):
                self.willing[site] = (
                    False  # the draw is among those who are there: nobody drawn may be missing
                )
            if not why and not self.willing[site]:
                self.refusals[site] = "its budget does not cover a round"

    def _note(self, site: str, answer: Message | str) -> str:
        """Remember whether a site will take another round; return why it gave none of this one."""
        if isinstance(answer, str):  # silent: asked again next time, it may come back
            self.willing.setdefault(site, True)
            return answer
        if "token" in answer.header and answer.header["token"] != self.tokens.get(site):
            return "somebody else answered for it"
        self.willing[site] = bool(answer.header.get("more", answer.accepted))
        if not answer.accepted:
            # A policy or a budget that says no will say no again; anything else may pass.
            final = answer.header.get("code") in (
                ConfigurationError.exit_code,
                PrivacyRefusal.exit_code,
            )
            self.willing[site] = bool(answer.header.get("more", not final))
            self.refusals[site] = answer.reason
            return answer.reason
        return ""

    def _round(
        self, agreement: Agreement, state: State, run: Run
    ) -> tuple[State, RoundRecord | str]:
        self._greet()  # sites that came back under a new connection
        if agreement.amplified and state.round > 0:
            self._settle(agreement)  # everyone is asked before the draw
        # Before anything is charged or sent: if the server dies from now on, this round is lost,
        # and not repeated with other randomness.
        write_safely(self.place.path / OPENED, json.dumps({"round": state.round}).encode())
        plan = open_round(agreement, state, run, lambda site: self.willing.get(site, False))
        if plan.over:
            return state, plan.over.replace("client", "site")
        header = self._header(TRAIN, terms=terms_to_dict(agreement.terms), round=state.round)
        asked = {
            self.nodes[site]: Message(header=header, payload=plan.downloads[site])
            for site in plan.cohort.ids
            if site in self.nodes
        }
        answers = self.transport.ask(asked, self.study.run.round_timeout)
        uplinks = [self._uplink(agreement, site, answers) for site in plan.cohort.ids]
        state, record = close_round(agreement, state, plan, uplinks, run)
        record = replace(record, effective_noise=effective_noise(agreement, plan, record))
        self.place.append_round(record)
        self._checkpoint(state)
        return state, record

    def _checkpoint(self, state: State) -> None:
        self.place.save_state(
            Checkpoint(state=state, run=self.name, experiment=self.study.digest())
        )

    def _uplink(
        self, agreement: Agreement, site: str, answers: Mapping[int, Message | str]
    ) -> Uplink:
        answer = answers.get(self.nodes.get(site, -1), "is not connected")
        before = self.willing.get(site, False)
        why = self._note(site, answer)
        if agreement.amplified:
            self.willing[site] = (
                before  # who may be drawn follows from what everyone was asked, never from the draw
            )
        if why or isinstance(answer, str):
            return Uplink(client=site, payload=None, reason=why or "no answer")
        largest = FRAME_BYTES + 4 * agreement.layout.size
        if len(answer.payload) > largest:
            return Uplink(
                client=site,
                payload=None,
                reason=f"sent {len(answer.payload)} bytes, at most {largest} were agreed",
            )
        return Uplink(client=site, payload=answer.payload)

    # -- the end -----------------------------------------------------------------------------------

    def _finish(
        self,
        agreement: Agreement,
        state: State,
        history: list[RoundRecord],
        ended: str | None,
        ledger: Ledger,
    ) -> None:
        stamps = [SEEDED] if self.study.run.noise == "seeded" else []
        self.place.save_model(state.model, self.layout, "; ".join(stamps))
        absent = self._deliver(agreement)
        summary = {
            "format": SUMMARY_FORMAT,
            "dpfl": __version__,
            "run": self.name,
            "study": self.study.study.name,
            "method": self.study.method.name,
            "unit": str(self.strategy.unit),
            "observer": str(self.strategy.observer),
            "adjacency": str(self.strategy.adjacency),
            "stamps": stamps,
            "assumptions": [*self.strategy.assumptions, *self._arithmetic()],
            "sites": sorted(agreement.claims),
            "refusals": self.refusals,
            "parameters": self.layout.size,
            "rounds": {
                "planned": agreement.terms.rounds,
                "done": state.round,
                "ended_early": ended,
            },
            "delivered": sorted(set(agreement.claims) - set(absent)),
            "undelivered": absent,
            "lost_rounds": [line.round for line in history if line.lost],
            "missed": missed_rounds(history),
            **total_bytes(history),
            "world_statements": [line.to_dict() for line in statements(ledger)],
        }
        write_safely(self.place.summary, (json.dumps(summary, indent=2) + "\n").encode())

    def _arithmetic(self) -> tuple[str, ...]:
        return (
            arithmetic_assumptions(self.model, self.layout) if self.strategy.local.private else ()
        )

    def _deliver(self, agreement: Agreement) -> dict[str, str]:
        """Give every member the model; returns why some did not get it."""
        header = self._header(END, terms=terms_to_dict(agreement.terms))
        letter = Message(header=header, payload=self.place.model.read_bytes())
        asked = {self.nodes[site]: letter for site in agreement.claims if site in self.nodes}
        answers = self.transport.ask(asked, min(self.study.run.round_timeout, DELIVERY_SECONDS))
        absent = {}
        for site in agreement.claims:
            answer = answers.get(self.nodes.get(site, -1), "is not connected")
            if isinstance(answer, str) or not answer.accepted:
                absent[site] = answer if isinstance(answer, str) else answer.reason
        return absent


def _bound(folder: Path) -> dict[str, int]:
    try:
        return {site: int(node) for site, node in json.loads((folder / NODES).read_text()).items()}
    except FileNotFoundError:
        return {}


def _refused(answer: Message | str) -> str:
    """Why a site does not accept the terms; empty if it does."""
    return answer if isinstance(answer, str) else "" if answer.accepted else answer.reason
