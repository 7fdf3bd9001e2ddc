"""The file of a ledger: made once, opened whole or not at all, written as entries of a chain.

Opening checks the file itself, its tables, its hash chain and the head that is kept beside it. A
ledger that fails any check is refused with a :class:`LedgerError` that says what to do.
"""

import functools
import os
import sqlite3
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

from dpfl.core.checks import check
from dpfl.core.errors import DiskError, LedgerError, disk_error
from dpfl.core.files import sync_folder
from dpfl.privacy import chain, old_ledger
from dpfl.privacy.chain import Entry, Head
from dpfl.privacy.costs import PrivacyCost
from dpfl.privacy.filters import Filter, FilterName, filter_named
from dpfl.privacy.flags import RaisedFlag
from dpfl.privacy.ledger_schema import FORMAT, SCHEMA, check_schema


class LedgerFile:
    """An open ledger file: its connection, its hash chain, and what was read from it before.

    ``flags`` are the facts that everyone who reads the ledger must know; a ledger that raises any
    is never written to.
    """

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self._connection = connection
        self._name = name
        self._known: Head | None = None
        self._costs: dict[str, PrivacyCost] = {}
        self.flags: tuple[RaisedFlag, ...] = ()

    # -- making and opening ------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: Path | str,
        identity: str,
        *,
        filter: FilterName = "allotments",  # noqa: A002
    ) -> Self:
        """Start a new ledger; an existing file is never overwritten.

        ``identity`` is the run or the site that the ledger is for. ``filter`` is the rule across
        studies (see :mod:`dpfl.privacy.filters`), fixed for the ledger's life. The path
        ``:memory:`` is for simulations only.
        """
        name, rule = str(path), filter_named(filter)
        if name == ":memory:":
            ledger = cls(_connect(name, "rwc"), name)
            ledger._set_up(identity, rule)
            return ledger
        there = any(Path(name + end).exists() for end in ("", "-wal"))
        remedy = "open it, or name another file"
        check(not there, name, "already exists, or part of it does", remedy, LedgerError)
        head = chain.head_path(name)
        problem = f"a ledger was kept here: its head file {head.name} is still there"
        remedy = "restore the ledger, or name another file"
        check(not head.exists(), name, problem, remedy, LedgerError)
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
        first = self._known = chain.first_head(meta)
        with self._guard():
            self._connection.executescript(f"BEGIN IMMEDIATE;{SCHEMA}")
            self._connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
            self._connection.execute("INSERT INTO chain VALUES (?, ?)", (0, first.digest))
            self._connection.execute("COMMIT")
        return first

    @classmethod
    def open(
        cls, path: Path | str, identity: str | None = None, *, read_only: bool = False
    ) -> Self:
        """Open a ledger and check all of it: the file, its hash chain, and its head file.

        ``identity``, if given, must be the one the ledger was made for. A ledger of dpfl 0.1 opens
        with ``read_only`` only, and raises a flag (``flags``).
        """
        name, mode = str(path), "ro" if read_only else "rw"
        noted = chain.read_head(name)
        try:
            return cls._opened(name, identity, mode, noted)
        except LedgerError:
            if noted is not None or not Path(name).is_file():
                raise
            time.sleep(0.2)  # another process may just have made it, and not yet noted its head
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
            if noted is None and not ledger.flags:
                chain.write_head(name, head)
        return head

    @classmethod
    def _opened(
        cls, name: str, identity: str | None, mode: str, noted: Head | None, headless: bool = False
    ) -> Self:
        """Open and check. The head was read before: what others write since puts the file ahead."""
        remedy = "check the path, or restore the file: a run does not go on without its ledger"
        check(Path(name).is_file(), name, "there is no ledger", remedy, LedgerError)
        ledger = cls(_connect(name, mode), name)
        try:
            with ledger.snapshot():
                found = ledger._check(identity)
                if old := found == old_ledger.FORMAT and mode == "ro":
                    converted = ledger._converted()
                else:
                    check(found == FORMAT, name, *old_ledger.refusal(found), LedgerError)
                    check_schema(ledger._connection, name)
                    ledger._known = chain.verify_chain(ledger._connection, name)
                    if noted is not None or not headless:
                        chain.check_ancestor(ledger._connection, name, noted, ledger._known)
        except BaseException:
            ledger.close()
            raise
        if old:
            ledger.close()
        return converted if old else ledger

    def _check(self, identity: str | None) -> str:
        """Check that the file is whole and the one that is meant; return its format."""
        (found,) = self._connection.execute("PRAGMA integrity_check").fetchone()
        remedy = "restore it from a backup"
        check(found == "ok", self._name, f"is damaged ({found})", remedy, LedgerError)
        meta = dict(self._connection.execute("SELECT key, value FROM meta").fetchall())
        remedy = "put back the ledger that this run was started with"
        same = identity in (None, meta.get("identity"))
        check(same, self._name, "belongs to another run", remedy, LedgerError)
        return str(meta.get("format"))

    def _converted(self) -> Self:
        """Read a ledger of dpfl 0.1 into memory, in today's form."""
        old = old_ledger.read(self._connection, self._name)
        ledger = type(self).create(":memory:", old.identity)
        with ledger._transaction() as entry:
            old.write(entry)
        ledger._name, ledger.flags = self._name, old.flags
        return ledger

    # -- reading -----------------------------------------------------------------------------------

    def _rows(self, query: str, **place: Any) -> list[Any]:
        """Return all rows of a query with named places."""
        with self._guard():
            return self._connection.execute(query, place).fetchall()

    def _one(self, query: str, **place: Any) -> Any:
        """Return the first row of a query with named places, None if there is none."""
        with self._guard():
            return self._connection.execute(query, place).fetchone()

    def identity(self) -> str:
        """Which run, or which site, this ledger was made for."""
        return str(self._one("SELECT value FROM meta WHERE key = 'identity'")[0])

    @property
    def filter(self) -> FilterName:
        """The rule across studies that the ledger was made with."""
        return self._filter.name

    @functools.cached_property
    def _filter(self) -> Filter:
        return filter_named(self._one("SELECT value FROM meta WHERE key = 'filter'")[0])

    def head(self) -> Head:
        """Return the newest entry of the hash chain; noted elsewhere, it reveals a rewriting."""
        with self._guard():
            return chain.last_head(self._connection)

    def contains(self, digest: str) -> bool:
        """Whether an entry of the chain has this digest."""
        return self._one("SELECT 1 FROM chain WHERE digest = :digest", digest=digest) is not None

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
        """Read everything inside this context as it is now, whatever others charge meanwhile."""
        with self._guard():
            if self._connection.in_transaction:
                yield
                return
            self._connection.execute("BEGIN")
            try:
                # The first read fixes the snapshot.
                self._connection.execute("SELECT 1 FROM sqlite_master").fetchone()
                yield
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    # -- writing -----------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[Entry]:
        """Write one entry of the chain, or nothing; after the commit, note its head."""
        check(not self.flags, self._name, *old_ledger.refusal(old_ledger.FORMAT), LedgerError)
        with self._guard():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                same = self._known is None or chain.contains(self._connection, self._known)
                problem = "was replaced by another copy while it was open"
                remedy = "put back the newest copy, and begin again from there"
                check(same, self._name, problem, remedy, LedgerError)
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


def _connect(name: str, mode: str) -> sqlite3.Connection:
    try:
        target = name if name == ":memory:" else f"{Path(name).absolute().as_uri()}?mode={mode}"
        finished = mode == "ro" and not Path(name + "-wal").exists()
        if finished and not os.access(Path(name).parent, os.W_OK):
            target += "&immutable=1"  # on a read-only medium, WAL could not make its index file
        connection = sqlite3.connect(target, uri=True, timeout=120, isolation_level=None)
        if mode != "ro":
            for setting in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
                connection.execute(f"PRAGMA {setting}")
        return connection
    except sqlite3.Error as error:
        raise translated(name, error) from error


def backup(source: Path, target: Path) -> None:
    """Copy a ledger that may be in use, through SQLite's own backup, and note the copy's head."""
    noted = chain.read_head(str(source))
    try:
        with closing(_connect(str(source), "ro")) as old, closing(sqlite3.connect(target)) as new:
            old.backup(new)
            head = chain.verify_chain(new, str(source))
            chain.check_ancestor(new, str(source), noted, head)
    except sqlite3.Error as error:
        raise translated(str(target), error) from error
    except OSError as error:
        raise disk_error(str(target), error) from error
    chain.head_path(str(target)).unlink(missing_ok=True)  # of an earlier backup
    chain.write_head(str(target), head)


def translated(name: str, error: sqlite3.Error) -> LedgerError | DiskError:
    """Say what an error of the database means to the person who runs this.

    A full disk is a :class:`DiskError`; the run can be resumed when there is space again.
    """
    text = str(error)
    if "full" in text or "disk I/O" in text:
        remedy = "free some space and resume; what was charged is kept"
        return DiskError(name, f"cannot be written ({text})", remedy)
    remedy = "restore it from a backup; a run does not go on without its ledger"
    return LedgerError(name, f"cannot be used ({text})", remedy)
