"""CIFAR-10 in its binary version.

Records are one label byte and 3,072 pixel bytes (red, green, blue, each row by row).
"""

import lzma
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from dpfl.core.errors import DataError
from dpfl.datasets import stored
from dpfl.datasets.stored import Arrays, check_file

TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
FILES = (*TRAIN, "test_batch.bin")
FOLDERS = ("cifar-10-batches-bin", "cifar-10-binary", ".")
ARCHIVE = "cifar-10-binary.tar.gz"
CLASSES = 10
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32
_VERSION = 1
_LARGEST = 10_000 * RECORD  # of the official files; a bound on what a compressed file may grow to
_REMEDY = f"{TRAIN[0]} to {TRAIN[-1]} and {FILES[-1]} (each may be packed as .xz) or {ARCHIVE}"


def read_cifar10(candidates: Sequence[Path]) -> Arrays:
    """Return train images (uint8, n x 3 x 32 x 32) and labels (int64), then test images and labels.

    The first candidate folder that holds all six files (``.bin`` or ``.bin.xz``), itself or in a
    folder of a usual name, or the official archive, is read.
    """
    folders = [base / name for base in candidates for name in FOLDERS]
    lacking = []
    for folder in folders:
        files = {name: file for name in FILES if (file := _present(folder / name))}
        if len(files) == len(FILES):
            return _stored(list(files.values()))
        if (folder / ARCHIVE).is_file():
            return _stored([folder / ARCHIVE])
        if files:
            lacking.append(f"{folder} lacks {', '.join(sorted({*FILES} - {*files}))}")
    if lacking:
        raise DataError("data set 'cifar10'", lacking[0], f"put {_REMEDY} there")
    raise stored.not_found("cifar10", [base / FOLDERS[1] for base in candidates], _REMEDY)


def _present(path: Path) -> Path | None:
    """The file, or the same packed as ``.xz``; None if neither is there."""
    packed = path.with_name(path.name + ".xz")
    return next((file for file in (path, packed) if file.is_file()), None)


def _stored(sources: list[Path]) -> Arrays:
    """Arrays of the six files, or of the archive that holds them."""

    def make() -> Arrays:
        if len(sources) == 1:
            batches = _unpacked(sources[0])
        else:  # threads: unpacking xz leaves the interpreter's lock to the others
            with ThreadPoolExecutor(len(sources)) as threads:
                batches = list(threads.map(lambda file: _records(file, _content(file)), sources))
        arrays = []
        for records in (np.concatenate(batches[:-1]), batches[-1]):
            arrays += [records[:, 1:].reshape(-1, *SHAPE), records[:, 0].astype(np.int64)]
        return arrays

    return stored.stored_arrays("cifar10", sources, make, version=_VERSION)


def _content(path: Path) -> bytes:
    """A file's bytes, unpacked if need be.

    No more is unpacked than an official file holds: a small file cannot fill the memory.
    """
    with stored.readable(path, "unpacked"):
        content = path.read_bytes()
        if path.suffix != ".xz":
            return content
        unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        unpacked = unpacker.decompress(content, max_length=_LARGEST + 1)
        if not unpacker.eof and len(unpacked) <= _LARGEST:
            raise EOFError("the compressed data ends too early")
        return unpacked


def _unpacked(archive: Path) -> list[np.ndarray]:
    """The records of the six files inside the official archive."""
    names = {f"cifar-10-batches-bin/{name}": name for name in FILES}
    members = stored.archive_members(archive, names.__contains__)
    found = {names[member]: content for member, content in members}
    missing = [name for name in FILES if name not in found]
    check_file(not missing, archive, f"lacks {', '.join(missing)}")
    return [_records(f"{archive}: {name}", found[name]) for name in FILES]


def _records(where: object, content: bytes) -> np.ndarray:
    """The records of one file, (n, 3,073), checked for their number and their labels."""
    size = f"more than {_LARGEST:,}" if len(content) > _LARGEST else f"{len(content):,}"
    records = f"no whole number of records of {RECORD:,} bytes, 10,000 at most"
    check_file(
        0 < len(content) <= _LARGEST and len(content) % RECORD == 0,
        where,
        f"its {size} bytes are {records}",
    )
    table = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    odd = int(np.argmax(table[:, 0] >= CLASSES))
    check_file(
        bool(table[odd, 0] < CLASSES),
        where,
        f"label {table[odd, 0]} of record {odd} is outside the {CLASSES} classes",
    )
    return table
