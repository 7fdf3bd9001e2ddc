"""A site's folder: its file, its records, its ledger, and what its people read from them.

::

    site.toml       data, budget, policy, address of the server: decides what the site accepts
    ledger.sqlite   what was charged over all studies, and the last answer to each
    token           the secret that tells this site from an impostor
    site.key        the private key that the server knows the site by, and site.key.pub
    ca.crt          the study's certificate
    site.log        what was refused or went wrong, in words that may reveal records
    models/         the models of studies that have ended
"""

from __future__ import annotations

import datetime
import hashlib
import secrets
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, DataError, DpflError, FolderError, LedgerError
from dpfl.core.files import write_safely
from dpfl.core.types import Observer, Plain, Unit
from dpfl.data.federation import Federation
from dpfl.data.tables import read_file
from dpfl.methods import METHODS
from dpfl.privacy.filters import FilterName
from dpfl.privacy.flags import Flag, RaisedFlag
from dpfl.privacy.site_ledger import SiteLedger
from dpfl.privacy.statement import Statement, statement
from dpfl.rounds.members import Member, honest_members
from dpfl.runs.experiment import Experiment
from dpfl.runs.processes import noted_process
from dpfl.runs.site_file import SITE_FILE, SiteFile

LEDGER, TOKEN, LOG, NODE_PROCESS = "ledger.sqlite", "token", "site.log", "supernode.pid"


class SiteFolder:
    """One site's folder. Paths in its file are relative to the folder.

    Nothing is kept in memory but the records: every answer may be given by a new process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = SiteFile.in_folder(folder)

    @classmethod
    def create(cls, folder: Path, values: Plain) -> Self:
        """Make a new site.

        ``values`` are those of its file, ``site.toml``. Where they are wrong, or the records cannot
        be read, no site is made.
        """
        path, remedy = folder / SITE_FILE, "run it, or name another folder"
        check(not path.exists(), str(folder), "already holds a site", remedy, FolderError)
        file = SiteFile.from_dict(values, "options")
        write_safely(path, file.to_toml().encode())
        try:
            site = cls(folder)
            site.member()
            site.prepare()
        except Exception:
            path.unlink()
            raise
        return site

    @property
    def id(self) -> str:
        """The site's name in studies."""
        return self.file.site.id

    def prepare(self) -> None:
        """Make what a new site lacks: a ledger with its budget, and a secret token."""
        path = self.folder / LEDGER
        if not path.exists():
            SiteLedger.create(path, self.id, filter=self._filter).close()
        self.ledger().close()
        if not (self.folder / TOKEN).exists():
            write_safely(self.folder / TOKEN, secrets.token_hex(32).encode(), secret=True)
        self.folder.chmod(0o700)

    @property
    def _filter(self) -> FilterName:
        """How the site's ledger adds studies up."""
        return "allotments" if self.file.budget is None else self.file.budget.filter

    def ledger(self) -> SiteLedger:
        """Open the ledger.

        A missing one is refused, since it may have been mislaid; so is a budget or a filter that is
        not the ledger's own.
        """
        ledger, budget = SiteLedger.open_for(self.folder / LEDGER, self.id), self.file.own_budget()
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

    @cached_property
    def _federation(self) -> Federation:
        """Load the records, once: from a file, or from a client of an embedded data set."""
        data = self.file.data
        if data.file is not None:
            records = {self.id: read_file(self.folder / data.file, data.label)}
            return Federation.from_arrays(records, classes=data.classes)
        values = {
            "data": {"name": data.dataset},
            "partition": data.partition,
            "method": {"name": next(name for name, one in METHODS.items() if one.reference)},
            "run": {"rounds": 1, "seed": data.seed},
        }
        whole = Experiment.from_dict(values, f"{self.folder / SITE_FILE}, [data]").federation()
        name, where = data.client or self.id, f"data set '{data.dataset}'"
        problem, remedy = f"has no client '{name}'", "name one of its clients"
        check(name in whole.shards, where, problem, remedy, DataError)
        shards = {self.id: whole.shards[name]}
        return Federation(shards=shards, classes=whole.classes, inputs=whole.inputs)

    def federation(self) -> Federation:
        """Return this site alone, as a federation of one."""
        return self._federation

    def member(self) -> Member:
        """Return the site as a member that claims what it enforces."""
        budget, settings = self.file.study_budget(), {self.id: self.file.own_settings()}
        budgets = {} if budget is None else {self.id: budget}
        own = replace(self.federation(), budgets=budgets, client_settings=settings)
        return honest_members(own)[self.id]

    def token(self, run: str) -> str:
        """Derive what proves to the server of one run that messages come from the same site.

        It is a hash of the site's secret and the run's name: of no use in any other run.
        """
        try:
            own = (self.folder / TOKEN).read_bytes()
        except OSError as error:
            remedy = "restore it from a backup, or make the site again in another folder"
            raise ConfigurationError(str(self.folder / TOKEN), "is missing", remedy) from error
        return hashlib.sha256(own + run.encode()).hexdigest()

    def log(self, sentence: str) -> None:
        """Write a line to the site's own log."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with (self.folder / LOG).open("a") as stream:
            stream.write(f"{now} {sentence}\n")

    # -- for the people at the site ----------------------------------------------------------------

    def flags(self) -> list[RaisedFlag]:
        """Return what its ethics board must know of its budget beside the numbers."""
        budget, records = self.file.own_budget(), self.member().shard.examples
        if budget is None or budget.unit is not Unit.RECORD or budget.delta * records < 1:
            return []
        detail = f"delta {budget.delta:g} is not below 1 / {records} records: a method may disclose"
        return [RaisedFlag(Flag.WEAK_DELTA, f"{detail} some records in full")]

    def spent(self) -> list[Statement]:
        """Return what the site has spent over all studies, against each adversary."""
        budget = self.file.own_budget()
        enforced = budget.observer if budget and budget.observer else Observer.SERVER
        with closing(self.ledger()) as ledger:
            observers = ledger.observers(self.id) or [enforced]
            lines = [statement(ledger, self.id, observer) for observer in observers]
            return [line for line in lines if line is not None]


@dataclass(frozen=True, kw_only=True)
class SiteStatus:
    """Whether a site is connected, which studies it has served, and what it has spent.

    ``studies``: title and last charged round of each run.
    """

    site: str
    running: bool
    studies: dict[str, tuple[str, int | None]]
    spent: list[Statement]

    @classmethod
    def of(cls, site: SiteFolder) -> SiteStatus:
        """Read the folder of a site."""
        with closing(site.ledger()) as ledger:
            titles = ledger.titles().items()
            studies = {run: (title, ledger.last_round(run)) for run, title in titles}
        running = noted_process(site.folder / NODE_PROCESS) is not None
        return cls(site=site.id, running=running, studies=studies, spent=site.spent())

    def to_dict(self) -> Plain:
        """Return plain values."""
        studies = [
            {"run": run, "title": title, "last_round": last}
            for run, (title, last) in self.studies.items()
        ]
        spent = [line.to_dict() for line in self.spent]
        return {"site": self.site, "running": self.running, "studies": studies, "spent": spent}
