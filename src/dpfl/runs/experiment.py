"""An experiment as data: TOML in, complete TOML out. Unknown keys are refused, with the nearest
known one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from dpfl.core.errors import ConfigurationError, did_you_mean
from dpfl.core.random import PublicSeed
from dpfl.core.types import ClientSettings
from dpfl.core.version import __version__
from dpfl.data.federation import Federation
from dpfl.data.partition import Partition
from dpfl.datasets.named import load_dataset
from dpfl.engine import ENGINES
from dpfl.engine.process import check_device
from dpfl.methods import find, make_strategy
from dpfl.models import make_model
from dpfl.plugs.selection import Everyone, FixedCohort, PoissonCohort, Selection
from dpfl.privacy.budgets import is_budget_file, make_budgets, read_budget_file
from dpfl.runs.toml_file import Section, TomlFile
from dpfl.strategy import Strategy


class DataSection(Section):
    """Which records: a named data set, or a ``folder`` with one CSV or Parquet file per client."""

    name: str | None = None
    folder: str | None = None
    label: str | None = None


class PartitionSection(Section):
    """Who holds which: a law and its knob. Data from a folder is already shared out."""

    kind: str | None = None
    clients: int | None = None
    shards_per_client: int = 2
    classes_per_client: int = 2
    alpha: float = 1.0
    records: int | None = None
    smallest: int = 2
    validation: bool = False


class BudgetsSection(Section):
    """What each client grants: a distribution's name, a number, a list, a file or a table; and
    delta. No defaults.

    ``scale`` multiplies every epsilon, to see what more or less would buy.
    """

    epsilon: str | float | list[float] | dict[str, float] | None = None
    delta: float | list[float] | dict[str, float] | None = None
    scale: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class ModelSection(Section):
    """A model by name."""

    name: str = "logistic"
    hidden: int = 64


class MethodSection(BaseModel):
    """A method by name, with its own settings beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    def settings(self) -> dict[str, Any]:
        """Everything but the name."""
        return dict(self.__pydantic_extra__ or {})


class RunSection(Section):
    """How long, with whom, and where randomness comes from."""

    rounds: int = Field(ge=1)
    cohort: int | float | None = None
    least_willing: int | None = Field(default=None, ge=1)
    sampling: Literal["uniform", "poisson"] | None = None
    seed: int = 0
    noise: Literal["seeded", "system"] = "seeded"
    engine: str = "stacked"
    device: str = "cpu"
    workers: int = Field(default=1, ge=1)
    evaluate_every: int = Field(default=1, ge=1)
    misreports: dict[str, float] = Field(default_factory=dict)
    dropout: float = Field(default=0.0, ge=0, le=1)


class ClientSection(Section):
    """A client's own practice."""

    batch_size: int | None = None
    local_steps: int | None = None
    local_epochs: int | None = None
    lr: float | None = None


class ClientSettingsSection(Section):
    """Habits that each client draws from a list, by the public seed; its own section wins."""

    batch_size: list[int] = Field(default_factory=list)
    local_steps: list[int] = Field(default_factory=list)
    local_epochs: list[int] = Field(default_factory=list)
    lr: list[float] = Field(default_factory=list)


class Experiment(TomlFile):
    """A whole experiment. What decides privacy (epsilon, delta, clip) has no default."""

    called: ClassVar[str] = "experiment"
    renamed: ClassVar[Mapping[str, str]] = {
        "practices": "client_settings",
        "run.liars": "run.misreports",
    }
    data: DataSection
    partition: PartitionSection = PartitionSection()
    budgets: BudgetsSection = BudgetsSection()
    model: ModelSection = ModelSection()
    method: MethodSection
    run: RunSection
    client_settings: ClientSettingsSection = ClientSettingsSection()
    clients: dict[str, ClientSection] = Field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str | None = None) -> Self:
        """Validate plain values; the first problem becomes one clear sentence. A budgets file is
        read in: it may change.
        """
        return super().from_dict(_with_budgets_read(values), where)

    def digest(self) -> str:
        """Name the result: equal digests give equal bits, whatever the number of workers."""
        values = self.to_dict()
        values["run"].pop("workers", None)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def content(self) -> str:
        """Name the result by everything it rests on: also the bytes of a folder's files, and this
        version of dpfl.
        """
        digest = hashlib.sha256(f"{__version__}:{self.digest()}".encode())
        if self.data.folder is not None:
            for path in sorted(Path(self.data.folder).glob("*")):
                if path.is_file():
                    digest.update(
                        path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest()
                    )
        return digest.hexdigest()

    # -- building what the file describes ----------------------------------------------------------

    def selection(self, population: int) -> Selection:
        """Return who takes part: everyone, a number, or a fraction of the population."""
        return selection_of(
            self.run.cohort,
            self.run.sampling or find(self.method.name).sampling,
            population,
            self.run.least_willing,
        )

    def strategy(self, population: int) -> Strategy:
        """Build the method with its settings and this experiment's selection."""
        settings = {**self.method.settings(), "selection": self.selection(population)}
        return make_strategy(self.method.name, settings)

    def public_seed(self) -> PublicSeed:
        """Return the root of all public randomness."""
        return PublicSeed(self.run.seed)

    def federation(self, data_folder: Path | None = None) -> Federation:
        """Load, share out, and attach budgets and practices."""
        federation = self._clients(data_folder)
        if self.partition.validation:
            federation = federation.with_validation(self.public_seed().child("data"))
        if self.budgets.epsilon is not None:
            if self.budgets.delta is None:
                raise ConfigurationError(
                    "[budgets] delta",
                    "is missing and has no default",
                    "give a delta well below 1 / records of the smallest client",
                )
            seed = self.public_seed().child("budgets")
            budgets = make_budgets(self.budgets.epsilon, self.budgets.delta, federation.ids, seed)
            if self.budgets.scale is not None:
                budgets = {
                    c: replace(b, epsilon=b.epsilon * self.budgets.scale)
                    for c, b in budgets.items()
                }
            federation = federation.with_budgets(budgets)
        unknown = sorted(set(self.clients) - set(federation.ids))
        if unknown:
            raise ConfigurationError(
                f"[clients.{unknown[0]}]",
                "is not in the federation",
                did_you_mean(unknown[0], federation.ids),
            )
        return replace(federation, client_settings=self._client_settings(federation.ids))

    def _client_settings(self, ids: tuple[str, ...]) -> dict[str, ClientSettings]:
        """What each client does in its own way: said of it, or drawn from a list."""
        lists = {
            name: values for name, values in self.client_settings.model_dump().items() if values
        }
        named = {
            client: section.model_dump(exclude_none=True)
            for client, section in self.clients.items()
        }
        if not lists:
            return {client: ClientSettings(**own) for client, own in named.items()}
        client_settings = {}
        for client in ids:
            seed = self.public_seed().child("practices", client)
            drawn = {
                name: values[int(seed.child(name).numpy().integers(len(values)))]
                for name, values in lists.items()
            }
            own = named.get(client, {})
            if {"local_steps", "local_epochs"} & set(own):
                drawn = {
                    name: value
                    for name, value in drawn.items()
                    if name not in ("local_steps", "local_epochs")
                }
            client_settings[client] = ClientSettings(**{**drawn, **own})
        return client_settings

    def _clients(self, data_folder: Path | None) -> Federation:
        seed = self.public_seed().child("data")
        if (self.data.name is None) == (self.data.folder is None):
            raise ConfigurationError(
                "[data]", "needs either a name or a folder", "name one data set"
            )
        if self.data.folder is not None:
            return Federation.from_files(self.data.folder, label=self.data.label, seed=seed.value)
        assert self.data.name is not None
        dataset = load_dataset(self.data.name, data_folder)
        if dataset.silos and self.partition.kind is None and self.partition.clients is not None:
            raise ConfigurationError(
                "[partition] clients",
                f"'{self.data.name}' comes in {len(dataset.silos)} natural silos",
                "leave the number out, say --partition natural to draw some of them, or name another partition",
            )
        kind = self.partition.kind or ("natural" if dataset.silos else "iid")
        law = Partition(
            **{**self.partition.model_dump(exclude={"clients", "kind", "validation"}), "kind": kind}
        )
        return Federation.from_dataset(dataset, law, self.partition.clients, seed)

    def build_model(self, federation: Federation) -> nn.Module:
        """Build the model with its reproducible start."""
        return make_model(
            self.model.name,
            federation.feature_shape,
            federation.classes,
            self.public_seed().child("model"),
            self.model.hidden,
            federation.inputs,
        )

    def check(self) -> None:
        """Refuse unknown names, and settings that make no method, before anything is loaded."""
        make_strategy(self.method.name, self.method.settings())
        check_device(self.run.device)
        if self.run.engine not in ENGINES:
            raise ConfigurationError(
                "[run] engine",
                f"there is no engine '{self.run.engine}'",
                did_you_mean(self.run.engine, ENGINES),
            )


def selection_of(
    cohort: int | float | None, sampling: str, population: int, least_willing: int | None = None
) -> Selection:
    """Everyone, a number of them, or a fraction of the population."""
    if least_willing is not None and (cohort is None or sampling == "poisson"):
        raise ConfigurationError(
            "[run] least_willing",
            f"{least_willing} is a number for cohorts of a fixed size, and this study draws none",
            "leave it out, or give a cohort with sampling = 'uniform'",
        )
    if cohort is None:
        return Everyone()
    if not cohort > 0 or (isinstance(cohort, float) and cohort > 1) or cohort > population:
        raise ConfigurationError(
            "[run] cohort",
            f"{cohort} of {population} clients",
            "give a whole number of clients, or a fraction above 0 and at most 1",
        )
    if sampling == "poisson":
        return PoissonCohort(
            sampling_rate=cohort if isinstance(cohort, float) else cohort / population
        )
    size = max(1, round(cohort * population)) if isinstance(cohort, float) else cohort
    return FixedCohort(size=size, least=least_willing)


def for_method(values: dict[str, Any], method: str) -> dict[str, Any]:
    """Return the same experiment for another method; settings that only the other methods have are
    left out.
    """
    settings = values.get("method", {})
    known = find(method).settings
    kept = {name: value for name, value in settings.items() if name in known}
    return {**values, "method": {**kept, "name": method}}


def _with_budgets_read(values: dict[str, Any]) -> dict[str, Any]:
    budgets: Any = values.get("budgets")
    source = budgets.get("epsilon") if isinstance(budgets, dict) else None
    if not (isinstance(source, str) and is_budget_file(source)):
        return values
    epsilons, deltas = read_budget_file(Path(source))
    common = budgets.get("delta")
    complete = isinstance(common, float) and set(deltas) == set(epsilons)
    clash = next((c for c, own in deltas.items() if complete and own != common), None)
    if clash is not None:
        raise ConfigurationError(
            f"budgets file {source}",
            f"gives '{clash}' delta {deltas[clash]:g}, and delta = {common:g} was given for all",
            "leave one of the two out; a delta for all fills only empty cells of the column",
        )
    delta = (
        {c: deltas.get(c, common) for c in epsilons}
        if deltas and isinstance(common, float | None)
        else common
    )
    if isinstance(delta, dict) and None in delta.values():
        client = next(c for c, value in delta.items() if value is None)
        raise ConfigurationError(
            f"budgets file {source}",
            f"has no delta for '{client}'",
            "give a delta column or --delta",
        )
    rest = {name: value for name, value in budgets.items() if name != "delta"}
    return {
        **values,
        "budgets": {**rest, "epsilon": epsilons, **({} if delta is None else {"delta": delta})},
    }
