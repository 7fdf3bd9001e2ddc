"""What the readers of data sets share: finding files, unpacking archives, keeping arrays.

Packed data is unpacked once, and the arrays made of it are kept in the user's cache. A kept file is
one line of JSON (what it was made of, and each array's name, type and shape) and then the arrays'
bytes. It is used only if that line and the file's size are as expected; else the sources are read
again and it is replaced.
"""

import csv
import gzip
import hashlib
import json
import lzma
import math
import os
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from dpfl.core.checks import check
from dpfl.core.errors import DataError
from dpfl.core.files import cache_folder

Arrays = dict[str, np.ndarray]
Four = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Training features and labels, then test features and labels."""

_PACKED = (EOFError, tarfile.TarError, lzma.LZMAError, zlib.error)
_TEXT = (ValueError, KeyError, TypeError, csv.Error, struct.error)
_LAYOUT = 1


def check_file(good: bool, where: object, problem: str) -> None:
    """Refuse a file that does not hold what it should: it is to be fetched again."""
    check(good, str(where), problem, "fetch the file again", DataError)


@contextmanager
def readable(where: object, verb: str = "read") -> Iterator[None]:
    """Turn whatever goes wrong while a file is read into one clear error.

    >>> with readable("some.csv"):
    ...     raise EOFError("it ends too early")
    Traceback (most recent call last):
    dpfl.core.errors.DataError: some.csv: cannot be read (it ends too early); fetch the file again
    """
    try:
        yield
    except (OSError, *_PACKED, *_TEXT) as error:
        problem = f"cannot be {verb} ({error})"
        raise DataError(str(where), problem, "fetch the file again") from error


def not_found(name: str, places: Sequence[Path], files: str) -> DataError:
    """The error for a data set whose files are in none of the places.

    ``files`` says what to put there.
    """
    problem = f"its files are in none of {', '.join(map(str, places))}"
    remedy = f"put {files} there, or name the folder with --data"
    return DataError(f"data set '{name}'", problem, remedy)


def archive_members(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the wanted files of a ``.tar.gz`` or ``.tar.xz``, in its order.

    The archive is read to its end, so that a damaged one is noticed even if all wanted files were
    whole. Links are left out.
    """
    unpack = lzma.open if path.suffix == ".xz" else gzip.open
    # Strictly forwards: going back in a compressed file means to unpack it again from the start.
    with (
        readable(path, "unpacked"),
        unpack(path) as stream,
        tarfile.open(fileobj=stream, mode="r|") as archive,
    ):
        for member in archive:
            if member.isfile() and wanted(member.name):
                content = archive.extractfile(member)
                yield member.name, content.read() if content else b""
        # The checksum comes last: only a file read to its end is known to be whole.
        while stream.read(1 << 20):
            pass


def stored_arrays(
    name: str, sources: Sequence[Path], make: Callable[[], Arrays], *, version: int
) -> Arrays:
    """Return what ``make`` makes of the sources, from the cache if they have not changed since.

    Raise ``version`` whenever ``make`` means something else than before. Arrays keep their order. A
    cache that cannot be used is done without.
    """
    try:
        made_of = _identity(name, sources, version)
        # One place for each first source: what a changed source makes replaces the old arrays.
        place = hashlib.blake2b(os.fsencode(sources[0].absolute()), digest_size=8).hexdigest()
        kept = cache_folder() / "arrays" / f"{name}-{place}"
    except (OSError, RuntimeError):  # a source is gone (make reports it), or a user has no home
        return make()
    arrays = _read(kept, made_of)
    if arrays is None:
        arrays = {key: np.ascontiguousarray(array) for key, array in make().items()}
        with suppress(OSError):
            _write(kept, made_of, arrays)
    return arrays


def _identity(name: str, sources: Sequence[Path], version: int) -> str:
    """What arrays are made of: names, sizes and times of the sources, and the versions."""
    seen = hashlib.blake2b(digest_size=16)
    for source in sources:
        status = source.stat()
        seen.update(os.fsencode(f"{source.name}\0{status.st_size}\0{status.st_mtime_ns}\n"))
    return f"{name} version {version} layout {_LAYOUT} sources {len(sources)} {seen.hexdigest()}"


def _read(kept: Path, made_of: str) -> Arrays | None:
    """The kept arrays, or None if they were made of something else or are not whole."""
    with (
        suppress(OSError, ValueError, TypeError, KeyError, AttributeError),
        kept.open("rb") as file,
    ):
        line = file.readline(1 << 16)
        head = json.loads(line)
        layout = {key: (np.dtype(kind), tuple(shape)) for key, kind, shape in head["arrays"]}
        size = len(line) + sum(kind.itemsize * math.prod(shape) for kind, shape in layout.values())
        if head["made_of"] == made_of and os.fstat(file.fileno()).st_size == size:
            return {
                key: np.fromfile(file, kind, count=math.prod(shape)).reshape(shape)
                for key, (kind, shape) in layout.items()
            }
    return None


def _write(kept: Path, made_of: str, arrays: Arrays) -> None:
    """Keep arrays, whole or not at all."""
    layout = [[key, array.dtype.str, list(array.shape)] for key, array in arrays.items()]
    kept.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own for each writer: two processes may unpack the same data at once.
    descriptor, draft = tempfile.mkstemp(prefix=f"{kept.name}.", suffix=".new", dir=kept.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(json.dumps({"made_of": made_of, "arrays": layout}).encode() + b"\n")
            for array in arrays.values():
                stream.write(array.data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(draft).replace(kept)
    except BaseException:  # an interrupt too must not leave a draft of hundreds of megabytes behind
        with suppress(OSError):
            Path(draft).unlink()
        raise
