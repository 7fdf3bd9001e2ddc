"""A federation: who holds what, and what each of them grants."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl.core.errors import ConfigurationError, DataError
from dpfl.core.random import PublicSeed
from dpfl.core.types import Budget, Practice
from dpfl.data.datasets import Dataset
from dpfl.data.partition import Partition, matching_test
from dpfl.data.tables import read_folder

TEST_FRACTION = 0.2


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One client's records: what it trains on, and what it keeps for testing."""

    features: Tensor
    labels: Tensor
    test_features: Tensor
    test_labels: Tensor

    def __repr__(self) -> str:
        """Say how much there is, and show none of it."""
        return f"Shard({len(self.labels)} training and {len(self.test_labels)} test records)"

    @property
    def examples(self) -> int:
        """Training records: the number a client declares."""
        return len(self.labels)


@dataclass(frozen=True, kw_only=True)
class Federation:
    """Clients by id, in canonical order, with their budgets and practices (where they have any of their own)."""

    shards: Mapping[str, Shard]
    classes: int
    budgets: Mapping[str, Budget] = field(default_factory=dict)
    practices: Mapping[str, Practice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.shards:
            raise DataError("federation", "has no clients", "give at least one")
        wrong = next((c for c, budget in self.budgets.items() if not isinstance(budget, Budget)), None)
        if wrong is not None:
            raise ConfigurationError(
                f"budget of '{wrong}'",
                f"{self.budgets[wrong]!r} is no Budget",
                "give dpfl.Budget(epsilon=..., delta=...)",
            )
        for name, others in (("budget", self.budgets), ("practice", self.practices)):
            unknown = sorted(set(others) - set(self.shards))
            if unknown:
                raise ConfigurationError(
                    "federation", f"there is a {name} for '{unknown[0]}', who is no client", "check the id"
                )
        for client, shard in self.shards.items():
            if shard.examples == 0:
                raise DataError(f"client '{client}'", "has no data", "leave it out of the federation")
            for labels in (shard.labels, shard.test_labels):
                if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < self.classes):
                    raise DataError(
                        f"client '{client}'", f"has a label outside 0..{self.classes - 1}", "number the classes from 0"
                    )

    def __repr__(self) -> str:
        """Say who there is, and show no record."""
        return f"Federation({len(self.shards)} clients, records of shape {self.feature_shape}, {self.classes} classes)"

    @property
    def ids(self) -> tuple[str, ...]:
        """Clients in canonical order."""
        return tuple(sorted(self.shards))

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of one record."""
        return tuple(next(iter(self.shards.values())).features.shape[1:])

    def test_set(self) -> tuple[Tensor, Tensor]:
        """All clients' test parts together; for simulations, which may look."""
        shards = [self.shards[client] for client in self.ids]
        return torch.cat([s.test_features for s in shards]), torch.cat([s.test_labels for s in shards])

    def fingerprint(self) -> str:
        """Name the data: equal fingerprints mean equal records, held by the same clients."""
        digest = hashlib.sha256()
        for client in self.ids:
            shard = self.shards[client]
            digest.update(f"{client}\x1f{tuple(shard.features.shape)}".encode())
            for tensor in (shard.features, shard.labels, shard.test_features, shard.test_labels):
                digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def with_budgets(self, budgets: Mapping[str, Budget]) -> Federation:
        """Return the same clients with these budgets."""
        return replace(self, budgets=dict(budgets))

    @classmethod
    def from_arrays(
        cls,
        clients: Mapping[str, Sequence[Any]],
        *,
        budgets: Mapping[str, Budget] | None = None,
        practices: Mapping[str, Practice] | None = None,
        classes: int | None = None,
        seed: int = 0,
    ) -> Federation:
        """Build from ``{id: (features, labels)}`` or ``{id: (features, labels, test_features, test_labels)}``.

        Arrays may be numpy, torch or lists. Without a test part, a fifth of each client's records is set aside.
        """
        shards = {}
        for client, arrays in sorted(clients.items()):
            if len(arrays) not in (2, 4):
                raise DataError(
                    f"client '{client}'",
                    f"has {len(arrays)} arrays",
                    "give (features, labels), with test parts or without",
                )
            features, labels = _pair(client, arrays[0], arrays[1])
            if len(arrays) == 4:
                test = _pair(client, arrays[2], arrays[3])
                shards[client] = Shard(features=features, labels=labels, test_features=test[0], test_labels=test[1])
            else:
                shards[client] = _own_split(client, features, labels, PublicSeed(seed).child("split", client))
        shapes = {tuple(x.shape[1:]) for s in shards.values() for x in (s.features, s.test_features)}
        if len(shapes) > 1:
            raise DataError("federation", f"clients have records of different shapes {sorted(shapes)}", "use one shape")
        odd = next(
            (client for client in shards if not (isinstance(client, str) and client.isprintable() and client)), None
        )
        if odd is not None:
            raise DataError(
                f"client {odd!r}", "has no printable name", "name clients by text without control characters"
            )
        both = [y for s in shards.values() for y in (s.labels, s.test_labels) if len(y)]
        largest = max((int(y.max()) for y in both), default=0)
        if classes is None and both and largest >= sum(len(y) for y in both):
            raise DataError(
                "federation", f"there is a label {largest}, more than records", "check which column is the label"
            )
        return cls(shards=shards, classes=classes or largest + 1, budgets=budgets or {}, practices=practices or {})

    @classmethod
    def from_torch(cls, clients: Mapping[str, Any], **options: Any) -> Federation:
        """Build from one map-style torch dataset of (features, label) per client."""
        arrays = {}
        for client, dataset in clients.items():
            items = [dataset[i] for i in range(len(dataset))]
            if not items:
                raise DataError(f"client '{client}'", "has no data", "leave it out of the federation")
            arrays[client] = (
                torch.stack([torch.as_tensor(x) for x, _ in items]),
                torch.tensor([int(y) for _, y in items]),
            )
        return cls.from_arrays(arrays, **options)

    @classmethod
    def from_files(cls, folder: Path | str, *, label: str | None = None, **options: Any) -> Federation:
        """Build from a folder with one CSV or Parquet file per client."""
        return cls.from_arrays(read_folder(Path(folder), label), **options)

    @classmethod
    def from_dataset(cls, dataset: Dataset, partition: Partition, clients: int | None, seed: PublicSeed) -> Federation:
        """Share out a named data set; natural silos keep their names."""
        if partition.kind == "natural":
            return cls._natural(dataset, clients, seed)
        count = 20 if clients is None else clients
        features, labels, test_features, test_labels = _train_and_test(dataset, seed.child("test"))
        train = partition.split(labels.numpy(), count, seed.child("partition"))
        test = matching_test(train, labels.numpy(), test_labels.numpy(), seed.child("matching"))
        digits = len(str(count - 1))
        shards = {
            f"client-{i:0{digits}d}": Shard(
                features=features[mine],
                labels=labels[mine],
                test_features=test_features[own],
                test_labels=test_labels[own],
            )
            for i, (mine, own) in enumerate(zip(train, test, strict=True))
        }
        return cls(shards=shards, classes=dataset.classes)

    @classmethod
    def _natural(cls, dataset: Dataset, clients: int | None, seed: PublicSeed) -> Federation:
        if dataset.silos is None:
            raise ConfigurationError(
                "partition", f"'{dataset.name}' has no natural silos", "use iid, shards, classes, dirichlet or unequal"
            )
        if clients is not None and clients != len(dataset.silos):
            raise ConfigurationError(
                "partition",
                f"'{dataset.name}' has {len(dataset.silos)} natural silos, not {clients}",
                "leave the number of clients out",
            )
        shards = {
            name: _own_split(name, dataset.features[index], dataset.labels[index], seed.child("split", name))
            for name, index in dataset.silos.items()
        }
        return cls(shards=shards, classes=dataset.classes)


def _as_array(values: Any) -> Any:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


def _pair(client: str, features: Any, labels: Any) -> tuple[Tensor, Tensor]:
    where = f"client '{client}'"
    try:
        with np.errstate(over="ignore"):  # what float32 cannot hold is refused below
            x = torch.from_numpy(np.array(_as_array(features), dtype=np.float32))
        y = np.array(_as_array(labels), dtype=np.float64)
    except (ValueError, TypeError) as error:
        raise DataError(
            where, f"has features or labels that are no numbers ({error})", "give arrays of numbers"
        ) from error
    if not bool(torch.isfinite(x).all()):
        raise DataError(
            where, "has features that are not finite numbers", "fill missing values and scale huge ones first"
        )
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or x.ndim < 1:
        raise DataError(where, f"has labels of shape {y.shape}", "give one class number per record, not one-hot rows")
    if len(x) != len(y):
        raise DataError(where, f"has {len(x)} records and {len(y)} labels", "give one label per record")
    if not np.all(np.isfinite(y)) or np.any(y != np.round(y)):
        raise DataError(where, "has labels that are no whole numbers", "number the classes from 0")
    if len(y) and not 0 <= y.min() <= y.max() < 2**31:
        odd = y.min() if y.min() < 0 else y.max()
        raise DataError(where, f"has label {odd:g}", "number the classes from 0")
    return x, torch.from_numpy(y.astype(np.int64))


def _own_split(client: str, features: Tensor, labels: Tensor, seed: PublicSeed) -> Shard:
    if len(labels) < 2:
        raise DataError(
            f"client '{client}'",
            f"has {len(labels)} record(s), too few for a train and a test part",
            "leave it out, or give both parts",
        )
    order = torch.randperm(len(labels), generator=seed.generator())
    cut = max(1, round(TEST_FRACTION * len(labels)))
    test, train = order[:cut].sort().values, order[cut:].sort().values
    return Shard(features=features[train], labels=labels[train], test_features=features[test], test_labels=labels[test])


def _train_and_test(dataset: Dataset, seed: PublicSeed) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the data set's own test part, or a fifth of every class."""
    if dataset.test is not None:
        return dataset.features, dataset.labels, *dataset.test
    if len(dataset.labels) < 5 * dataset.classes:
        raise DataError(
            f"data set '{dataset.name}'", f"has {len(dataset.labels)} records, too few for a test part", "use more"
        )
    generator = seed.numpy()
    chosen = []
    for label in range(dataset.classes):
        members = generator.permutation(np.flatnonzero(dataset.labels.numpy() == label))
        chosen.append(members[: round(TEST_FRACTION * len(members))])
    mask = np.zeros(len(dataset.labels), dtype=bool)
    mask[np.concatenate(chosen)] = True
    x, y = dataset.features, dataset.labels
    return x[~mask], y[~mask], x[mask], y[mask]
