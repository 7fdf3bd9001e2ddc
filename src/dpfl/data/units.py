"""Units of privacy as they stand in a file, and which of them are set aside for testing.

A unit is a record or, where a schema names persons, all records of one person. It has a *mark*: a
keyed hash of what it is known by. A person is known by the id, a record by its parsed values (a gap
is a value) and by how many equal ones came before it. The test part of n units is the max(1,
round(n / 5)) units with the smallest hashes of their marks.

*Formal guarantees*, for every key, so that none of them rests on its secrecy. The sizes of both
parts follow from n, which is public. Where the content of a unit changes and its mark stays (the
records of a person, a blank), no unit changes sides. A unit that is removed or added, or that gets
another mark, moves at most one other unit, with which it trades places.

A *blank* is a unit whose content does not count: a rule for missing values drops its record, or it
was withdrawn. It keeps its mark and its place and holds the same zeros as every blank. It is drawn
and computed like any unit, and then left out of every sum.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from dpfl.core.seeds import PublicSeed
from dpfl.data.schema import Prepared

SPLIT_VERSION = "2"
"""How units are marked and set aside; what began under another version does not go on."""

TEST_FRACTION = 0.2


@dataclass(frozen=True, repr=False)
class UnitKey:
    """The key of all hashes of units: public in a simulation, a secret of its own at a site."""

    value: bytes

    @classmethod
    def of(cls, seed: PublicSeed) -> "UnitKey":
        """Return the public key that follows from a seed."""
        return cls(hashlib.sha256(str(seed.value).encode()).digest())

    @property
    def name(self) -> str:
        """What tells this key from others, and nothing of it."""
        return self.hash("key").hex()

    def hash(self, purpose: str, *parts: bytes) -> bytes:
        """Hash byte strings for one purpose (16 letters at most); no two purposes share a hash."""
        keyed = hashlib.blake2b(key=self.value, digest_size=32, person=purpose.encode())
        for part in parts:
            keyed.update(len(part).to_bytes(8, "big") + part)
        return keyed.digest()

    def hashes(self, purpose: str, parts: Iterable[bytes]) -> list[bytes]:
        """Hash each of many byte strings for one purpose."""
        keyed = hashlib.blake2b(key=self.value, digest_size=32, person=purpose.encode())
        digests = []
        for part in parts:
            each = keyed.copy()
            each.update(part)
            digests.append(each.digest())
        return digests

    def marks(self, records: Iterable[bytes]) -> list[bytes]:
        """Mark records, each by its bytes and by how many equal ones came before it."""
        before: Counter[bytes] = Counter()
        numbered = []
        for record in records:
            numbered.append(before[record].to_bytes(8, "big") + record)
            before[record] += 1
        return self.hashes("record", numbered)

    def person_mark(self, person: str) -> bytes:
        """Mark a person by the id."""
        return self.hash("person", person.encode())

    def order(self, marks: Sequence[bytes]) -> list[int]:
        """Return the places of units by the hashes of their marks, the smallest first.

        Units are trained and tested on in this order, whatever their order in the file is.
        """
        return sorted(range(len(marks)), key=self.hashes("split", marks).__getitem__)


def units_to_test(units: int) -> int:
    """How many units are set aside for testing.

    >>> [units_to_test(n) for n in (2, 7, 8, 300)]
    [1, 1, 2, 60]
    """
    return max(1, round(TEST_FRACTION * units))


def row_bytes(*columns: np.ndarray) -> list[bytes]:
    """Write each record's numbers as bytes; equal numbers give equal bytes."""
    parts = []
    for column in columns:
        numbers = column.reshape(len(column), math.prod(column.shape[1:]))
        if numbers.dtype.kind == "f":
            numbers = np.where(np.isnan(numbers), np.nan, numbers + 0.0)  # one gap, one zero
        width = numbers.shape[1] * numbers.itemsize
        parts.append(np.ascontiguousarray(numbers).view(np.uint8).reshape(len(column), width))
    return [row.tobytes() for row in np.concatenate(parts, axis=1)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Units:
    """One client's units.

    ``features`` and ``targets`` have a row for each. ``marks`` tell units apart, ``contents`` are
    all that the file says of each. ``blank`` says which do not count, ``empty`` is their target.
    """

    features: np.ndarray
    targets: np.ndarray
    marks: Sequence[bytes]
    contents: Sequence[bytes]
    blank: np.ndarray
    empty: np.ndarray

    def __post_init__(self) -> None:
        if self.blank.any():
            self.features[self.blank] = 0
            self.targets[self.blank] = self.empty

    def in_study(self, withdrawn: Collection[bytes], blanks: Collection[bytes]) -> "Units":
        """Return the units of a study.

        Of those that were ``withdrawn``, ``blanks`` were in the study before, and stay in it as
        blanks, whether the file still has them or not. The others are left out.
        """
        if not withdrawn:
            return self
        stay = [i for i, mark in enumerate(self.marks) if mark not in withdrawn or mark in blanks]
        marks = [self.marks[i] for i in stay]
        gone = sorted({*blanks} - {*marks})
        zeros = np.zeros((len(gone), *self.features.shape[1:]), self.features.dtype)
        no_targets = np.broadcast_to(self.empty, (len(gone), *self.targets.shape[1:]))
        blank = [bool(self.blank[i]) or self.marks[i] in blanks for i in stay]
        return replace(
            self,
            features=np.concatenate([self.features[stay], zeros]),
            targets=np.concatenate([self.targets[stay], no_targets]),
            marks=[*marks, *gone],
            contents=[*(self.contents[i] for i in stay), *[b""] * len(gone)],
            blank=np.array([*blank, *[True] * len(gone)], dtype=bool),
        )

    def digest(self, key: UnitKey, blanks: Collection[bytes], about: str = "") -> str:
        """Name the units of a study by marks and contents; of ``blanks``, by their marks alone.

        ``about`` says what features are made by.
        """
        lines = [
            key.hash("unit", mark, b"" if mark in blanks else key.hash("content", content))
            for mark, content in zip(self.marks, self.contents, strict=True)
        ]
        return key.hash("units", SPLIT_VERSION.encode(), about.encode(), *sorted(lines)).hex()


def record_units(features: np.ndarray, targets: np.ndarray, key: UnitKey) -> Units:
    """Return records of numbers as units, whatever type a task gives their targets."""
    records = row_bytes(features, targets.astype(np.float64))
    return Units(
        features=features,
        targets=targets,
        marks=key.marks(records),
        contents=records,
        blank=np.zeros(len(records), dtype=bool),
        empty=np.zeros(targets.shape[1:], dtype=targets.dtype),
    )


def marks_of(features: Tensor, targets: Tensor, key: UnitKey) -> tuple[bytes, ...]:
    """Mark records that are no file's: by their numbers."""
    return tuple(key.marks(row_bytes(features.numpy(), targets.numpy().astype(np.float64))))


def table_units(made: Prepared, key: UnitKey, most: int) -> Units:
    """Return the records of a prepared table as units, or its persons, in the order of their ids.

    A record that a rule for missing values drops is a blank; so is a person who has no other one.
    Of each person at most so many records are used, chosen by their hashes. With ``most`` = 1 a
    unit is a record. Else it has ``most`` places: features (persons, most, ...) and targets
    (persons, most, ...) as float64, where NaN marks a place without a record; its features repeat
    the person's first record.
    """
    records = row_bytes(made.values)
    empty = np.zeros(made.targets.shape[1:], dtype=made.targets.dtype)
    if made.persons is None:
        return Units(
            features=made.features,
            targets=made.targets,
            marks=key.marks(records),
            contents=records,
            blank=~made.kept,
            empty=empty,
        )
    rows_of: dict[str, list[int]] = {}
    for row, person in enumerate(made.persons):
        rows_of.setdefault(person, []).append(row)
    persons = sorted(rows_of)
    places = np.zeros((len(persons), most), dtype=np.int64)
    filled = np.zeros((len(persons), most), dtype=bool)
    for number, person in enumerate(persons):
        rows = rows_of[person]
        marks = key.marks([person.encode() + records[row] for row in rows])
        hashes = key.hashes("choice", marks)
        by_hash = [row for _, row in sorted(zip(hashes, rows, strict=True))]
        used = [row for row in by_hash if made.kept[row]][:most]
        filled[number] = np.arange(most) < len(used)
        places[number] = [*used, *[(used or rows)[0]] * (most - len(used))]
    targets = made.targets[places[:, 0]]
    if most > 1:
        targets = made.targets[places].astype(np.float64)
        targets[~filled] = np.nan
        empty = np.full((most, *empty.shape), np.nan)
        empty[0] = 0.0
    return Units(
        features=made.features[places[:, 0] if most == 1 else places],
        targets=targets,
        marks=[key.person_mark(person) for person in persons],
        contents=[b"".join(sorted(records[row] for row in rows_of[person])) for person in persons],
        blank=~filled[:, 0],
        empty=empty,
    )
