"""Packed data, unpacked once: the members of an archive, and the arrays made of them, kept in the
user's cache.

A kept file is one line of JSON (what it was made of, and each array's name, type and shape) and
then the arrays' bytes. It is used only if that line and the file's size are as expected; else the
sources are read again and it is replaced.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import math
import os
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np

from dpfl.core.errors import DataError
from dpfl.privacy.cache import cache_folder

Arrays = dict[str, np.ndarray]
UNREADABLE = (OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error)
_LAYOUT = 1


def archive_members(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the wanted files of a ``.tar.gz`` or ``.tar.xz``, in the archive's
    order.
    """
    unpack = lzma.open if path.suffix == ".xz" else gzip.open
    try:
        # Strictly forwards: going back in a compressed file means to unpack it again from the
        # start.
        with unpack(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                if member.isfile() and wanted(member.name):
                    content = archive.extractfile(member)
                    yield member.name, content.read() if content else b""
            while stream.read(
                1 << 20
            ):  # the checksum comes last: only a file read to its end is known to be whole
                pass
    except UNREADABLE as error:
        raise DataError(
            str(path), f"cannot be unpacked ({error})", "fetch the file again"
        ) from error


def stored_arrays(
    name: str, sources: Sequence[Path], make: Callable[[], Arrays], *, version: int
) -> Arrays:
    """Return what ``make`` makes of the sources, from the cache if they have not changed since.

    Raise ``version`` whenever ``make`` means something else than before. A cache that cannot be
    used is done without.
    """
    try:
        made_of = _identity(name, sources, version)
        # One place for each first source: what a changed source makes replaces what the old one
        # made.
        place = hashlib.blake2b(os.fsencode(sources[0].absolute()), digest_size=8).hexdigest()
        kept = cache_folder() / "arrays" / f"{name}-{place}"
    except (
        OSError,
        RuntimeError,
    ):  # a source that is gone is make's to report; a user without a home has no cache
        return make()
    arrays = _read(kept, made_of)
    if arrays is None:
        arrays = {key: np.ascontiguousarray(array) for key, array in make().items()}
        with suppress(OSError):
            _write(kept, made_of, arrays)
    return arrays


def _identity(name: str, sources: Sequence[Path], version: int) -> str:
    seen = hashlib.blake2b(digest_size=16)
    for source in sources:
        status = source.stat()
        seen.update(os.fsencode(f"{source.name}\0{status.st_size}\0{status.st_mtime_ns}\n"))
    return f"{name} version {version} layout {_LAYOUT} sources {len(sources)} {seen.hexdigest()}"


def _read(kept: Path, made_of: str) -> Arrays | None:
    try:
        with kept.open("rb") as stream:
            return _arrays(stream, made_of)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _arrays(stream: IO[bytes], made_of: str) -> Arrays | None:
    line = stream.readline(1 << 16)
    head = json.loads(line)
    if head["made_of"] != made_of:
        return None
    layout = {key: (np.dtype(kind), tuple(shape)) for key, kind, shape in head["arrays"]}
    size = len(line) + sum(kind.itemsize * math.prod(shape) for kind, shape in layout.values())
    if os.fstat(stream.fileno()).st_size != size:
        return None
    return {
        key: np.fromfile(stream, kind, count=math.prod(shape)).reshape(shape)
        for key, (kind, shape) in layout.items()
    }


def _write(kept: Path, made_of: str, arrays: Arrays) -> None:
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
