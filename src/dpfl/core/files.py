"""Where caches are, and writing that leaves the old content or the new, never half of either."""

import os
from contextlib import suppress
from pathlib import Path

from dpfl.core.errors import disk_error


def cache_folder() -> Path:
    """``DPFL_CACHE``, else the user's cache folder."""
    if named := os.environ.get("DPFL_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dpfl"


def sync_folder(folder: Path) -> None:
    """Make a rename or a link in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_safely(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Replace a file so that a reader sees the old one or the new one; a secret was never readable
    by others.
    """
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
