"""Where records lie: in one storage, of which every client holds a stretch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dpfl.data.inputs import NUMBERS, Inputs


@dataclass(frozen=True)
class Records:
    """Records with their labels, in one storage of which every client holds a stretch."""

    features: Tensor
    labels: Tensor

    def __repr__(self) -> str:
        """Say how much there is, and show none of it."""
        return f"Records({len(self.labels)})"

    @cached_property
    def label_range(self) -> tuple[int, int]:
        """Smallest and largest label (0, -1 if there is none)."""
        return extremes(self.labels)

    @cached_property
    def feature_range(self) -> tuple[int, int]:
        """Smallest and largest token (0, -1 if there is none)."""
        return extremes(self.features)

    @cached_property
    def digest(self) -> bytes:
        """Name the records: the bytes behind them and how they lie there (windows of a text
        overlap).
        """
        digest = hashlib.sha256()
        for tensor in (self.features, self.labels):
            geometry = (
                f"{tensor.dtype}{tuple(tensor.shape)}{tensor.stride()}{tensor.storage_offset()}"
            )
            digest.update(geometry.encode())
            storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            digest.update(storage.numpy().data)
        return digest.digest()


Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One client's records: what it trains on, and what it keeps for testing. Views of storage
    shared with others.
    """

    train: Records
    span: Span
    test: Records
    test_span: Span

    @classmethod
    def of(
        cls, features: Tensor, labels: Tensor, test_features: Tensor, test_labels: Tensor
    ) -> Shard:
        """Hold records that nobody else shares."""
        return cls(
            train=Records(features, labels),
            span=(0, len(labels)),
            test=Records(test_features, test_labels),
            test_span=(0, len(test_labels)),
        )

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

    def __repr__(self) -> str:
        """Say how much there is, and show none of it."""
        return f"Shard({self.examples} training and {self.test_span[1] - self.test_span[0]} test records)"

    @property
    def examples(self) -> int:
        """Training records: the number a client declares."""
        return self.span[1] - self.span[0]


def extremes(values: Tensor) -> tuple[int, int]:
    """Smallest and largest of whole numbers (0, -1 if there are none)."""
    if values.numel() == 0:
        return 0, -1
    if values.ndim == 2 and values.stride() == (
        1,
        1,
    ):  # windows of one text: the text itself will do
        values = values.as_strided((len(values) + values.shape[1] - 1,), (1,))
    low, high = torch.aminmax(values)
    return int(low), int(high)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Records with labels; with a test part of its own, or natural silos: who holds which stretch
    of the records.
    """

    name: str
    features: Tensor
    labels: Tensor
    classes: int
    inputs: Inputs = NUMBERS
    test: tuple[Tensor, Tensor] | None = None
    silos: Mapping[str, tuple[int, int]] | None = None
    test_silos: Mapping[str, tuple[int, int]] | None = None
