"""Where records lie: in one storage, of which every client holds a stretch.

A federation of 100,000 clients is then a few tensors and 100,000 pairs of numbers, and the batches
of many clients are one look-up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dpfl.core.checks import check
from dpfl.core.errors import DataError
from dpfl.data.inputs import NUMBERS, Inputs
from dpfl.tasks import Classification, Task

check_data = partial(check, kind=DataError)
"""Refuse data unless they are good: where, what is wrong, what to do."""

Span = tuple[int, int]
_AT_ONCE = 512  # records whose features are computed together
Parts = tuple[Tensor, Tensor, Tensor, Tensor]
"""One client's training features and labels, then its test features and labels."""


@dataclass(frozen=True)
class Records:
    """``features`` with their ``labels``, in one storage of which every client has a stretch."""

    features: Tensor
    labels: Tensor

    def __repr__(self) -> str:
        """Say how much there is, and show none of it."""
        return f"Records({len(self.labels)})"

    def mapped(self, make: Callable[[Tensor], Tensor], spans: Sequence[Span]) -> Records:
        """Return records whose features ``make`` computes, in the stretches that are held.

        They are computed for a few hundred records at a time; elsewhere there are zeros.
        """
        held = torch.zeros(len(self.labels), dtype=torch.bool)
        for first, last in spans:
            held[first:last] = True
        found: Tensor | None = None
        with torch.no_grad():
            for some in torch.split(held.nonzero()[:, 0], _AT_ONCE):
                rows = make(self.features[some])
                if found is None:
                    found = rows.new_zeros(len(held), *rows.shape[1:])
                found[some] = rows
        if found is None:
            found = make(self.features[:0])
        return Records(found, self.labels)

    def token_outside(self, span: Span, count: int) -> int | None:
        """A token of a stretch that is outside 0..count - 1, if there is one.

        The range of the whole storage is computed once: it settles most stretches.
        """
        low, high = self._token_range
        if low < 0 or high >= count:
            low, high = _range(self.features[slice(*span)])
        return low if low < 0 else high if high >= count else None

    @cached_property
    def _token_range(self) -> Span:
        return _range(self.features)

    @cached_property
    def digest(self) -> bytes:
        """A digest of the bytes behind the records and how they lie there.

        Windows of a text overlap: they are a view of one storage, which is read as a whole.
        """
        digest = hashlib.sha256()
        for tensor in (self.features, self.labels):
            geometry = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
            digest.update("".join(map(str, geometry)).encode())
            storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            if tensor.is_contiguous():  # its own part: a file may hold those of many clients
                first, size = tensor.storage_offset(), tensor.element_size()
                storage = storage[first * size : (first + tensor.numel()) * size]
            digest.update(storage.numpy().data)
        return digest.digest()


def _range(values: Tensor) -> Span:
    """Smallest and largest of whole numbers (0, -1 if there are none)."""
    if values.numel() == 0:
        return 0, -1
    if values.ndim == 2 and values.stride() == (1, 1):
        # Windows of one text: the text itself will do.
        values = values.as_strided((len(values) + values.shape[1] - 1,), (1,))
    low, high = torch.aminmax(values)
    return int(low), int(high)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One client's records: what it trains on (``train``), and keeps for testing (``test``).

    ``span`` and ``test_span`` are its stretches of storage that it may share with others.
    """

    train: Records
    span: Span
    test: Records
    test_span: Span

    @classmethod
    def of(
        cls, features: Tensor, labels: Tensor, test_features: Tensor, test_labels: Tensor
    ) -> Shard:
        """Hold records that nobody else shares.

        >>> Shard.of(torch.zeros(3, 2), torch.zeros(3), torch.zeros(1, 2), torch.zeros(1))
        Shard(3 training and 1 test records)
        """
        train, test = Records(features, labels), Records(test_features, test_labels)
        spans = (0, len(labels)), (0, len(test_labels))
        return cls(train=train, span=spans[0], test=test, test_span=spans[1])

    @property
    def features(self) -> Tensor:
        """What the client trains on."""
        return self.train.features[slice(*self.span)]

    @property
    def labels(self) -> Tensor:
        """The classes of what it trains on."""
        return self.train.labels[slice(*self.span)]

    @property
    def test_features(self) -> Tensor:
        """What it keeps for testing."""
        return self.test.features[slice(*self.test_span)]

    @property
    def test_labels(self) -> Tensor:
        """The classes of what it keeps for testing."""
        return self.test.labels[slice(*self.test_span)]

    @property
    def examples(self) -> int:
        """Training records: the number a client declares."""
        return self.span[1] - self.span[0]

    def __repr__(self) -> str:
        """Say how much there is, and show none of it."""
        tests = self.test_span[1] - self.test_span[0]
        return f"Shard({self.examples} training and {tests} test records)"


def spans_of(parts: Sequence[Sized]) -> list[Span]:
    """Where each of the ``parts`` begins and ends when all lie one after the other.

    >>> spans_of(["abc", "de"])
    [(0, 3), (3, 5)]
    """
    return list(pairwise(np.cumsum([0, *map(len, parts)]).tolist()))


def lay_out(parts: Mapping[str, Parts], *, copy: bool = True) -> dict[str, Shard]:
    """Lay the clients' ``parts`` into one storage: batches of many clients are then one look-up.

    Without ``copy`` they stay where they are, as memory-mapped records must.
    """
    if not copy:
        return {name: Shard.of(*own) for name, own in parts.items()}
    features, labels, test_features, test_labels = zip(*parts.values(), strict=True)
    train = Records(torch.cat(features), torch.cat(labels))
    test = Records(torch.cat(test_features), torch.cat(test_labels))
    spans = zip(parts, spans_of(labels), spans_of(test_labels), strict=True)
    return {
        name: Shard(train=train, span=span, test=test, test_span=own) for name, span, own in spans
    }


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Records (``features``) with ``labels``, as they are published under a ``name``.

    ``classes`` is how many classes the labels have; a data set whose targets are no classes has a
    ``task`` instead. ``inputs`` says how stored records become a model's input. ``test`` is the
    data set's own test part, if it has one. ``silos`` are its natural clients, if it has any: who
    holds which stretch of the records (and of the test part, in ``test_silos``).
    """

    name: str
    features: Tensor
    labels: Tensor
    classes: int = 1
    task: Task | None = None
    inputs: Inputs = NUMBERS
    test: tuple[Tensor, Tensor] | None = None
    silos: Mapping[str, Span] | None = None
    test_silos: Mapping[str, Span] | None = None

    def __repr__(self) -> str:
        """Say what it is, and show no record."""
        shape = tuple(self.features.shape[1:])
        return (
            f"Dataset('{self.name}', {len(self.features)} records of shape {shape}, {self.learned})"
        )

    @property
    def learned(self) -> Task:
        """What is learned from it, unless one says otherwise."""
        return self.task or Classification(classes=self.classes)

    def as_task(self, task: Task | None) -> Dataset:
        """Return the same records with targets as ``task`` takes them (None: as they are)."""
        if task is None:
            return self
        where, (x, y) = f"data set '{self.name}'", self.test or (None, None)
        labels = task.check_targets(where, self.labels.numpy())
        test = None if x is None or y is None else (x, task.check_targets(where, y.numpy()))
        own = task.resolve([labels] if test is None else [labels, test[1]])
        return replace(self, labels=labels, test=test, task=own)

    def strata(self, targets: Tensor) -> np.ndarray:
        """The class of each record, by which a law may share records out; 0 where none are."""
        labels = targets.numpy()
        return labels if self.task is None else _classes_of(labels)


def _classes_of(targets: np.ndarray) -> np.ndarray:
    """Zeros and ones of a yes-or-no task are classes; other numbers are none."""
    flat = targets.ndim == 1 and bool(np.all(targets == np.round(targets))) and targets.size > 0
    few = flat and targets.min() >= 0 and targets.max() < min(1000, len(targets))
    return targets.astype(np.int64) if few else np.zeros(len(targets), dtype=np.int64)
