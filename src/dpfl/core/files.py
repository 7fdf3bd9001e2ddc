"""Where caches are, reading what anybody may have written, and writing that leaves the old
content or the new, never half of either.
"""

import csv
import errno
import fcntl
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dpfl.core.errors import DpflError, FolderError, PeerError, disk_error


def cache_folder() -> Path:
    """``DPFL_CACHE``, else the user's cache folder."""
    if named := os.environ.get("DPFL_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dpfl"


_HALF_CHARACTERS = re.compile(r"\\u[dD][89a-fA-F]")
_LONG_NUMBERS = re.compile(r"\d{309}")  # which no float can be as large as


def parsed(text: str | bytes, **how: Any) -> Any:
    """Read JSON; a ValueError says why it cannot be read, however it is wrong.

    Lists within lists without end are refused, and so are halves of characters and numbers of
    hundreds of digits: nobody could go on with them. ``how`` are arguments of :func:`json.loads`.

    >>> parsed('["\\\\ud83d\\\\ude42", 1]')[1]
    1
    """
    words = text.decode() if isinstance(text, bytes) else text
    if _LONG_NUMBERS.search(words):
        raise ValueError("it holds a number of hundreds of digits")
    try:
        found = json.loads(words, **how)
        if _HALF_CHARACTERS.search(words):
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except RecursionError as error:
        raise ValueError("it holds lists within lists without end") from error


def is_there(path: Path) -> bool:
    """Whether there is such a file; there is none under a name that no file can have."""
    try:
        return path.exists()
    except OSError:
        return False


def check_regular(path: Path) -> None:
    """Raise an OSError for what cannot be read to its end: a device, or a FIFO in some folder.

    The pipe of a shell, which is in no folder, can be read.
    """
    fifo = path.is_fifo() and path.resolve().exists()
    if fifo or path.is_char_device() or path.is_block_device():
        raise OSError(errno.EINVAL, "it is a device or a FIFO")


def content_of(path: Path) -> bytes:
    """Read a file that somebody has named.

    What is not a file to read to its end, and a name that no file can have, are OSErrors like any
    other.
    """
    try:
        check_regular(path)
        return path.read_bytes()
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error)) from error


_MALFORMED = OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, PeerError


@contextmanager
def readable_file(path: Path, remedy: str, kind: type[DpflError] = FolderError) -> Iterator[None]:
    """Turn whatever goes wrong while a file is read into an error of this kind."""
    try:
        yield
    except _MALFORMED as error:
        raise kind(str(path), f"cannot be read ({error})", remedy) from error


def text_of(path: Path) -> str:
    """Read a text file in UTF-8 that somebody has named, as :func:`content_of` does."""
    return io.TextIOWrapper(io.BytesIO(content_of(path)), encoding="utf-8-sig").read()


def csv_records(text: str) -> list[tuple[int, list[str]]]:
    """Read the lines of a CSV file that are not blank, each with its number in the file.

    A record with line breaks in quotes has the number of its first line. A ValueError names the
    line that cannot be read.

    >>> csv_records('id,remark\\n\\n7,"two\\nlines"\\n8,one\\n')
    [(1, ['id', 'remark']), (3, ['7', 'two\\nlines']), (5, ['8', 'one'])]
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    records = []
    line = 1
    try:
        for cells in reader:
            if cells:
                records.append((line, cells))
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"line {line}: {error}") from error
    return records


def sync_folder(folder: Path) -> None:
    """Make a rename or a link in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, line: Mapping[str, object]) -> None:
    """Add one line of JSON to a file, on disk before this returns.

    A line that was cut off before it, by a kill or a full disk, is ended first.
    """
    new = not path.exists()
    try:
        with path.open("ab+") as stream:
            stream.seek(-min(1, stream.tell()), os.SEEK_CUR)
            cut_off = stream.read(1) not in (b"", b"\n")
            stream.write(b"\n" * cut_off + json.dumps(line).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        if new:
            sync_folder(path.parent)
    except OSError as error:
        raise disk_error(str(path), error) from error


@contextmanager
def for_owner_only() -> Iterator[None]:
    """Make files and folders in this context readable by their owner only.

    That holds for what processes that are started in it make, too. It also decorates a function.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def check_private(folder: Path) -> None:
    """Refuse a folder that other users of this machine may read or change."""
    if folder.stat().st_mode & 0o077:
        raise FolderError(
            str(folder),
            "is open to other users of this machine",
            f"close it to them: chmod 700 {folder}",
        )


def write_safely(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Replace a file so that a reader sees the old one or the new one; a secret was never readable
    by others.
    """
    if not path.name:
        raise FolderError(str(path), "is not the name of a file", "name a file")
    draft = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)
        opened = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o666)
        with os.fdopen(opened, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise disk_error(str(path), error) from error


@contextmanager
def hold_folder(path: Path, lock: str = ".lock") -> Iterator[None]:
    """Hold a folder for this process.

    ``lock`` is the name of the file in it that is locked; a folder may be held by processes that do
    different things in it. The lock is the operating system's: it ends with the process, however
    that ends. A folder that another process holds is refused.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        stream = (path / lock).open("w")
    except OSError as error:
        raise disk_error(str(path), error) from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise FolderError(
                str(path), "is in use by another process", "wait for it, or end it"
            ) from error
        yield
