"""The file of a real federation's server: the study that it offers to the sites."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, StrictInt
from torch import nn

from dpfl.core.checks import check
from dpfl.core.errors import FolderError, PrivacyRefusal
from dpfl.core.random import PublicSeed
from dpfl.methods import find, make_strategy
from dpfl.models import make_model
from dpfl.plugs.selection import Selection
from dpfl.privacy.flags import Flag, RaisedFlag
from dpfl.runs.experiment import MethodSection, ModelSection, selection_of
from dpfl.runs.sections import ServerSection as OptimizerSection
from dpfl.runs.site_file import Name
from dpfl.runs.toml_file import Section, TomlFile
from dpfl.strategy import Strategy

STUDY_FILE = "study.toml"
LINK_PROCESS = "superlink.pid"  # holds the process id of the server's SuperLink
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
