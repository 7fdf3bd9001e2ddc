"""A site: it answers a server's messages, and trusts none of them.

What is checked before any work: that the study names this site, that method, clip, noise, sampling
and rounds are within the site's own policy, and that its own ledger covers the round. Noise comes
from the operating system. Nothing of the site's state lives in memory only: every answer may be
given by a new process.
"""

from contextlib import closing
from pathlib import Path

from torch import Tensor

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, DataError, DpflError, PeerError, PrivacyRefusal
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.core.version import __version__
from dpfl.deploy.commitment import Commitment
from dpfl.deploy.messages import WENT_WRONG, Introduction, Message, acceptance, refusal
from dpfl.deploy.outcome import keep_model, pack_private, unpack_private
from dpfl.deploy.policy import check_download, check_plan
from dpfl.deploy.records import LoadedSite, Records
from dpfl.deploy.requests import Delivery, Hello, Request, TermsRequest, TrainingRequest, UnderTerms
from dpfl.deploy.site_folder import WORKER_LOG, log, note_sent
from dpfl.engine import make_engine
from dpfl.privacy.site_ledger import SiteLedger
from dpfl.rounds import Agreement, Workshop, buffer_shapes, client_round
from dpfl.rounds.enrol import secret_for

_DIED = "ended over this message"
_OUT_OF_BUDGET = "its budget does not cover another round"


class Site(LoadedSite):
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
            self.log(str(error))
            proof = self.proof(message.header.get("run"))  # what is final must be this site's
            return refusal(str(error), site=self.id, code=error.exit_code, **proof)
        except Exception as error:
            # What went wrong with data, ledger or code may reveal records: it stays here.
            self.log(f"{type(error).__name__}: {error}")
            return refusal(WENT_WRONG, site=self.id, code=1)

    def _answer(self, request: Request) -> Message:
        """Answer a request by its kind."""
        match request:
            case Hello():
                return self._introduce(request)
            case TermsRequest():
                return self._accept_terms(request)
            case TrainingRequest():
                return self._train(request)
            case Delivery():
                return self._keep(request)
        raise AssertionError(request)

    def _introduce(self, request: Hello) -> Message:
        """Say who this is, and what it claims, if the study is acceptable."""
        self.check_study(request.study)
        token, claims = self.token(request.run), self.member().claims
        said = Introduction(site=self.id, claims=claims, token=token, version=__version__)
        return said.to_message()

    def _agreement(self, request: UnderTerms) -> Agreement:
        """Plan the study under the server's terms, with this site's own budget and settings.

        Terms that this study cannot have are refused; so is a plan outside the site's policy.
        """
        study, terms = request.study, request.terms
        member = self.member(study.learned())
        strategy, model = study.strategy(), study.build_model()
        layout, shapes = Layout.of_module(model), buffer_shapes(model, strategy.releases)
        releases = tuple((one.share, one.numbers(shapes[one.into])) for one in strategy.releases)
        fitting = (
            terms.rounds == study.run.rounds
            and 1 <= terms.population <= len(study.study.sites)
            and 0 < terms.expected_cohort <= terms.population
            and 1 <= terms.participations <= terms.rounds
            and terms.parameters == layout.size
            and terms.releases == releases
        )
        check(fitting, "terms", "do not belong to this study", "enrol again", PeerError)
        agreement = Agreement(
            strategy=strategy.resolve(terms),
            terms=terms,
            layout=layout,
            claims={self.id: member.claims},
            buffer_shapes=shapes,
        )
        check_plan(self.file, agreement, member)
        return agreement

    def _commitment(self, request: UnderTerms) -> Commitment:
        """Check study and terms, and return what the site commits to if it accepts them."""
        self.check_study(request.study)
        apart = self.file.budget is not None and self.file.budget.per_study is not None
        agreement = self._agreement(request)
        member = self.member(request.study.learned())
        return Commitment(agreement=agreement, member=member, per_study=apart)

    def _accept_terms(self, request: TermsRequest) -> Message:
        """Accept the terms. Once they are binding the site commits to its plan.

        That happens before it releases anything. An amplified cost is charged for all rounds now,
        drawn or not. Terms that are not binding yet cost nothing: the server asks who would accept
        them, and leaves the others out of the population.
        """
        commitment, run = self._commitment(request), request.run
        with closing(self.ledger()) as ledger:
            if not request.binding or ledger.agreed(run) is None:
                commitment.check(ledger)
            token = self.token(run)
            if not request.binding:
                return acceptance(self.id, more=True, token=token)
            study, new = request.study, ledger.agreed(run) is None
            ledger.register(run, seeded=study.seeded, title=study.title)
            same, problem = ledger.agree(run, request.digest()), "are not those agreed on before"
            check(same, "terms", problem, "begin another run", PeerError)
            commitment.make(ledger, run)
            if new:
                what = f"{study.study.name}: {study.method_text} (run {run})"
                self.log(f"agreed to {study.run.rounds} rounds of {what}")
            more = commitment.covers(ledger, run, commitment.agreement.first_round)
            if not more:
                self.log(f"{study.study.name}: its budget does not cover a round")
            return acceptance(self.id, more=more, token=token)

    def _train(self, request: TrainingRequest) -> Message:
        """Answer one round: check, work, then charge and store the answer before it is sent."""
        commitment, run, round_ = self._commitment(request), request.run, request.round
        with closing(self.ledger()) as ledger:
            # What was planned and paid for is what is done.
            same, problem = ledger.agreed(run) == request.digest(), "is not under the agreed terms"
            check(same, "round", problem, "begin another run", PeerError)
            self.take_receipt(ledger, request.run, request.receipt, request.signer)
            last = ledger.answered(run)
            if last is not None and last.round == round_:  # the same bytes, already charged
                if not last.payload:
                    return refusal("its work failed in this round", site=self.id)
                return self._upload(ledger, commitment, request, last.payload)
            if last is not None and last.round > round_:
                return refusal(f"round {round_} is over", site=self.id)
            if not commitment.agreement.first_round <= round_ < request.terms.rounds:
                return refusal(f"round {round_} is not in the plan", site=self.id)
            commitment.check_unchanged(ledger, run)
            if not commitment.covers(ledger, run, round_):
                return self._out_of_budget(request)
            check_download(commitment.agreement, round_, request.payload)
            private = {} if last is None else unpack_private(last.private)
            charges = commitment.charges(round_)
            try:
                check(self._able, "worker", _DIED, f"see {WORKER_LOG}", DataError)
                payload, private = self._work(request, commitment.agreement, private)
            except Exception as error:
                # That work failed may reveal something of the records: it is charged like an
                # answer, not tried again, and what went wrong stays here.
                kept = b"" if last is None else last.private
                ledger.charge_and_store(run, round_, charges, b"", kept)
                problem = f"failed in round {round_} ({type(error).__name__}: {error})"
                raise DataError("local work", problem, "check the records") from error
            kept = pack_private(private)
            if not ledger.charge_and_store(run, round_, charges, payload, kept):
                return self._out_of_budget(request)
            return self._upload(ledger, commitment, request, payload)

    def _out_of_budget(self, request: TrainingRequest) -> Message:
        """Refuse this round and every later one."""
        self.log(f"{request.study.study.name}: {_OUT_OF_BUDGET}")
        token = self.token(request.run)
        return refusal(_OUT_OF_BUDGET, site=self.id, more=False, token=token)

    def _work(
        self, request: TrainingRequest, agreement: Agreement, private: dict[str, Tensor]
    ) -> tuple[bytes, dict[str, Tensor]]:
        """Do the local work of a round, as a simulated client does it.

        ``private`` is the part of the model that stays at the site. Returns the upload, and that
        part as it is after the round.
        """
        study = request.study
        seed = PublicSeed(study.run.seed).child("secret") if study.seeded else None
        workshop = Workshop(
            agreement=agreement,
            run=request.run,
            engine=make_engine("stacked"),
            model=study.build_model(),
            secret=lambda round_, site: secret_for(seed, "client", round_, site),
        )
        downloads = {self.id: request.payload}
        members = {self.id: self.member(study.learned())}
        (uplink,) = client_round(workshop, downloads, members, private)
        assert uplink.payload is not None
        return uplink.payload, private

    def _upload(
        self, ledger: SiteLedger, commitment: Commitment, request: TrainingRequest, payload: bytes
    ) -> Message:
        """Build the answer of a round, which also says whether the plan covers another one."""
        more = commitment.covers(ledger, request.run, request.round + 1)
        token = self.token(request.run)
        head = ledger.heads(request.run)[0]
        return acceptance(self.id, payload, round=request.round, token=token, more=more, head=head)

    def _keep(self, request: Delivery) -> Message:
        """Keep the model of a study that this site took part in; nothing of the site goes back."""
        with closing(self.ledger()) as ledger:
            agreed, remedy = ledger.agreed(request.run), "send its model to those who took part"
            known = agreed == request.digest()
            check(known, "study", "was not agreed to by this site", remedy, PeerError)
            self.take_receipt(ledger, request.run, request.receipt, request.signer)
            last = ledger.answered(request.run)
        private = b"" if last is None else last.private
        keep_model(self.folder, request.run, request.study, request.payload, private)
        return acceptance(self.id)


def answered(
    folder: Path, message: Message, records: Records | None = None, *, able: bool = True
) -> Message:
    """Let the site in a folder answer a message; ``records`` keeps what it reads for the next.

    With ``able`` False no work is done: it has ended the process before. The round is charged.
    """
    try:
        site = Site(folder, records, able=able)
    except DpflError as error:
        log(folder, str(error))
        reason = "the site's folder cannot be used; its operator must look at it"
        answer = refusal(reason, code=error.exit_code)
        note_sent(folder, message, answer)
        return answer
    return site.answer(message)
