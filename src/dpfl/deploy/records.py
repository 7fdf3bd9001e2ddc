"""A site with its records: read once, and again only when its file or its settings change.

What a site's process keeps between messages: its records, and what was made of them.
"""

import secrets
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from torch import nn

from dpfl.core.checks import check
from dpfl.core.errors import (
    ConfigurationError,
    DataError,
    DpflError,
    FolderError,
    PrivacyRefusal,
)
from dpfl.core.files import for_owner_only, is_there, write_safely
from dpfl.core.promise import SUMMED
from dpfl.core.types import Plain, Unit
from dpfl.data.building import ClientTable, arrays_of
from dpfl.data.federation import Federation
from dpfl.data.records import Shard
from dpfl.data.schema import Schema
from dpfl.data.tables import read_columns, read_file
from dpfl.data.units import UnitKey, Units, record_units
from dpfl.deploy.policy import check_offer
from dpfl.deploy.site_folder import LEDGER, SiteFolder
from dpfl.engine import make_engine
from dpfl.engine.base import Engine
from dpfl.methods import METHODS, find
from dpfl.models import check_model
from dpfl.models.featured import with_features
from dpfl.privacy.flags import Flag, RaisedFlag
from dpfl.privacy.site_ledger import PlannedUnits, SiteLedger
from dpfl.rounds.members import Member, data_flags, honest_members
from dpfl.runs.deployment import Offer, site_task
from dpfl.runs.sections import TaskSection
from dpfl.runs.site_file import SCHEMA_FILE as SCHEMA_FILE, SITE_FILE, SiteFile
from dpfl.strategy import Strategy
from dpfl.tasks import Regression, Task, make_task


@dataclass
class Records:
    """The records of one site, kept between messages, and what they were read from.

    ``units`` are those of the file, and ``options`` how they become a federation. ``federation``
    holds those of the study that the last message was about, and ``planned`` names them.
    ``learned`` are the same records with targets as the task of the last study takes them,
    ``featured`` public features of them, as the last study's model takes them. ``checked`` is the
    study whose model was found to take them. ``engine`` keeps what does not change between rounds.
    """

    key: object = None
    units: Units | None = None
    options: Plain = field(default_factory=dict)
    study: object = None
    planned: PlannedUnits | None = None
    federation: Federation | None = None
    learned: Federation | None = None
    featured: tuple[object, Federation] | None = None
    checked: object = None
    engine: Engine = field(default_factory=lambda: make_engine("stacked"))


UNITS_KEY = "units.key"


class LoadedSite(SiteFolder):
    """A site that knows its records. ``records`` keeps them for the next message.

    Its units are those of the next study: withdrawn ones are left out. :meth:`enter` makes them
    those of a study that has begun.
    """

    def __init__(self, folder: Path, records: Records | None = None) -> None:
        super().__init__(folder)
        self.file.check_methods(METHODS, str(folder / SITE_FILE))
        self.schema = self._read_schema()
        self._records = records or Records()
        self._left: tuple[frozenset[bytes], frozenset[bytes]] | None = None

    @property
    def units_key(self) -> UnitKey:
        """The secret under which units are marked and set aside for testing, made once."""
        path = self.folder / UNITS_KEY
        if not path.exists():
            if (self.folder / LEDGER).exists():
                with closing(self.ledger(reading=True)) as ledger:
                    check(
                        not (ledger.withdrawals() or ledger.runs_with_units()),
                        str(path),
                        "is missing: who was withdrawn, and who is tested on, is not known",
                        "restore it from a backup",
                        FolderError,
                    )
            write_safely(path, secrets.token_hex(32).encode(), secret=True)
        try:
            key = UnitKey(bytes.fromhex(path.read_text().strip()))
            if len(key.value) != 32:
                raise ValueError(f"it has {len(key.value)} bytes")
            return key
        except (OSError, ValueError) as error:
            raise FolderError(str(path), f"cannot be used ({error})", "restore it") from error

    def prepare(self) -> None:
        """Make what a new site lacks: its key for units, too."""
        super().prepare()
        assert self.units_key.value

    def enter(self, ledger: SiteLedger, run: str | None) -> PlannedUnits | None:
        """Go on with the units of a run, or of the next study; return what the run was planned for.

        Units that were withdrawn since a run began stay in it as blanks.
        """
        with ledger.snapshot():
            planned = None if run is None else ledger.units(run)
            blanks = frozenset[bytes]() if planned is None else planned.blanks
            self._left = frozenset(ledger.withdrawals()), blanks
            same = not self._left[0] or ledger.marked_by() in (None, self.units_key.name)
        check(
            same,
            str(self.folder / UNITS_KEY),
            "is not the key under which units were withdrawn",
            "restore it from a backup",
            FolderError,
        )
        return planned

    def planned_units(self) -> PlannedUnits:
        """Name and count the units of the study, as they are now."""
        shard = self.federation().shards[self.id]
        cache = self._records
        if cache.planned is None:
            blanks = self.withdrawn()[1]
            digest = self._digest(self.units(), *self.withdrawn())
            cache.planned = PlannedUnits(digest, shard.examples, len(shard.test_labels), blanks)
        return cache.planned

    def units(self) -> Units:
        """Return the units of the file, withdrawn or not."""
        data = self.file.data
        cache = self._records
        key: tuple[object, ...] = (self.id, data.model_dump_json(), self.schema, self.units_key)
        if is_there(path := self.folder / data.file):
            stat = path.stat()  # the time of a change of the entry itself cannot be set
            key = (*key, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        if cache.units is None or cache.key != key:
            cache.units, cache.options = self._read_units()
            cache.key = key
            cache.federation = None
        return cache.units

    def still_planned(self, ledger: SiteLedger, run: str) -> bool:
        """Whether the units of a run are those that it was planned for."""
        planned = self.enter(ledger, run)
        return planned is not None and planned.digest == self.planned_units().digest

    def digests_without(self, ledger: SiteLedger, run: str, mark: bytes) -> tuple[str, str]:
        """Name the units that a run was planned for, and those with one more blank; the second is
        empty where the units are others now.
        """
        same = self.still_planned(ledger, run)
        units = self.units()
        planned = ledger.units(run)
        assert planned is not None
        withdrawn, blanks = self.withdrawn()
        after = self._digest(units, withdrawn | {mark}, blanks | {mark}) if same else ""
        return planned.digest, after

    def _digest(self, units: Units, withdrawn: frozenset[bytes], blanks: frozenset[bytes]) -> str:
        """Name the units of a study, and what makes features of them."""
        data = self.file.data.model_dump_json(exclude={"file", "schema"})
        about = f"{data} {self.schema and self.schema.to_dict()}"
        return units.in_study(withdrawn, blanks).digest(self.units_key, blanks, about)

    def withdrawn(self) -> tuple[frozenset[bytes], frozenset[bytes]]:
        """The marks of all units that were withdrawn, and of those that are blanks of the study."""
        if self._left is None and (self.folder / LEDGER).exists():
            with closing(self.ledger(reading=True)) as ledger:
                self.enter(ledger, None)
        return self._left or (frozenset(), frozenset())

    def _read_schema(self) -> Schema | None:
        """Read what the columns of the records hold; the budget must be about the same unit."""
        given = self.file.data.schema
        where = str(self.folder / SITE_FILE)
        if given is None:
            return None
        if isinstance(given, str):
            schema = Schema.read(self.folder / given)
        else:
            schema = Schema.from_dict(given, f"{where}, [data] schema")
        check(
            len(schema.target) == 1,
            f"{where}, [data] schema",
            f"has {len(schema.target)} targets, and sites learn one",
            "name one column",
        )
        for method in map(find, self.file.policy.methods or ()):
            if method.model is not None:  # it can be built without settings
                method().protecting(schema.unit, single=schema.single)
        budget = self.file.own_budget()
        unit = schema.unit
        check(
            budget is None or budget.unit in (unit, Unit.CLIENT),
            f"{where}, [budget] unit",
            f"is '{budget and budget.unit}', and the schema protects a {unit}",
            f'set unit = "{unit}", or "client"',
        )
        return schema

    @classmethod
    @for_owner_only()
    def create(
        cls,
        folder: Path,
        values: Plain,
        schema: Path | None = None,
        *,
        another_budget: bool = False,
    ) -> Self:
        """Make a new site.

        ``values`` are those of its file, ``site.toml``; ``schema`` is a file that is copied into
        the folder. Where they are wrong, or the records cannot be read, no site is made; nor where
        another site was made for the records, unless they get ``another_budget`` beside that one.
        """
        path = folder / SITE_FILE
        check(
            not path.exists(),
            str(folder),
            "already holds a site",
            "run it, or name another folder",
            FolderError,
        )
        made = [path, folder / UNITS_KEY]
        if schema is not None:
            made.append(folder / SCHEMA_FILE)
            values = {**values, "data": {**values["data"], "schema": SCHEMA_FILE}}
        file = SiteFile.from_dict(values, "options")
        write_safely(path, file.to_toml().encode())
        try:
            if schema is not None:
                write_safely(folder / SCHEMA_FILE, schema.read_bytes())
            site = cls(folder)
            site.member()
            site._mark_records(another_budget)
            site.prepare()
        except Exception:
            for one in made:
                one.unlink(missing_ok=True)
            raise
        return site

    @property
    def mark(self) -> Path:
        """The file beside the records that names every folder with a ledger for them."""
        records = (self.folder / self.file.data.file).resolve()
        return records.with_name(f"{records.name}.dpfl")

    def _mark_records(self, another_budget: bool) -> None:
        """Name this folder beside the records, before they have a ledger in it.

        Where the folder of the records is read-only, the site is made without a mark.
        """
        folders = self.mark.read_text() if self.mark.exists() else ""
        if folders and not another_budget:
            raise PrivacyRefusal(
                str(self.mark.with_suffix("")),
                f"have a budget in the ledger of {', '.join(folders.splitlines())} already",
                "run that site, or add a budget beside it with --another-budget",
            )
        with suppress(DpflError):
            write_safely(self.mark, f"{folders}{self.folder.absolute()}\n".encode(), secret=True)

    def federation(self, task: Task | None = None) -> Federation:
        """Return this site alone, as a federation of one.

        Its targets are as ``task`` takes them, or as the site's file declares them if None.
        """
        units = self.units()
        cache = self._records
        if cache.federation is None or cache.study != self.withdrawn():
            cache.study = self.withdrawn()
            arrays = {self.id: units.in_study(*self.withdrawn())}
            cache.federation = Federation.from_arrays(arrays, key=self.units_key, **cache.options)
            cache.learned = cache.featured = cache.planned = None
        if task is None:
            return cache.federation
        if cache.learned is None or cache.learned.task.single != task:
            cache.learned = for_task(cache.federation, task)
            cache.featured = None
        return cache.learned

    @property
    def engine(self) -> Engine:
        """What executes local work."""
        return self._records.engine

    def featured_member(self, study: Offer, features: nn.Module | None) -> Member:
        """Return the site as a member of a study, with ``features`` in place of its records.

        They are computed once for a study.
        """
        member = self.member(study.learned())
        kept = self._records
        if features is None:
            return member
        federation = self.federation(study.learned())
        key = study.model.model_dump_json()
        if kept.featured is None or kept.featured[0] != key:
            kept.featured = key, with_features(federation, features)
        made = kept.featured[1]
        return replace(member, shard=made.shards[self.id], inputs=made.inputs)

    def _read_units(self) -> tuple[Units, Plain]:
        """Read the units of the file, and the options of a federation of them."""
        data = self.file.data
        key = self.units_key
        path = self.folder / data.file
        if self.schema is None:
            features, labels = read_file(path, data.label)
            task = Regression() if data.targets == "numbers" else None
            return record_units(features, labels, key), {"task": task, "classes": data.classes}
        columns, rows = read_columns(path)
        tables = {self.id: ClientTable(columns, str(path), rows)}
        arrays, options = arrays_of(tables, self.schema, None, {}, key)
        return arrays[self.id], options

    def member(self, task: Task | None = None) -> Member:
        """Return the site as a member that claims what it enforces, and learns ``task``."""
        budget = self.file.study_budget()
        settings = {self.id: self.file.client_settings.settings()}
        budgets = {} if budget is None else {self.id: budget}
        own = replace(self.federation(task), budgets=budgets, client_settings=settings)
        return honest_members(own)[self.id]

    @property
    def unit(self) -> Unit:
        """What the site holds many of: records, or persons by its schema's word."""
        return Unit.RECORD if self.schema is None else self.schema.unit

    @property
    def targets_text(self) -> str:
        """What the site's targets are, in words."""
        task = self.federation().task.single
        return "numbers as targets" if task.targets == "numbers" else str(task)

    def summed(self) -> list[str]:
        """Titles of studies over a secure sum: they say how many sites may collude."""
        with closing(self.checked_ledger()) as ledger:
            return [title for title in ledger.titles().values() if SUMMED in title]

    def flags(self) -> list[RaisedFlag]:
        """Return what its ethics board must know of its budget beside the numbers."""
        budget = self.file.own_budget()
        records = 0
        with suppress(DataError):  # a ledger can be read when records cannot
            records = self.member().shard.examples
        unit = Unit.CLIENT if budget is None or budget.unit is None else budget.unit
        if budget is None or not unit.of_data or budget.delta * records < 1:
            return []
        detail = f"delta {budget.delta:g} is not below 1 / {records} {unit}s: a method may disclose"
        return [RaisedFlag(Flag.WEAK_DELTA, f"{detail} some {unit}s in full")]

    def check_study(self, study: Offer) -> None:
        """Check the study against this site's own policy and records.

        What the server is told does not describe the records; the site's log does.
        """
        strategy = check_offer(self.file, study, self.member())
        self._check_schema(study, strategy)
        declared = self.federation()
        task = study.learned()
        shape = study.study.feature_shape
        fitting = fits(declared, study)
        if not fitting:
            self.log(f"records have shape {list(declared.record_shape)} and {declared.task}")
        check(
            fitting,
            f"site '{self.id}'",
            f"its records do not have the study's shape {shape} and targets ({task})",
            "prepare the same columns everywhere",
        )
        own = self.federation(task)
        kept = self._records
        model = study.digest()
        if kept.checked != (kept.key, model):
            shapes = own.feature_shape, own.task, own.inputs, own.target_shape
            check_model(study.build_model(), *shapes)
            kept.checked = kept.key, model
            for raised in data_flags({self.id: self.member()}, strategy.local):
                self.log(str(raised))  # here alone: the server is not told

    def _check_schema(self, study: Offer, strategy: Strategy) -> None:
        """Refuse a study that states another schema, or whose method takes single records only."""
        where = f"site '{self.id}'"
        stated = study.study.described()
        own = self.schema
        if stated is not None:
            remedy = "use the study's schema: dpfl site init --schema"
            if own is None:
                raise ConfigurationError(where, "has no schema, and the study states one", remedy)
            if (other := stated.difference(own)) is not None:  # the server is not told its columns
                self.log(f"its schema is not the study's ({other})")
                raise ConfigurationError(where, "its schema is not the study's", remedy)
        if own is not None:
            strategy.protecting(own.unit, single=own.single)


def fits(declared: Federation, study: Offer) -> bool:
    """Whether a site's records, with targets as its file declares them, are those of a study.

    No value of a record decides it: a server is told.
    """
    same_shape = list(declared.record_shape) == study.study.feature_shape
    return same_shape and study.learned().takes(declared.task.single)


def for_task(declared: Federation, task: Task) -> Federation:
    """Convert the targets of a federation to those of ``task``; who tests on what stays."""
    shards = {}
    task = declared.task.same_units(task)
    for client, shard in declared.shards.items():
        own, test = (
            task.check_targets(f"client '{client}'", targets.numpy())
            for targets in (shard.labels, shard.test_labels)
        )
        live = {"live": shard.live, "test_live": shard.test_live}
        shards[client] = Shard.of(shard.features, own, shard.test_features, test, **live)
    return replace(declared, shards=shards, task=task)


def declare_unit(schema: Path | None) -> str:
    """Return the unit that a budget is about, by the schema in a file: persons, or records."""
    return str(Unit.RECORD if schema is None else Schema.read(schema).unit)


def declare_targets(task: str | None, classes: int | None, *, schema: bool = False) -> Plain:
    """Return the keys of [data] in a site's file that fit studies with a task.

    ``task`` left out is classification; ``classes`` left out is 2, or none where the task learns
    numbers. A ``schema`` declares both.
    """
    if schema:
        check(task is None, "--task", f"'{task}' was given, and a schema", "leave one of them out")
        return {} if classes is None else {"classes": classes}
    task = task or "classification"
    kind = make_task(task).targets
    count = 2 if classes is None and kind == "classes" else classes
    site_task(TaskSection(name=task), count, "--classes")
    return {"targets": kind, "classes": count}
