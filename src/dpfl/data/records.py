"""Where records lie: in one storage, of which every client holds a stretch.

A federation of 100,000 clients is then a few tensors and 100,000 pairs of numbers, and the batches
of many clients are one look-up.
"""

from __future__ import annotations

import hashlib
import math
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
from dpfl.numerics.clipping import LARGEST_NORM, within_bounds
from dpfl.tasks import Classification, Task

check_data = partial(check, kind=DataError)
"""Refuse data unless they are good: where, what is wrong, what to do."""

Span = tuple[int, int]
_AT_ONCE = 512  # records whose features are computed together


@dataclass(frozen=True)
class Records:
    """``features`` with their ``labels``, in one storage of which every client has a stretch.

    ``live`` says which of them count, and which are blanks (:mod:`dpfl.data.units`); None where all
    count. ``marks`` tell units apart, where they are known.
    """

    features: Tensor
    labels: Tensor
    live: Tensor | None = None
    marks: tuple[bytes, ...] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        """Say how much there is, and show none of it."""
        return f"Records({len(self)})"

    def taken(self, places: Tensor) -> Records:
        """Return the records at these places."""
        marks = self.marks
        live = self.live
        return Records(
            self.features[places],
            self.labels[places],
            None if live is None else live[places],
            None if marks is None else tuple(marks[row] for row in places.tolist()),
        )

    @classmethod
    def joined(cls, parts: Sequence[Records]) -> Records:
        """Lay records one after the other."""
        live = marks = None
        if any(part.live is not None for part in parts):
            live = torch.cat([part.counted for part in parts])
        if all(part.marks is not None for part in parts):
            marks = tuple(mark for part in parts for mark in part.marks or ())
        features = torch.cat([part.features for part in parts])
        return cls(features, torch.cat([part.labels for part in parts]), live, marks)

    @property
    def counted(self) -> Tensor:
        """Which records count."""
        everyone = torch.ones(len(self.labels), dtype=torch.bool)
        return everyone if self.live is None else self.live

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
        return replace(self, features=found)

    def token_outside(self, span: Span, count: int) -> int | None:
        """A token of a stretch that is outside 0..count - 1, if there is one.

        The range of the whole storage is computed once: it settles most stretches.
        """
        low, high = self._token_range
        if low < 0 or high >= count:
            low, high = _range(self.features[slice(*span)])
        return low if low < 0 else high if high >= count else None

    def too_large(self, span: Span) -> bool:
        """Whether a record of a stretch is not :func:`within_bounds`, and so counts as zero.

        The largest number of the whole storage is found once: it settles most stretches.
        """
        return not (self._bounded or bool(within_bounds(self.features[slice(*span)]).all()))

    @cached_property
    def _bounded(self) -> bool:
        """Whether no record can be too large."""
        if not self.features.is_floating_point():
            return True
        largest = torch.linalg.vector_norm(self.features, ord=math.inf)
        return bool(largest * math.sqrt(self.features[:1].numel()) <= LARGEST_NORM)

    @cached_property
    def _token_range(self) -> Span:
        return _range(self.features)

    @cached_property
    def digest(self) -> bytes:
        """A digest of the bytes behind the records and how they lie there.

        Windows of a text overlap: they are a view of one storage, which is read as a whole.
        """
        digest = hashlib.sha256()
        for tensor in (self.features, self.labels, *([] if self.live is None else [self.live])):
            geometry = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
            digest.update("".join(map(str, geometry)).encode())
            storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            if tensor.is_contiguous():  # its own part: a file may hold those of many clients
                first = tensor.storage_offset()
                size = tensor.element_size()
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
        cls,
        features: Tensor,
        labels: Tensor,
        test_features: Tensor,
        test_labels: Tensor,
        *,
        live: Tensor | None = None,
        test_live: Tensor | None = None,
    ) -> Shard:
        """Hold records that nobody else shares; ``live`` and ``test_live`` say which count.

        >>> Shard.of(torch.zeros(3, 2), torch.zeros(3), torch.zeros(1, 2), torch.zeros(1))
        Shard(3 training and 1 test records)
        """
        train = Records(features, labels, live)
        test = Records(test_features, test_labels, test_live)
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
    def live(self) -> Tensor | None:
        """Which of the records that it trains on count; None where all do."""
        return None if self.train.live is None else self.train.live[slice(*self.span)]

    @property
    def test_live(self) -> Tensor | None:
        """Which of the records that it keeps for testing count; None where all do."""
        return None if self.test.live is None else self.test.live[slice(*self.test_span)]

    @cached_property
    def memory(self) -> dict[str, tuple[object, Tensor]]:
        """What follows from the training records alone, and was worked out in an earlier round."""
        return {}

    def without_blanks(self) -> Shard:
        """Return the records that count: for eyes that may see everything."""
        if self.live is None and self.test_live is None:
            return self
        parts = (
            Records(self.features, self.labels, self.live),
            Records(self.test_features, self.test_labels, self.test_live),
        )
        train, test = (part.taken(part.counted.nonzero()[:, 0]) for part in parts)
        return Shard.of(train.features, train.labels, test.features, test.labels)

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
        return {
            name: Shard(train=train, span=(0, len(train)), test=test, test_span=(0, len(test)))
            for name, (train, test) in parts.items()
        }
    trains, tests = zip(*parts.values(), strict=True)
    train = Records.joined(trains)
    test = Records.joined(tests)
    spans = zip(parts, spans_of(trains), spans_of(tests), strict=True)
    return {
        name: Shard(train=train, span=span, test=test, test_span=test_span)
        for name, span, test_span in spans
    }


Parts = tuple[Records, Records]
"""One client's training and test records."""


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
