"""An experiment as data: TOML in, complete TOML out. Unknown keys are refused, with the nearest
known one.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field
from torch import nn

from dpfl.core.checks import check
from dpfl.core.errors import did_you_mean
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
from dpfl.plugs.selection import Selection
from dpfl.privacy.budgets import is_budget_file, make_budgets, read_budget_file
from dpfl.runs.sections import (
    BudgetsSection,
    ClientSettingsSection,
    DataSection,
    PartitionSection,
    RunSection,
    ServerSection,
)
from dpfl.runs.sections import MethodSection as MethodSection
from dpfl.runs.sections import ModelSection as ModelSection
from dpfl.runs.sections import selection_of as selection_of
from dpfl.runs.site_file import ClientSection
from dpfl.runs.toml_file import TomlFile
from dpfl.strategy import Strategy


class Experiment(TomlFile):
    """A whole experiment. What decides privacy (epsilon, delta, clip) has no default.

    ``server`` replaces the method's own step by a server optimiser; ``client_settings`` and
    ``clients`` say what single clients do in their own way.
    """

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
    server: ServerSection | None = None
    run: RunSection
    client_settings: ClientSettingsSection = ClientSettingsSection()
    clients: dict[str, ClientSection] = Field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str | None = None) -> Self:
        """Validate plain values. A budgets file is read in, since it may change later."""
        return super().from_dict(_with_budgets_read(values), where)

    def digest(self) -> str:
        """Name the result: equal digests give equal bits, whatever the number of workers."""
        values = self.to_dict()
        values["run"].pop("workers", None)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def content(self) -> str:
        """Name the result by everything it depends on: also the bytes of a folder's files, and this
        version of dpfl.
        """
        digest = hashlib.sha256(f"{__version__}:{self.digest()}".encode())
        folder = self.data.folder
        files = sorted(Path(folder).glob("*")) if folder is not None else []
        for path in filter(Path.is_file, files):
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    def check(self) -> None:
        """Refuse unknown names, and settings that make no method, before anything is loaded.

        Methods, engines and devices are looked up, and the method is built once with these
        settings. Whether it fits the federation is known only when the records are there.
        """
        strategy = make_strategy(self.method.name, self.method.settings())
        if self.server is not None:
            self.server.step(strategy.step, self.run.rounds)
        check_device(self.run.device)
        engine = self.run.engine
        problem = f"there is no engine '{engine}'"
        check(engine in ENGINES, "[run] engine", problem, did_you_mean(engine, ENGINES))

    # -- building what the file describes ----------------------------------------------------------

    def public_seed(self) -> PublicSeed:
        """Return the root of all public randomness."""
        return PublicSeed(self.run.seed)

    def selection(self, population: int) -> Selection:
        """Return who takes part: everyone, a number, or a fraction of the population."""
        sampling = self.run.sampling or find(self.method.name).sampling
        return selection_of(self.run.cohort, sampling, population, self.run.least_willing)

    def strategy(self, population: int) -> Strategy:
        """Build the method with its settings, this experiment's selection and server optimiser."""
        settings = {**self.method.settings(), "selection": self.selection(population)}
        strategy = make_strategy(self.method.name, settings)
        if self.server is None:
            return strategy
        return replace(strategy, step=self.server.step(strategy.step, self.run.rounds))

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

    def federation(self, data_folder: Path | None = None) -> Federation:
        """Load the records, share them out, and attach budgets and client settings."""
        federation = self._clients(data_folder)
        if self.partition.validation:
            federation = federation.with_validation(self.public_seed().child("data"))
        epsilon, delta, scale = self.budgets.epsilon, self.budgets.delta, self.budgets.scale
        if epsilon is not None:
            remedy = "give a delta well below 1 / records of the smallest client"
            missing = "is missing and has no default"
            check(delta is not None, "[budgets] delta", missing, remedy)
            assert delta is not None
            seed = self.public_seed().child("budgets")
            budgets = make_budgets(epsilon, delta, federation.ids, seed)
            if scale is not None:
                budgets = {c: replace(b, epsilon=b.epsilon * scale) for c, b in budgets.items()}
            federation = federation.with_budgets(budgets)
        for client in sorted(set(self.clients) - set(federation.ids)):
            near = did_you_mean(client, federation.ids)
            check(False, f"[clients.{client}]", "is not in the federation", near)
        return replace(federation, client_settings=self._client_settings(federation.ids))

    def _client_settings(self, ids: tuple[str, ...]) -> dict[str, ClientSettings]:
        """The settings of each client: those of its own section, over those drawn from lists."""
        lists = {name: own for name, own in self.client_settings.model_dump().items() if own}
        found = {}
        for client in ids if lists else self.clients:
            seed = self.public_seed().child("practices", client)
            drawn = {
                name: own[int(seed.child(name).numpy().integers(len(own)))]
                for name, own in lists.items()
            }
            found[client] = self.clients.get(client, ClientSection()).over(drawn)
        return found

    def _clients(self, data_folder: Path | None) -> Federation:
        """Load the records and share them out."""
        name, folder, seed = self.data.name, self.data.folder, self.public_seed().child("data")
        one = (name is None) != (folder is None)
        check(one, "[data]", "needs either a name or a folder", "name one data set")
        if folder is not None:
            return Federation.from_files(folder, label=self.data.label, seed=seed.value)
        assert name is not None
        dataset = load_dataset(name, data_folder)
        kind, clients = self.partition.kind, self.partition.clients
        check(
            not dataset.silos or kind is not None or clients is None,
            "[partition] clients",
            f"'{name}' comes in {len(dataset.silos or ())} natural silos",
            "leave the number out, say --partition natural to draw some of them, or name another "
            "partition",
        )
        kind = kind or ("natural" if dataset.silos else "iid")
        settings = self.partition.model_dump(exclude={"clients", "kind", "validation"})
        return Federation.from_dataset(dataset, Partition(**settings, kind=kind), clients, seed)


def for_method(values: dict[str, Any], method: str) -> dict[str, Any]:
    """Return the same experiment for another method; settings that only the other methods have are
    left out.
    """
    known = find(method).settings
    kept = {name: value for name, value in values.get("method", {}).items() if name in known}
    return {**values, "method": {**kept, "name": method}}


def _with_budgets_read(values: dict[str, Any]) -> dict[str, Any]:
    """Replace the name of a budgets file by what it holds."""
    budgets: Any = values.get("budgets")
    source = budgets.get("epsilon") if isinstance(budgets, dict) else None
    if not (isinstance(source, str) and is_budget_file(source)):
        return values
    where = f"budgets file {source}"
    epsilons, deltas = read_budget_file(Path(source))
    delta = common = budgets.get("delta")
    if isinstance(common, float) and set(deltas) == set(epsilons):
        for client, own in deltas.items():
            problem = f"gives '{client}' delta {own:g}, and delta = {common:g} was given for all"
            remedy = (
                "leave one of the two out; a delta for all fills only empty cells of the column"
            )
            check(own == common, where, problem, remedy)
    if deltas and isinstance(common, float | None):
        delta = {client: deltas.get(client, common) for client in epsilons}
        for client, own in delta.items():
            problem, remedy = f"has no delta for '{client}'", "give a delta column or --delta"
            check(own is not None, where, problem, remedy)
    rest = {name: value for name, value in budgets.items() if name != "delta"}
    known = {} if delta is None else {"delta": delta}
    return {**values, "budgets": {**rest, "epsilon": epsilons, **known}}
