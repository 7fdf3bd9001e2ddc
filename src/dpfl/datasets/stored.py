"""What the readers of data sets share: finding files, unpacking archives, keeping arrays.

Packed data is unpacked once, and the arrays made of it are kept in the user's cache, one file of
safetensors for each source. A kept file is used only if it is whole and says that it was made of
the sources as they are now; else they are read again and it is replaced.
"""

import csv
import gzip
import hashlib
import lzma
import os
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from dpfl.core.checks import check
from dpfl.core.errors import DataError, DpflError
from dpfl.core.files import cache_folder, write_safely

Arrays = Sequence[np.ndarray]
"""From most readers: training features and labels, then test features and labels."""

_DAMAGED = (OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error)
_MALFORMED = (ValueError, KeyError, TypeError, csv.Error, struct.error)


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
    except (*_DAMAGED, *_MALFORMED) as error:
        raise DataError(
            str(where),
            f"cannot be {verb} ({getattr(error, 'strerror', None) or error})",
            "fetch the file again",
        ) from error


def not_found(name: str, places: Sequence[Path], files: str) -> DataError:
    """The error for a data set whose files are in none of the places.

    ``files`` says what to put there.
    """
    return DataError(
        f"data set '{name}'",
        f"its files are in none of {', '.join(map(str, places))}",
        f"put {files} there, or in a folder that DPFL_DATA names",
    )


def archive_members(path: Path, wanted: Callable[[str], object]) -> Iterator[tuple[str, bytes]]:
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
        made_of = {"made_of": f"{name} version {version} sources {_fingerprint(sources)}"}
        # One place for each first source: what a changed source makes replaces the old arrays.
        place = hashlib.blake2b(os.fsencode(sources[0].absolute()), digest_size=8).hexdigest()
        kept = cache_folder() / "arrays" / f"{name}-{place}"
    except (OSError, RuntimeError):  # a source is gone (make reports it), or a user has no home
        return make()
    with suppress(OSError, SafetensorError), safe_open(kept, framework="np") as file:
        if file.metadata() == made_of:
            return [file.get_tensor(str(number)) for number in range(len(file.keys()))]
    arrays = [np.ascontiguousarray(array) for array in make()]
    with suppress(OSError, DpflError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        # A folder for each writer: two processes may unpack the same data at once. It is removed
        # also after an interrupt, which must not leave hundreds of megabytes behind.
        with tempfile.TemporaryDirectory(dir=kept.parent) as drafts:
            draft = Path(drafts, kept.name)
            named = enumerate(arrays)
            write_safely(draft, save({str(i): array for i, array in named}, metadata=made_of))
            draft.replace(kept)
    return arrays


def _fingerprint(sources: Sequence[Path]) -> str:
    """A digest of the sources' names, sizes and times."""
    seen = hashlib.blake2b(digest_size=16)
    for source in sources:
        status = source.stat()
        seen.update(os.fsencode(f"{source.name}\0{status.st_size}\0{status.st_mtime_ns}\n"))
    return seen.hexdigest()
