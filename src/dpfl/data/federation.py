"""A federation: who holds which records, and the budget of each client.

It is built from arrays, torch datasets, files or a named data set; whatever cannot be used is
refused when it is built, with the client's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from dpfl.core.checks import check, whole_number
from dpfl.core.random import PublicSeed
from dpfl.core.types import Budget, ClientSettings, Unit, unit_called
from dpfl.data.arguments import check_kind, per_client
from dpfl.data.arrays import ENCODE, client_parts, split_end, split_off, with_classes, with_declared
from dpfl.data.building import Sources
from dpfl.data.inputs import NUMBERS, Inputs, Tokens
from dpfl.data.partition import Partition
from dpfl.data.records import Dataset, Records, Shard, check_data, lay_out
from dpfl.data.schema import Schema
from dpfl.data.sources import client_names, is_mapped, renamed
from dpfl.data.units import SPLIT_VERSION, UnitKey, Units, marks_of
from dpfl.tasks import Classification, Task, make_task


@dataclass(frozen=True, kw_only=True)
class Federation(Sources):
    """Clients by id, with their records, budgets and settings.

    ``shards`` are the clients' records, all of one shape, with targets as ``task`` takes them.
    ``inputs`` says how stored records become a model's input. ``budgets`` and ``client_settings``
    need not name every client; one budget or one set of settings is for all. ``stratified`` says
    that labels decided who holds a record or tests on it. One record then decides which others are
    trained on, and neighbouring federations may differ in more than one: runs on them are flagged.
    So are those whose task was not declared as a whole: ``inferred`` names the setting that was
    counted in the records.

    ``unit`` is whose presence is hidden by what protects single units of the data: a record, or by
    its own word a person, whose records are one unit. ``schema`` says how features were made.

    >>> clients = {"a": ([[0.0], [1.0]] * 5, [0, 1] * 5), "b": ([[0.2], [0.9]] * 5, [0, 1] * 5)}
    >>> Federation.from_arrays(clients)
    Federation(2 clients, records of shape (1,), 2 classes)
    """

    shards: Mapping[str, Shard]
    task: Task
    inputs: Inputs = NUMBERS
    budgets: Mapping[str, Budget] = field(default_factory=dict)
    client_settings: Mapping[str, ClientSettings] = field(default_factory=dict)
    stratified: bool = False
    inferred: str = ""
    unit: Unit = Unit.RECORD
    schema: Schema | None = None

    def __post_init__(self) -> None:
        check_data(bool(self.shards), "federation", "has no clients", "give at least one")
        for name, kind in (("budgets", Budget), ("client_settings", ClientSettings)):
            by_client = per_client(name, getattr(self, name), kind, self.shards)
            object.__setattr__(self, name, by_client)
        good: dict[int, bool] = {}  # whether a whole storage has targets of the task
        for client, shard in self.shards.items():
            where = f"client '{client}'"
            check_data(shard.examples > 0, where, "has no data", "leave it out of the federation")
            for records, span in ((shard.train, shard.span), (shard.test, shard.test_span)):
                if id(records) not in good:
                    good[id(records)] = self.task.outside(records.labels) is None
                if not good[id(records)]:
                    odd = self.task.outside(records.labels[slice(*span)])
                    check_data(odd is None, where, odd or "", "number the classes from 0")
                if isinstance(self.inputs, Tokens):
                    count = self.inputs.vocabulary
                    token = records.token_outside(span, count)
                    check_data(
                        token is None, where, f"has token {token}, outside 0..{count - 1}", ENCODE
                    )

    def __repr__(self) -> str:
        """Say who there is, and show no record."""
        shape = f"{self.unit}s of shape {self.feature_shape}"
        return f"Federation({len(self.shards)} clients, {shape}, {self.task})"

    @property
    def ids(self) -> tuple[str, ...]:
        """Clients in canonical order."""
        return tuple(sorted(self.shards))

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of one unit as it is stored: a record, or a person's records together."""
        return tuple(next(iter(self.shards.values())).features.shape[1:])

    @property
    def record_shape(self) -> tuple[int, ...]:
        """Shape of one record, which a model takes."""
        return self.task.record_shape(self.feature_shape)

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Shape of one target; empty where it is one number."""
        return tuple(next(iter(self.shards.values())).labels.shape[1:])

    @property
    def classes(self) -> int:
        """How many numbers the model gives for a record: of classification, the classes."""
        return self.task.width

    def test_set(self) -> tuple[Tensor, Tensor]:
        """All clients' test features and labels together: for simulations, which may look."""
        shards = [self.shards[client].without_blanks() for client in self.ids]
        first = shards[0]
        last = shards[-1]
        if all(a.test is b.test and a.test_span[1] == b.test_span[0] for a, b in pairwise(shards)):
            whole = slice(first.test_span[0], last.test_span[1])
            return first.test.features[whole], first.test.labels[whole]
        labels = torch.cat([shard.test_labels for shard in shards])
        return torch.cat([shard.test_features for shard in shards]), labels

    def fingerprint(self) -> str:
        """Name the data: equal fingerprints mean equal records, held by the same clients."""
        digest = hashlib.sha256(f"{SPLIT_VERSION} {self.inputs!r}".encode())
        if self.task != Classification(classes=self.task.width):
            digest.update(repr(self.task.to_dict()).encode())
        if self.unit is not Unit.RECORD:
            digest.update(f"per {self.unit}".encode())
        for client in self.ids:
            shard = self.shards[client]
            digest.update(f"{client}\x1f{shard.span}{shard.test_span}".encode())
            digest.update(shard.train.digest + shard.test.digest)
        return digest.hexdigest()

    def with_budgets(self, budgets: Mapping[Any, Budget] | Budget) -> Federation:
        """Return the same clients with these budgets, which replace those they had.

        ``budgets`` are by client, or one for all; clients that were named by numbers may be named
        so again.
        """
        numbered = {int(client): client for client in self.ids if client.isdecimal()}
        return replace(self, budgets=renamed(budgets, numbered))

    def with_validation(self, seed: PublicSeed) -> Federation:
        """Set a fifth of each client's training records aside by a ``seed``, and test on those.

        The test records are not looked at. Of windows of a text, which overlap, the last fifth is
        set aside.
        """
        if all(shard.train.features.is_contiguous() for shard in self.shards.values()):
            parts = {}
            for client in self.ids:
                shard = self.shards[client]
                key = UnitKey.of(seed.child("validation", client))
                if shard.train.marks is None:
                    marks = marks_of(shard.features, shard.labels, key)
                else:
                    marks = shard.train.marks[slice(*shard.span)]
                records = Records(shard.features, shard.labels, shard.live, marks)
                parts[client] = split_off(client, records, key)
            return replace(self, shards=lay_out(parts))
        shards = {}
        for client, shard in self.shards.items():
            span, test_span = split_end(client, shard.span)
            shards[client] = replace(shard, span=span, test=shard.train, test_span=test_span)
        return replace(self, shards=shards)

    @classmethod
    def from_arrays(
        cls,
        clients: Mapping[Any, Sequence[Any] | Units],
        *,
        budgets: Mapping[Any, Budget] | Budget | None = None,
        client_settings: Mapping[Any, ClientSettings] | ClientSettings | None = None,
        task: Task | str | Mapping[str, Any] | None = None,
        classes: int | None = None,
        tokens: int | None = None,
        stratified: bool = False,
        seed: int = 0,
        unit: str = Unit.RECORD,
        schema: Schema | None = None,
        key: UnitKey | None = None,
    ) -> Self:
        """Build from arrays: numpy, torch, lists or sparse matrices.

        ``clients`` is ``{id: (features, targets)}`` or ``{id: (features, targets, test_features,
        test_targets)}``. Without a test part, a fifth of each client's records is set aside by
        their hashes under a ``key``, which follows from ``seed`` unless it is given; with
        ``stratified``, which is flagged, a fifth of each class.
        Features are numbers; with ``tokens`` (the size of the vocabulary) they are whole numbers
        for an embedding. ``task`` says what is learned (:mod:`dpfl.tasks`), by name or as an
        object; left out, it is classification. Its labels are 0..``classes`` - 1; without
        ``classes``, the largest label decides, which is flagged, and a class without a record is
        refused.
        ``budgets`` and ``client_settings`` are by client.
        Clients that are numbered are named by their numbers, with leading zeros. ``unit`` is the
        word for what a record is about, where each is about another one, such as "patient".
        ``schema`` says how the features were made, and travels with the model.

        Features in a memory-mapped file stay there. Of these the last fifth is set aside, and at
        most 10,000 records; a file of several clients is best given as slices of one array.

        >>> arrays = ([[0.0], [1.0]] * 5, [0, 1] * 5)
        >>> federation = Federation.from_arrays({"a": arrays, "b": arrays})
        >>> federation.ids, federation.shards["a"]
        (('a', 'b'), Shard(8 training and 2 test records))
        """
        for name, count in (("tokens", tokens), ("classes", classes)):
            if count is not None:
                whole_number("federation", name, count)
        check(
            isinstance(clients, Mapping),
            "federation",
            f"clients are a {type(clients).__name__}",
            "give {client: arrays}",
        )
        check_data(bool(clients), "federation", "has no clients", "give at least one")
        names = client_names(clients)
        clients = {names[client]: arrays for client, arrays in clients.items()}
        learned = with_classes(make_task(task), classes)
        build = partial(
            client_parts, task=learned, tokens=tokens is not None, stratified=stratified
        )
        parts = {}
        for client, arrays in sorted(clients.items(), key=lambda pair: str(pair[0])):
            public = UnitKey.of(PublicSeed(seed).child("split", client))
            parts[client] = build(client, arrays, key=key or public)
        shapes = {tuple(r.features.shape[1:]) for part in parts.values() for r in part}
        check_data(
            len(shapes) == 1,
            "federation",
            f"clients have records of different shapes {sorted(shapes)}",
            "use one shape",
        )
        shapes = {tuple(r.labels.shape[1:]) for part in parts.values() for r in part}
        check_data(
            len(shapes) == 1,
            "federation",
            f"clients have targets of different shapes {sorted(shapes)}",
            "use one shape",
        )
        return cls(
            shards=lay_out(parts, copy=not any(map(_is_mapped, clients.values()))),
            task=learned.resolve([r.labels for part in parts.values() for r in part]),
            inputs=NUMBERS if tokens is None else Tokens(tokens),
            budgets=renamed(budgets, names),
            client_settings=renamed(client_settings, names),
            stratified=stratified and any(map(_is_whole, clients.values())),
            inferred=learned.inferred,
            unit=unit_called(unit),
            schema=schema,
        )

    @classmethod
    def from_dataset(
        cls,
        dataset: Dataset,
        partition: Partition,
        clients: int | None,
        seed: PublicSeed,
        task: Task | None = None,
    ) -> Federation:
        """Share out a ``dataset`` among ``clients`` (20 if None), by a public ``seed``.

        ``task`` is what is learned from it, the data set's own task if None. ``partition`` says by
        which law records are shared out.

        With a natural partition clients keep their names, and ``clients`` of them are drawn (all if
        None). A data set without a test part sets a fifth of its records aside.
        """
        check_kind("dataset", dataset, Dataset)
        check_kind("partition", partition, Partition)
        check_kind("seed", seed, PublicSeed)
        if task is not None and dataset.task is None:
            task = with_declared(task, dataset.classes)
        dataset = dataset.as_task(task)
        shards = partition.shards(dataset, clients, seed)
        return cls(
            shards=shards,
            task=dataset.learned,
            inputs=dataset.inputs,
            stratified=partition.by_label,
            inferred="" if task is None else task.inferred,
        )


def _is_mapped(arrays: Sequence[Any] | Units) -> bool:
    return not isinstance(arrays, Units) and is_mapped(arrays[0])


def _is_whole(arrays: Sequence[Any] | Units) -> bool:
    """Whether a client gave no test part of its own."""
    return isinstance(arrays, Units) or len(arrays) == 2
