"""An experiment as data: TOML in, complete TOML out. Unknown keys are refused, with the nearest
known one.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator
from torch import nn

from dpfl.core.checks import check, one_of
from dpfl.core.errors import ConfigurationError, did_you_mean
from dpfl.core.random import PublicSeed
from dpfl.core.types import ClientSettings, Plain
from dpfl.core.version import __version__
from dpfl.data.federation import Federation
from dpfl.data.partition import Partition
from dpfl.data.units import SPLIT_VERSION
from dpfl.datasets.named import load_dataset
from dpfl.engine import ENGINES
from dpfl.engine.process import check_device
from dpfl.methods import find
from dpfl.plugs.accounted_metric import AccountedMetric
from dpfl.plugs.base import FigureSpec
from dpfl.privacy.budgets import is_budget_file, make_budgets
from dpfl.rounds.members import honest_members
from dpfl.runs import sections
from dpfl.runs.accounted_section import AccountedSection
from dpfl.runs.for_method import for_method as for_method, with_own_model
from dpfl.runs.named_files import resolve_files
from dpfl.runs.toml_file import TomlFile, read_toml
from dpfl.strategy import Strategy
from dpfl.strategy.preconditioning import strategy_signal
from dpfl.tasks import Task

MOST_PLANNED = 32
"""By how many rounds progress is measured until a method has planned its own."""


class Experiment(TomlFile):
    """A whole experiment. What decides privacy (epsilon, delta, clip) has no default.

    ``data``, ``partition`` and ``budgets`` make the federation, ``model``, ``method`` and ``run``
    what is trained how long. ``task`` says what is learned where it is not the data set's own
    classification. ``server`` replaces the method's own step by a server optimiser; over a
    ``secure_sum`` the server sees sums alone; ``accounted`` is a metric that is measured within the
    plan; ``client_settings`` and ``clients`` say what single clients do in their own way.
    """

    python: ClassVar[bool] = False
    called: ClassVar[str] = "experiment"
    # What never changes a bit; weights are named by their digest.
    incidental: ClassVar[Plain] = {"run": {"workers"}, "model": {"weights"}}
    data: sections.DataSection
    partition: sections.PartitionSection = sections.PartitionSection()
    budgets: sections.BudgetsSection = sections.BudgetsSection()
    model: sections.ModelSection = sections.ModelSection()
    task: sections.TaskSection | None = None
    method: sections.MethodSection
    server: sections.ServerSection | None = None
    secure_sum: sections.SecureSumSection | None = None
    run: sections.RunSection
    accounted: AccountedSection | None = None
    client_settings: sections.ClientSettingsSection = sections.ClientSettingsSection()
    clients: dict[str, sections.ClientSection] = Field(default_factory=dict)

    def content(self) -> str:
        """Name the result by everything it depends on: also the bytes of a folder's files, how
        records are set aside, and this version of dpfl.
        """
        digest = hashlib.sha256(f"{__version__}:{SPLIT_VERSION}:{self.digest()}".encode())
        folder = self.data.folder
        files = sorted(Path(folder).glob("*")) if folder is not None else []
        for path in filter(Path.is_file, files):
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    @classmethod
    def from_options(cls, values: Plain, where: str | None = None) -> Self:
        """Read the files that a person's own values name, and validate."""
        return cls.from_dict(resolve_files(values), where)

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read and validate a person's own TOML file, and the files that it names."""
        return cls.from_options(read_toml(path), str(path))

    def agrees(self, where: str) -> None:
        """Refuse files that are named and were not read: the digest would not cover them."""
        weights = self.model.weights_sha256 is None and self.model.weights
        for name in (weights, self.budgets.epsilon):
            if isinstance(name, str) and (name == weights or is_budget_file(name)):
                raise ConfigurationError(
                    where, f"the file '{name}' was not read", "read it by Experiment.from_options"
                )

    @model_validator(mode="before")
    @classmethod
    def _take_model(cls, values: Any) -> Any:
        """Fill in the model that a method brings along."""
        return with_own_model(values)

    def check(self) -> None:
        """Refuse unknown names, and settings that make no method, before anything is loaded.

        Methods, engines and devices are looked up, and the method is built once with these
        settings. Whether it fits the federation is known only when the records are there.
        """
        self.method.strategy(self.run, self.server, self.secure_sum)
        if self.task is not None and self.task.name is not None:
            self.learned()
        self.accounted_metric()
        check_device(self.run.device)
        one_of("[run]", ENGINES, engine=self.run.engine)

    # -- what a report asks of every run -----------------------------------------------------------

    @property
    def method_name(self) -> str:
        """The name of the method."""
        return self.method.name

    @property
    def public_seed_value(self) -> int:
        """The seed of everything public in the run."""
        return self.run.seed

    @property
    def rounds(self) -> int:
        """How many rounds are planned; at most so many, where the method plans them itself."""
        return self.run.rounds or MOST_PLANNED

    @property
    def seeded(self) -> bool:
        """Whether noise comes from the seed."""
        return self.run.noise == "seeded"

    def figures(self, clients: int) -> Sequence[tuple[str, FigureSpec]]:
        """The figures that the components declare, in a federation of so many ``clients``."""
        return self.strategy(clients).figures()

    def federation_key(self) -> Mapping[str, object]:
        """What runs that are compared must share, by section."""
        names = ["data", "partition", "budgets", "model", "clients", "client_settings"]
        if find(self.method.name).model is not None:
            names.remove("model")  # it is part of the method
        return {name: getattr(self, name) for name in names}

    def settings_key(self) -> object:
        """What the runs of one method must share: everything but the seed."""
        return (
            self.method,
            self.secure_sum,
            self.run.model_dump(exclude={"seed", "workers", "personal_finish"}),
        )

    # -- building what the file describes ----------------------------------------------------------

    def public_seed(self) -> PublicSeed:
        """Return the root of all public randomness."""
        return PublicSeed(self.run.seed)

    def strategy(self, population: int) -> Strategy:
        """Build the method with its settings, this experiment's selection and server optimiser."""
        return self.method.strategy(self.run, self.server, self.secure_sum, population)

    def learned(self, own: Task | None = None) -> Task | None:
        """Build the task that the file asks for, None if it says nothing of it.

        ``own`` is that of the data set, for what the file leaves open.
        """
        return None if self.task is None else self.task.task(own)

    def accounted_metric(self) -> AccountedMetric | None:
        """Build the metric that is measured within the plan, None if the file names none."""
        return None if self.accounted is None else self.accounted.build()

    def build_model(self, federation: Federation) -> nn.Module:
        """Build the model with its reproducible start."""
        shape = federation.record_shape
        width = federation.task.width
        inputs = federation.inputs
        signal = self._signal(federation)
        return self.model.build(shape, width, self.public_seed(), inputs, signal)

    def built_model(self, federation: Federation) -> Plain:
        """What the model is built from: name and settings, with features by name."""
        shape = federation.record_shape
        inputs = federation.inputs
        features = self.model.named_features(shape, inputs, self._signal(federation))
        own = self.model.model_dump(include={"name", "hidden"})
        return own if features is None else {**own, "features": features}

    def _signal(self, federation: Federation) -> float | None:
        """The federation's signal, by which features are chosen; None where nobody asks."""
        if self.model.features != "auto" or not federation.budgets:
            return None
        claims = {c: m.claims for c, m in honest_members(federation).items()}
        strategy = self.strategy(len(claims))
        return strategy_signal(strategy, claims)

    def federation(self, data_folder: Path | None = None) -> Federation:
        """Load the records, share them out, and attach budgets and client settings."""
        federation = self._clients(data_folder)
        if self.partition.validation:
            federation = federation.with_validation(self.public_seed().child("data"))
        epsilon = self.budgets.epsilon
        delta = self.budgets.delta
        scale = self.budgets.scale
        if epsilon is not None:
            if delta is None:
                raise ConfigurationError(
                    "[budgets] delta",
                    "is missing and has no default",
                    "give a delta well below 1 / records of the smallest client",
                )
            seed = self.public_seed().child("budgets")
            budgets = make_budgets(epsilon, delta, federation.ids, seed)
            own = {c: replace(b, epsilon=b.epsilon * (scale or 1)) for c, b in budgets.items()}
            federation = federation.with_budgets(own)
        for client in sorted(set(self.clients) - set(federation.ids)):
            raise ConfigurationError(
                f"[clients.{client}]",
                "is not in the federation",
                did_you_mean(client, federation.ids),
            )
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
            own = self.clients.get(client, sections.ClientSection()).settings()
            found[client] = own.over(ClientSettings(**drawn))
        return found

    def _clients(self, data_folder: Path | None) -> Federation:
        """Load the records and share them out."""
        name = self.data.name
        folder = self.data.folder
        seed = self.public_seed().child("data")
        if (name is None) == (folder is None):
            raise ConfigurationError(
                "[data]", "needs either a name or a folder", "name one data set"
            )
        label = self.data.label
        check(
            label is None or folder is not None,
            "[data] label",
            f"'{label}' is given for the data set '{name}', which has its own",
            "leave it out: it is for the files of a folder",
        )
        named = folder is None
        check(
            not (named and self.data.stratified),
            "[data] stratified",
            f"is for a folder, and '{name}' is a data set",
            "leave it out",
        )
        if folder is not None:
            federation = Federation.from_files(
                folder,
                label=self.data.label,
                schema=self.data.described(),
                seed=seed.value,
                stratified=self.data.stratified,
                task=self.learned(),
            )
            for key in self.partition.model_dump(exclude_defaults=True).keys() - {"validation"}:
                raise ConfigurationError(
                    f"[partition] {key}",
                    "the files of a folder are shared out already",
                    "leave it out",
                )
            return federation
        assert name is not None
        dataset = load_dataset(name, data_folder)
        kind = self.partition.kind
        clients = self.partition.clients
        check(
            not dataset.silos or kind is not None or clients is None,
            "[partition] clients",
            f"'{name}' comes in {len(dataset.silos or ())} natural silos",
            "leave the number out, or name a partition (natural draws some of them)",
        )
        kind = kind or ("natural" if dataset.silos else "iid")
        settings = self.partition.model_dump(exclude={"clients", "kind", "validation"})
        partition = Partition(**settings, kind=kind)
        learned = self.learned(dataset.learned)
        return Federation.from_dataset(dataset, partition, clients, seed, learned)
