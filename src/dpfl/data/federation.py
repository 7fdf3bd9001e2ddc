"""A federation: who holds which records, and the budget of each client."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl.core.checks import check, whole_number
from dpfl.core.errors import DataError
from dpfl.core.random import PublicSeed
from dpfl.core.types import Budget, ClientSettings
from dpfl.data.arrays import ENCODE, TEST_FRACTION, client_parts, split_end, split_off
from dpfl.data.inputs import NUMBERS, Inputs, Tokens
from dpfl.data.partition import Partition, matching_test
from dpfl.data.records import Dataset, Parts, Records, Shard, lay_out, spans_of
from dpfl.data.tables import read_folder


@dataclass(frozen=True, kw_only=True)
class Federation:
    """Clients by id, with their records, budgets and settings.

    ``shards`` are the clients' records, all of one shape, with labels 0..``classes`` - 1.
    ``inputs`` says how stored records become a model's input. ``budgets`` and ``client_settings``
    need not name every client.

    >>> clients = {"a": ([[0.0], [1.0]] * 5, [0, 1] * 5), "b": ([[0.2], [0.9]] * 5, [0, 1] * 5)}
    >>> Federation.from_arrays(clients)
    Federation(2 clients, records of shape (1,), 2 classes)
    """

    shards: Mapping[str, Shard]
    classes: int
    inputs: Inputs = NUMBERS
    budgets: Mapping[str, Budget] = field(default_factory=dict)
    client_settings: Mapping[str, ClientSettings] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(bool(self.shards), "federation", "has no clients", "give at least one", DataError)
        for client, budget in self.budgets.items():
            where, remedy = f"budget of '{client}'", "give dpfl.Budget(epsilon=..., delta=...)"
            check(isinstance(budget, Budget), where, f"{budget!r} is not a Budget", remedy)
        for what, given in (("a budget is", self.budgets), ("settings are", self.client_settings)):
            for client in sorted(given):
                problem = f"{what} given for '{client}', who is not a client"
                check(client in self.shards, "federation", problem, "check the id")
        for client, shard in self.shards.items():
            self._check_shard(f"client '{client}'", shard)

    def _check_shard(self, where: str, shard: Shard) -> None:
        """Refuse a client without data, or with labels or tokens out of range."""
        remedy = "leave it out of the federation"
        check(shard.examples > 0, where, "has no data", remedy, DataError)
        for records, span in ((shard.train, shard.span), (shard.test, shard.test_span)):
            odd = records.outside("label", span, self.classes)
            problem = f"has label {odd}, outside 0..{self.classes - 1}"
            check(odd is None, where, problem, "number the classes from 0", DataError)
            if isinstance(self.inputs, Tokens):
                odd = records.outside("token", span, self.inputs.vocabulary)
                problem = f"has token {odd}, outside 0..{self.inputs.vocabulary - 1}"
                check(odd is None, where, problem, ENCODE, DataError)

    def __repr__(self) -> str:
        """Say who there is, and show no record."""
        shape = f"records of shape {self.feature_shape}"
        return f"Federation({len(self.shards)} clients, {shape}, {self.classes} classes)"

    @property
    def ids(self) -> tuple[str, ...]:
        """Clients in canonical order."""
        return tuple(sorted(self.shards))

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of one record."""
        return tuple(next(iter(self.shards.values())).features.shape[1:])

    def test_set(self) -> tuple[Tensor, Tensor]:
        """All clients' test features and labels together: for simulations, which may look."""
        shards = [self.shards[client] for client in self.ids]
        first, last = shards[0], shards[-1]
        if all(a.test is b.test and a.test_span[1] == b.test_span[0] for a, b in pairwise(shards)):
            whole = slice(first.test_span[0], last.test_span[1])
            return first.test.features[whole], first.test.labels[whole]
        labels = torch.cat([shard.test_labels for shard in shards])
        return torch.cat([shard.test_features for shard in shards]), labels

    def fingerprint(self) -> str:
        """Name the data: equal fingerprints mean equal records, held by the same clients."""
        digest = hashlib.sha256(repr(self.inputs).encode())
        for client in self.ids:
            shard = self.shards[client]
            digest.update(f"{client}\x1f{shard.span}{shard.test_span}".encode())
            digest.update(shard.train.digest + shard.test.digest)
        return digest.hexdigest()

    def with_budgets(self, budgets: Mapping[str, Budget]) -> Federation:
        """Return the same clients with these budgets, which replace those they had."""
        return replace(self, budgets=dict(budgets))

    def with_validation(self, seed: PublicSeed) -> Federation:
        """Set a fifth of each client's training records aside, and test on those.

        The test records are not looked at. Of windows of a text, which overlap, the last fifth is
        set aside.
        """
        if all(shard.train.features.is_contiguous() for shard in self.shards.values()):
            parts = {}
            for client in self.ids:
                shard, own = self.shards[client], seed.child("validation", client)
                parts[client] = split_off(client, shard.features, shard.labels, own)
            return replace(self, shards=lay_out(parts))
        shards = {}
        for client, shard in self.shards.items():
            span, test_span = split_end(client, shard.span)
            shards[client] = replace(shard, span=span, test=shard.train, test_span=test_span)
        return replace(self, shards=shards)

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
        """Build from arrays: numpy, torch or lists.

        ``clients`` is ``{id: (features, labels)}`` or ``{id: (features, labels, test_features,
        test_labels)}``. Without a test part, a fifth of each client's records is set aside, by
        ``seed``. Features are numbers; with ``tokens`` (the size of the vocabulary) they are whole
        numbers for an embedding. Labels are 0..``classes`` - 1; without ``classes``, the largest
        label decides. ``budgets`` and ``client_settings`` are by client.

        >>> arrays = ([[0.0], [1.0]] * 5, [0, 1] * 5)
        >>> federation = Federation.from_arrays({"a": arrays, "b": arrays})
        >>> federation.ids, federation.shards["a"]
        (('a', 'b'), Shard(8 training and 2 test records))
        """
        for name, count in (("tokens", tokens), ("classes", classes)):
            if count is not None:
                whole_number("federation", name, count)
        parts = {}
        for client, arrays in sorted(clients.items()):
            own = PublicSeed(seed).child("split", client)
            parts[client] = client_parts(client, arrays, tokens=tokens is not None, seed=own)
        check(bool(parts), "federation", "has no clients", "give at least one", DataError)
        shapes = {tuple(x.shape[1:]) for part in parts.values() for x in (part[0], part[2])}
        problem = f"clients have records of different shapes {sorted(shapes)}"
        check(len(shapes) == 1, "federation", problem, "use one shape", DataError)
        labels = torch.cat([y for part in parts.values() for y in (part[1], part[3])])
        largest = int(labels.max()) if len(labels) else 0
        problem = f"there is a label {largest}, more than records"
        plausible = classes is not None or largest < max(len(labels), 1)
        check(plausible, "federation", problem, "check which column is the label", DataError)
        return cls(
            shards=lay_out(parts),
            classes=classes or largest + 1,
            inputs=NUMBERS if tokens is None else Tokens(tokens),
            budgets=budgets or {},
            client_settings=client_settings or {},
        )

    @classmethod
    def from_torch(cls, clients: Mapping[str, Any], **options: Any) -> Federation:
        """Build from one map-style torch dataset of (features, label) per client.

        ``options`` are those of :meth:`from_arrays`, here and in :meth:`from_files`.
        """
        arrays = {}
        for client, dataset in clients.items():
            items = [dataset[i] for i in range(len(dataset))]
            where, remedy = f"client '{client}'", "leave it out of the federation"
            check(bool(items), where, "has no data", remedy, DataError)
            features = torch.stack([torch.as_tensor(x) for x, _ in items])
            arrays[client] = features, torch.tensor([int(y) for _, y in items])
        return cls.from_arrays(arrays, **options)

    @classmethod
    def from_files(
        cls, folder: Path | str, *, label: str | None = None, **options: Any
    ) -> Federation:
        """Build from a folder with one CSV or Parquet file per client.

        A file's name is its client's id. ``label`` names the column of the labels; without it, the
        last column is taken.
        """
        return cls.from_arrays(read_folder(Path(folder), label), **options)

    @classmethod
    def from_dataset(
        cls, dataset: Dataset, partition: Partition, clients: int | None, seed: PublicSeed
    ) -> Federation:
        """Share out a named data set among ``clients`` (20 if None), by a public seed.

        With a natural partition clients keep their names, and ``clients`` of them are drawn (all if
        None). A data set without a test part sets a fifth of every class aside.
        """
        if partition.kind == "natural":
            shards = _natural(dataset, partition.records, clients, seed)
        else:
            shards = _shared_out(dataset, partition, 20 if clients is None else clients, seed)
        return cls(shards=shards, classes=dataset.classes, inputs=dataset.inputs)


def _shared_out(
    dataset: Dataset, partition: Partition, count: int, seed: PublicSeed
) -> dict[str, Shard]:
    """Split a data set by a partition; clients are named ``client-0``, ``client-1`` and so on.

    Every client's test records have the label mix of its training records.
    """
    features, labels, test_features, test_labels = _train_and_test(dataset, seed.child("test"))
    usable = np.arange(len(labels))
    if dataset.test_silos is not None:  # not the texts kept for testing
        spans = sorted((dataset.silos or {}).items())
        usable = np.concatenate([np.arange(*span) for _, span in spans])
    known = labels.numpy()[usable]
    train = partition.split(known, count, seed.child("partition"))
    test = matching_test(train, known, test_labels.numpy(), seed.child("matching"))
    # Records are laid out client by client: batches of many clients are then one look-up.
    own, own_test = usable[np.concatenate(train)], np.concatenate(test)
    records = Records(features[own], labels[own])
    test_records = Records(test_features[own_test], test_labels[own_test])
    digits = len(str(count - 1))
    return {
        f"client-{i:0{digits}d}": Shard(train=records, span=a, test=test_records, test_span=b)
        for i, (a, b) in enumerate(zip(spans_of(train), spans_of(test), strict=True))
    }


def _natural(
    dataset: Dataset, records: int | None, clients: int | None, seed: PublicSeed
) -> dict[str, Shard]:
    """The data set's own silos, or some of them; each client keeps at most ``records`` records."""
    silos, kinds = dataset.silos or {}, "use iid, shards, classes, dirichlet or unequal"
    check(bool(silos), "partition", f"'{dataset.name}' has no natural silos", kinds)
    names = sorted(silos)
    if clients is not None:  # some of them, by the public seed
        problem = f"'{dataset.name}' has {len(names)} natural silos, not {clients}"
        remedy = "name at most as many clients, or leave the number out"
        check(1 <= clients <= len(names), "partition", problem, remedy)
        chosen = seed.child("silos").numpy().choice(names, clients, replace=False)
        names = sorted(chosen.tolist())
    if dataset.test is not None and dataset.test_silos is not None:
        train, test = Records(dataset.features, dataset.labels), Records(*dataset.test)
        shards = {}
        for name in names:
            first, last = silos[name]
            span = first, last if records is None else min(last, first + records)
            test_span = dataset.test_silos[name]
            shards[name] = Shard(train=train, span=span, test=test, test_span=test_span)
        return shards
    parts: dict[str, Parts] = {}
    for name in names:
        own = slice(*silos[name])
        held, own_seed = (dataset.features[own], dataset.labels[own]), seed.child("split", name)
        x, y, test_x, test_y = split_off(name, *held, own_seed)
        parts[name] = (x[:records], y[:records], test_x, test_y)
    return lay_out(parts)


def _train_and_test(dataset: Dataset, seed: PublicSeed) -> Parts:
    """The data set's own test part, or a fifth of every class."""
    x, y = dataset.features, dataset.labels
    if dataset.test is not None:
        return x, y, *dataset.test
    where, problem = f"data set '{dataset.name}'", f"has {len(y)} records, too few for a test part"
    check(len(y) >= 5 * dataset.classes, where, problem, "use more", DataError)
    generator, mask = seed.numpy(), np.zeros(len(y), dtype=bool)
    for label in range(dataset.classes):
        members = generator.permutation(np.flatnonzero(y.numpy() == label))
        mask[members[: round(TEST_FRACTION * len(members))]] = True
    return x[~mask], y[~mask], x[mask], y[mask]
