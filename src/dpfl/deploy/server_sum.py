"""The server's part of a round's secure sum: five questions to the sites.

What a server that comes back must know is on disk before the message that follows from it leaves:
who is in the session, what they have sealed for each other, and the one list of survivors. It goes
on in the same session, whose members send the same bytes again. A server that was cut off before
begins a new attempt, which costs nothing: nobody had sent an upload yet.

What sites answer in the phases of a secure sum, as the server reads it.

Every reader takes the name of the site and the plain values of its answer; what is not as agreed is
refused in the name of the site.

How far the secure sum of a round has come, on the server's disk.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from dpfl.core.checks import check
from dpfl.core.errors import CheckpointError, DpflError, PeerError, PrivacyRefusal
from dpfl.core.files import parsed, readable_file, write_safely
from dpfl.core.types import Plain
from dpfl.deploy.connections import Connections
from dpfl.deploy.messages import Message, Reply, readable, round_name
from dpfl.deploy.requests import SumRequest, TrainingRequest
from dpfl.deploy.sum_phases import KEYS, SHARES, SURVIVORS, UNMASK, digest_of, sum_terms
from dpfl.rounds import Agreement, Plan, SumOfUploads, SumPlan, Uplink
from dpfl.runs.folder import RunFolder
from dpfl.runs.validation import check_types
from dpfl.secure_sum import keys, server
from dpfl.secure_sum.integers import packed_size
from dpfl.secure_sum.session import MemberKeys, Roster, Shares, SumTerms

SUM = "sum.json"


@dataclass(frozen=True, kw_only=True)
class OpenSum:
    """How far the sum of a round has come.

    ``roster`` and ``shares`` are those of the session, once all of its members have sent both;
    ``survivors`` is the list that members are asked to sign, once their masked inputs are there.
    """

    round: int
    attempt: int
    roster: Roster | None = None
    shares: Mapping[str, Shares] = field(default_factory=dict)
    survivors: tuple[str, ...] | None = None

    def write(self, folder: Path) -> None:
        """Write it to the server's folder."""
        told = {
            "round": self.round,
            "attempt": self.attempt,
            "roster": self.roster and self.roster.to_dict(),
            "shares": {name: one.to_dict() for name, one in self.shares.items()},
            "survivors": self.survivors,
        }
        write_safely(folder / SUM, json.dumps(told).encode(), secret=True)

    @classmethod
    def read(cls, folder: Path, round_: int) -> OpenSum | None:
        """Read how far the sum of a round has come; None where it has not begun."""
        remedy = "remove it: the sum of its round is then lost where sites have sent uploads"
        with readable_file(folder / SUM, remedy, CheckpointError), suppress(FileNotFoundError):
            told = parsed((folder / SUM).read_bytes())
            if told["round"] != round_:
                return None
            found = cls(
                round=round_,
                attempt=told["attempt"],
                roster=told["roster"] and Roster.read(told["roster"]),
                shares={name: Shares.read(one) for name, one in told["shares"].items()},
                survivors=told["survivors"] and tuple(told["survivors"]),
            )
            check_types(found)
            return found
        return None


def read_keys(terms: SumTerms) -> Callable[[str, Any], MemberKeys]:
    """Make the reader of one-time keys, which must be signed for this sum."""

    def read(site: str, told: Any) -> MemberKeys:
        own = MemberKeys.read(told)
        _own(own.name, site)
        keys.check_signature(own.identity, own.signature, own.content(terms), "keys")
        return own

    return read


def read_shares(roster: Roster) -> Callable[[str, Any], Shares]:
    """Make the reader of shares: one must be sealed for each neighbour."""

    def read(site: str, told: Any) -> Shares:
        shares = Shares.read(told)
        _own(shares.announcement.name, site)
        shares.announcement.check(roster)
        holders = {roster.names[one] for one in shares.announcement.holders(roster)} - {site}
        check(
            holders == set(shares.sealed),
            "shares",
            "has not sealed a share for each of its neighbours",
            "use the same version",
            PeerError,
        )
        return shares

    return read


def read_signature(roster: Roster, survivors: tuple[str, ...]) -> Callable[[str, Any], str]:
    """Make the reader of signatures under a list of survivors."""

    def read(site: str, told: Any) -> str:
        signature = str(told["signature"])
        server.check_survivor_signature(roster, survivors, site, signature)
        return signature

    return read


def read_revealed(site: str, told: Any) -> dict[str, bytes]:
    """Read the shares that a survivor has revealed, by the member whom they are about."""
    return {
        str(name): base64.b64decode(one, validate=True) for name, one in told["revealed"].items()
    }


def _own(name: str, site: str) -> None:
    """Refuse what a site sends in another's name."""
    check(name == site, "answer", f"is for '{name[:60]}'", "send its own", PeerError)


Answer = TypeVar("Answer")


WORDS = {
    KEYS: "keys",
    SHARES: "shares of their secrets",
    SURVIVORS: "signatures",
    UNMASK: "shares that unmask",
}
"""The phases, as people who watch the server read them."""


class _Lost(Exception):
    """A sum that cannot be completed, and why."""


@dataclass
class ServerSum:
    """The sum of one round, as its server asks for it.

    ``problems`` says why sites are not in it, ``masked`` is what the others have sent.
    """

    sites: Connections
    folder: RunFolder
    agreement: Agreement
    plan: Plan
    problems: dict[str, str] = field(default_factory=dict)
    masked: dict[str, bytes] = field(default_factory=dict)

    def play(self) -> SumOfUploads | None:
        """Ask for all phases, and return the sum; None where it is lost, and why in ``problems``.

        A sum is lost where too few sites are left, and where what they reveal does not fit. Nothing
        is unmasked then.
        """
        opened = OpenSum.read(self.folder.path, self.plan.round)
        try:
            if opened is None or opened.roster is None:
                opened = self._begin(0 if opened is None else opened.attempt + 1)
            total = self._finish(opened)
            total.check_plan(self._planned, self.plan.cohort.ids)
            return total
        except (_Lost, PeerError, PrivacyRefusal) as error:
            for site in self.plan.cohort.ids:
                self.problems.setdefault(site, f"the secure sum is lost: {error}")
            return None

    @property
    def _planned(self) -> SumPlan:
        return self.agreement.sum_plan(self.plan.round, len(self.plan.cohort))

    def uplinks(self) -> list[Uplink]:
        """What came of each site: its masked upload, or why it is not in the sum."""
        return [
            Uplink(client=site, payload=None, reason=self.problems[site])
            if site in self.problems
            else Uplink(client=site, payload=self.masked.get(site))
            for site in self.plan.cohort.ids
        ]

    # -- before anybody sends an upload ------------------------------------------------------------

    def _begin(self, attempt: int) -> OpenSum:
        """Exchange keys and shares, in new attempts until all who are left have sent both."""
        members: tuple[str, ...] = self.plan.cohort.ids
        while True:
            terms = self._terms(attempt)
            OpenSum(round=self.plan.round, attempt=attempt).write(self.folder.path)
            made = self._ask(KEYS, members, {"terms": asdict(terms)}, read_keys(terms))
            self._check_enough(made, terms)
            roster = server.make_roster(terms, made)
            shares = self._ask(SHARES, roster.names, roster.to_dict(), read_shares(roster))
            if len(shares) == len(roster.names):
                found = OpenSum(
                    round=self.plan.round, attempt=attempt, roster=roster, shares=shares
                )
                found.write(self.folder.path)
                return found
            self._check_enough(shares, terms)
            members = tuple(sorted(shares))
            attempt = attempt + 1

    def _terms(self, attempt: int) -> SumTerms:
        """The terms of an attempt."""
        download, *others = {*self.plan.downloads.values()}
        assert not others, "a secure sum has one download for all"
        plan = self.plan
        run = self.sites.run
        model = digest_of(download)
        asked = len(plan.cohort)
        agreed = self._request(KEYS, {}).digest()
        return sum_terms(
            self.agreement, agreed, run, plan.round, asked, attempt=attempt, model=model
        )

    def _check_enough(self, left: Mapping[str, object], terms: SumTerms) -> None:
        if len(left) < terms.least:
            why = "; ".join(f"{site}: {problem}" for site, problem in self.problems.items())
            raise _Lost(f"{len(left)} sites are left, {terms.least} are needed ({why})")

    # -- masked inputs, and what takes the masks off -----------------------------------------------

    def _finish(self, opened: OpenSum) -> SumOfUploads:
        """Collect masked inputs, let the survivors sign who they are, and take the masks off."""
        roster = opened.roster
        assert roster is not None
        self.masked = self._masked_inputs(opened, roster)
        here = tuple(sorted(self.masked))
        if opened.survivors is None:
            self._check_enough(self.masked, roster.terms)
            opened = replace(opened, survivors=here)
            opened.write(self.folder.path)
        survivors = opened.survivors
        assert survivors is not None
        if survivors != here:
            raise _Lost("a survivor did not send its masked upload again")
        about: Plain = {"session": roster.session}
        signed = self._ask(
            SURVIVORS,
            survivors,
            {**about, "survivors": list(survivors)},
            read_signature(roster, survivors),
        )
        needed = roster.group.threshold
        if len(signed) < needed:
            raise _Lost(f"{len(signed)} survivors have signed who they are, {needed} are needed")
        signatures = dict(sorted(signed.items())[:needed])
        told = {**about, "signatures": signatures}
        revealed = self._ask(UNMASK, survivors, told, read_revealed)
        announced = {name: one.announcement for name, one in opened.shares.items()}
        total = server.unmasked_sum(roster, announced, self.masked, revealed)
        return SumOfUploads(integers=total, ids=survivors)

    def _masked_inputs(self, opened: OpenSum, roster: Roster) -> dict[str, bytes]:
        """Ask for masked inputs; with each request goes the receipt for the last answer."""
        sites = self.sites
        signer = self.sites.signer
        round_ = self.plan.round
        announced = [asdict(one.announcement) for one in opened.shares.values()]
        request = TrainingRequest(
            study=sites.study,
            run=sites.run,
            terms=self.agreement.terms,
            signer=signer.key,
            round=round_,
        )
        messages = {}
        for site in opened.survivors or roster.names:
            mail = server.mail_for(roster, opened.shares, site)
            sealed = {name: base64.b64encode(one).decode() for name, one in mail.items()}
            about = {"session": roster.session, "announced": announced, "sealed": sealed}
            download = self.plan.downloads[site]
            receipt = signer.last.get(site)
            own = replace(request, payload=download, receipt=receipt, sum=about)
            messages[site] = own.to_message()
        size = packed_size(roster.terms.numbers, roster.terms.width)

        def payload(site: str, message: Message) -> bytes:
            check(
                len(message.payload) == size,
                "masked update",
                f"sent {len(message.payload)} bytes, {size} were agreed",
                "send those",
                PeerError,
            )
            head = message.header.get("head")
            if isinstance(head, str):
                signer.sign(sites.run, site, round_, head)
            return message.payload

        return self._replies(messages, "masked updates", payload)

    # -- asking ------------------------------------------------------------------------------------

    def _ask(
        self,
        phase: str,
        to: tuple[str, ...],
        about: Plain,
        read: Callable[[str, Any], Answer],
    ) -> dict[str, Answer]:
        """Ask sites for one phase; whoever answers something else is left out, with the reason."""
        messages = dict.fromkeys(to, self._request(phase, about).to_message())
        return self._replies(messages, phase, lambda site, one: read(site, one.header["sum"]))

    def _request(self, phase: str, about: Plain) -> SumRequest:
        """The request for one phase."""
        sites = self.sites
        return SumRequest(
            study=sites.study,
            run=sites.run,
            terms=self.agreement.terms,
            signer=sites.signer.key,
            round=self.plan.round,
            phase=phase,
            sum=about,
        )

    def _replies(
        self,
        messages: Mapping[str, Message],
        what: str,
        read: Callable[[str, Message], Answer],
    ) -> dict[str, Answer]:
        """Send messages, and read the answers that are as agreed."""
        limit = self.sites.study.run.round_timeout
        found = {}
        where = f"{round_name(self.plan.round).capitalize()}, secure sum"
        asked = f"{len(messages)} sites are asked for {WORDS.get(what, what)}"
        self.sites.progress.expect(f"{where}: {asked}, and waited for up to {limit:g} s")
        replies = self.sites.ask(messages, limit)
        self._note_times(what, messages, replies)
        for site, reply in replies.items():
            problem = self._noted(site, reply)
            try:
                if problem:
                    raise PeerError(site, problem, "see its log")
                with readable("answer"):
                    found[site] = read(site, reply.message)
            except DpflError as error:
                self.problems[site] = problem or str(error)
        return found

    def _note_times(
        self, what: str, messages: Mapping[str, Message], replies: Mapping[str, Reply]
    ) -> None:
        """Write down how long each site took for a phase, and how many bytes went each way."""
        answered = {site: reply for site, reply in replies.items() if reply.answered}
        size = {site: [messages[site].size, one.message.size] for site, one in answered.items()}
        seconds = {site: round(one.seconds, 3) for site, one in answered.items()}
        line = {"round": self.plan.round, "phase": what, "seconds": seconds, "bytes_down_up": size}
        self.folder.append(self.folder.timings, line)

    def _noted(self, site: str, reply: Reply) -> str:
        """Remember whether a site will go on; where the draw is secret, nothing follows from it."""
        before = self.sites.willing.get(site, False)
        problem = self.sites.note(site, reply)
        if self.agreement.amplified:
            self.sites.willing[site] = before
        return problem
