"""A federation: who holds what, and what each of them grants."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl.core.errors import ConfigurationError, DataError
from dpfl.core.random import PublicSeed
from dpfl.core.types import Budget, ClientSettings
from dpfl.data.inputs import NUMBERS, Inputs, Tokens
from dpfl.data.partition import Partition, matching_test
from dpfl.data.records import Dataset, Records, Shard, Span, extremes
from dpfl.data.tables import read_folder

TEST_FRACTION = 0.2


@dataclass(frozen=True, kw_only=True)
class Federation:
    """Clients by id, in canonical order, with their budgets and practices (where they have any of
    their own).
    """

    shards: Mapping[str, Shard]
    classes: int
    inputs: Inputs = NUMBERS
    budgets: Mapping[str, Budget] = field(default_factory=dict)
    client_settings: Mapping[str, ClientSettings] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.shards:
            raise DataError("federation", "has no clients", "give at least one")
        wrong = next(
            (c for c, budget in self.budgets.items() if not isinstance(budget, Budget)), None
        )
        if wrong is not None:
            raise ConfigurationError(
                f"budget of '{wrong}'",
                f"{self.budgets[wrong]!r} is no Budget",
                "give dpfl.Budget(epsilon=..., delta=...)",
            )
        for name, others in (("budget", self.budgets), ("practice", self.client_settings)):
            unknown = sorted(set(others) - set(self.shards))
            if unknown:
                raise ConfigurationError(
                    "federation",
                    f"there is a {name} for '{unknown[0]}', who is no client",
                    "check the id",
                )
        for client, shard in self.shards.items():
            if shard.examples == 0:
                raise DataError(
                    f"client '{client}'", "has no data", "leave it out of the federation"
                )
        for client, shard in self.shards.items():
            for records, span in ((shard.train, shard.span), (shard.test, shard.test_span)):
                _check_range(
                    client, "label", records.labels, records.label_range, span, self.classes
                )
                if isinstance(self.inputs, Tokens):
                    _check_range(
                        client,
                        "token",
                        records.features,
                        records.feature_range,
                        span,
                        self.inputs.vocabulary,
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
        first, last = shards[0], shards[-1]
        if all(a.test is b.test and a.test_span[1] == b.test_span[0] for a, b in pairwise(shards)):
            whole = slice(first.test_span[0], last.test_span[1])
            return first.test.features[whole], first.test.labels[whole]
        return torch.cat([s.test_features for s in shards]), torch.cat(
            [s.test_labels for s in shards]
        )

    def fingerprint(self) -> str:
        """Name the data: equal fingerprints mean equal records, held by the same clients."""
        digest = hashlib.sha256(repr(self.inputs).encode())
        for client in self.ids:
            shard = self.shards[client]
            digest.update(f"{client}\x1f{shard.span}{shard.test_span}".encode())
            digest.update(shard.train.digest + shard.test.digest)
        return digest.hexdigest()

    def with_budgets(self, budgets: Mapping[str, Budget]) -> Federation:
        """Return the same clients with these budgets."""
        return replace(self, budgets=dict(budgets))

    def with_validation(self, seed: PublicSeed) -> Federation:
        """Set a fifth of each client's training records aside and test on those; the test records
        are not looked at.
        """
        shards = [self.shards[client] for client in self.ids]
        if not all(
            shard.train.features.is_contiguous() for shard in shards
        ):  # overlapping windows of a text: its end
            spans = {client: _tail(client, self.shards[client].span) for client in self.ids}
            return replace(
                self,
                shards={
                    client: replace(
                        shard, span=spans[client][0], test=shard.train, test_span=spans[client][1]
                    )
                    for client, shard in self.shards.items()
                },
            )
        parts = {
            client: _own_split(
                client, shard.features, shard.labels, seed.child("validation", client)
            )
            for client, shard in zip(self.ids, shards, strict=True)
        }
        return replace(self, shards=_side_by_side(parts))

    @classmethod
    def from_arrays(
        cls,
        clients: Mapping[str, Sequence[Any]],
        *,
        budgets: Mapping[str, Budget] | None = None,
        client_settings: Mapping[str, ClientSettings] | None = None,
        classes: int | None = None,
        tokens: int | None = None,
        seed: int = 0,
    ) -> Federation:
        """Build from ``{id: (features, labels)}`` or ``{id: (features, labels, test_features,
        test_labels)}``.

        Arrays may be numpy, torch or lists. Without a test part, a fifth of each client's records
        is set aside. Features are numbers; with ``tokens`` (the size of the vocabulary) they are
        whole numbers for an embedding.
        """
        for name, count in (("tokens", tokens), ("classes", classes)):
            if count is not None and (
                isinstance(count, bool) or not isinstance(count, int) or count < 1
            ):
                raise ConfigurationError(
                    "federation", f"{name} = {count!r}", "give a whole number above 0"
                )
        parts: dict[str, _Parts] = {}
        kind = np.float32 if tokens is None else np.int64
        for client, arrays in sorted(clients.items()):
            if len(arrays) not in (2, 4):
                raise DataError(
                    f"client '{client}'",
                    f"has {len(arrays)} arrays",
                    "give (features, labels), with test parts or without",
                )
            features, labels = _pair(client, arrays[0], arrays[1], kind)
            if len(arrays) == 4:
                parts[client] = (features, labels, *_pair(client, arrays[2], arrays[3], kind))
            else:
                parts[client] = _own_split(
                    client, features, labels, PublicSeed(seed).child("split", client)
                )
        if not parts:
            raise DataError("federation", "has no clients", "give at least one")
        shapes = {tuple(x.shape[1:]) for part in parts.values() for x in (part[0], part[2])}
        if len(shapes) > 1:
            raise DataError(
                "federation",
                f"clients have records of different shapes {sorted(shapes)}",
                "use one shape",
            )
        odd = next(
            (
                client
                for client in parts
                if not (isinstance(client, str) and client.isprintable() and client)
            ),
            None,
        )
        if odd is not None:
            raise DataError(
                f"client {odd!r}",
                "has no printable name",
                "name clients by text without control characters",
            )
        both = [y for part in parts.values() for y in (part[1], part[3]) if len(y)]
        largest = max((int(y.max()) for y in both), default=0)
        if classes is None and both and largest >= sum(len(y) for y in both):
            raise DataError(
                "federation",
                f"there is a label {largest}, more than records",
                "check which column is the label",
            )
        return cls(
            shards=_side_by_side(parts),
            classes=classes or largest + 1,
            inputs=NUMBERS if tokens is None else Tokens(tokens),
            budgets=budgets or {},
            client_settings=client_settings or {},
        )

    @classmethod
    def from_torch(cls, clients: Mapping[str, Any], **options: Any) -> Federation:
        """Build from one map-style torch dataset of (features, label) per client."""
        arrays = {}
        for client, dataset in clients.items():
            items = [dataset[i] for i in range(len(dataset))]
            if not items:
                raise DataError(
                    f"client '{client}'", "has no data", "leave it out of the federation"
                )
            arrays[client] = (
                torch.stack([torch.as_tensor(x) for x, _ in items]),
                torch.tensor([int(y) for _, y in items]),
            )
        return cls.from_arrays(arrays, **options)

    @classmethod
    def from_files(
        cls, folder: Path | str, *, label: str | None = None, **options: Any
    ) -> Federation:
        """Build from a folder with one CSV or Parquet file per client."""
        return cls.from_arrays(read_folder(Path(folder), label), **options)

    @classmethod
    def from_dataset(
        cls, dataset: Dataset, partition: Partition, clients: int | None, seed: PublicSeed
    ) -> Federation:
        """Share out a named data set; natural silos keep their names."""
        if partition.kind == "natural":
            return cls._natural(dataset, partition, clients, seed)
        count = 20 if clients is None else clients
        features, labels, test_features, test_labels = _train_and_test(dataset, seed.child("test"))
        trains = (
            None if dataset.test_silos is None else _inside(dataset.silos or {})
        )  # not the texts kept for testing
        known = labels.numpy() if trains is None else labels.numpy()[trains]
        train = partition.split(known, count, seed.child("partition"))
        test = matching_test(train, known, test_labels.numpy(), seed.child("matching"))
        train = train if trains is None else [trains[part] for part in train]
        digits = len(str(count - 1))
        # Records are laid out client by client: each holds a stretch, and many clients' batches are
        # one look-up.
        own, own_test = np.concatenate(train), np.concatenate(test)
        records, test_records = (
            Records(features[own], labels[own]),
            Records(test_features[own_test], test_labels[own_test]),
        )
        shards = {
            f"client-{i:0{digits}d}": Shard(
                train=records, span=span, test=test_records, test_span=test_span
            )
            for i, (span, test_span) in enumerate(zip(_spans(train), _spans(test), strict=True))
        }
        return cls(shards=shards, classes=dataset.classes, inputs=dataset.inputs)

    @classmethod
    def _natural(
        cls, dataset: Dataset, law: Partition, clients: int | None, seed: PublicSeed
    ) -> Federation:
        if dataset.silos is None:
            raise ConfigurationError(
                "partition",
                f"'{dataset.name}' has no natural silos",
                "use iid, shards, classes, dirichlet or unequal",
            )
        names = sorted(dataset.silos)
        if clients is not None and not 1 <= clients <= len(names):
            raise ConfigurationError(
                "partition",
                f"'{dataset.name}' has {len(names)} natural silos, not {clients}",
                "name at most as many clients, or leave the number out",
            )
        if clients is not None:  # some of them, by the public seed
            names = sorted(
                seed.child("silos").numpy().choice(names, clients, replace=False).tolist()
            )
        if dataset.test is not None and dataset.test_silos is not None:
            train, test = Records(dataset.features, dataset.labels), Records(*dataset.test)
            shards = {}
            for name in names:
                first, last = dataset.silos[name]
                last = last if law.records is None else min(last, first + law.records)
                shards[name] = Shard(
                    train=train, span=(first, last), test=test, test_span=dataset.test_silos[name]
                )
            return cls(shards=shards, classes=dataset.classes, inputs=dataset.inputs)
        parts: dict[str, _Parts] = {}
        for name in names:
            own = slice(*dataset.silos[name])
            x, y, *rest = _own_split(
                name, dataset.features[own], dataset.labels[own], seed.child("split", name)
            )
            parts[name] = (x[: law.records], y[: law.records], rest[0], rest[1])
        return cls(shards=_side_by_side(parts), classes=dataset.classes, inputs=dataset.inputs)


_Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def _inside(silos: Mapping[str, Span]) -> np.ndarray:
    """Every record that some silo trains on."""
    return np.concatenate([np.arange(*span) for _, span in sorted(silos.items())])


def _spans(parts: Sequence[Sized]) -> list[Span]:
    """Where each part begins and ends when all lie one after the other."""
    ends = np.cumsum([0, *map(len, parts)]).tolist()
    return list(pairwise(ends))


def _side_by_side(parts: Mapping[str, _Parts]) -> dict[str, Shard]:
    """Lay the clients' records into one storage, so that the batches of many clients are one
    look-up.
    """
    columns = list(zip(*parts.values(), strict=True))
    train = Records(torch.cat(columns[0]), torch.cat(columns[1]))
    test = Records(torch.cat(columns[2]), torch.cat(columns[3]))
    spans = zip(parts, _spans(columns[1]), _spans(columns[3]), strict=True)
    return {
        name: Shard(train=train, span=span, test=test, test_span=own) for name, span, own in spans
    }


def _check_range(
    client: str, what: str, values: Tensor, range_: tuple[int, int], span: Span, count: int
) -> None:
    if range_[0] >= 0 and range_[1] < count:
        return  # nobody in this storage has a wrong one
    low, high = extremes(values[slice(*span)])
    if low < 0 or high >= count:
        odd = low if low < 0 else high
        advice = (
            "number the classes from 0"
            if what == "label"
            else "encode texts with the vocabulary that was named"
        )
        raise DataError(f"client '{client}'", f"has {what} {odd}, outside 0..{count - 1}", advice)


def _as_array(values: Any) -> Any:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


def _pair(client: str, features: Any, labels: Any, kind: type[np.generic]) -> tuple[Tensor, Tensor]:
    where = f"client '{client}'"
    try:
        given = np.asarray(_as_array(features))
        if kind is np.int64 and given.dtype.kind not in "iu" and given.size:
            raise DataError(
                where, f"has tokens of type {given.dtype}", "give whole numbers, one a token"
            )
        if given.dtype.kind == "c":
            raise DataError(where, "has complex features", "give arrays of real numbers")
        if kind is np.int64 and given.size and int(given.max()) > np.iinfo(np.int64).max:
            raise DataError(
                where,
                f"has token {int(given.max())}",
                "encode texts with the vocabulary that was named",
            )
        with np.errstate(over="ignore"):  # what float32 cannot hold is refused below
            x = torch.from_numpy(np.array(given, dtype=kind))
        y = np.array(_as_array(labels), dtype=np.float64)
    except (ValueError, TypeError) as error:
        raise DataError(
            where, f"has features or labels that are no numbers ({error})", "give arrays of numbers"
        ) from error
    if not bool(torch.isfinite(x).all()):
        raise DataError(
            where,
            "has features that are not finite numbers",
            "fill missing values and scale huge ones first",
        )
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or x.ndim < 1:
        raise DataError(
            where,
            f"has labels of shape {y.shape}",
            "give one class number per record, not one-hot rows",
        )
    if len(x) != len(y):
        raise DataError(
            where, f"has {len(x)} records and {len(y)} labels", "give one label per record"
        )
    if not np.all(np.isfinite(y)) or np.any(y != np.round(y)):
        raise DataError(where, "has labels that are no whole numbers", "number the classes from 0")
    if len(y) and not 0 <= y.min() <= y.max() < 2**31:
        odd = y.min() if y.min() < 0 else y.max()
        raise DataError(where, f"has label {odd:g}", "number the classes from 0")
    return x, torch.from_numpy(y.astype(np.int64))


def _own_split(client: str, features: Tensor, labels: Tensor, seed: PublicSeed) -> _Parts:
    if len(labels) < 2:
        raise DataError(
            f"client '{client}'",
            f"has {len(labels)} record(s), too few for a train and a test part",
            "leave it out, or give both parts",
        )
    order = torch.randperm(len(labels), generator=seed.generator())
    cut = max(1, round(TEST_FRACTION * len(labels)))
    test, train = order[:cut].sort().values, order[cut:].sort().values
    return features[train], labels[train], features[test], labels[test]


def _tail(client: str, span: Span) -> tuple[Span, Span]:
    first, last = span
    if last - first < 2:
        raise DataError(
            f"client '{client}'", "has one record, too few to set some aside", "leave it out"
        )
    cut = last - max(1, round(TEST_FRACTION * (last - first)))
    return (first, cut), (cut, last)


def _train_and_test(dataset: Dataset, seed: PublicSeed) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the data set's own test part, or a fifth of every class."""
    if dataset.test is not None:
        return dataset.features, dataset.labels, *dataset.test
    if len(dataset.labels) < 5 * dataset.classes:
        raise DataError(
            f"data set '{dataset.name}'",
            f"has {len(dataset.labels)} records, too few for a test part",
            "use more",
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
