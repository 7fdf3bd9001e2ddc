"""The file of a real federation's server: the study that it offers to the sites."""

from typing import ClassVar, Literal

from pydantic import Field, PositiveInt, StrictInt
from torch import nn

from dpfl.core.checks import check
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.random import PublicSeed
from dpfl.core.types import Plain
from dpfl.privacy.flags import Flag, RaisedFlag
from dpfl.runs import sections
from dpfl.runs.site_file import Name
from dpfl.runs.toml_file import Section, TomlFile
from dpfl.strategy import Strategy

STUDY_FILE = "study.toml"
LINK_PROCESS = "superlink.pid"  # holds the process id of the server's SuperLink


_SIMULATED = {
    Flag.HYPOTHETICAL: "plans with larger budgets than the sites have",
    Flag.CURATOR: "trusts one party with the records of all sites",
    Flag.ALONE: "shares nothing, so that there is nothing to coordinate",
}
"""What exists in a simulation only."""


class StudySection(Section):
    """What the study is called, who may take part, and what every site's records look like."""

    name: str = Field(min_length=1)
    sites: list[Name] = Field(min_length=1)
    feature_shape: list[PositiveInt] = Field(min_length=1)
    classes: int = Field(ge=2)


class RoundsSection(sections.RoundsSection):
    """How many rounds, with how many sites, and how long the server waits for them.

    ``noise``: drawn by the operating system, except in a rehearsal.
    """

    rounds: StrictInt = Field(ge=1)
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
    """The server's file: everything that sites are told, and the network.

    The digest names what was agreed on. How long the server waits, and for how many, may change.
    """

    called: ClassVar[str] = "study"
    made_with: ClassVar[str] = "dpfl server init"
    incidental: ClassVar[Plain] = {
        "network": True,
        "run": {"round_timeout", "enrol_timeout", "least_sites"},
    }
    study: StudySection
    model: sections.ModelSection = sections.ModelSection()
    method: sections.MethodSection
    run: RoundsSection
    server: sections.ServerSection | None = None
    network: NetworkSection = NetworkSection()

    def agrees(self, where: str) -> None:
        """Every site is named once, and there are enough of them."""
        sites, least = self.study.sites, self.run.least_sites
        check(len(set(sites)) == len(sites), where, "names a site twice", "name each site once")
        where, problem = f"{where}, [run] least_sites", f"{least} of {len(sites)} sites are needed"
        check(least <= len(sites), where, problem, "name more sites, or lower least_sites")

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

    def offer(self) -> Plain:
        """Return what sites are told: everything but the network."""
        return self.model_dump(exclude_none=True, exclude={"network"})

    def strategy(self) -> Strategy:
        """Make the method's strategy; one that exists in a simulation only is refused."""
        strategy = self.method.strategy(self.run, self.server, len(self.study.sites))
        where, channel = f"method '{self.method.name}'", type(strategy.channel).__name__
        problem = f"its channel ({channel}) exists in a simulation only: real sites send messages"
        problem += " one by one, and the guarantee rests on their sum"
        remedy = "use another method, or simulate it"
        check(not strategy.channel.simulated, where, problem, remedy, PrivacyRefusal)
        remedy = "use it in a simulation"
        for flag in strategy.flags:
            check(flag not in _SIMULATED, where, _SIMULATED.get(flag, ""), remedy, PrivacyRefusal)
        return strategy

    def build_model(self) -> nn.Module:
        """Build the first model, which is the same everywhere."""
        shape, seed = tuple(self.study.feature_shape), PublicSeed(self.run.seed)
        return self.model.build(shape, self.study.classes, seed)
