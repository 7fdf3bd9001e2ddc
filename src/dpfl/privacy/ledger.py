"""The ledger: what every account has been charged, as stored events, in one SQLite file.

*Formal guarantees.* A charge is committed (WAL, ``synchronous=FULL``) before :meth:`Ledger.charge` returns, hence before
anything it pays for is drawn or released. Reading a history, checking it against the budget and inserting happen in one
``BEGIN IMMEDIATE`` transaction, so no number of processes can pass a cap together. Nothing is ever refunded. Epsilon is
never stored: it is derived from the events, each time, by one accountant over the account's whole history.

A key is (run, round, account, observer). A second charge under the same key is a *replay*: allowed, and free, only for
the same bill with the same non-empty ``draw`` token, that is for a simulation that will repeat the same bytes.

An account is a client, or a whole population that is always billed alike (one row for 100,000 clients). What the world
sees is a function of what the server sees: where a round has no bill against the world, the one against the server is it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from dpfl.core.errors import LedgerError, disk_error
from dpfl.core.files import sync_folder
from dpfl.core.types import Budget, Observer, Unit
from dpfl.privacy.allowance import Allowance
from dpfl.privacy.bills import Bill, Charge, Tab, tab_of
from dpfl.privacy.events import merged
from dpfl.privacy.readings import Readings, translated

FORMAT = "dpfl-ledger-1"
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE runs (run TEXT PRIMARY KEY, seeded INTEGER NOT NULL, title TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE bills (digest TEXT PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE charges (
    run TEXT NOT NULL REFERENCES runs, round INTEGER NOT NULL, account TEXT NOT NULL, observer TEXT NOT NULL,
    bill TEXT NOT NULL REFERENCES bills, draw TEXT NOT NULL, PRIMARY KEY (run, round, account, observer)
) WITHOUT ROWID;
CREATE INDEX charges_by_account ON charges (account, observer, bill);
CREATE TABLE grants (
    account TEXT PRIMARY KEY, observer TEXT NOT NULL, unit TEXT NOT NULL, epsilon REAL NOT NULL, delta REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE members (account TEXT NOT NULL, population TEXT NOT NULL, PRIMARY KEY (account, population)) WITHOUT ROWID;
CREATE INDEX members_by_population ON members (population);
CREATE TABLE journal (run TEXT NOT NULL, round INTEGER NOT NULL, at REAL NOT NULL);
"""


class Ledger(Readings):
    """An open ledger file. Use :meth:`create` once, :meth:`open` ever after: a missing file is refused, not made."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        super().__init__(connection, name)
        self._allowance = Allowance()

    @classmethod
    def create(cls, path: Path | str, identity: str) -> Ledger:
        """Start a new ledger; an existing file is never overwritten. ``:memory:`` is for simulations without a folder."""
        name = str(path)
        if name != ":memory:" and (Path(path).exists() or Path(name + "-wal").exists()):
            raise LedgerError(name, "already exists, or part of it does", "open it, or name another file")
        if name == ":memory:":
            ledger = cls(_connect(name, "rwc"), name)
            ledger._set_up(identity)
            return ledger
        # Written under a name of its own and linked into place: a ledger that exists is complete, and never replaced.
        draft = Path(f"{name}.{uuid.uuid4().hex}.new")
        try:
            with closing(_connect(str(draft), "rwc")) as connection:
                cls(connection, name)._set_up(identity)
            os.link(draft, path)
            sync_folder(Path(path).parent)
        except FileExistsError as error:
            raise LedgerError(name, "already exists", "open it, or name another file") from error
        except OSError as error:
            raise disk_error(name, error) from error
        finally:
            draft.unlink(missing_ok=True)
        return cls(_connect(name, "rw"), name)

    def _set_up(self, identity: str) -> None:
        with self._guard():
            self._connection.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}COMMIT;")
            rows = [("format", FORMAT), ("identity", identity)]
            self._connection.executemany("INSERT INTO meta VALUES (?, ?)", rows)

    @classmethod
    def open(cls, path: Path | str, identity: str | None = None, *, read_only: bool = False) -> Ledger:
        """Open an existing ledger, check that it is whole and, if ``identity`` is given, that it is the one meant."""
        name = str(path)
        if not Path(path).is_file():
            raise LedgerError(
                name,
                "there is no ledger",
                "check the path, or restore the file: a run does not go on without its ledger",
            )
        ledger = cls(_connect(name, "ro" if read_only else "rw"), name)
        with ledger._guard():
            rows = ledger._connection.execute("PRAGMA quick_check").fetchall()
            if rows != [("ok",)]:
                raise LedgerError(name, f"is damaged ({rows[0][0]})", "restore it from a backup")
            meta = dict(ledger._connection.execute("SELECT key, value FROM meta").fetchall())
        if meta.get("format") != FORMAT:
            raise LedgerError(
                name,
                f"has format {meta.get('format')}",
                f"use the version of dpfl that reads it; this one reads {FORMAT}",
            )
        if identity is not None and meta.get("identity") != identity:
            raise LedgerError(name, "belongs to another run", "put back the ledger that this run was started with")
        return ledger

    def identity(self) -> str:
        """Which run, or which site, this ledger was made for."""
        with self._guard():
            row = self._connection.execute("SELECT value FROM meta WHERE key = 'identity'").fetchone()
        return str(row[0])

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._guard():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def register(self, run: str, *, seeded: bool, title: str) -> None:
        """Name a run before it charges anything; naming it again is harmless if it is the same."""
        if not run:
            raise LedgerError(self._name, "a run without a name", "name it")
        with self._transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO runs VALUES (?, ?, ?)", (run, int(seeded), title))
            row = connection.execute("SELECT seeded FROM runs WHERE run = ?", (run,)).fetchone()
            if bool(row[0]) != seeded:
                raise LedgerError(
                    self._name, f"knows run {run} with another kind of randomness", "give the run another name"
                )

    def grant(self, budgets: Mapping[str, Budget], *, unit: Unit, observer: Observer) -> None:
        """Write down what each account enforces. A different grant for a known account is refused."""
        rows = [
            (account, str(budget.observer or observer), str(budget.unit or unit), budget.epsilon, budget.delta)
            for account, budget in budgets.items()
        ]
        with self._transaction() as connection:
            for row in rows:
                known = connection.execute("SELECT * FROM grants WHERE account = ?", row[:1]).fetchone()
                if known is not None and known != row:
                    raise LedgerError(
                        self._name,
                        f"account '{row[0]}' was granted epsilon {known[3]} at delta {known[4]} per {known[2]} against the "
                        f"{known[1]}, not {row[3]} at {row[4]} per {row[2]} against the {row[1]}",
                        "put the grant back: what was granted is for good, in this ledger",
                    )
            connection.executemany("INSERT OR IGNORE INTO grants VALUES (?, ?, ?, ?, ?)", rows)

    def population(self, accounts: Sequence[str]) -> str:
        """Name the account of clients that are always billed alike; membership is stored once."""
        name = "population:" + hashlib.sha256(json.dumps(sorted(accounts)).encode()).hexdigest()[:32]
        with self._transaction() as connection:
            if connection.execute("SELECT 1 FROM members WHERE population = ? LIMIT 1", (name,)).fetchone() is None:
                connection.executemany("INSERT INTO members VALUES (?, ?)", [(account, name) for account in accounts])
        return name

    def charge(
        self,
        run: str,
        round_: int,
        charges: Sequence[Charge],
        *,
        horizon: int = 1,
        also: Callable[[sqlite3.Connection], None] | None = None,
    ) -> frozenset[str]:
        """Charge, durably and all in one transaction; returns the accounts that could not afford it (not charged).

        ``also`` writes what belongs to the charge into the same transaction, if nobody was refused.
        """
        to_world = {charge.account for charge in charges if charge.observer is Observer.WORLD}
        refused: set[str] = set()
        new: list[tuple[str, int, str, str, str, str]] = []
        stored: dict[int, str] = {}  # many accounts of a round share one bill
        with self._transaction() as connection:
            # All are decided before any is written: what one of them adds must not count against another.
            for charge in charges:
                if id(charge.bill) not in stored:
                    stored[id(charge.bill)] = self._store(connection, charge.bill)
                row = (
                    run,
                    round_,
                    charge.account,
                    str(charge.observer),
                    stored[id(charge.bill)],
                    charge.draw,
                )
                if self._replayed(connection, row):
                    continue
                seen_by = {charge.observer}
                if charge.observer is Observer.WORLD:
                    self._refuse_late_world_bill(connection, row)
                elif charge.account not in to_world and not self._rows_of(connection, row, "world"):
                    seen_by.add(Observer.WORLD)  # no bill of its own: what the server sees covers the world
                for account in self._payers(connection, charge.account):
                    if not self._affordable(account, charge.bill, seen_by, horizon):
                        refused.add(charge.account)
                        break
                new.append(row)
            paid = [row for row in new if row[2] not in refused]
            connection.executemany("INSERT INTO charges VALUES (?, ?, ?, ?, ?, ?)", paid)
            connection.execute("INSERT INTO journal VALUES (?, ?, ?)", (run, round_, time.time()))
            if also is not None and not refused:
                also(connection)
        return frozenset(refused)

    def _replayed(self, connection: sqlite3.Connection, row: tuple[str, int, str, str, str, str]) -> bool:
        """Whether this very charge is there already; another one under its key is refused."""
        key = "run = ? AND round = ? AND account = ? AND observer = ?"
        known = connection.execute(f"SELECT bill, draw FROM charges WHERE {key}", row[:4]).fetchone()
        if known is not None and (row[5] == "" or known != row[4:]):
            raise LedgerError(
                self._name,
                f"round {row[1]} of run {row[0]} was already charged to '{row[2]}' for another release",
                "go on with the next round: a charged round is never repeated with fresh randomness",
            )
        return known is not None

    @staticmethod
    def _rows_of(connection: sqlite3.Connection, row: tuple[str, int, str, str, str, str], observer: str) -> bool:
        """Whether this round was billed against the observer to the account, its populations or its members."""
        kin = """SELECT :a UNION SELECT population FROM members WHERE account = :a
                 UNION SELECT account FROM members WHERE population = :a"""
        query = f"SELECT 1 FROM charges WHERE run = :r AND round = :n AND observer = :o AND account IN ({kin})"
        place = {"r": row[0], "n": row[1], "a": row[2], "o": observer}
        return connection.execute(query, place).fetchone() is not None

    def _refuse_late_world_bill(self, connection: sqlite3.Connection, row: tuple[str, int, str, str, str, str]) -> None:
        """A world bill written after the server's would lower what the world was already taken to have seen."""
        if self._rows_of(connection, row, "server") and not self._rows_of(connection, row, "world"):
            raise LedgerError(
                self._name,
                f"round {row[1]} of run {row[0]} was already billed to '{row[2]}' against the server, which covers the world",
                "bill the world first, or not at all",
            )

    @staticmethod
    def _payers(connection: sqlite3.Connection, account: str) -> list[str]:
        """Whose grants a charge touches: the account's own, or one member of each kind in a population.

        Members with equal grants in the same populations and without charges of their own have the same history.
        """
        members = connection.execute(
            """
            SELECT MIN(m.account) FROM members AS m JOIN grants AS g ON g.account = m.account
            WHERE m.population = :p GROUP BY g.observer, g.unit, g.epsilon, g.delta,
                (SELECT GROUP_CONCAT(population) FROM (
                    SELECT population FROM members WHERE account = m.account ORDER BY population)),
                CASE WHEN EXISTS (SELECT 1 FROM charges AS c WHERE c.account = m.account AND (c.observer = 'world'
                    OR NOT EXISTS (SELECT 1 FROM charges AS w WHERE w.run = c.run AND w.round = c.round
                        AND w.observer = 'world' AND w.account = :p)))
                THEN m.account END
            """,
            {"p": account},
        ).fetchall()
        return [row[0] for row in members] or [account]

    def affordable(
        self,
        account: str,
        bill: Bill,
        seen_by: Iterable[Observer],
        *,
        before: tuple[str, int] | None = None,
        horizon: int = 1,
        times: int = 1,
    ) -> bool:
        """Pre-check: whether the account's own grant covers this bill, ``times`` over, on top of its history.

        ``before`` (run, round) leaves out what this run charged from that round on, for a round that is being replayed.
        """
        events = tuple(event.times(event.steps * times) for event in bill.events)
        with self._guard():
            return self._affordable(account, replace(bill, events=events), set(seen_by), horizon, before)

    def _affordable(
        self, account: str, bill: Bill, seen_by: set[Observer], horizon: int, until: tuple[str, int] | None = None
    ) -> bool:
        grant = self._connection.execute(
            "SELECT observer, unit, epsilon, delta FROM grants WHERE account = ?", (account,)
        ).fetchone()
        if grant is None:
            return True
        observer, unit, limit, delta = Observer(grant[0]), Unit(grant[1]), grant[2], grant[3]
        if observer not in seen_by:
            return True  # this release is not seen by the one this grant is against
        before = self._bills(account, observer, until)
        after = tab_of([*before, (bill, 1)])
        adjacency = None if after is None else after.adjacency_as(unit)
        if adjacency is None:
            return False  # a record-level release says nothing of a client
        past = merged(event.times(event.steps * n) for past_bill, n in before for event in past_bill.events)
        return self._allowance.fits(past, bill.events, limit, delta, adjacency=adjacency, horizon=horizon)

    @staticmethod
    def _store(connection: sqlite3.Connection, bill: Bill) -> str:
        body = bill.to_json()
        digest = hashlib.sha256(body.encode()).hexdigest()[:32]
        connection.execute("INSERT OR IGNORE INTO bills VALUES (?, ?)", (digest, body))
        return digest

    def _bills(self, account: str, observer: Observer, until: tuple[str, int] | None = None) -> list[tuple[Bill, int]]:
        """Bills of an account and of the populations it belongs to, counted."""
        run, round_ = until or (None, 0)
        own = "(SELECT :account UNION SELECT population FROM members WHERE account = :account)"
        seen = "observer = 'server'"
        if observer is Observer.WORLD:
            seen = f"""(observer = 'world' OR NOT EXISTS (SELECT 1 FROM charges AS w WHERE w.run = c.run
                AND w.round = c.round AND w.observer = 'world' AND w.account IN {own}))"""
        query = f"""SELECT bill, COUNT(*) FROM charges AS c WHERE account IN {own} AND {seen}
            AND (:run IS NULL OR NOT (run = :run AND round >= :round)) GROUP BY bill ORDER BY bill"""
        rows = self._connection.execute(query, {"account": account, "run": run, "round": round_}).fetchall()
        return [(self._bill(digest), count) for digest, count in rows]

    def _bill(self, digest: str) -> Bill:
        row = self._connection.execute("SELECT body FROM bills WHERE digest = ?", (digest,)).fetchone()
        if row is None or hashlib.sha256(row[0].encode()).hexdigest()[:32] != digest:
            raise LedgerError(
                self._name, f"bill {digest} is missing or was changed", "restore the ledger from a backup"
            )
        return Bill.from_json(row[0])

    def tab(self, account: str, observer: Observer) -> Tab | None:
        """Everything charged to an account against an observer, over all runs."""
        with self._guard():
            return tab_of(self._bills(account, observer))


def _connect(name: str, mode: str) -> sqlite3.Connection:
    try:
        target = name if name == ":memory:" else f"{Path(name).absolute().as_uri()}?mode={mode}"
        if mode == "ro" and not os.access(Path(name).parent, os.W_OK) and not Path(name + "-wal").exists():
            target += "&immutable=1"  # a finished ledger on a read-only medium: WAL could not make its index file
        connection = sqlite3.connect(target, uri=True, timeout=120, isolation_level=None)
        if mode != "ro":
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA foreign_keys=ON")
        return connection
    except sqlite3.Error as error:
        raise translated(name, error) from error


def backup(source: Path, target: Path) -> None:
    """Copy a ledger that may be in use, consistently, through SQLite's own backup."""
    try:
        with closing(_connect(str(source), "ro")) as old, closing(sqlite3.connect(target)) as new:
            old.backup(new)
    except (sqlite3.Error, OSError) as error:
        raise (
            disk_error(str(target), error) if isinstance(error, OSError) else translated(str(target), error)
        ) from error
