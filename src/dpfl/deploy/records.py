"""A site with its records: read once, and again only when its file or its settings change."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from dpfl.core.checks import check
from dpfl.core.errors import DataError, FolderError
from dpfl.core.files import write_safely
from dpfl.core.types import Plain, Unit
from dpfl.data.federation import Federation
from dpfl.data.tables import read_file
from dpfl.deploy.policy import check_offer
from dpfl.deploy.site_folder import SiteFolder
from dpfl.methods import METHODS
from dpfl.models import check_model
from dpfl.privacy.flags import Flag, RaisedFlag
from dpfl.rounds.members import Member, honest_members
from dpfl.runs.deployment import StudyFile
from dpfl.runs.experiment import Experiment
from dpfl.runs.site_file import SITE_FILE, SiteFile


@dataclass
class Records:
    """The records of one site, kept between messages, and what they were read from."""

    key: object = None
    federation: Federation | None = None


class LoadedSite(SiteFolder):
    """A site that knows its records. ``records`` keeps them for the next message."""

    def __init__(self, folder: Path, records: Records | None = None) -> None:
        super().__init__(folder)
        self.file.check_methods(METHODS, str(folder / SITE_FILE))
        self._records = records or Records()

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

    def federation(self) -> Federation:
        """Return this site alone, as a federation of one."""
        data, kept = self.file.data, self._records
        key: tuple[object, ...] = (self.id, data.model_dump_json())
        if data.file is not None and (path := self.folder / data.file).exists():
            key = (*key, path.stat().st_mtime_ns, path.stat().st_size)
        if kept.federation is None or kept.key != key:
            kept.key, kept.federation = key, self._read_records()
        return kept.federation

    def _read_records(self) -> Federation:
        """Read the records: from a file, or from a client of an embedded data set."""
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
        return Federation(shards=shards, task=whole.task, inputs=whole.inputs)

    def member(self) -> Member:
        """Return the site as a member that claims what it enforces."""
        budget, settings = self.file.study_budget(), {self.id: self.file.own_settings()}
        budgets = {} if budget is None else {self.id: budget}
        own = replace(self.federation(), budgets=budgets, client_settings=settings)
        return honest_members(own)[self.id]

    def flags(self) -> list[RaisedFlag]:
        """Return what its ethics board must know of its budget beside the numbers."""
        budget, records = self.file.own_budget(), self.member().shard.examples
        if budget is None or budget.unit is not Unit.RECORD or budget.delta * records < 1:
            return []
        detail = f"delta {budget.delta:g} is not below 1 / {records} records: a method may disclose"
        return [RaisedFlag(Flag.WEAK_DELTA, f"{detail} some records in full")]

    def check_study(self, study: StudyFile) -> None:
        """Check the study against this site's own policy and records.

        What the server is told does not describe the records; the site's log does.
        """
        check_offer(self.file, study, self.member())
        federation, about = self.federation(), study.study
        shape, classes = list(federation.feature_shape), federation.classes
        fits = shape == about.feature_shape and classes <= about.classes
        if not fits:
            self.log(f"records have shape {shape} and {classes} classes")
        wanted = f"shape {about.feature_shape} and {about.classes} classes"
        problem = f"its records do not have the study's {wanted}"
        check(fits, f"site '{self.id}'", problem, "prepare the same columns everywhere")
        model = study.build_model()
        check_model(model, federation.feature_shape, about.classes, federation.inputs)
