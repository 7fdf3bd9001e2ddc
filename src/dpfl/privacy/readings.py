"""What can be read in a ledger without changing it: who was granted what, who was billed when, which runs there were."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dpfl.core.errors import DiskError, LedgerError
from dpfl.core.types import Budget, Observer, Unit


@dataclass(frozen=True, kw_only=True)
class Studied:
    """A run that a ledger knows, and when it was charged."""

    run: str
    title: str
    seeded: bool
    first: float | None  # seconds since 1970
    last: float | None
    last_round: int | None


class Readings:
    """The reading half of :class:`dpfl.privacy.ledger.Ledger`."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self._connection = connection
        self._name = name

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise translated(self._name, error) from error

    def accounts(self) -> list[str]:
        """Every client that was granted or charged anything; populations are listed by their members."""
        query = """SELECT account FROM grants UNION SELECT account FROM members
                   UNION SELECT account FROM charges WHERE account NOT IN (SELECT population FROM members)"""
        with self._guard():
            return sorted(row[0] for row in self._connection.execute(query))

    def grants(self) -> dict[str, Budget]:
        """What each account enforces."""
        with self._guard():
            rows = self._connection.execute("SELECT * FROM grants").fetchall()
        return {row[0]: _budget(row) for row in rows}

    def grant_of(self, account: str) -> Budget | None:
        """What one account enforces, if it said so."""
        with self._guard():
            row = self._connection.execute("SELECT * FROM grants WHERE account = ?", (account,)).fetchone()
        return None if row is None else _budget(row)

    def observers(self, account: str) -> list[Observer]:
        """Against whom the account was ever billed."""
        query = """SELECT DISTINCT observer FROM charges
                   WHERE account IN (SELECT ? UNION SELECT population FROM members WHERE account = ?)"""
        with self._guard():
            return sorted(Observer(row[0]) for row in self._connection.execute(query, (account, account)))

    def participations(self, account: str, observer: Observer) -> int:
        """How many rounds were charged to the account, itself or through a population."""
        query = """SELECT COUNT(*) FROM charges WHERE observer = ?
                   AND account IN (SELECT ? UNION SELECT population FROM members WHERE account = ?)"""
        with self._guard():
            return int(self._connection.execute(query, (str(observer), account, account)).fetchone()[0])

    def charged(self, run: str, observer: Observer = Observer.SERVER) -> set[tuple[int, str]]:
        """Return every (round, account) that a run has charged against an observer."""
        query = "SELECT round, account FROM charges WHERE run = ? AND observer = ?"
        with self._guard():
            return set(self._connection.execute(query, (run, str(observer))).fetchall())

    def last_round(self, run: str) -> int | None:
        """Return the newest round of a run that was charged to anyone."""
        with self._guard():
            row = self._connection.execute("SELECT MAX(round) FROM journal WHERE run = ?", (run,)).fetchone()
        return None if row[0] is None else int(row[0])

    def titles(self) -> dict[str, str]:
        """Return every run and what it was called."""
        with self._guard():
            return dict(self._connection.execute("SELECT run, title FROM runs ORDER BY run").fetchall())

    def studies(self) -> list[Studied]:
        """Every run with its times, the oldest first."""
        query = """SELECT runs.run, title, seeded, MIN(at), MAX(at), MAX(round) FROM runs
                   LEFT JOIN journal ON journal.run = runs.run GROUP BY runs.run ORDER BY MIN(at), runs.run"""
        with self._guard():
            rows = self._connection.execute(query).fetchall()
        return [
            Studied(run=run, title=title, seeded=bool(seeded), first=first, last=last, last_round=last_round)
            for run, title, seeded, first, last, last_round in rows
        ]

    def seeded_runs(self) -> list[str]:
        """Runs whose noise anyone with the seed can reproduce."""
        with self._guard():
            return [row[0] for row in self._connection.execute("SELECT run FROM runs WHERE seeded ORDER BY run")]


def _budget(row: tuple[str, str, str, float, float]) -> Budget:
    return Budget(epsilon=row[3], delta=row[4], unit=Unit(row[2]), observer=Observer(row[1]))


def translated(name: str, error: sqlite3.Error) -> LedgerError | DiskError:
    """Say what an error of the database means to the person who runs this."""
    text = str(error)
    if "full" in text or "disk I/O" in text:
        return DiskError(name, f"cannot be written ({text})", "free some space and resume; what was charged is kept")
    return LedgerError(
        name, f"cannot be used ({text})", "restore it from a backup; a run does not go on without its ledger"
    )
