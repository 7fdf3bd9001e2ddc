"""A real federation as data: the study that a server offers, and a site's own file, which decides
what it accepts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, StrictInt
from torch import nn

from dpfl.core.errors import ConfigurationError, PrivacyRefusal, did_you_mean
from dpfl.core.random import PublicSeed
from dpfl.core.types import Budget, ClientSettings, Observer, Unit
from dpfl.methods import METHODS, find, make_strategy
from dpfl.models import make_model
from dpfl.plugs.selection import Selection
from dpfl.privacy.accountant import SMALLEST_DELTA
from dpfl.runs.experiment import ClientSection, MethodSection, ModelSection, selection_of
from dpfl.runs.toml_file import Section, TomlFile
from dpfl.strategy import Strategy

STUDY_FILE, SITE_FILE = "study.toml", "site.toml"
LINK_PROCESS = "superlink.pid"  # where the server notes its SuperLink
Name = Annotated[str, Field(pattern=r"^[^./\\\s\x00-\x1f][^/\\\x00-\x1f]{0,99}$")]
"""Of a site: it is also a file's name."""
_PATIENCE = ("round_timeout", "enrol_timeout", "least_sites")


class StudySection(Section):
    """What the study is called, who may take part, and what every site's records look like."""

    name: str = Field(min_length=1)
    sites: list[Name] = Field(min_length=1)
    feature_shape: list[PositiveInt] = Field(min_length=1)
    classes: int = Field(ge=2)


class RoundsSection(Section):
    """How long, with whom, and how long the server waits. Noise is the operating system's but in a
    rehearsal.
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
    network: NetworkSection = NetworkSection()

    def agrees(self, where: str) -> None:
        """Every site is named once, and there are enough of them."""
        if len(set(self.study.sites)) < len(self.study.sites):
            raise ConfigurationError(where, "names a site twice", "name each site once")
        if self.run.least_sites > len(self.study.sites):
            raise ConfigurationError(
                f"{where}, [run] least_sites",
                f"{self.run.least_sites} sites are asked for, and [study] sites names {len(self.study.sites)}",
                "name more sites, or ask for fewer",
            )

    def offer(self) -> dict[str, Any]:
        """What sites are told: all but the network."""
        return self.model_dump(exclude_none=True, exclude={"network"})

    def digest(self) -> str:
        """Name what was agreed on; how long the server waits, and for how many, may change on the
        way.
        """
        offer = self.offer()
        offer["run"] = {
            name: value for name, value in offer["run"].items() if name not in _PATIENCE
        }
        return hashlib.sha256(json.dumps(offer, sort_keys=True).encode()).hexdigest()

    def selection(self) -> Selection:
        """Who is drawn in a round."""
        sampling = self.run.sampling or find(self.method.name).sampling
        return selection_of(
            self.run.cohort, sampling, len(self.study.sites), self.run.least_willing
        )

    def strategy(self) -> Strategy:
        """The method; what can exist in a simulation only is refused."""
        strategy = make_strategy(
            self.method.name, {**self.method.settings(), "selection": self.selection()}
        )
        if strategy.channel.simulated:
            raise PrivacyRefusal(
                f"method '{self.method.name}'",
                f"its channel ({type(strategy.channel).__name__}) exists in a simulation only: between real sites every "
                "message arrives on its own, and the guarantee that rests on their sum would be gone",
                "use another method, or simulate it",
            )
        if strategy.local.hypothetical:
            raise PrivacyRefusal(
                f"method '{self.method.name}'",
                "grants more than sites grant",
                "use it in a simulation only",
            )
        return strategy

    def build_model(self) -> nn.Module:
        """The same first model everywhere."""
        seed = PublicSeed(self.run.seed).child("model")
        shape = tuple(self.study.feature_shape)
        return make_model(self.model.name, shape, self.study.classes, seed, self.model.hidden)


class SiteSection(Section):
    """Who this is."""

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
    """This site's budget over all studies, and against whom it holds. No defaults for what decides
    privacy.

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

    def agrees(self, where: str) -> None:
        """There is a budget, it is used against somebody whom the policy does not trust, and there
        are records.
        """
        if self.own_budget() is None and not self.policy.allow_unprotected:
            raise ConfigurationError(
                f"{where}, [budget]",
                "is missing",
                "grant an epsilon and a delta: neither has a default",
            )
        if self.budget is not None and (self.budget.per_study or 0.0) > self.budget.epsilon:
            raise ConfigurationError(
                f"{where}, [budget] per_study",
                f"{self.budget.per_study:g} is more than was granted",
                "give a part of epsilon",
            )
        if self.budget is not None and 0 < self.budget.delta < SMALLEST_DELTA:
            raise ConfigurationError(
                f"{where}, [budget] delta",
                f"{self.budget.delta:g} is below {SMALLEST_DELTA:g}, where the accountant's own rounding would matter",
                "grant a larger one",
            )
        unknown = [name for name in self.policy.methods or () if name not in METHODS]
        if unknown:
            raise ConfigurationError(
                f"{where}, [policy] methods",
                f"there is no method '{unknown[0]}'",
                did_you_mean(unknown[0], METHODS),
            )
        host, _, port = self.server.address.rpartition(":")
        if not host or "/" in host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise ConfigurationError(
                f"{where}, [server] address",
                f"'{self.server.address}' is no name and port",
                "give it as in study.example.org:9092",
            )
        if (self.data.file is None) == (self.data.dataset is None):
            raise ConfigurationError(
                f"{where}, [data]", "needs either a file or a dataset", "name one of the two"
            )
        if self.data.file is not None and self.data.classes is None:
            raise ConfigurationError(
                f"{where}, [data] classes",
                "is missing",
                "declare how many classes there are: servers are told",
            )
        if (
            self.budget is not None
            and self.budget.observer == "world"
            and not self.policy.trust_server
        ):
            raise ConfigurationError(
                f"{where}, [budget] observer",
                "a budget against the world alone trusts the server with everything it sees",
                "say trust_server = true in [policy], or grant against the server",
            )

    def own_budget(self) -> Budget | None:
        """What the ledger enforces; nothing only where the site allows methods that protect nobody."""
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
        """What noise is planned for in one study; the ledger stops at the whole budget."""
        whole = self.own_budget()
        if whole is None or self.budget is None or self.budget.per_study is None:
            return whole
        part = self.budget.per_study / self.budget.epsilon
        # An allotment has a delta of its own; studies that pay round by round share one.
        delta = whole.delta * part if self.budget.filter == "allotments" else whole.delta
        return replace(whole, epsilon=self.budget.per_study, delta=delta)

    def own_practice(self) -> ClientSettings:
        """The site's habits."""
        return ClientSettings(**self.client_settings.model_dump(exclude_none=True))
