"""A site's folder: its file, its records, its ledger, and what its people read from them.

::

    site.toml       data, budget, policy, address of the server: decides what the site accepts
    schema.toml     what the columns of the records hold, where the site has a schema
    ledger.sqlite   what was charged over all studies, and the last answer to each
    units.key       the secret under which units are marked and set aside for testing
    token           the secret that tells this site from an impostor
    site.key        the private key that the server knows the site by, and site.key.pub
    identity.key    the private key that other sites know the site by, in secure sums
    ca.crt          the study's certificate
    site.log        what was agreed to, refused or went wrong; it may quote records
    sent.jsonl      everything that left the site: when, for which study and round, bytes and hash
    receipts.jsonl  the servers' signatures under the entries of the ledger
    models/         the models of studies that have ended, and what they are worth to the site

Other users have no permission on it. Beside the records lies ``RECORDS.dpfl``, which names the
folder: a second site on the same records would have a budget of its own.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import secrets
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dpfl.core.checks import check
from dpfl.core.errors import DiskError, DpflError, FolderError, LedgerError, PeerError
from dpfl.core.files import append_line, for_owner_only, write_safely
from dpfl.core.types import Observer
from dpfl.deploy.messages import LONGEST, Message, write_header
from dpfl.deploy.receipts import RECEIPTS, Receipt, check_held, read_receipts, signing_key
from dpfl.privacy.filters import FilterName
from dpfl.privacy.site_ledger import SiteLedger
from dpfl.privacy.statement import Statement, statement
from dpfl.runs.site_file import MODELS as MODELS, SiteFile
from dpfl.secure_sum.keys import public_half

LEDGER, TOKEN, IDENTITY = "ledger.sqlite", "token", "identity.key"
LOG, SENT = "site.log", "sent.jsonl"
CONNECTED, INBOX, SITE_PROCESS = "connected.json", "inbox.bin", "site.pid"
WORKER_LOG, SAYS = "worker.log", "says.txt"
FINISH = "finish.json"


class SiteFolder:
    """One site's folder. Paths in its file are relative to the folder.

    Everything that a site's small process needs; it reads no records, and imports no torch.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = SiteFile.in_folder(folder)

    @property
    def id(self) -> str:
        """The site's name in studies."""
        return self.file.site.id

    @for_owner_only()
    def prepare(self) -> None:
        """Make what a new site lacks: a ledger with its budget, a secret token, an identity."""
        path = self.folder / LEDGER
        if not path.exists():
            SiteLedger.create(path, self.id, filter=self._filter).close()
        self.ledger().close()
        if not (self.folder / TOKEN).exists():
            write_safely(self.folder / TOKEN, secrets.token_hex(32).encode(), secret=True)
        self.identity()
        self.folder.chmod(0o700)

    def identity(self) -> Ed25519PrivateKey:
        """The key that other sites know this site by; it is made when it is first needed."""
        return signing_key(self.folder / IDENTITY)

    @property
    def _filter(self) -> FilterName:
        """How the site's ledger adds studies up."""
        return "allotments" if self.file.budget is None else self.file.budget.filter

    def ledger(self, *, reading: bool = False) -> SiteLedger:
        """Open the ledger.

        A missing one is refused, since it may have been mislaid; so is a budget or a filter that is
        not the ledger's own. With ``reading`` nothing has to be written: people who may only look
        at the folder can do that.
        """
        budget = self.file.own_budget()
        path = self.folder / LEDGER
        if path.exists() and not os.access(self.folder, os.W_OK):
            check(
                reading,
                str(self.folder),
                "cannot be written",
                "let the user that runs dpfl write there",
                DiskError,
            )
            return SiteLedger.open(path, self.id, read_only=True)
        ledger = SiteLedger.open_for(path, self.id)
        try:
            check(
                ledger.filter == self._filter,
                str(self.folder / LEDGER),
                f"adds studies up by '{ledger.filter}', not by '{self._filter}'",
                "put [budget] filter back in site.toml: it is fixed when the ledger is made",
                LedgerError,
            )
            if budget is not None and budget.unit is not None and budget.observer is not None:
                ledger.set_budgets({self.id: budget}, unit=budget.unit, observer=budget.observer)
        except DpflError:
            ledger.close()
            raise
        return ledger

    @property
    def identity_key(self) -> str:
        """The public half of its identity, hexadecimal: what other sites pin."""
        return public_half(self.identity())

    def token(self, run: str) -> str:
        """Derive what proves to the server of one run that messages come from the same site.

        It is a hash of the site's secret and the run's name: of no use in any other run.
        """
        try:
            own = (self.folder / TOKEN).read_bytes()
        except OSError as error:
            raise FolderError(
                str(self.folder / TOKEN),
                "is missing",
                "restore it from a backup, or make the site again in another folder",
            ) from error
        return hashlib.sha256(own + run.encode()).hexdigest()

    def proof(self, run: object) -> dict[str, str]:
        """Return the token for the header of an answer, or nothing where there is none."""
        with suppress(DpflError, UnicodeError):
            return {"token": self.token(str(run))} if isinstance(run, str) else {}
        return {}

    def log(self, sentence: str) -> None:
        """Write a line to the site's own log."""
        log(self.folder, sentence)

    def take_receipt(
        self, ledger: SiteLedger, run: str, receipt: Receipt | None, signer: str
    ) -> None:
        """Check that the ledger holds what servers have signed, and keep a new signature, once.

        ``receipt`` is what the server of ``run`` has sent along, signed with the key ``signer``.
        """
        if receipt is not None:
            receipt.check(signer)
            check(
                (receipt.run, receipt.site) == (run, self.id),
                "receipt",
                "is not this site's",
                "begin another run",
                PeerError,
            )
            heads = ledger.heads(run)
            if receipt.head not in heads:
                self.log(f"the server's receipt: {receipt}")  # it can be held against it
            check_held(receipt, self.id, heads)
        newest = self.check_receipts(ledger)
        if receipt is not None and newest.get(run) != receipt:
            append_line(self.folder / RECEIPTS, asdict(receipt))

    def checked_ledger(self) -> SiteLedger:
        """Open the ledger to read from it; one that lacks what a server has signed is refused."""
        ledger = self.ledger(reading=True)
        try:
            self.check_receipts(ledger)
        except DpflError:
            ledger.close()
            raise
        return ledger

    def check_receipts(self, ledger: SiteLedger) -> dict[str, Receipt]:
        """Refuse a ledger that lacks what the newest receipts of this folder say that it held.

        Returns the newest receipt of every run.
        """
        newest = {receipt.run: receipt for receipt in read_receipts(self.folder / RECEIPTS)}
        for receipt in newest.values():
            check_held(receipt, self.id, ledger.heads(receipt.run), LedgerError)
        return newest

    # -- for the people at the site ----------------------------------------------------------------

    def spent(self) -> list[Statement]:
        """Return what the site has spent over all studies, against each adversary."""
        budget = self.file.own_budget()
        enforced = budget.observer if budget and budget.observer else Observer.SERVER
        with closing(self.checked_ledger()) as ledger:
            observers = ledger.observers(self.id) or [enforced]
            lines = [statement(ledger, self.id, observer) for observer in observers]
            return [line for line in lines if line is not None]


def log(folder: Path, sentence: str) -> None:
    """Write a line to the log of the site in a folder; a server's words cannot make it two.

    A log that cannot be written stops nothing: what must not be lost is in the ledger.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in sentence[:LONGEST])
    with suppress(OSError), (folder / LOG).open("a", encoding="utf-8") as stream:
        stream.write(f"{now} {line}\n")


def note_sent(folder: Path, asked: Message | None, answer: Message) -> None:
    """Write down what leaves a site: an append-only log, on disk before it is sent.

    ``asked`` is None where what arrived could not be read.
    """
    told = {} if asked is None else asked.header
    study = told.get("study")
    about = study.get("study") if isinstance(study, dict) else None
    whole = write_header(answer.header).encode() + answer.payload
    line = {
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "study": str(about.get("name") if isinstance(about, dict) else None)[:100],
        "run": str(told.get("run"))[:100],
        "kind": str(told.get("kind"))[:20],
        "round": told.get("round") if isinstance(told.get("round"), int) else None,
        "accepted": answer.accepted,
        "bytes": len(whole),
        "sha256": hashlib.sha256(whole).hexdigest(),
    }
    append_line(folder / SENT, line)
