"""A site's part of a secure sum: what it remembers, and when it refuses.

*Formal guarantees.* A site masks its upload of a round in one session only. Charge, masked bytes
and session are committed in one transaction before anything leaves; asked in the same session
again, the site sends the same bytes, and any other session of that round is refused. It signs one
list of survivors, after that is on disk, and gives for every member one of two shares, in however
many processes it is asked at once. What is summed, how many must survive and how many may collude
are the site's own plan, not the server's word.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dpfl.core.checks import check
from dpfl.core.errors import PeerError, PrivacyRefusal
from dpfl.core.grid import Grid
from dpfl.core.types import Plain
from dpfl.deploy.messages import readable
from dpfl.deploy.order import place
from dpfl.deploy.requests import SumRequest, TrainingRequest
from dpfl.deploy.sum_phases import KEYS, SHARES, SURVIVORS, UNMASK, digest_of, sum_terms
from dpfl.privacy.site_ledger import SiteLedger, StoredSum
from dpfl.rounds import Agreement
from dpfl.rounds.codec import decode_download, decode_upload
from dpfl.secure_sum import member
from dpfl.secure_sum.session import Announcement, MemberState, Roster, SumTerms
from dpfl.secure_sum.trust import Trust

_WHERE = "secure sum"


@dataclass(frozen=True, kw_only=True)
class SiteSum:
    """One request about a secure sum, at a site.

    ``identity`` is the site's key, ``trust`` says whom it counts on.
    """

    site: str
    ledger: SiteLedger
    agreement: Agreement
    request: SumRequest | TrainingRequest
    identity: Ed25519PrivateKey
    trust: Trust

    def answer(self) -> Plain:
        """Answer one of the phases around the masked input."""
        assert isinstance(self.request, SumRequest)
        phases: dict[str, Callable[[Plain], Plain]] = {
            KEYS: self._keys,
            SHARES: self._shares,
            SURVIVORS: self._survivors,
            UNMASK: self._unmask,
        }
        phase = phases.get(self.request.phase)
        if phase is None:
            raise PeerError(
                _WHERE,
                f"there is no phase '{self.request.phase[:60]}'",
                "use the same version on both sides",
            )
        with readable(_WHERE):
            return phase(self.request.sum)

    # -- the phases --------------------------------------------------------------------------------

    def _keys(self, told: Plain) -> Plain:
        """Make one-time keys for an attempt, once; a new attempt forgets those of the last."""
        terms = SumTerms.read(told["terms"])
        stored = self._stored()
        self._check_terms(terms)
        if stored is not None and stored.attempt == terms.attempt:
            state = self._state(stored)
            check(
                state.terms == terms,
                _WHERE,
                "is about something else than before, in the same attempt",
                "begin a new attempt",
                PeerError,
            )
            return asdict(state.keys)
        check(
            stored is None or stored.attempt < terms.attempt,
            _WHERE,
            f"attempt {terms.attempt} is over",
            "begin a later one",
            PeerError,
        )
        check(
            not self.committed,
            _WHERE,
            "this site has sent its upload of this round, in another session",
            "begin another round: a repetition needs new noise, and is charged anew",
            PeerError,
        )
        state = member.make_keys(self.site, self.identity, terms)
        self._store(terms.attempt, "", state)
        return asdict(state.keys)

    def _shares(self, told: Plain) -> Plain:
        """Join the session of a roster, if its members may be counted on."""
        roster = Roster.read(told)
        state = self._state(self._stored(roster.terms.attempt))
        self.trust.check(roster)
        state = member.make_shares(state, self.identity, roster)
        self._store(roster.terms.attempt, roster.session, state)
        assert state.shares is not None
        return state.shares.to_dict()

    def _survivors(self, told: Plain) -> Plain:
        """Sign the list of survivors."""
        stored, state = self._joined(told)
        survivors = tuple(str(name) for name in told["survivors"])
        new = state.survivors is None
        state, signature = member.sign_survivors(state, self.identity, survivors)
        self._store(stored.attempt, stored.session, state, noted=new)
        return {"signature": signature}

    def _unmask(self, told: Plain) -> Plain:
        """Reveal one share for each member, and forget the others."""
        stored, state = self._joined(told)
        signatures = {str(name): str(one) for name, one in told["signatures"].items()}
        state, revealed = member.reveal(state, signatures)
        self._store(stored.attempt, stored.session, state)
        return {
            "revealed": {name: base64.b64encode(one).decode() for name, one in revealed.items()}
        }

    # -- the masked input --------------------------------------------------------------------------

    @property
    def committed(self) -> bool:
        """Whether the upload of this round was charged, and belongs to a session."""
        last = self.ledger.answered(self.request.run)
        return last is not None and self._place(last.round) >= self._place(self.request.round)

    def check_same_session(self) -> None:
        """Refuse to send an upload again in another session than the one it was masked for."""
        with readable(_WHERE):
            self._joined(self.request.sum or {})

    def check_input(self) -> None:
        """Refuse, before any work, an input that could not be masked.

        The download must be the one that the session is about, and state as many drawn sites:
        shares of noise are made for them. Everything that others have sealed must be there.
        """
        assert self.request.sum is not None
        with readable(_WHERE):
            _, state = self._joined(self.request.sum)
            check(
                digest_of(self.request.payload) == state.terms.model,
                "download",
                "is not the one that the session is about",
                "send the same to all members",
                PeerError,
            )
            download = decode_download(self.request.payload, self.agreement.layout.size)
            drawn = download.drawn
            asked = state.terms.asked
            check(
                drawn == asked,
                "download",
                f"says that {drawn} sites were drawn, and {asked} are asked in the sum",
                "state one number",
                PeerError,
            )
            member.opened_shares(state, *self._mail())

    def masked(self, upload: bytes) -> tuple[bytes, StoredSum]:
        """Mask an upload; returns what is sent, and what is to be remembered.

        The masks are made once: the caller commits both together with the charge.
        """
        stored, state = self._joined(self.request.sum or {})
        state, payload = member.make_masked(state, *self._mail(), self._integers(upload, state))
        return payload, stored._replace(state=state.to_bytes())

    def _integers(self, upload: bytes, state: MemberState) -> np.ndarray:
        """The integers of an upload, as multiples of the grid's step."""
        terms = state.terms
        request = self.request
        grid = Grid(state.terms.step)
        sent = decode_upload(upload, terms.numbers, request.run, request.round, self.site, grid)
        return grid.integers(sent).numpy().astype(np.int64)

    def _mail(self) -> tuple[Mapping[str, Announcement], Mapping[str, bytes]]:
        """What others have announced, and have sealed for this site."""
        told: Any = self.request.sum
        announced = [Announcement.read(one) for one in told["announced"]]
        sealed = {str(name): base64.b64decode(one) for name, one in told["sealed"].items()}
        return {one.name: one for one in announced}, sealed

    # -- what is remembered ------------------------------------------------------------------------

    @cached_property
    def _remembered(self) -> StoredSum | None:
        """What was remembered of the run's last sum when this request came: read once, so that all
        of the answer follows from it.
        """
        return self.ledger.stored_sum(self.request.run)

    def _stored(self, attempt: int | None = None) -> StoredSum | None:
        """What is remembered of this round's sum, of this attempt if one is named."""
        stored = self._remembered
        round_ = self.request.round
        if stored is None or self._place(stored.round) < self._place(round_):
            return None
        check(
            stored.round == round_,
            _WHERE,
            f"the sum of round {round_} is over",
            "begin another round",
            PeerError,
        )
        return stored if attempt in (None, stored.attempt) else None

    def _place(self, round_: int) -> tuple[int, int]:
        return place(self.request.study, self.agreement, round_)

    def _state(self, stored: StoredSum | None) -> MemberState:
        """The site's own state; a phase out of order finds none."""
        if stored is None or not stored.state:
            raise PeerError(
                _WHERE,
                f"no keys were made for this attempt of round {self.request.round}",
                "send the phases in order",
            )
        return MemberState.from_bytes(stored.state)

    def _joined(self, told: Plain) -> tuple[StoredSum, MemberState]:
        """The session that was joined; another one is refused."""
        stored = self._stored()
        state = self._state(stored)
        assert stored is not None
        check(
            bool(stored.session) and told.get("session") == stored.session,
            _WHERE,
            "this site has joined another session of this round",
            "begin another round",
            PeerError,
        )
        return stored, state

    def _store(
        self, attempt: int, session: str, state: MemberState, *, noted: bool = False
    ) -> None:
        """Remember a state, before the answer that follows from it leaves.

        ``noted``: as an entry of the ledger's hash chain. Refused where another process has
        answered since: two messages at once would get two answers, such as signatures under two
        lists of survivors.
        """
        stored = StoredSum(self.request.round, attempt, session, state.to_bytes())
        before = self._remembered
        run = self.request.run
        check(
            self.ledger.store_sum(run, before, stored, noted=noted),
            _WHERE,
            "another message about this sum was answered meanwhile",
            "ask one thing after the other",
            PeerError,
        )

    def _check_terms(self, terms: SumTerms) -> None:
        """Refuse terms that do not follow from what was agreed on."""
        request = self.request
        agreement = self.agreement
        most = agreement.most_drawn(request.round)
        check(
            2 <= terms.asked <= most,
            _WHERE,
            f"says that {terms.asked} sites are asked, of at most {most}",
            "draw as agreed",
            PeerError,
        )
        own = sum_terms(
            agreement,
            request.digest(),
            request.run,
            request.round,
            terms.asked,
            attempt=terms.attempt,
            model=terms.model,
        )
        for field in fields(SumTerms):
            theirs = getattr(terms, field.name)
            ours = getattr(own, field.name)
            check(
                theirs == ours,
                _WHERE,
                f"its {field.name} is {theirs!r:.60}, and {ours!r:.60} follows from the study",
                "use the same version and study on both sides",
                PrivacyRefusal,
            )
