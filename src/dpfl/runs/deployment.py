"""The files of a real federation: the study that a server offers, and a site's own file.

The site's file decides what the site accepts, whatever a server says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, StrictInt
from torch import nn

from dpfl.core.checks import check
from dpfl.core.errors import FolderError, PrivacyRefusal, did_you_mean
from dpfl.core.random import PublicSeed
from dpfl.core.types import Budget, ClientSettings, Observer, Unit
from dpfl.methods import METHODS, find, make_strategy
from dpfl.models import make_model
from dpfl.plugs.selection import Selection
from dpfl.privacy.accountant import SMALLEST_DELTA
from dpfl.privacy.flags import Flag, RaisedFlag
from dpfl.runs.experiment import ClientSection, MethodSection, ModelSection, selection_of
from dpfl.runs.sections import ServerSection as OptimizerSection
from dpfl.runs.toml_file import Section, TomlFile
from dpfl.strategy import Strategy

STUDY_FILE, SITE_FILE = "study.toml", "site.toml"
LINK_PROCESS = "superlink.pid"  # holds the process id of the server's SuperLink
Name = Annotated[str, Field(pattern=r"^[^./\\\s\x00-\x1f][^/\\\x00-\x1f]{0,99}$")]
"""A site's name; it is also a file's name."""
_PATIENCE = ("round_timeout", "enrol_timeout", "least_sites")


class StudySection(Section):
    """What the study is called, who may take part, and what every site's records look like."""

    name: str = Field(min_length=1)
    sites: list[Name] = Field(min_length=1)
    feature_shape: list[PositiveInt] = Field(min_length=1)
    classes: int = Field(ge=2)


class RoundsSection(Section):
    """How many rounds, with how many sites, and how long the server waits for them.

    ``noise``: drawn by the operating system, except in a rehearsal.
    """

    rounds: StrictInt = Field(ge=1)
    cohort: int | float | None = None
    least_willing: int | None = Field(default=None, ge=1)
    sampling: Literal["uniform", "poisson"] | None = None
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


class StudyFile(TomlFile):
    """The server's file: everything that sites are told, and the network."""

    called: ClassVar[str] = "study"

    study: StudySection
    model: ModelSection = ModelSection()
    method: MethodSection
    run: RoundsSection
    server: OptimizerSection | None = None
    network: NetworkSection = NetworkSection()

    @classmethod
    def in_folder(cls, folder: Path) -> StudyFile:
        """Read the study of a server's folder."""
        path, remedy = folder / STUDY_FILE, "make one with dpfl server init"
        check(path.exists(), str(folder), "holds no study", remedy, FolderError)
        return cls.from_file(path)

    def agrees(self, where: str) -> None:
        """Every site is named once, and there are enough of them."""
        sites, least = self.study.sites, self.run.least_sites
        check(len(set(sites)) == len(sites), where, "names a site twice", "name each site once")
        check(
            least <= len(sites),
            f"{where}, [run] least_sites",
            f"{least} sites are needed, and [study] sites names {len(sites)}",
            "name more sites, or lower least_sites",
        )

    @property
    def title(self) -> str:
        """The study in a ledger's list."""
        return f"{self.study.name}: {self.method.name}"

    @property
    def seeded(self) -> bool:
        """Whether this is a rehearsal, whose noise can be repeated."""
        return self.run.noise == "seeded"

    @property
    def flags(self) -> tuple[RaisedFlag, ...]:
        """What every result of this study must carry."""
        return (RaisedFlag(Flag.SEEDED, "a rehearsal"),) if self.seeded else ()

    def offer(self) -> dict[str, Any]:
        """Return what sites are told: everything but the network."""
        return self.model_dump(exclude_none=True, exclude={"network"})

    def digest(self) -> str:
        """Name what was agreed on. How long the server waits, and for how many, may change."""
        offer = self.offer()
        offer["run"] = {k: v for k, v in offer["run"].items() if k not in _PATIENCE}
        return hashlib.sha256(json.dumps(offer, sort_keys=True).encode()).hexdigest()

    def selection(self) -> Selection:
        """Return how the sites of a round are drawn."""
        run, sites = self.run, len(self.study.sites)
        sampling = run.sampling or find(self.method.name).sampling
        return selection_of(run.cohort, sampling, sites, run.least_willing)

    def strategy(self) -> Strategy:
        """Make the method's strategy; one that exists in a simulation only is refused."""
        settings = {**self.method.settings(), "selection": self.selection()}
        strategy, where = make_strategy(self.method.name, settings), f"method '{self.method.name}'"
        check(
            not strategy.channel.simulated,
            where,
            f"its channel ({type(strategy.channel).__name__}) exists in a simulation only: real "
            "sites send messages one by one, and the guarantee rests on their sum",
            "use another method, or simulate it",
            PrivacyRefusal,
        )
        problem = "plans with larger budgets than the sites have"
        remedy = "use it in a simulation only"
        check(not strategy.local.hypothetical, where, problem, remedy, PrivacyRefusal)
        if self.server is None:
            return strategy
        return replace(strategy, step=self.server.step(strategy.step, self.run.rounds))

    def build_model(self) -> nn.Module:
        """Build the first model, which is the same everywhere."""
        seed = PublicSeed(self.run.seed).child("model")
        shape = tuple(self.study.feature_shape)
        return make_model(self.model.name, shape, self.study.classes, seed, self.model.hidden)


class SiteSection(Section):
    """The site's name in studies."""

    id: Name


class SiteDataSection(Section):
    """The site's own records: a CSV or Parquet file, or a client of an embedded data set for a
    rehearsal.

    ``classes``: how many classes there are, as everyone may know. It is declared, not counted:
    whether a study fits is answered to any server, and must not depend on the records.
    """

    file: str | None = None
    label: str | None = None
    classes: int | None = Field(default=None, ge=2)
    dataset: str | None = None
    client: str | None = None
    partition: dict[str, Any] = Field(default_factory=dict)
    seed: int = 0


class BudgetSection(Section):
    """This site's budget over all studies. What decides privacy has no default.

    ``per_study``: the part of epsilon that noise is planned for in one study; without it, a study
    may use all of it. ``filter``: how studies that are chosen one after the other add up. ``renyi``
    pays round by round, and what a study does not use is left for the next; ``allotments`` gives
    every study an epsilon and a delta of its own, taken when it begins; ``gaussian`` is exact, for
    studies without sampling only. It is fixed when the site's ledger is made.
    """

    epsilon: float
    delta: float
    per_study: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    unit: Literal["record", "client"] = "record"
    observer: Literal["server", "world"] = "server"
    filter: Literal["renyi", "allotments", "gaussian"] = "renyi"


class PolicySection(Section):
    """What this site accepts, whatever a server says."""

    methods: list[str] | None = None
    trust_server: bool = False
    least_noise_multiplier: float = Field(default=0.3, ge=0)
    largest_clip: float | None = Field(default=None, gt=0)
    largest_sampling_rate: float = Field(default=1.0, gt=0, le=1)
    most_rounds: int | None = Field(default=None, ge=1)
    least_sites: int = Field(default=2, ge=1)
    allow_seeded: bool = False
    allow_unprotected: bool = False


class ServerSection(Section):
    """How to reach the server, and with which key."""

    address: str = "127.0.0.1:9092"
    certificate: str = "ca.crt"
    key: str = "site.key"


class SiteFile(TomlFile):
    """A site's own file. It never leaves the site."""

    called: ClassVar[str] = "site"
    renamed: ClassVar[Mapping[str, str]] = {"practice": "client_settings"}

    site: SiteSection
    data: SiteDataSection
    budget: BudgetSection | None = None
    policy: PolicySection = PolicySection()
    client_settings: ClientSection = ClientSection()
    server: ServerSection = ServerSection()

    @classmethod
    def in_folder(cls, folder: Path) -> SiteFile:
        """Read the file of a site's folder."""
        path, remedy = folder / SITE_FILE, "make one with dpfl site init"
        check(path.exists(), str(folder), "holds no site", remedy, FolderError)
        return cls.from_file(path)

    def agrees(self, where: str) -> None:
        """Refuse a file without a budget, records or an address, or whose policy contradicts it."""
        has_budget = self.own_budget() is not None or self.policy.allow_unprotected
        remedy = "give an epsilon and a delta: neither has a default"
        check(has_budget, f"{where}, [budget]", "is missing", remedy)
        if self.budget is not None:
            self._check_budget(self.budget, f"{where}, [budget]")
        for name in self.policy.methods or ():
            at, problem = f"{where}, [policy] methods", f"there is no method '{name}'"
            check(name in METHODS, at, problem, did_you_mean(name, METHODS))
        host, _, port = self.server.address.rpartition(":")
        good = host and "/" not in host and port.isdecimal() and 1 <= int(port) <= 65535
        at, problem = (
            f"{where}, [server] address",
            f"'{self.server.address}' is not a name and port",
        )
        check(bool(good), at, problem, "give it as in study.example.org:9092")
        one, at = (self.data.file is None) != (self.data.dataset is None), f"{where}, [data]"
        check(one, at, "needs either a file or a dataset", "name one of the two")
        declared = self.data.file is None or self.data.classes is not None
        remedy = "declare how many classes there are: servers are told"
        check(declared, f"{at} classes", "is missing", remedy)

    def _check_budget(self, budget: BudgetSection, at: str) -> None:
        part, delta = budget.per_study or 0.0, budget.delta
        problem = f"{part:g} is more than the whole budget"
        check(part <= budget.epsilon, f"{at} per_study", problem, "give a part of epsilon")
        low = f"{delta:g} is below {SMALLEST_DELTA:g}, where the accountant's rounding matters"
        check(not 0 < delta < SMALLEST_DELTA, f"{at} delta", low, "give a larger one")
        check(
            budget.observer != "world" or self.policy.trust_server,
            f"{at} observer",
            "a budget against the world alone trusts the server with everything it sees",
            'set trust_server = true in [policy], or observer = "server"',
        )

    def own_budget(self) -> Budget | None:
        """Return what the ledger enforces; None where the site allows unprotected methods."""
        own = self.budget
        if own is None:
            return None
        return Budget(
            epsilon=own.epsilon,
            delta=own.delta,
            unit=Unit(own.unit),
            observer=Observer(own.observer),
            accountant="renyi" if own.filter == "renyi" else None,
        )

    def study_budget(self) -> Budget | None:
        """Return what noise is planned for in one study; the ledger enforces the whole budget."""
        whole = self.own_budget()
        if whole is None or self.budget is None or self.budget.per_study is None:
            return whole
        part = self.budget.per_study / self.budget.epsilon
        # An allotment has a delta of its own; studies that pay round by round share one.
        delta = whole.delta * part if self.budget.filter == "allotments" else whole.delta
        return replace(whole, epsilon=self.budget.per_study, delta=delta)

    def own_settings(self) -> ClientSettings:
        """Return the site's own settings of local work."""
        return ClientSettings(**self.client_settings.model_dump(exclude_none=True))
