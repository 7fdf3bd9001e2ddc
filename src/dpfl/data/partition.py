"""Who holds which record.

Every partition returns disjoint, non-empty index sets, one per client.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dpfl.core.checks import check, positive, whole_number
from dpfl.core.errors import DataError, unknown_name
from dpfl.core.random import PublicSeed

Indices = list[np.ndarray]
Rng = np.random.Generator
_DRAWS = 500


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A partition by name (``PARTITIONS``, or ``natural`` for a data set's own silos).

    ``shards_per_client``, ``classes_per_client`` and ``alpha`` belong to one kind each. ``records``
    limits (or fixes) how many records a client holds; nobody has fewer than ``smallest``.

    >>> labels = np.arange(6) % 2
    >>> [len(part) for part in Partition(kind="iid").split(labels, 3, PublicSeed(0))]
    [2, 2, 2]
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
        positive("partition", alpha=self.alpha)
        for name in ("shards_per_client", "classes_per_client", "smallest", "records"):
            if getattr(self, name) is not None:
                whole_number("partition", name, getattr(self, name))

    @property
    def least(self) -> int:
        """The fewest records that a client may hold before they are limited."""
        return max(self.records or 0, self.smallest)

    def split(self, labels: np.ndarray, clients: int, seed: PublicSeed) -> Indices:
        """Share out the records behind ``labels`` among so many clients.

        Returns each client's indices in ascending order. Partitions that leave somebody with too
        few records are refused.
        """
        check(clients >= 1, "partition", f"{clients} clients", "give at least 1 client")
        wanted, remedy = clients * self.least, f"use at most {len(labels) // self.least} clients"
        each = f"{clients} clients of at least {self.least} records need {wanted} records"
        problem = f"{each}, there are {len(labels)}"
        check(wanted <= len(labels), "partition", problem, remedy, DataError)
        generator = seed.numpy()
        parts = PARTITIONS[self.kind].split(self, labels, clients, generator)
        if self.records is not None:
            parts = [generator.permutation(part)[: self.records] for part in parts]
        for i, part in enumerate(parts):
            remedy = "use fewer clients or another partition"
            check(len(part) > 0, "partition", f"client {i} has no data", remedy, DataError)
        return [np.sort(part) for part in parts]


class Kind(NamedTuple):
    """How one kind of partition splits labels among clients, and what it is."""

    split: Callable[[Partition, np.ndarray, int, Rng], Indices]
    about: str


def _iid(law: Partition, labels: np.ndarray, clients: int, draw: Rng) -> Indices:
    """Equal shares in random order; what is left over belongs to nobody."""
    each = len(labels) // clients
    order = draw.permutation(len(labels))
    return [order[i * each : (i + 1) * each] for i in range(clients)]


def _shards(law: Partition, labels: np.ndarray, clients: int, draw: Rng) -> Indices:
    """McMahan et al. 2017: sort by label, cut into shards, deal ``shards_per_client`` to each."""
    count = clients * law.shards_per_client
    problem, remedy = f"{count} shards of {len(labels)} records", "use fewer clients or shards"
    check(count <= len(labels), "partition", problem, remedy, DataError)
    jitter = draw.permutation(len(labels))
    shards = np.array_split(jitter[np.argsort(labels[jitter], kind="stable")], count)
    deal = draw.permutation(count).reshape(clients, law.shards_per_client)
    return [np.concatenate([shards[j] for j in row]) for row in deal]


def _classes(law: Partition, labels: np.ndarray, clients: int, draw: Rng) -> Indices:
    """At most ``classes_per_client`` classes a client, dealt like cards.

    Every class is shared out equally among those who hold it.
    """
    known = np.unique(labels)
    each = min(law.classes_per_client, len(known))
    problem = f"{clients} clients of {each} classes leave some of {len(known)} classes to nobody"
    remedy = "use more clients or classes"
    check(clients * each >= len(known), "partition", problem, remedy, DataError)
    hands: list[list[int]] = [[] for _ in range(clients)]
    deck: list[int] = []
    for hand in hands:
        while len(hand) < each:
            fresh = next((k for k in deck if k not in hand), None)
            if fresh is None:
                deck.extend(draw.permutation(len(known)).tolist())
            else:
                hand.append(fresh)
                deck.remove(fresh)
    parts: list[Indices] = [[] for _ in range(clients)]
    for k, label in enumerate(known):
        holders = [part for part, hand in zip(parts, hands, strict=True) if k in hand]
        members = draw.permutation(np.flatnonzero(labels == label))
        for part, share in zip(holders, np.array_split(members, len(holders)), strict=True):
            part.append(share)
    return [np.concatenate(part) for part in parts]


def _dirichlet(law: Partition, labels: np.ndarray, clients: int, draw: Rng) -> Indices:
    """Each class is shared out by a Dirichlet(alpha) draw, redrawn until all have enough.

    A small alpha gives clients few classes each; a large one equal mixes.
    """
    for _ in range(_DRAWS):
        parts: list[Indices] = [[] for _ in range(clients)]
        for label in np.unique(labels):
            members = draw.permutation(np.flatnonzero(labels == label))
            shares = draw.dirichlet(np.full(clients, law.alpha))
            cuts = (np.cumsum(shares)[:-1] * len(members)).astype(int)
            for part, share in zip(parts, np.split(members, cuts), strict=True):
                part.append(share)
        whole = [np.concatenate(part) for part in parts]
        if min(map(len, whole)) >= law.least:
            return whole
    what = f"Dirichlet({law.alpha:g}) over {clients} clients leaves someone below {law.least}"
    remedy = "use a larger alpha, fewer clients or fewer records"
    raise DataError("partition", f"{what} records in {_DRAWS} draws", remedy)


def _unequal(law: Partition, labels: np.ndarray, clients: int, draw: Rng) -> Indices:
    """Sizes drawn from Dirichlet(alpha), labels IID, nobody below the least."""
    spare = len(labels) - clients * law.least
    shares = draw.dirichlet(np.full(clients, law.alpha))
    sizes = law.least + np.floor(spare * shares).astype(int)
    order = draw.permutation(len(labels))
    return np.split(order[: sizes.sum()], np.cumsum(sizes)[:-1])


_MCMAHAN = "sorted by label, cut into shards, shards_per_client each (McMahan et al.)"
PARTITIONS: dict[str, Kind] = {
    "iid": Kind(_iid, "equal random shares"),
    "shards": Kind(_shards, _MCMAHAN),
    "classes": Kind(_classes, "at most classes_per_client classes a client"),
    "dirichlet": Kind(_dirichlet, "every class shared out by Dirichlet(alpha)"),
    "unequal": Kind(_unequal, "sizes from Dirichlet(alpha), labels IID"),
}


def matching_test(
    train: Indices, train_labels: np.ndarray, test_labels: np.ndarray, seed: PublicSeed
) -> Indices:
    """Share out test records so that each client's have the label mix of its training records.

    A client that would go without borrows one record of the label that it holds most.
    """
    generator = seed.numpy()
    parts: list[list[int]] = [[] for _ in train]
    for label in np.unique(test_labels):
        held = np.array([np.sum(train_labels[part] == label) for part in train], dtype=float)
        members = generator.permutation(np.flatnonzero(test_labels == label))
        if held.sum() > 0:
            cuts = np.round(np.cumsum(held / held.sum())[:-1] * len(members)).astype(int)
            for part, share in zip(parts, np.split(members, cuts), strict=True):
                part.extend(share.tolist())
    for i, part in enumerate(parts):
        if not part:
            favourite = np.bincount(train_labels[train[i]]).argmax()
            pool = np.flatnonzero(test_labels == favourite)
            part.append(int(generator.choice(pool if len(pool) else np.arange(len(test_labels)))))
    return [np.sort(np.array(part, dtype=np.int64)) for part in parts]
