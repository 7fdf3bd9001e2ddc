"""What this process has computed, and a small file on disk that may propose calibrated noise.

Two things that must not be confused. ``remembered`` keeps results of this process in memory: they
decide statements. ``proposed`` reads numbers from a file that anyone could have edited: they are
suggestions, evaluated afresh by whoever asks. A file that cannot be read or written is done
without: it never changes a result.
"""

import contextlib
import os
import sqlite3
import warnings
from collections.abc import Callable, Hashable
from pathlib import Path

_memory: dict[Hashable, float] = {}
_MOST_REMEMBERED = 200_000
_TABLE = """CREATE TABLE IF NOT EXISTS results
    (key TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID"""


def cache_folder() -> Path:
    """``DPFL_CACHE``, else the user's cache folder."""
    if named := os.environ.get("DPFL_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dpfl"


def remembered(key: Hashable, compute: Callable[[], float]) -> float:
    """Return what this process computed for ``key`` before, else compute it."""
    if key not in _memory:
        value = compute()
        if len(_memory) >= _MOST_REMEMBERED:
            _memory.clear()
        _memory[key] = value
    return _memory[key]


def forget() -> None:
    """Drop what this process remembers (the disk keeps its proposals)."""
    _memory.clear()


def proposed(key: str) -> object:
    """Return the value on disk for ``key``, or None. Anyone may have edited it."""
    with contextlib.suppress(sqlite3.Error, OSError), contextlib.closing(_connect()) as connection:
        row = connection.execute("SELECT value FROM results WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]
    return None


def propose(key: str, value: float) -> None:
    """Write a proposal for later processes; where that fails, warn and go on.

    The key holds the whole question and the accounting version.
    """
    try:
        with contextlib.closing(_connect()) as connection, connection:
            connection.execute("INSERT OR REPLACE INTO results VALUES (?, ?)", (key, value))
    except (sqlite3.Error, OSError) as error:
        text = f"calibrated noise is not cached on disk: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _connect() -> sqlite3.Connection:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(folder / "accounting.sqlite", timeout=10)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute(_TABLE)
    except sqlite3.Error:
        connection.close()
        raise
    return connection
