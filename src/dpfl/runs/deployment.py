"""The file of a real federation's server: the study that it offers to the sites."""

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, StrictInt, model_validator
from torch import nn

from dpfl.core.checks import MOST_ROUNDS, check, check_name
from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.promise import SUMMED, colluding
from dpfl.core.random import PublicSeed
from dpfl.core.types import Plain, Unit, unit_called
from dpfl.methods import METHODS
from dpfl.plugs.accounted_metric import AccountedMetric
from dpfl.plugs.release_costs import Shares
from dpfl.privacy.flags import Flag, RaisedFlag
from dpfl.runs import sections
from dpfl.runs.accounted_section import AccountedSection
from dpfl.runs.for_method import with_own_model
from dpfl.runs.named_files import resolve_files
from dpfl.runs.study_section import StudySection as StudySection, site_task as site_task
from dpfl.runs.toml_file import Section, TomlFile, read_toml
from dpfl.secure_sum.trust import LEAST_HONEST
from dpfl.strategy import Strategy
from dpfl.tasks import MetricWords, PerPerson, Task

STUDY_FILE = "study.toml"
LINK_PROCESS = "superlink.pid"  # holds the process id of the server's SuperLink


_SIMULATED = {
    Flag.HYPOTHETICAL: "plans with larger budgets than the sites have",
    Flag.CURATOR: "trusts one party with the records of all sites",
    Flag.ALONE: "shares nothing, so that there is nothing to coordinate",
}
"""What exists in a simulation only."""


class RoundsSection(sections.RoundsSection):
    """How many rounds, with how many sites, and how long the server waits for them.

    ``noise``: drawn by the operating system, except in a rehearsal.
    """

    rounds: StrictInt | None = Field(default=None, ge=1, le=MOST_ROUNDS)
    round_timeout: float = Field(default=600.0, gt=0)
    enrol_timeout: float = Field(default=600.0, gt=0)
    least_sites: int = Field(default=2, ge=1)
    noise: Literal["system", "seeded"] = "system"
    seed: int = Field(default=0, ge=0)


class NetworkSection(Section):
    """Where the server listens, and under which names sites reach it."""

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=9092, ge=1, le=65535)
    names: list[str] = Field(default=["localhost"])


class Offer(TomlFile):
    """A study as sites are told of it. No file is opened for it, and it names none.

    ``task`` says what is learned where it is not a classification with the study's classes. With
    ``secure_sum`` the server sees sums of uploads alone. ``accounted`` is a metric that is measured
    on the sites' test records, within their plans.
    The digest names what was agreed on. How long the server waits, and for how many, may change.
    """

    called: ClassVar[str] = "study"
    made_with: ClassVar[str] = "dpfl server init"
    incidental: ClassVar[Plain] = {"run": {"round_timeout", "enrol_timeout", "least_sites"}}
    study: StudySection
    model: sections.OfferedModel = sections.OfferedModel()
    task: sections.TaskSection | None = None
    method: sections.MethodSection
    run: RoundsSection
    server: sections.ServerSection | None = None
    secure_sum: sections.SecureSumSection | None = None
    accounted: AccountedSection | None = None

    @model_validator(mode="before")
    @classmethod
    def _follow_method(cls, values: Any) -> Any:
        """Fill in the model that a method brings along, and the secure sum that it is made for."""
        values = with_own_model(values)
        method = values.get("method") if isinstance(values, dict) else None
        name = str(method.get("name")) if isinstance(method, dict) else ""
        if name in METHODS and METHODS[name].secure:
            return {"secure_sum": {}, **values}
        return values

    def agrees(self, where: str) -> None:
        """Every site is named once, there are enough of them, and there is such a task."""
        planned = self.method.name in METHODS and METHODS[self.method.name].model is not None
        check(
            self.run.rounds is not None or planned,
            f"{where}, [run] rounds",
            "is missing",
            "give a value",
        )
        check_name(f"{where}, [study] name", self.study.name)
        self.learned(f"{where}, ")
        self.measurements()
        schema = self.study.described()
        stated = self.study.unit
        if stated is not None and schema is not None:
            check(
                stated == schema.unit,
                f"{where}, [study] unit",
                f"'{stated}' was given, and the schema makes it '{schema.unit}'",
                "leave it out",
            )
        unit_called(self.unit_word)
        sites = self.study.sites
        least = self.run.least_sites
        check(len(set(sites)) == len(sites), where, "names a site twice", "name each site once")
        where = f"{where}, [run] least_sites"
        check(
            least <= len(sites),
            where,
            f"{least} of {len(sites)} sites are needed",
            "name more sites, or lower least_sites",
        )

    @property
    def unit_word(self) -> str:
        """The word for what the data of all sites are about: "record", or that for a person."""
        schema = self.study.described()
        return self.study.unit or (Unit.RECORD if schema is None else schema.unit)

    @property
    def title(self) -> str:
        """The study in a ledger's list."""
        task = "" if self.task is None else f", {self.learned_text}"
        return f"{self.study.name}: {self.method.name}{task}{self._summed_text}"

    @property
    def seeded(self) -> bool:
        """Whether this is a rehearsal, whose noise can be repeated."""
        return self.run.noise == "seeded"

    @property
    def flags(self) -> tuple[RaisedFlag, ...]:
        """What every result of this study must carry."""
        return (RaisedFlag(Flag.SEEDED, "a rehearsal"),) if self.seeded else ()

    def offer(self) -> Plain:
        """Return what sites are told: everything but the network."""
        return self.model_dump(exclude_none=True, exclude={"network"})

    def strategy(self) -> Strategy:
        """Make the method's strategy; one that exists in a simulation only is refused."""
        sites = len(self.study.sites)
        strategy = self.method.strategy(self.run, self.server, self.secure_sum, sites)
        group = strategy.channel.group(strategy.selection.cohort_size(sites) or sites)
        problem = "every sum holds one honest site only, and sites ask for 2 or more"
        check(
            group is None or group.honest >= LEAST_HONEST,
            "[secure_sum]",
            problem,
            "name more sites",
            PrivacyRefusal,
        )
        where = f"method '{self.method.name}'"
        channel = type(strategy.channel).__name__
        problem = f"its channel ({channel}) exists in a simulation only: real sites send messages"
        problem += " one by one, and the guarantee rests on their sum"
        check(
            not strategy.channel.simulated,
            where,
            problem,
            "use another method, or simulate it",
            PrivacyRefusal,
        )
        remedy = "use it in a simulation"
        for flag in strategy.flags:
            check(flag not in _SIMULATED, where, _SIMULATED.get(flag, ""), remedy, PrivacyRefusal)
        stated = self.study.unit
        schema = self.study.described()
        problem = f"'{stated}' was given, and {self.method.name} protects whole sites"
        check(
            stated is None or strategy.unit.of_data,
            "[study] unit",
            problem,
            "leave it out, or use another method",
        )
        strategy.check_measured(sum(part for part, _ in self.measurements()))
        single = schema is None or schema.single
        return strategy.protecting(unit_called(self.unit_word), single=single)

    def trained(self) -> tuple[nn.Module, Strategy]:
        """Build the first model, and the strategy that trains it."""
        model = self.build_model()
        return model, self.strategy().for_model(model)

    def learned(self, where: str = "") -> Task:
        """Build the task, complete: nobody sees all sites' targets to fill what is left open."""
        return site_task(self.task, self.study.classes, f"{where}[study] classes")

    def accounted_metric(self) -> AccountedMetric | None:
        """Build the metric that is measured within the plan, None if the file names none."""
        return None if self.accounted is None else self.accounted.build()

    def measurements(self) -> Shares:
        """Return what is planned for each measurement of the accounted metric; none without one.

        A metric that the task does not have, or that is never measured, is refused.
        """
        metric = self.accounted_metric()
        rounds = self.run.rounds
        if metric is None:
            return ()
        if rounds is None:
            raise ConfigurationError(
                "[run] rounds",
                "measurements are planned before the method has planned its rounds",
                "give a number beside [accounted]",
            )
        schema = self.study.described()
        task = self.learned()
        single = schema is None or schema.single
        return metric.shares(task if single else PerPerson(task=task), rounds)

    @property
    def learned_text(self) -> str:
        """The task and its metric, in words."""
        task = self.learned()
        return f"{task} ({MetricWords(task.metric).words})"

    @property
    def method_text(self) -> str:
        """The method, the task, what is measured, and whom it protects where these are persons."""
        unit = self.strategy().unit
        own = self.accounted
        measured = "" if own is None else f", accounted {own.metric} every {own.every} rounds"
        per = "" if unit in (Unit.RECORD, Unit.CLIENT) else f", per {unit}"
        return f"{self.method.name}, {self.learned_text}{measured}{per}{self._summed_text}"

    @property
    def _summed_text(self) -> str:
        """The secure sum and its adversary, to follow other words; nothing where there is none."""
        if self.secure_sum is None:
            return ""
        if not self.strategy().shares_noise:
            return f", {SUMMED} where own noise counts alone"
        return f", {SUMMED} against the server{colluding(self.secure_sum.colluders, 'site')}"

    @property
    def least_sites(self) -> int:
        """With fewer sites the study does not begin or continue."""
        return max(self.run.least_sites, self.secure_sum.least_members if self.secure_sum else 0)

    @property
    def least_sites_by(self) -> str:
        """Which settings ask for so many sites."""
        return "least_sites" if self.least_sites == self.run.least_sites else "[secure_sum]"

    @property
    def rounds_text(self) -> str:
        """How many rounds there are, in words."""
        rounds = self.run.rounds
        return "as many rounds as it plans" if rounds is None else f"{rounds} rounds"

    def build_model(self) -> nn.Module:
        """Build the first model, which is the same everywhere."""
        shape = tuple(self.study.feature_shape)
        seed = PublicSeed(self.run.seed)
        return self.model.build(shape, self.learned().width, seed)


class StudyFile(Offer):
    """The server's file: what it offers to sites, and the network."""

    incidental: ClassVar[Plain] = {**Offer.incidental, "network": True}
    network: NetworkSection = NetworkSection()

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read and validate a server's own TOML file; a schema that it names is read in."""
        return cls.from_dict(resolve_files(read_toml(path), path.parent), str(path))
