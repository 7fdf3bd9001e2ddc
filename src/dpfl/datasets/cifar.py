"""CIFAR-10 in its binary version: records of one label byte and 3,072 pixel bytes (red, green,
blue, each row by row).
"""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from dpfl.core.errors import DataError
from dpfl.datasets.stored import UNREADABLE, archive_members, stored_arrays

TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = "test_batch.bin"
FILES = (*TRAIN, TEST)
FOLDERS = ("cifar-10-batches-bin", "cifar-10-binary", ".")
ARCHIVE = "cifar-10-binary.tar.gz"
CLASSES = 10
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32
_VERSION = 1
_LARGEST = 10_000 * RECORD  # of the official files; a bound on what a compressed file may grow to

Four = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def read_cifar10(candidates: Sequence[Path]) -> Four:
    """Return train images (uint8, n x 3 x 32 x 32) and labels (int64), then test images and labels.

    The first candidate folder that holds all six files (``.bin`` or ``.bin.xz``), itself or in a
    folder of a usual name, or the official archive, is read.
    """
    for base in candidates:
        for folder in (base / name for name in FOLDERS):
            files = [_present(folder / name) for name in FILES]
            found = [file for file in files if file is not None]
            if len(found) == len(FILES):
                return _stored(found, found)
            if (folder / ARCHIVE).is_file():
                return _stored([folder / ARCHIVE], folder / ARCHIVE)
    raise _absent(candidates)


def _present(path: Path) -> Path | None:
    packed = path.with_name(path.name + ".xz")
    return next((file for file in (path, packed) if file.is_file()), None)


def _absent(candidates: Sequence[Path]) -> DataError:
    places = ", ".join(str(base / FOLDERS[1]) for base in candidates)
    problem = f"its files are in none of {places}"
    for folder in (base / name for base in candidates for name in FOLDERS):
        missing = [name for name in FILES if _present(folder / name) is None]
        if len(missing) < len(FILES):
            problem = f"{folder} lacks {', '.join(missing)}"
            break
    return DataError(
        "data set 'cifar10'",
        problem,
        f"put {TRAIN[0]} to {TRAIN[-1]} and {TEST} (each may be packed as .xz) or {ARCHIVE} there",
    )


def _stored(sources: list[Path], packed: list[Path] | Path) -> Four:
    def make() -> dict[str, np.ndarray]:
        records = _unpacked(packed) if isinstance(packed, Path) else _read_all(packed)
        return {
            "train_images": _images(records[:-1]),
            "train_labels": _labels(records[:-1]),
            "test_images": _images(records[-1:]),
            "test_labels": _labels(records[-1:]),
        }

    arrays = stored_arrays("cifar10", sources, make, version=_VERSION)
    return (
        arrays["train_images"],
        arrays["train_labels"],
        arrays["test_images"],
        arrays["test_labels"],
    )


def _read_all(files: list[Path]) -> list[np.ndarray]:
    with ThreadPoolExecutor(
        len(files)
    ) as threads:  # unpacking xz leaves the interpreter's lock to the others
        return list(threads.map(lambda file: _records(str(file), _content(file)), files))


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        if path.suffix != ".xz":
            return content
        unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        unpacked = unpacker.decompress(content, max_length=_LARGEST + 1)
        if not unpacker.eof and len(unpacked) <= _LARGEST:
            raise EOFError("the compressed data ends too early")
        return unpacked
    except UNREADABLE as error:
        raise DataError(
            str(path), f"cannot be unpacked ({error})", "fetch the file again"
        ) from error


def _unpacked(archive: Path) -> list[np.ndarray]:
    names = {f"cifar-10-batches-bin/{name}": name for name in FILES}
    found = {names[name]: content for name, content in archive_members(archive, names.__contains__)}
    missing = [name for name in FILES if name not in found]
    if missing:
        raise DataError(str(archive), f"lacks {', '.join(missing)}", "fetch the file again")
    return [_records(f"{archive}: {name}", found[name]) for name in FILES]


def _records(where: str, content: bytes) -> np.ndarray:
    if not content or len(content) % RECORD or len(content) > _LARGEST:
        size = f"more than {_LARGEST:,}" if len(content) > _LARGEST else f"{len(content):,}"
        raise DataError(
            where,
            f"its {size} bytes are no whole number of records of {RECORD:,} bytes, 10,000 at most",
            "fetch the file again",
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    largest = int(records[:, 0].max())
    if largest >= CLASSES:
        position = int(np.argmax(records[:, 0] >= CLASSES))
        raise DataError(
            where,
            f"label {records[position, 0]} of record {position} is outside the {CLASSES} classes",
            "fetch the file again",
        )
    return records


def _images(batches: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([batch[:, 1:] for batch in batches]).reshape(-1, *SHAPE)


def _labels(batches: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([batch[:, 0] for batch in batches]).astype(np.int64)
