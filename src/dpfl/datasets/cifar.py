"""CIFAR-10 in its binary version.

Records are one label byte and 3,072 pixel bytes (red, green, blue, each row by row).
"""

import lzma
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from dpfl.core.errors import DataError
from dpfl.datasets.stored import (
    Four,
    archive_members,
    check_file,
    not_found,
    readable,
    stored_arrays,
)

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


def read_cifar10(candidates: Sequence[Path]) -> Four:
    """Return train images (uint8, n x 3 x 32 x 32) and labels (int64), then test images and labels.

    The first candidate folder that holds all six files (``.bin`` or ``.bin.xz``), itself or in a
    folder of a usual name, or the official archive, is read.
    """
    folders = [base / name for base in candidates for name in FOLDERS]
    for folder in folders:
        files = [file for name in FILES if (file := _present(folder / name))]
        if len(files) == len(FILES):
            return _stored(files)
        if (folder / ARCHIVE).is_file():
            return _stored([folder / ARCHIVE])
    for folder in folders:
        missing = [name for name in FILES if _present(folder / name) is None]
        if len(missing) < len(FILES):
            problem = f"{folder} lacks {', '.join(missing)}"
            raise DataError("data set 'cifar10'", problem, f"put {_REMEDY} there")
    raise not_found("cifar10", [base / FOLDERS[1] for base in candidates], _REMEDY)


def _present(path: Path) -> Path | None:
    """The file, or the same packed as ``.xz``; None if neither is there."""
    packed = path.with_name(path.name + ".xz")
    return next((file for file in (path, packed) if file.is_file()), None)


def _stored(sources: list[Path]) -> Four:
    """Arrays of the six files, or of the archive that holds them."""

    def make() -> dict[str, np.ndarray]:
        batches = _unpacked(sources[0]) if len(sources) == 1 else _read_all(sources)
        arrays = {}
        for part, some in (("train", batches[:-1]), ("test", batches[-1:])):
            records = np.concatenate(some)
            arrays[f"{part}_images"] = records[:, 1:].reshape(-1, *SHAPE)
            arrays[f"{part}_labels"] = records[:, 0].astype(np.int64)
        return arrays

    x, y, test_x, test_y = stored_arrays("cifar10", sources, make, version=_VERSION).values()
    return x, y, test_x, test_y


def _read_all(files: list[Path]) -> list[np.ndarray]:
    """The records of all files, one thread a file."""
    # Threads: unpacking xz leaves the interpreter's lock to the others.
    with ThreadPoolExecutor(len(files)) as threads:
        return list(threads.map(lambda file: _records(file, _content(file)), files))


def _content(path: Path) -> bytes:
    """A file's bytes, unpacked if need be.

    No more is unpacked than an official file holds: a small file cannot fill the memory.
    """
    with readable(path, "unpacked"):
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
    found = {names[name]: content for name, content in archive_members(archive, names.__contains__)}
    missing = [name for name in FILES if name not in found]
    check_file(not missing, archive, f"lacks {', '.join(missing)}")
    return [_records(f"{archive}: {name}", found[name]) for name in FILES]


def _records(where: object, content: bytes) -> np.ndarray:
    """The records of one file, (n, 3,073), checked for their number and their labels."""
    size = f"more than {_LARGEST:,}" if len(content) > _LARGEST else f"{len(content):,}"
    whole = 0 < len(content) <= _LARGEST and len(content) % RECORD == 0
    records = f"no whole number of records of {RECORD:,} bytes, 10,000 at most"
    check_file(whole, where, f"its {size} bytes are {records}")
    table = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    odd = int(np.argmax(table[:, 0] >= CLASSES))
    problem = f"label {table[odd, 0]} of record {odd} is outside the {CLASSES} classes"
    check_file(bool(table[odd, 0] < CLASSES), where, problem)
    return table
