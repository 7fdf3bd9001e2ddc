"""Who holds which record. Every law returns disjoint, non-empty index sets, one a client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dpfl.core.errors import ConfigurationError, DataError, unknown_name
from dpfl.core.random import PublicSeed

Indices = list[np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A law by name with its one knob; ``records`` limits (or fixes) how many records a client
    holds.
    """

    kind: str = "iid"
    shards_per_client: int = 2
    classes_per_client: int = 2
    alpha: float = 1.0
    records: int | None = None
    smallest: int = 2

    def __post_init__(self) -> None:
        if self.kind not in PARTITIONS and self.kind != "natural":
            raise unknown_name("partition", "partition", self.kind, [*PARTITIONS, "natural"])
        if not (np.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigurationError("partition", f"alpha = {self.alpha}", "give an alpha above 0")
        counts = [self.shards_per_client, self.classes_per_client, self.smallest]
        if min(counts + ([] if self.records is None else [self.records])) < 1:
            raise ConfigurationError(
                "partition", "a count below 1 was given", "give counts of at least 1"
            )

    def split(self, labels: np.ndarray, clients: int, seed: PublicSeed) -> Indices:
        """Share out the records behind ``labels``."""
        if clients < 1:
            raise ConfigurationError("partition", f"{clients} clients", "give at least 1 client")
        each = max(self.records or 0, self.smallest)
        wanted = clients * each
        if wanted > len(labels):
            raise DataError(
                "partition",
                f"{clients} clients of at least {each} records need {wanted} records, there are {len(labels)}",
                f"use at most {len(labels) // each} clients",
            )
        generator = seed.numpy()
        parts = PARTITIONS[self.kind][0](self, labels, clients, generator)
        if self.records is not None:
            parts = [generator.permutation(part)[: self.records] for part in parts]
        empty = next((i for i, part in enumerate(parts) if len(part) == 0), None)
        if empty is not None:
            raise DataError(
                "partition", f"client {empty} has no data", "use fewer clients or another partition"
            )
        return [np.sort(part) for part in parts]


def _iid(
    law: Partition, labels: np.ndarray, clients: int, generator: np.random.Generator
) -> Indices:
    each = len(labels) // clients
    order = generator.permutation(len(labels))
    return [order[i * each : (i + 1) * each] for i in range(clients)]


def _shards(
    law: Partition, labels: np.ndarray, clients: int, generator: np.random.Generator
) -> Indices:
    """McMahan et al. 2017: sort by label, cut into shards, deal ``shards_per_client`` to each."""
    count = clients * law.shards_per_client
    if count > len(labels):
        raise DataError(
            "partition", f"{count} shards of {len(labels)} records", "use fewer clients or shards"
        )
    jitter = generator.permutation(len(labels))
    order = jitter[np.argsort(labels[jitter], kind="stable")]
    shards = np.array_split(order, count)
    deal = generator.permutation(count).reshape(clients, law.shards_per_client)
    return [np.concatenate([shards[j] for j in row]) for row in deal]


def _classes(
    law: Partition, labels: np.ndarray, clients: int, generator: np.random.Generator
) -> Indices:
    """At most ``classes_per_client`` classes a client; every class is shared out equally among
    those who hold it.
    """
    known = np.unique(labels)
    c = min(law.classes_per_client, len(known))
    if clients * c < len(known):
        raise DataError(
            "partition",
            f"{clients} clients of {c} classes leave some of {len(known)} classes to nobody",
            "use more clients or classes",
        )
    hand: list[list[int]] = []
    deck: list[int] = []
    for _ in range(clients):
        mine: list[int] = []
        while len(mine) < c:
            fresh = [k for k in deck if k not in mine]
            if not fresh:
                deck.extend(generator.permutation(len(known)).tolist())
                continue
            mine.append(fresh[0])
            deck.remove(fresh[0])
        hand.append(mine)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for k, label in enumerate(known):
        holders = [i for i in range(clients) if k in hand[i]]
        pieces = np.array_split(
            generator.permutation(np.flatnonzero(labels == label)), len(holders)
        )
        for i, piece in zip(holders, pieces, strict=True):
            parts[i].append(piece)
    return [np.concatenate(p) for p in parts]


def _dirichlet(
    law: Partition, labels: np.ndarray, clients: int, generator: np.random.Generator
) -> Indices:
    """Each class is shared out by a Dirichlet(alpha) draw; redrawn until nobody has fewer than
    ``smallest``.
    """
    floor = max(law.records or 0, law.smallest)
    for _ in range(500):
        parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
        for label in np.unique(labels):
            members = generator.permutation(np.flatnonzero(labels == label))
            cuts = (
                np.cumsum(generator.dirichlet(np.full(clients, law.alpha)))[:-1] * len(members)
            ).astype(int)
            for part, piece in zip(parts, np.split(members, cuts), strict=True):
                part.append(piece)
        whole = [np.concatenate(part) for part in parts]
        if min(map(len, whole)) >= floor:
            return whole
    raise DataError(
        "partition", f"Dirichlet({law.alpha:g}) over {clients} clients leaves someone below {floor} records in 500 draws",
        "use a larger alpha, fewer clients or fewer records",
    )  # fmt: skip


def _unequal(
    law: Partition, labels: np.ndarray, clients: int, generator: np.random.Generator
) -> Indices:
    """Sizes drawn from Dirichlet(alpha), labels IID, nobody below ``smallest``."""
    floor = max(law.records or 0, law.smallest)
    spare = len(labels) - clients * floor
    sizes = floor + np.floor(spare * generator.dirichlet(np.full(clients, law.alpha))).astype(int)
    order = generator.permutation(len(labels))
    return np.split(order[: sizes.sum()], np.cumsum(sizes)[:-1])


Law = Callable[[Partition, np.ndarray, int, np.random.Generator], Indices]
PARTITIONS: dict[str, tuple[Law, str]] = {
    "iid": (_iid, "equal random shares"),
    "shards": (
        _shards,
        "sorted by label, cut into shards, shards_per_client each (McMahan et al.)",
    ),
    "classes": (_classes, "at most classes_per_client classes a client"),
    "dirichlet": (_dirichlet, "every class shared out by Dirichlet(alpha)"),
    "unequal": (_unequal, "sizes from Dirichlet(alpha), labels IID"),
}


def matching_test(
    train: Indices, train_labels: np.ndarray, test_labels: np.ndarray, seed: PublicSeed
) -> Indices:
    """Share out test records so that every client's test part has the label mix of its train
    part.
    """
    generator = seed.numpy()
    parts: list[list[int]] = [[] for _ in train]
    held = np.array(
        [
            [np.sum(train_labels[part] == label) for label in np.unique(test_labels)]
            for part in train
        ],
        dtype=float,
    )
    for column, label in enumerate(np.unique(test_labels)):
        members = generator.permutation(np.flatnonzero(test_labels == label))
        total = held[:, column].sum()
        if total == 0:
            continue
        cuts = np.round(np.cumsum(held[:, column] / total)[:-1] * len(members)).astype(int)
        for part, piece in zip(parts, np.split(members, cuts), strict=True):
            part.extend(piece.tolist())
    for i, part in enumerate(
        parts
    ):  # nobody goes without: borrow one record of a label the client holds
        if not part:
            favourite = np.bincount(train_labels[train[i]]).argmax()
            pool = np.flatnonzero(test_labels == favourite)
            part.append(int(generator.choice(pool if len(pool) else np.arange(len(test_labels)))))
    return [np.sort(np.array(part, dtype=np.int64)) for part in parts]
