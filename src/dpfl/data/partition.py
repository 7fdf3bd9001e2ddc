"""Who holds which record of a named data set.

Every partition returns disjoint, non-empty index sets, one per client. A data set that comes with
silos (hospitals, roles of plays) can be taken by those instead. Draws depend on a public seed
alone, so that everyone who knows the experiment file can repeat them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpfl.core.checks import check, positive, whole_number
from dpfl.core.errors import DataError, unknown_name
from dpfl.core.random import PublicSeed
from dpfl.data.arrays import split_off
from dpfl.data.records import Dataset, Parts, Records, Shard, check_data, lay_out
from dpfl.data.units import UnitKey, marks_of

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
    def by_label(self) -> bool:
        """Whether labels decide who holds a record."""
        return self.kind in ("shards", "classes", "dirichlet")

    @property
    def least(self) -> int:
        """The fewest records that a client may hold before they are limited."""
        return max(self.records or 0, self.smallest)

    def split(self, labels: np.ndarray, clients: int, seed: PublicSeed) -> Indices:
        """Share out the records behind ``labels`` among so many clients.

        Returns each client's indices in ascending order; too few for someone are refused.
        """
        check(clients >= 1, "partition", f"{clients} clients", "give at least 1 client")
        wanted = clients * self.least
        problem = f"{clients} clients need {wanted} records at least, there are {len(labels)}"
        most = len(labels) // self.least
        each = len(labels) // clients
        remedies = [f"ask for at most {each} records per client"] * bool(self.records and each)
        remedies += [f"use at most {most} clients"] * bool(most)
        check_data(
            wanted <= len(labels),
            "partition",
            problem,
            ", or ".join(remedies) or "use fewer clients with fewer records each",
        )
        parts = PARTITIONS[self.kind].split(self, labels, clients, generator := seed.numpy())
        if self.records is not None:
            parts = [generator.permutation(part)[: self.records] for part in parts]
        check_data(
            all(map(len, parts)),
            "partition",
            "a client has no data",
            "use fewer clients or another partition",
        )
        return [np.sort(part) for part in parts]

    def shards(self, dataset: Dataset, clients: int | None, seed: PublicSeed) -> dict[str, Shard]:
        """Share out a data set among ``clients`` (20 if None), or take its natural silos.

        Clients are named ``client-0``, ``client-1`` and so on. Where labels decide who holds a
        record, a client's test records have the label mix of its training records. The partition is
        a part of a simulation: a neighbour is about the records that a client holds after it.
        """
        if self.kind == "natural":
            return _natural(dataset, self.records, clients, seed)
        count = 20 if clients is None else clients
        whole, tested = _train_and_test(dataset, seed.child("test"))
        usable = np.arange(len(whole))
        if dataset.test_silos is not None:  # not the texts kept for testing
            spans = sorted((dataset.silos or {}).items())
            usable = np.concatenate([np.arange(*span) for _, span in spans])
        labels = dataset.strata(whole.labels)[usable]
        train = self.split(labels, count, seed.child("partition"))
        tests = dataset.strata(tested.labels)
        if not self.by_label:  # nor do test records follow labels then
            labels = np.zeros_like(labels)
            tests = np.zeros_like(tests)
        test = matching_test(train, labels, tests, seed.child("matching"))
        parts = {}
        digits = len(str(count - 1))
        for i, (own, tests) in enumerate(zip(train, test, strict=True)):
            held = torch.from_numpy(usable[own]), torch.from_numpy(tests)
            parts[f"client-{i:0{digits}d}"] = whole.taken(held[0]), tested.taken(held[1])
        return lay_out(parts)


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
    check_data(
        count <= len(labels),
        "partition",
        f"{count} shards of {len(labels)} records",
        "use fewer clients or shards",
    )
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
    check_data(
        clients * each >= len(known),
        "partition",
        f"{clients} clients of {each} classes leave some of {len(known)} classes to nobody",
        "use more clients or classes",
    )
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
        _deal(np.array_split(members, len(holders)), holders)
    return [np.concatenate(part) for part in parts]


def _deal(shares: Indices, parts: list[Indices]) -> None:
    """Give each client its share of a class."""
    for share, part in zip(shares, parts, strict=True):
        part.append(share)


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
            _deal(np.split(members, cuts), parts)
        whole = [np.concatenate(part) for part in parts]
        if min(map(len, whole)) >= law.least:
            return whole
    what = f"Dirichlet({law.alpha:g}) over {clients} clients leaves someone below {law.least}"
    raise DataError(
        "partition",
        f"{what} records in {_DRAWS} draws",
        "use a larger alpha, fewer clients or fewer records",
    )


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
    parts: list[Indices] = [[] for _ in train]
    for label in np.unique(test_labels):
        held = np.array([np.sum(train_labels[part] == label) for part in train], dtype=float)
        members = generator.permutation(np.flatnonzero(test_labels == label))
        if held.sum() > 0:
            cuts = np.round(np.cumsum(held / held.sum())[:-1] * len(members)).astype(int)
            _deal(np.split(members, cuts), parts)
    for own, part in zip(train, parts, strict=True):
        if not sum(map(len, part)):
            pool = np.flatnonzero(test_labels == np.bincount(train_labels[own]).argmax())
            part.append(generator.choice(pool if len(pool) else np.arange(len(test_labels)), 1))
    return [np.sort(np.concatenate(part)) for part in parts]


def _natural(
    dataset: Dataset, records: int | None, clients: int | None, seed: PublicSeed
) -> dict[str, Shard]:
    """The data set's own silos, or some of them; each client keeps at most ``records`` records."""
    silos = dataset.silos or {}
    check(
        bool(silos),
        "partition",
        f"'{dataset.name}' has no natural silos",
        "use iid, shards, classes, dirichlet or unequal",
    )
    names = sorted(silos)
    if clients is not None:  # some of them, by the public seed
        check(
            1 <= clients <= len(names),
            "partition",
            f"'{dataset.name}' has {len(names)} natural silos, not {clients}",
            "name at most as many clients, or leave the number out",
        )
        names = sorted(seed.child("silos").numpy().choice(names, clients, replace=False).tolist())
    shards = {}
    parts = {}
    if dataset.test is not None and dataset.test_silos is not None:
        train = Records(dataset.features, dataset.labels)
        test = Records(*dataset.test)
        for name in names:
            first, last = silos[name]
            span = first, last if records is None else min(last, first + records)
            own = dataset.test_silos[name]
            shards[name] = Shard(train=train, span=span, test=test, test_span=own)
        return shards
    for name in names:
        x, y = (whole[slice(*silos[name])] for whole in (dataset.features, dataset.labels))
        train, test = _set_aside(name, x, y, seed.child("split", name))
        parts[name] = train.taken(torch.arange(len(train))[:records]), test
    return lay_out(parts)


def _set_aside(name: str, features: Tensor, labels: Tensor, seed: PublicSeed) -> Parts:
    """Set a fifth of the records aside, by their hashes under a public seed."""
    key = UnitKey.of(seed)
    return split_off(name, Records(features, labels, None, marks_of(features, labels, key)), key)


def _train_and_test(dataset: Dataset, seed: PublicSeed) -> Parts:
    """The data set's own test part, or a fifth of its records."""
    x = dataset.features
    y = dataset.labels
    if dataset.test is not None:
        return Records(x, y), Records(*dataset.test)
    check_data(
        len(y) >= 5 * dataset.classes,
        f"data set '{dataset.name}'",
        f"has {len(y)} records, too few for a test part",
        "use more",
    )
    return _set_aside(dataset.name, x, y, seed)
