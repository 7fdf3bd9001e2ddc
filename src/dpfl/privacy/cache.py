"""A small cache on disk for pure, slow functions of numbers (accounting curves, calibrated noise).

The key names the computation and the versions of everything that computed it. A cache that cannot be read or written
is done without: it never changes a result.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import warnings
from collections.abc import Callable
from pathlib import Path

_memory: dict[str, float] = {}


def cache_folder() -> Path:
    """``DPFL_CACHE``, else the user's cache folder."""
    named = os.environ.get("DPFL_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dpfl"


def _connect() -> sqlite3.Connection:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(folder / "accounting.sqlite", timeout=10)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID")
    return connection


def remembered(key: str, compute: Callable[[], float]) -> float:
    """Return the stored result for ``key``, else compute and store it."""
    if key in _memory:
        return _memory[key]
    value: float | None = None
    with contextlib.suppress(sqlite3.Error, OSError), contextlib.closing(_connect()) as connection:
        row = connection.execute("SELECT value FROM results WHERE key = ?", (key,)).fetchone()
        value = None if row is None or not float(row[0]) >= 0 else float(row[0])  # NaN or negative: not ours
    if value is None:
        value = compute()
        try:
            with contextlib.closing(_connect()) as connection, connection:
                connection.execute("INSERT OR REPLACE INTO results VALUES (?, ?)", (key, value))
        except (sqlite3.Error, OSError) as error:
            warnings.warn(f"results are not cached on disk: {error}", RuntimeWarning, stacklevel=2)
    _memory[key] = value
    return value


def forget() -> None:
    """Drop what this process remembers (the disk keeps its part)."""
    _memory.clear()
