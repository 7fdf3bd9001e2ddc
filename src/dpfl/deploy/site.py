"""A site: its data, its policy, its ledger. It answers a server's messages, and believes none of
them.

What is checked before any work: that the study names this site, that method, clip, noise, sampling
and rounds are within the site's own policy, and that its own ledger covers the round. Noise comes
from the operating system. Nothing of the site's state lives in memory only: every answer may be
given by a new process.
"""

from __future__ import annotations

import datetime
import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import torch as safetensors
from torch import Tensor

from dpfl.core.errors import (
    ConfigurationError,
    DataError,
    DpflError,
    FolderError,
    LedgerError,
    PeerError,
    PrivacyRefusal,
)
from dpfl.core.files import write_safely
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Claims, Observer, Unit
from dpfl.core.version import __version__
from dpfl.data.federation import Federation
from dpfl.data.tables import read_file
from dpfl.deploy.commitment import Commitment
from dpfl.deploy.outcome import keep_model
from dpfl.deploy.policy import check_offer, check_plan
from dpfl.deploy.messages import (
    END,
    HELLO,
    TERMS,
    TRAIN,
    Introduction,
    Message,
    refusal,
    terms_from_dict,
    terms_to_dict,
    write_header,
)
from dpfl.engine import make_engine
from dpfl.models import check_model
from dpfl.privacy.filters import FilterName
from dpfl.privacy.site_ledger import SiteLedger
from dpfl.privacy.statement import Statement, statement
from dpfl.rounds import Agreement, blocks_of, work
from dpfl.rounds.codec import decode_download
from dpfl.rounds.members import Member
from dpfl.runs.deployment import SITE_FILE, SiteFile, StudyFile
from dpfl.runs.experiment import Experiment

LEDGER, TOKEN, LOG = "ledger.sqlite", "token", "site.log"


class Site:
    """One site's folder. Paths in its file are relative to the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / SITE_FILE).exists():
            raise FolderError(str(folder), "holds no site", "make one with dpfl site init")
        self.file = SiteFile.from_file(folder / SITE_FILE)
        self._federation: Federation | None = None

    @property
    def id(self) -> str:
        """Its name in studies."""
        return self.file.site.id

    # -- made once ---------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make what a new site lacks: a ledger with its grant, and a token that tells it from
        impostors.
        """
        path = self.folder / LEDGER
        if not path.exists():
            SiteLedger.create(path, self.id, filter=self._filter()).close()
        self.ledger().close()
        if not (self.folder / TOKEN).exists():
            write_safely(self.folder / TOKEN, secrets.token_hex(32).encode(), secret=True)
        self.folder.chmod(0o700)

    def ledger(self) -> SiteLedger:
        """Open the ledger; a missing one is refused, since it may have been mislaid, and so is
        another grant than its own.
        """
        ledger = SiteLedger.open_for(self.folder / LEDGER, self.id)
        budget = self.file.own_budget()
        try:
            if ledger.filter != self._filter():
                raise LedgerError(
                    str(self.folder / LEDGER),
                    f"adds studies up by '{ledger.filter}', not by '{self._filter()}'",
                    "put [budget] filter back in site.toml: it is fixed when the ledger is made",
                )
            if budget is not None and budget.unit is not None and budget.observer is not None:
                ledger.set_budgets({self.id: budget}, unit=budget.unit, observer=budget.observer)
        except DpflError:
            ledger.close()
            raise
        return ledger

    def _filter(self) -> FilterName:
        return "allotments" if self.file.budget is None else self.file.budget.filter

    def federation(self) -> Federation:
        """This site alone, as a federation of one."""
        if self._federation is None:
            self._federation = self._loaded()
        return self._federation

    def _loaded(self) -> Federation:
        data = self.file.data
        if data.dataset is not None:
            values = {
                "data": {"name": data.dataset},
                "partition": data.partition,
                "method": {"name": "fedavg"},
                "run": {"rounds": 1, "seed": data.seed},
            }
            whole = Experiment.from_dict(values, f"{self.folder / SITE_FILE}, [data]").federation()
            name = data.client or self.id
            if name not in whole.shards:
                raise DataError(
                    f"data set '{data.dataset}'",
                    f"has no client '{name}'",
                    "name one of its clients",
                )
            return Federation(
                shards={self.id: whole.shards[name]}, classes=whole.classes, inputs=whole.inputs
            )
        assert data.file is not None
        return Federation.from_arrays(
            {self.id: read_file(self.folder / data.file, data.label)}, classes=data.classes
        )

    def member(self) -> Member:
        """The site as a member: it claims what it enforces."""
        federation, budget = self.federation(), self.file.study_budget()
        shard = federation.shards[self.id]
        return Member(
            id=self.id,
            shard=shard,
            budget=budget,
            claims=Claims(
                epsilon=budget.epsilon if budget else float("inf"),
                delta=budget.delta if budget else 0.0,
                examples=shard.examples,
                accountant=budget.accountant if budget else None,
            ),
            client_settings=self.file.own_practice(),
            inputs=federation.inputs,
        )

    def token(self, run: str) -> str:
        """What proves to the server of a run that a later message is from the same site; useless
        elsewhere.
        """
        try:
            own = (self.folder / TOKEN).read_bytes()
        except OSError as error:
            raise ConfigurationError(
                str(self.folder / TOKEN),
                "is missing",
                "restore it from a backup, or make the site anew in another folder",
            ) from error
        return hashlib.sha256(own + run.encode()).hexdigest()

    # -- answers -----------------------------------------------------------------------------------

    def answer(self, letter: Message) -> Message:
        """Answer a server's message. What is refused is refused in one sentence, and costs nothing."""
        try:
            study = self._study(letter)
            kind = letter.header.get("kind")
            if kind == HELLO:
                return self._hello(study, str(letter.header["run"]))
            if kind == TERMS:
                return self._agree(study, letter)
            if kind == TRAIN:
                return self._train(study, letter)
            if kind == END:
                return self._keep(study, letter)
            return refusal(f"there is no message '{kind}'")
        except (ConfigurationError, PrivacyRefusal, PeerError) as error:
            self._log(str(error))
            return refusal(str(error), site=self.id, code=error.exit_code)
        except Exception as error:
            # What went wrong with data, ledger or code may tell of records: it stays here.
            self._log(f"{type(error).__name__}: {error}")
            code = error.exit_code if isinstance(error, DpflError) else 1
            return refusal(
                "something at the site went wrong; its own log says what", site=self.id, code=code
            )

    def _log(self, sentence: str) -> None:
        stamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with (self.folder / LOG).open("a") as stream:
            stream.write(f"{stamp} {sentence}\n")

    def _study(self, letter: Message) -> StudyFile:
        version = str(letter.header.get("dpfl", ""))
        if version.split(".")[:2] != __version__.split(".")[:2]:
            raise PeerError(
                "server",
                f"runs dpfl {version or 'unknown'}, this site {__version__}",
                "use the same version",
            )
        return StudyFile.from_dict(dict(letter.header["study"]), "the server's study")

    def _hello(self, study: StudyFile, run: str) -> Message:
        self._accepts(study)
        member = self.member()
        said = Introduction(
            site=self.id, claims=member.claims, token=self.token(run), version=__version__
        )
        return Message(header=said.to_header())

    def _accepts(self, study: StudyFile) -> None:
        """Check the study against this site's own policy and data."""
        check_offer(self.file, study, self.member())
        federation = self.federation()
        if (
            list(federation.feature_shape) != list(study.study.feature_shape)
            or federation.classes > study.study.classes
        ):
            self._log(
                f"records have shape {list(federation.feature_shape)} and {federation.classes} classes"
            )
            raise ConfigurationError(
                f"site '{self.id}'",
                f"its records do not have the study's shape {study.study.feature_shape} and {study.study.classes} classes",
                "prepare the same columns everywhere",
            )
        check_model(
            study.build_model(), federation.feature_shape, study.study.classes, federation.inputs
        )

    def _agreement(self, study: StudyFile, letter: Message) -> Agreement:
        """What the server's terms make of the study: planned here, with this site's own budget and
        habits.
        """
        terms = terms_from_dict(letter.header["terms"])
        fitting = (
            terms.rounds == study.run.rounds
            and 1 <= terms.population <= len(study.study.sites)
            and 0 < terms.expected_cohort <= terms.population
            and 1 <= terms.participations <= terms.rounds
            and terms.parameters == Layout.of_module(study.build_model()).size
        )
        if not fitting:
            raise PeerError("terms", "do not belong to this study", "enrol again")
        strategy = study.strategy().resolve(terms)
        layout = Layout.of_module(study.build_model())
        agreement = Agreement(
            strategy=strategy, terms=terms, layout=layout, claims={self.id: self.member().claims}
        )
        check_plan(self.file, agreement, self.member())
        return agreement

    def _commitment(self, agreement: Agreement) -> Commitment:
        per_study = self.file.budget is not None and self.file.budget.per_study is not None
        return Commitment(
            site=self.id, agreement=agreement, member=self.member(), per_study=per_study
        )

    def _agree(self, study: StudyFile, letter: Message) -> Message:
        """Accept the terms. Once they are binding the site commits to its plan, before it releases
        anything.

        An amplified cost is charged for all rounds now, drawn or not. Terms that are not binding
        yet cost nothing: the server asks who would accept them, and leaves the others out of the
        population.
        """
        self._accepts(study)
        agreement, run = self._agreement(study, letter), str(letter.header["run"])
        ledger = self.ledger()
        try:
            if letter.header.get("binding") is not True:
                self._commitment(agreement).check(ledger)
                return Message(header={"ok": True, "site": self.id, "more": True})
            if ledger.agreed(run) is None:
                self._commitment(agreement).check(ledger)
            ledger.register(
                run,
                seeded=study.run.noise == "seeded",
                title=f"{study.study.name}: {study.method.name}",
            )
            if not ledger.agree(run, _digest(study, letter)):
                raise PeerError(
                    "terms", "are not those that were agreed on for this run", "begin another run"
                )
            self._commitment(agreement).make(ledger, run)
            more = self._commitment(agreement).covers(ledger, run, 0)
            if not more:
                self._log(f"{study.study.name}: its budget does not cover a round")
            return Message(header={"ok": True, "site": self.id, "more": more})
        finally:
            ledger.close()

    def _train(self, study: StudyFile, letter: Message) -> Message:
        """One round: check, work, pay and keep the answer, answer."""
        run, round_ = str(letter.header["run"]), int(letter.header["round"])
        self._accepts(study)
        agreement = self._agreement(study, letter)
        ledger = self.ledger()
        try:
            if ledger.agreed(run) != _digest(
                study, letter
            ):  # what was planned and paid for is what is done
                raise PeerError(
                    "round",
                    "its study or terms are not those that were agreed on",
                    "begin another run",
                )
            last = ledger.answered(run)
            if last is not None and last.round == round_:
                return self._answer(
                    ledger, agreement, run, round_, last.payload
                )  # the same bytes, paid already
            if last is not None and last.round > round_:
                return refusal(f"round {round_} is over", site=self.id)
            if not 0 <= round_ < agreement.terms.rounds:
                return refusal(f"round {round_} is not in the plan", site=self.id)
            if not self._commitment(agreement).covers(ledger, run, round_):
                return self._spent_up(study)
            self._check_drawn(agreement, letter.payload)
            private = {} if last is None else _unpacked(last.private)
            try:
                payload, private = self._work(
                    study, agreement, run, round_, letter.payload, private
                )
            except Exception:
                # That work failed may tell of the records: it is charged like an answer.
                ledger.charge(run, round_, self._commitment(agreement).charges())
                raise
            paid = ledger.charge_and_store(
                run, round_, self._commitment(agreement).charges(), payload, _packed(private)
            )
            if not paid:
                return self._spent_up(study)
            return self._answer(ledger, agreement, run, round_, payload)
        finally:
            ledger.close()

    def _spent_up(self, study: StudyFile) -> Message:
        self._log(f"{study.study.name}: its budget does not cover another round")
        return refusal("its budget does not cover another round", site=self.id, more=False)

    def _check_drawn(self, agreement: Agreement, download: bytes) -> None:
        """A share of noise is made for the number drawn: with a number larger than was agreed on it
        would be too small.
        """
        drawn = decode_download(download, agreement.layout.size).drawn
        size = agreement.strategy.selection.cohort_size(agreement.terms.population)
        largest = agreement.terms.population if size is None else size
        if not 1 <= drawn <= largest:
            raise PeerError(
                "download",
                f"says that {drawn} sites were drawn",
                f"draw at most {largest}, as was agreed",
            )

    def _work(
        self,
        study: StudyFile,
        agreement: Agreement,
        run: str,
        round_: int,
        download: bytes,
        private: dict[str, Tensor],
    ) -> tuple[bytes, dict[str, Tensor]]:
        member = self.member()
        seeded = study.run.noise == "seeded"
        root = PublicSeed(study.run.seed).child("secret").child("client", round_, self.id)
        rng = SecretRng.simulated(root) if seeded else SecretRng.from_system()
        engine = make_engine("stacked")
        blocks = blocks_of(agreement, {self.id: member}, engine)
        (uplink,) = work(
            agreement,
            run,
            {self.id: download},
            {self.id: member},
            {self.id: rng},
            engine,
            study.build_model(),
            blocks,
            private,
        )
        assert uplink.payload is not None
        return uplink.payload, private

    def _answer(
        self, ledger: SiteLedger, agreement: Agreement, run: str, round_: int, payload: bytes
    ) -> Message:
        more = self._commitment(agreement).covers(ledger, run, round_ + 1)
        header = {
            "ok": True,
            "site": self.id,
            "round": round_,
            "token": self.token(run),
            "more": more,
        }
        return Message(header=header, payload=payload)

    def _keep(self, study: StudyFile, letter: Message) -> Message:
        """Keep the model of a study that has ended, if this site took part. Nothing of the site's
        goes back.
        """
        run, ledger = str(letter.header["run"]), self.ledger()
        try:
            if ledger.agreed(run) != _digest(study, letter):
                raise PeerError(
                    "study",
                    "is none that this site has agreed to",
                    "send its model to those who took part",
                )
            last = ledger.answered(run)
        finally:
            ledger.close()
        keep_model(self.folder, run, study, letter.payload, b"" if last is None else last.private)
        return Message(header={"ok": True, "site": self.id})

    # -- for the people at the site ----------------------------------------------------------------

    def warnings(self) -> list[str]:
        """What its board must know of its grant beside the numbers."""
        budget, records = self.file.own_budget(), self.member().shard.examples
        if budget is None or budget.unit is not Unit.RECORD or budget.delta * records < 1:
            return []
        return [
            f"WEAK: delta {budget.delta:g} is not below 1 / {records} records: it allows to give some away whole"
        ]

    def spent(self) -> list[Statement]:
        """What this site has spent, over all studies, against everyone it was billed against."""
        ledger = self.ledger()
        try:
            budget = self.file.own_budget()
            observers = ledger.observers(self.id) or [
                budget.observer if budget and budget.observer else Observer.SERVER
            ]
            lines = [statement(ledger, self.id, observer) for observer in observers]
            return [line for line in lines if line is not None]
        finally:
            ledger.close()


def _digest(study: StudyFile, letter: Message) -> str:
    """Name the study and the terms together."""
    terms = terms_to_dict(terms_from_dict(letter.header["terms"]))
    return hashlib.sha256(
        write_header({"study": study.digest(), "terms": terms}).encode()
    ).hexdigest()


def _packed(private: Mapping[str, Tensor]) -> bytes:
    return (
        safetensors.save({name: tensor.contiguous() for name, tensor in private.items()})
        if private
        else b""
    )


def _unpacked(packed: bytes) -> dict[str, Any]:
    return dict(safetensors.load(packed)) if packed else {}
