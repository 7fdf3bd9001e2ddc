"""A small file on disk that may propose calibrated noise.

Anyone could have edited it: what it holds are suggestions, evaluated afresh by whoever asks. A file
that cannot be read or written is done without: it never changes a result.
"""

import os
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

_TABLE = """CREATE TABLE IF NOT EXISTS results
    (key TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID"""


def cache_folder() -> Path:
    """``DPFL_CACHE``, else the user's cache folder."""
    if named := os.environ.get("DPFL_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dpfl"


def proposed(key: str) -> object:
    """Return the value on disk for ``key``, or None. Anyone may have edited it."""
    with suppress(sqlite3.Error, OSError), _database() as database:
        row = database.execute("SELECT value FROM results WHERE key = ?", (key,)).fetchone()
        return row and row[0]
    return None


def propose(key: str, value: float) -> None:
    """Write a proposal for later processes; where that fails, warn and go on.

    The key holds the whole question and the accounting version.
    """
    try:
        with _database() as database:
            database.execute("INSERT OR REPLACE INTO results VALUES (?, ?)", (key, value))
    except (sqlite3.Error, OSError) as error:
        warnings.warn(
            f"calibrated noise is not cached on disk: {error}", RuntimeWarning, stacklevel=2
        )


@contextmanager
def _database() -> Iterator[sqlite3.Connection]:
    """Open the file for one transaction, and make it where there is none."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    path = cache_folder() / "accounting.sqlite"
    with closing(sqlite3.connect(path, timeout=10)) as connection, connection:
        for command in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=NORMAL", _TABLE):
            connection.execute(command)
        yield connection
