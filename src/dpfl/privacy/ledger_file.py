"""The file of a ledger: made once, opened whole or not at all, written as entries of a hash chain."""

from __future__ import annotations

import functools
import os
import sqlite3
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Self

from dpfl.core.errors import DiskError, LedgerError, disk_error
from dpfl.core.files import sync_folder
from dpfl.privacy import chain
from dpfl.privacy.chain import Entry, Head
from dpfl.privacy.filters import Filter, FilterName, filter_named

FORMAT = "dpfl-ledger-2"
_OLDER = {"dpfl-ledger-1": "dpfl 0.1"}
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE chain (number INTEGER PRIMARY KEY, digest TEXT NOT NULL);
CREATE TABLE runs (
    run TEXT PRIMARY KEY, seeded INTEGER NOT NULL, title TEXT NOT NULL, entry INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE bills (digest TEXT PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE grants (
    account TEXT PRIMARY KEY, observer TEXT NOT NULL, unit TEXT NOT NULL, epsilon REAL NOT NULL, delta REAL
    NOT NULL, entry INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE members (
    account TEXT NOT NULL, population TEXT NOT NULL, entry INTEGER NOT NULL, PRIMARY KEY (account, population)
) WITHOUT ROWID;
CREATE INDEX members_by_population ON members (population);
CREATE TABLE plans (
    run TEXT NOT NULL REFERENCES runs, account TEXT NOT NULL, observer TEXT NOT NULL,
    bill TEXT NOT NULL REFERENCES bills, releases INTEGER NOT NULL, delta REAL, entry INTEGER NOT NULL,
    PRIMARY KEY (account, observer, run)
) WITHOUT ROWID;
CREATE TABLE charges (
    run TEXT NOT NULL REFERENCES runs, round INTEGER NOT NULL, account TEXT NOT NULL, observer TEXT NOT NULL,
    plan TEXT NOT NULL, bill TEXT NOT NULL REFERENCES bills, draw TEXT NOT NULL, entry INTEGER NOT NULL,
    PRIMARY KEY (account, observer, run, round)
) WITHOUT ROWID;
CREATE INDEX charges_by_plan ON charges (plan, observer, run, account, round);
CREATE TABLE journal (run TEXT NOT NULL, round INTEGER NOT NULL, at REAL NOT NULL, entry INTEGER NOT NULL);
CREATE INDEX journal_by_run ON journal (run, round);
"""

SITE_SCHEMA = """
CREATE TABLE IF NOT EXISTS agreed (run TEXT PRIMARY KEY, digest TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS outbox (
    run TEXT NOT NULL, round INTEGER NOT NULL, payload BLOB NOT NULL, private BLOB NOT NULL, PRIMARY KEY (run)
) WITHOUT ROWID;
"""
"""What the ledger of a site has beside: what it agreed on, and its last answers. The hash chain
does not cover them.
"""


class LedgerFile:
    """An open ledger file. Use :meth:`create` once, :meth:`open` ever after: a missing file is
    refused.
    """

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self._connection = connection
        self._name = name
        self._known: Head | None = None
        self._rule: Filter | None = None

    @classmethod
    def create(
        cls,
        path: Path | str,
        identity: str,
        *,
        filter: FilterName = "allotments",  # noqa: A002
    ) -> Self:
        """Start a new ledger; an existing file is never overwritten. ``:memory:`` is for
        simulations only.

        ``filter`` is the rule across studies (see :mod:`dpfl.privacy.filters`). It is fixed for the
        ledger's life.
        """
        name, rule = str(path), filter_named(filter)
        if name == ":memory:":
            ledger = cls(_connect(name, "rwc"), name)
            ledger._set_up(identity, rule)
            return ledger
        if Path(path).exists() or Path(name + "-wal").exists():
            raise LedgerError(
                name, "already exists, or part of it does", "open it, or name another file"
            )
        if chain.head_path(name).exists():
            raise LedgerError(
                name,
                f"a ledger was kept here: its head file {chain.head_path(name).name} is still there",
                "restore the ledger, or name another file",
            )
        # Written under a name of its own and linked into place: a ledger that exists is complete.
        draft = Path(f"{name}.{uuid.uuid4().hex}.new")
        try:
            with closing(_connect(str(draft), "rwc")) as connection:
                first = cls(connection, name)._set_up(identity, rule)
            os.link(draft, path)
            sync_folder(Path(path).parent)
        except FileExistsError as error:
            raise LedgerError(name, "already exists", "open it, or name another file") from error
        except OSError as error:
            raise disk_error(name, error) from error
        finally:
            draft.unlink(missing_ok=True)
        chain.write_head(name, first)
        ledger = cls(_connect(name, "rw"), name)
        ledger._known = first
        return ledger

    def _set_up(self, identity: str, rule: Filter) -> Head:
        meta = {"format": FORMAT, "identity": identity, "filter": rule.name}
        first = chain.first_head(meta)
        with self._guard():
            self._connection.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}")
            self._connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
            self._connection.execute(
                "INSERT INTO chain VALUES (?, ?)", (first.number, first.digest)
            )
            self._connection.execute("COMMIT")
        self._known = first
        return first

    @classmethod
    def open(
        cls, path: Path | str, identity: str | None = None, *, read_only: bool = False
    ) -> Self:
        """Open a ledger and check all of it: the file, its hash chain, and the head noted beside
        it.

        ``identity``, if given, must be the one the ledger was made for.
        """
        name, mode = str(path), "ro" if read_only else "rw"
        noted = chain.read_head(name)
        try:
            return cls._opened(name, identity, mode, noted)
        except LedgerError:
            if noted is not None or not Path(name).is_file():
                raise
            time.sleep(
                0.2
            )  # another process may just have made the ledger, and not yet noted its head
            if (noted := chain.read_head(name)) is None:
                raise
        return cls._opened(name, identity, mode, noted)

    @classmethod
    def accept_head(cls, path: Path | str) -> Head:
        """Check a ledger whose head file is missing, and write the file anew.

        Only a person can know that no newer copy of the ledger exists; a head file that is there is
        never replaced.
        """
        name = str(path)
        noted = chain.read_head(name)
        with closing(cls._opened(name, None, "ro", noted, headless=True)) as ledger:
            head = ledger.head()
        if noted is None:
            chain.write_head(name, head)
        return head

    @classmethod
    def _opened(
        cls, name: str, identity: str | None, mode: str, noted: Head | None, headless: bool = False
    ) -> Self:
        # The head file was read before the database: what others write meanwhile puts the latter
        # ahead.
        if not Path(name).is_file():
            raise LedgerError(
                name,
                "there is no ledger",
                "check the path, or restore the file: a run does not go on without its ledger",
            )
        ledger = cls(_connect(name, mode), name)
        try:
            with ledger.snapshot():
                ledger._check(identity)
                ledger._known = chain.verify_chain(ledger._connection, name)
                if noted is not None or not headless:
                    chain.check_ancestor(ledger._connection, name, noted, ledger._known)
        except BaseException:
            ledger.close()
            raise
        return ledger

    def _check(self, identity: str | None) -> None:
        rows = self._connection.execute("PRAGMA integrity_check").fetchall()
        if rows != [("ok",)]:
            raise LedgerError(self._name, f"is damaged ({rows[0][0]})", "restore it from a backup")
        meta = dict(self._connection.execute("SELECT key, value FROM meta").fetchall())
        if (found := meta.get("format")) != FORMAT:
            reader = _OLDER.get(str(found), "the version of dpfl that wrote it")
            raise LedgerError(
                self._name,
                f"has format {found}",
                f"read it with {reader}; this one reads {FORMAT}, in which studies are planned beforehand",
            )
        stored = set(self._connection.execute(_OBJECTS))
        if odd := sorted(
            name
            for _, name, _ in (_objects(_SCHEMA) - stored)
            | (stored - _objects(_SCHEMA + SITE_SCHEMA))
        ):
            problem = f"'{odd[0]}' is not as dpfl makes it, and could change what is written"
            raise LedgerError(self._name, problem, "restore it from a backup")
        if identity is not None and meta.get("identity") != identity:
            problem, remedy = (
                "belongs to another run",
                "put back the ledger that this run was started with",
            )
            raise LedgerError(self._name, problem, remedy)

    def _meta(self, key: str) -> str:
        with self._guard():
            return str(
                self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[
                    0
                ]
            )

    def identity(self) -> str:
        """Which run, or which site, this ledger was made for."""
        return self._meta("identity")

    @property
    def filter(self) -> FilterName:
        """The rule across studies that the ledger was made with."""
        return self._filter.name

    @property
    def _filter(self) -> Filter:
        if self._rule is None:
            self._rule = filter_named(self._meta("filter"))
        return self._rule

    def head(self) -> Head:
        """Return the newest entry of the hash chain. Noted elsewhere, it reveals a rewritten
        ledger.
        """
        with self._guard():
            return chain.last_head(self._connection)

    def contains(self, digest: str) -> bool:
        """Whether an entry of the chain has this digest."""
        with self._guard():
            found = self._connection.execute(
                "SELECT 1 FROM chain WHERE digest = ?", (digest,)
            ).fetchone()
        return found is not None

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise translated(self._name, error) from error

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read everything inside this context as it is now, whatever other processes charge
        meanwhile.
        """
        with self._guard():
            if self._connection.in_transaction:
                yield
                return
            self._connection.execute("BEGIN")
            try:
                self._connection.execute(
                    "SELECT 1 FROM sqlite_master"
                ).fetchone()  # the first read fixes the snapshot
                yield
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    @contextmanager
    def _transaction(self) -> Iterator[Entry]:
        """Write one entry of the chain, or nothing; after the commit, note its head beside the
        ledger.
        """
        with self._guard():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                if self._known is not None and not chain.contains(self._connection, self._known):
                    problem = "was replaced by another copy while it was open"
                    raise LedgerError(
                        self._name, problem, "put back the newest copy, and begin again from there"
                    )
                entry = Entry(self._connection, chain.last_head(self._connection))
                yield entry
                head = entry.seal()
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        if head is not None:
            self._known = head
            if self._name != ":memory:":
                chain.write_head(self._name, head)


_OBJECTS = "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL"


@functools.cache
def _objects(schema: str) -> frozenset[tuple[str, str, str]]:
    """The tables and indices that a schema makes, as SQLite writes them down."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(schema)
        return frozenset(connection.execute(_OBJECTS).fetchall())


def _connect(name: str, mode: str) -> sqlite3.Connection:
    try:
        target = name if name == ":memory:" else f"{Path(name).absolute().as_uri()}?mode={mode}"
        if (
            mode == "ro"
            and not os.access(Path(name).parent, os.W_OK)
            and not Path(name + "-wal").exists()
        ):
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
    """Copy a ledger that may be in use, through SQLite's own backup, and write the copy's head
    beside it.
    """
    noted = chain.read_head(str(source))
    try:
        with closing(_connect(str(source), "ro")) as old, closing(sqlite3.connect(target)) as new:
            old.backup(new)
            head = chain.verify_chain(new, str(source))
            chain.check_ancestor(new, str(source), noted, head)
    except (sqlite3.Error, OSError) as error:
        raise (
            disk_error(str(target), error)
            if isinstance(error, OSError)
            else translated(str(target), error)
        ) from error
    chain.head_path(str(target)).unlink(missing_ok=True)  # of an earlier backup
    chain.write_head(str(target), head)


def translated(name: str, error: sqlite3.Error) -> LedgerError | DiskError:
    """Say what an error of the database means to the person who runs this."""
    text = str(error)
    if "full" in text or "disk I/O" in text:
        return DiskError(
            name,
            f"cannot be written ({text})",
            "free some space and resume; what was charged is kept",
        )
    return LedgerError(
        name,
        f"cannot be used ({text})",
        "restore it from a backup; a run does not go on without its ledger",
    )
