"""A site: it answers a server's messages, and trusts none of them.

What is checked before any work: that the study names this site, that method, clip, noise, sampling
and rounds are within the site's own policy, and that its own ledger covers the round. Noise comes
from the operating system. Nothing of the site's state lives in memory only: every answer may be
given by a new process.
"""

from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, DataError, DpflError, PeerError, PrivacyRefusal
from dpfl.core.files import check_private, write_safely
from dpfl.core.version import __version__
from dpfl.deploy.bound_site import BoundSite
from dpfl.deploy.commitment import Commitment
from dpfl.deploy.messages import WENT_WRONG, Introduction, Message, acceptance, refusal
from dpfl.deploy.order import following, place
from dpfl.deploy.outcome import (
    PRIVATE,
    keep_model,
    own_part,
    pack_private,
    unpack_private,
)
from dpfl.deploy.policy import check_download, check_identities
from dpfl.deploy.records import Records
from dpfl.deploy.requests import (
    Delivery,
    Hello,
    Request,
    SumRequest,
    TermsRequest,
    TrainingRequest,
    UnderTerms,
)
from dpfl.deploy.site_folder import WORKER_LOG, log, note_sent
from dpfl.deploy.site_sum import SiteSum
from dpfl.privacy.site_ledger import Answered, PlannedUnits, SiteLedger, UnitsWithdrawn
from dpfl.rounds import Agreement
from dpfl.rounds.members import true_claims

_DIED = "ended over this message"
STOPPED = "it takes no further part in this study"
"""What a server is told by every site that has stopped, whatever the reason."""

_CHANGED = "its records are not those that the study was planned for; put back what was there"
_EARLIER = "it began under an earlier rule for setting test records aside, and cannot go on"


class Site(BoundSite):
    """A site that answers requests; :meth:`answer` is the only door.

    *Formal guarantees.* Nothing leaves the site that its ledger was not charged for in the same
    transaction that stored the answer. The same round is answered twice with the same bytes only,
    and charged once. A refusal depends on the site's file and ledger, not on its records; work that
    fails may depend on records, and is charged like an answer.
    """

    def __init__(self, folder: Path, records: Records | None = None, *, able: bool = True) -> None:
        super().__init__(folder, records)
        self._able = able

    def answer(self, message: Message) -> Message:
        """Answer a server's message; a refusal is one sentence, and work that failed is charged.

        What leaves is written to the site's log of everything that was sent.
        """
        answer = self._answered(message)
        note_sent(self.folder, message, answer)
        return answer

    def _answered(self, message: Message) -> Message:
        """Answer a message, or say in one sentence why not."""
        try:
            return self._answer(Request.read(message))
        except (ConfigurationError, PrivacyRefusal, PeerError) as error:
            reason = str(error).removeprefix(f"site '{self.id}': ")  # whoever reads it knows
            self.log("; ".join((reason, *getattr(error, "__notes__", ()))))
            proof = self.proof(message.header.get("run"))  # what is final must be this site's
            return refusal(reason, site=self.id, code=error.exit_code, **proof)
        except UnitsWithdrawn:
            return self._answered(message)
        except Exception as error:
            # What went wrong with data, ledger or code may reveal records: it stays here.
            self.log(f"{type(error).__name__}: {error}")
            return refusal(WENT_WRONG, site=self.id, code=1)

    def _answer(self, request: Request) -> Message:
        """Answer a request by its kind, with the units of its study."""
        with closing(self.ledger()) as ledger:
            planned = self.enter(ledger, request.run)
            match request:
                case Hello():
                    return self._introduce(request, planned)
                case TermsRequest():
                    return self._accept_terms(ledger, request)
                case TrainingRequest():
                    return self._train(ledger, request)
                case SumRequest():
                    return self._add_up(ledger, request)
                case Delivery():
                    return self._keep(ledger, request)
        raise AssertionError(request)

    def _introduce(self, request: Hello, planned: PlannedUnits | None) -> Message:
        """Say who this is, and what it claims, if the study is acceptable.

        Once a study is agreed on it claims what it did then, whatever its records are now.
        """
        if planned is None:
            self.check_study(request.study)
            planned = self.planned_units()
        tested = planned.tested if request.study.accounted else 0
        claims = true_claims(self.file.study_budget(), planned.trained)
        claims = replace(claims, test_examples=tested)
        token = self.token(request.run)
        said = Introduction(site=self.id, claims=claims, token=token, version=__version__)
        if request.study.secure_sum:
            said = replace(said, identity=self.identity_key)
        return said.to_message()

    def _changed(self, ledger: SiteLedger, request: UnderTerms) -> bool:
        """Whether the units are not those that an agreed study was planned for; the log says so."""
        if ledger.agreed(request.run) is None:
            return False
        planned = self.enter(ledger, request.run)
        reason = _CHANGED
        try:
            if planned is not None and planned.digest == self.planned_units().digest:
                return False
        except Exception as error:  # whatever is wrong with the file, the server hears the same
            reason = str(error)
        self.log(f"{request.study.study.name}: {_EARLIER if planned is None else reason}")
        return True

    def _accept_terms(self, ledger: SiteLedger, request: TermsRequest) -> Message:
        """Accept the terms. Once they are binding the site commits to its plan.

        That happens before it releases anything. An amplified cost is charged for all rounds now,
        drawn or not. Terms that are not binding yet cost nothing: the server asks who would accept
        them, and leaves the others out of the population.
        """
        run = request.run
        token = self.token(request.run)
        agreed = ledger.agreed(run)
        check(
            agreed in (None, request.digest()),
            "terms",
            "are not those agreed on before",
            "begin another run",
            PeerError,
        )
        if self._changed(ledger, request):
            return acceptance(self.id, more=True, token=token)  # it stops where all others do
        commitment = self.commitment(request)
        if request.study.secure_sum:
            check_identities(self.file, self.identity_key, request.identities)
        if not request.binding or agreed is None:
            commitment.check(ledger)
        if not request.binding:
            return acceptance(self.id, more=True, token=token)
        study = request.study
        ledger.register(run, seeded=study.seeded, title=study.title)
        units = self.planned_units()
        withdrawn = len(self.withdrawn()[0])
        check(
            ledger.agree(run, request.digest(), units, withdrawn),
            "terms",
            "are not those agreed on before",
            "begin another run",
            PeerError,
        )
        commitment.make(ledger, run)
        if agreed is None:
            what = f"{study.study.name}: {study.method_text} (run {run})"
            self.log(f"agreed to {request.terms.rounds} rounds of {what}")
        more = commitment.covers(ledger, run, commitment.agreement.first_round)
        if not more:
            self._log_budget(ledger, commitment, request)
        return acceptance(self.id, more=more, token=token)

    def _train(self, ledger: SiteLedger, request: TrainingRequest) -> Message:
        """Answer one round: check, work, then charge and store the answer before it is sent."""
        run = request.run
        round_ = request.round
        last, stored, commitment = self._entered(ledger, request)
        if last is not None and stored:
            return self._answer_again(ledger, request, last)
        if commitment is None:
            return self._stop(request)
        part = self.part_of_sum(ledger, request, commitment.agreement)
        if problem := commitment.unplanned(round_):
            return refusal(problem, site=self.id)
        order = partial(place, request.study, commitment.agreement)
        if last is not None and order(last.round) > order(round_):
            return refusal(f"round {round_} is over", site=self.id)
        commitment.check_unchanged(ledger, run)
        if not commitment.covers(ledger, run, round_):
            self._log_budget(ledger, commitment, request)
            return self._stop(request)
        check_download(commitment.agreement, round_, request.payload)
        if part is not None:
            part.check_input()
        return self._new_answer(ledger, commitment, request, part)

    def _answer_again(
        self, ledger: SiteLedger, request: TrainingRequest, last: Answered
    ) -> Message:
        """Send the very bytes of the ``last`` answer, which was charged when it was stored.

        Whatever has changed since, records or policy, they are sent; there may be no round after.
        """
        if not last.payload:
            return refusal("its work failed in this round", site=self.id)
        if request.study.secure_sum:
            part = self.part_of_sum(ledger, request, self._agreed(ledger, request))
            if part is not None:
                part.check_same_session()
        more = False
        with suppress(DpflError):  # why there is no round after is logged when one is asked for
            if not self._changed(ledger, request):
                more = self._goes_on(ledger, self.commitment(request), request)
        return self._upload(ledger, request, last.payload, more=more)

    def _new_answer(
        self,
        ledger: SiteLedger,
        commitment: Commitment,
        request: TrainingRequest,
        part: SiteSum | None,
    ) -> Message:
        """Work on a round that was not answered yet, then charge and store the answer.

        ``part`` is the site's part of the round's secure sum, if there is one.
        """
        run = request.run
        round_ = request.round
        last = ledger.answered(request.run)
        private = {} if last is None else unpack_private(last.private)
        charges = commitment.charges(round_)
        stored = None
        units = self.planned_units().digest
        try:
            check(self._able, "worker", _DIED, f"see {WORKER_LOG}", DataError)
            payload, private = self.work(request, commitment.agreement, private)
            if part is not None:
                payload, stored = part.masked(payload)
        except Exception as error:
            # That work failed may reveal something of the records: it is charged like an answer,
            # not tried again, and what went wrong stays here.
            unchanged = b"" if last is None else last.private
            ledger.charge_and_store(run, round_, charges, b"", unchanged, units=units)
            raise DataError(
                "local work",
                f"failed in round {round_} ({type(error).__name__}: {error})",
                "check the records",
            ) from error
        if self.planned_units().digest != units:  # the file has changed while it was worked on
            raise UnitsWithdrawn
        packed = pack_private(private)
        if not ledger.charge_and_store(run, round_, charges, payload, packed, stored, units=units):
            self._log_budget(ledger, commitment, request)
            return self._stop(request)
        more = self._goes_on(ledger, commitment, request)
        return self._upload(ledger, request, payload, more=more)

    def _entered(
        self, ledger: SiteLedger, request: TrainingRequest | SumRequest
    ) -> tuple[Answered | None, bool, Commitment | None]:
        """Return the last answer, whether it is to this round, and else the commitment to it."""
        last = ledger.answered(request.run)
        stored = last is not None and last.round == request.round
        commitment = None if stored or self._changed(ledger, request) else self.commitment(request)
        self._check_agreed(ledger, request)
        return last, stored, commitment

    def _check_agreed(self, ledger: SiteLedger, request: UnderTerms) -> None:
        """Refuse work under other terms than were agreed on, and a ledger that lacks what is
        signed.
        """
        # What was planned and paid for is what is done.
        check(
            ledger.agreed(request.run) == request.digest(),
            "round",
            "is not under the agreed terms",
            "begin another run",
            PeerError,
        )
        self.take_receipt(ledger, request.run, request.receipt, request.signer)

    def _add_up(self, ledger: SiteLedger, request: SumRequest) -> Message:
        """Answer one phase of a secure sum, which by itself releases nothing of the records."""
        run = request.run
        round_ = request.round
        _, stored, commitment = self._entered(ledger, request)
        if commitment is None and not stored:
            return self._stop(request)
        agreement = self._agreed(ledger, request) if commitment is None else commitment.agreement
        part = self.part_of_sum(ledger, request, agreement)
        if part is None:
            raise PeerError("secure sum", "this study has none", "ask for uploads")
        if commitment is not None and (problem := commitment.unplanned(round_)):
            return refusal(problem, site=self.id)
        if commitment is not None and not commitment.covers(ledger, run, round_):
            self._log_budget(ledger, commitment, request)
            return self._stop(request)
        return acceptance(self.id, round=round_, token=self.token(run), sum=part.answer())

    def _agreed(self, ledger: SiteLedger, request: UnderTerms) -> Agreement:
        """What was agreed on, by the ledger: neither records nor policy are looked at."""
        planned = ledger.units(request.run)
        if planned is None:
            raise PeerError("study", _EARLIER, "begin another run")
        return self.agreement(request, planned)

    def _stop(self, request: UnderTerms) -> Message:
        """Refuse this round and every later one; why is in the log of the site."""
        return refusal(STOPPED, site=self.id, more=False, token=self.token(request.run))

    def _log_budget(self, ledger: SiteLedger, commitment: Commitment, request: UnderTerms) -> None:
        """Write down that the budget is used up, with what is left of it."""
        left = commitment.shortfall(ledger)
        self.log(f"{request.study.study.name}: its budget does not cover another round ({left})")

    def _goes_on(
        self, ledger: SiteLedger, commitment: Commitment, request: TrainingRequest
    ) -> bool:
        """Whether the plan covers a round after this one."""
        ahead = following(request.study, commitment.agreement, request.round)
        return any(commitment.covers(ledger, request.run, round_) for round_ in ahead)

    def _upload(
        self, ledger: SiteLedger, request: TrainingRequest, payload: bytes, *, more: bool
    ) -> Message:
        """Build the answer of a round, which also says whether there can be another one."""
        token = self.token(request.run)
        head = ledger.heads(request.run)[0]
        return acceptance(self.id, payload, round=request.round, token=token, more=more, head=head)

    def _keep(self, ledger: SiteLedger, request: Delivery) -> Message:
        """Keep the model of a study that this site took part in; nothing of the site goes back."""
        check(
            ledger.agreed(request.run) == request.digest(),
            "study",
            "was not agreed to by this site",
            "send its model to those who took part",
            PeerError,
        )
        self.take_receipt(ledger, request.run, request.receipt, request.signer)
        ledger.close_sum(request.run)
        folder = keep_model(self.folder, request.run, request.study, request.payload)
        with ledger.nobody_leaves():
            last = ledger.answered(request.run)
            if last is not None and last.private:
                private = unpack_private(last.private)[self.id]
                own_model = own_part(folder, request.study, private)
                write_safely(folder / PRIVATE, own_model, secret=True)
        return acceptance(self.id)


def answered(
    folder: Path, message: Message, records: Records | None = None, *, able: bool = True
) -> Message:
    """Let the site in a folder answer a message; ``records`` keeps what it reads for the next.

    With ``able`` False no work is done: it has ended the process before. The round is charged.
    """
    try:
        site = Site(folder, records, able=able)
        check_private(folder)
    except DpflError as error:
        log(folder, str(error))
        reason = "the site's folder cannot be used; its operator must look at it"
        answer = refusal(reason, code=error.exit_code)
        note_sent(folder, message, answer)
        return answer
    return site.answer(message)
