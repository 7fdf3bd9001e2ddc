"""The file of a ledger: made once, opened whole or not at all, written as entries of a chain.

Opening checks the file itself, its tables, its hash chain and the head that is kept beside it. A
ledger that fails any check is refused with a :class:`LedgerError` that says what to do.
"""
# ruff: noqa: A002

import functools
import os
import sqlite3
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

from dpfl.core.errors import DiskError, LedgerError, disk_error
from dpfl.core.files import sync_folder
from dpfl.core.types import Budget
from dpfl.privacy import chain
from dpfl.privacy.chain import Entry, Head, require
from dpfl.privacy.costs import PrivacyCost
from dpfl.privacy.filters import FILTERS, Filter, FilterName, filter_named
from dpfl.privacy.ledger_schema import FORMAT, SCHEMA, check_schema

_TAKEN = {
    "": "already exists",
    "-wal": "a part of it already exists",
    ".head": "a ledger was kept here: its head file is still there",
}


class LedgerFile:
    """An open ledger file: its connection, its hash chain, and what was read from it before."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self._connection = connection
        self._name = name
        self._known: Head | None = None
        self._costs: dict[str, PrivacyCost] = {}
        self._budgets: dict[str, Budget] = {}  # a row that was read never changes

    # -- making and opening ------------------------------------------------------------------------

    @classmethod
    def create(cls, path: Path | str, identity: str, *, filter: FilterName = "allotments") -> Self:
        """Start a new ledger; an existing file is never overwritten.

        ``identity`` is the run or the site that the ledger is for. ``filter`` is the rule across
        studies (see :mod:`dpfl.privacy.filters`), fixed for the ledger's life. The path
        ``:memory:`` is for simulations only.
        """
        name = str(path)
        remedy = "open or restore it, or name another file"
        if name == ":memory:":
            return cls(_connect(name, "rwc"), name)._set_up(identity, filter)
        require(Path(name).parent.is_dir(), name, "is in no folder that exists", "make the folder")
        for end, problem in _TAKEN.items():
            require(not Path(name + end).exists(), name, problem, remedy)
        # Written under a name of its own and linked into place: a ledger that exists is complete.
        draft = Path(f"{name}.{uuid.uuid4().hex}.new")
        try:
            with closing(cls(_connect(str(draft), "rwc"), name)._set_up(identity, filter)) as made:
                first = made.head()
            os.link(draft, path)
            sync_folder(Path(path).parent)
        except FileExistsError as error:
            raise LedgerError(name, _TAKEN[""], remedy) from error
        except OSError as error:
            raise disk_error(name, error) from error
        finally:
            draft.unlink(missing_ok=True)
        chain.write_head(name, first)
        return cls.open(name, identity)

    def _set_up(self, identity: str, rule: str) -> Self:
        meta = {"format": FORMAT, "identity": identity, "filter": filter_named(rule).name}
        first = Head(0, chain.digest_of(0, "", {"meta": list(meta.items())}))
        with database_errors(self._name):
            self._connection.executescript(f"BEGIN IMMEDIATE;{SCHEMA}")
            self._connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
            self._connection.execute("INSERT INTO chain VALUES (?, ?)", first)
            self._connection.execute("COMMIT")
        return self

    @classmethod
    def open(
        cls,
        path: Path | str,
        identity: str | None = None,
        *,
        read_only: bool = False,
        accept_head: bool = False,
    ) -> Self:
        """Open a ledger and check all of it: the file, its hash chain, and its head file.

        ``identity``, if given, must be the one the ledger was made for. ``accept_head`` writes a
        missing head file anew: only a person can know that no newer copy of the ledger exists. A
        head file that is there is never replaced.
        """
        name = str(path)
        remedy = "check the path, or restore it: no run goes on without its ledger"
        require(Path(name).is_file(), name, "there is no ledger", remedy)
        # The head is read before the ledger: what others write since puts the ledger ahead.
        if (noted := chain.read_head(name)) is None:
            time.sleep(0.2)  # another process may just have made it, and not yet noted its head
            noted = chain.read_head(name)
        ledger = cls(_connect(name, "ro" if read_only else "rw"), name)
        try:
            with ledger.snapshot():
                ledger._check(identity)
                head = chain.verify_chain(ledger._connection, name, noted, accept_head)
        except BaseException:
            ledger.close()
            raise
        ledger._known = head
        if accept_head and noted is None:
            chain.write_head(name, head)
        return ledger

    def _check(self, identity: str | None) -> None:
        """Check that the file is whole, the one that is meant, and of today's format."""
        found = self._rows("PRAGMA integrity_check")[0][0]
        require(found == "ok", self._name, f"is damaged ({found})")
        meta = dict(self._rows("SELECT key, value FROM meta"))
        owner = meta.get("identity")
        found = meta.get("format")
        problem = f"belongs to another run or site: to '{owner}', not to '{identity}'"
        remedy = "put back the ledger, or the name, that this one was started with"
        self._require(identity in (None, owner), problem, remedy)
        problem = f"has format {found}, and this dpfl reads {FORMAT}"
        self._require(found == FORMAT, problem, "use the version of dpfl that wrote it")
        named = owner is not None and meta.get("filter") in FILTERS
        require(named, self._name, "does not say whose it is, or how it adds up")
        check_schema(self._connection, self._name)

    def _require(self, good: bool, problem: str, remedy: str) -> None:
        require(good, self._name, problem, remedy)

    def close(self) -> None:
        """Close the database connection; what was charged is on disk already."""
        self._connection.close()

    # -- reading -----------------------------------------------------------------------------------

    def _rows(self, query: str, **place: Any) -> list[Any]:
        """Return all rows of a query with named places."""
        with database_errors(self._name):
            return self._connection.execute(query, place).fetchall()

    def _select(self, columns: str, table: str, **same: Any) -> list[Any]:
        """Return these columns of the rows of a table that have these values in others."""
        where = " AND ".join(f"{column} = :{column}" for column in same)
        return self._rows(f"SELECT {columns} FROM {table} WHERE {where}", **same)

    def identity(self) -> str:
        """Which run, or which site, this ledger was made for."""
        return str(self._select("value", "meta", key="identity")[0][0])

    @property
    def filter(self) -> FilterName:
        """The name of the rule across studies."""
        return self.rule.name

    @functools.cached_property
    def rule(self) -> Filter:
        """The rule across studies that the ledger was made with."""
        return filter_named(self._select("value", "meta", key="filter")[0][0])

    def head(self) -> Head:
        """Return the newest entry of the hash chain; noted elsewhere, it reveals a rewriting."""
        with database_errors(self._name):
            return chain.last_head(self._connection)

    def contains(self, digest: str) -> bool:
        """Whether an entry of the chain has this digest."""
        return bool(self._select("1", "chain", digest=digest))

    # -- transactions ------------------------------------------------------------------------------

    @contextmanager
    def _begun(self, kind: str) -> Iterator[None]:
        """Begin a transaction; what is not committed in this context is rolled back."""
        with database_errors(self._name):
            self._connection.execute(f"BEGIN {kind}")
            try:
                yield
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read everything inside this context as it is now, whatever others charge meanwhile."""
        if self._connection.in_transaction:
            yield
            return
        with self._begun("DEFERRED"):
            self._rows("SELECT 1 FROM sqlite_master")  # the first read fixes the snapshot
            yield

    @contextmanager
    def _transaction(self) -> Iterator[Entry]:
        """Write one entry of the chain, or nothing; after the commit, note its head."""
        with self._begun("IMMEDIATE"):
            same = self._known is None or chain.contains(self._connection, self._known)
            remedy = "put back the newest copy, and begin again there"
            self._require(same, "was replaced by another copy while it was open", remedy)
            entry = Entry(self._connection)
            yield entry
            head = entry.seal()
            self._connection.execute("COMMIT")
        if head is not None:
            self._known = head
            if self._name != ":memory:":
                chain.write_head(self._name, head)


def _connect(name: str, mode: str) -> sqlite3.Connection:
    with database_errors(name):
        target = name if name == ":memory:" else f"{Path(name).absolute().as_uri()}?mode={mode}"
        finished = mode == "ro" and not Path(name + "-wal").exists()
        if finished and not os.access(Path(name).parent, os.W_OK):
            target += "&immutable=1"  # on a read-only medium, WAL could not make its index file
        connection = sqlite3.connect(target, uri=True, timeout=120, isolation_level=None)
        if mode != "ro":
            for setting in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
                connection.execute(f"PRAGMA {setting}")
        return connection


def backup(source: Path, target: Path) -> None:
    """Copy a ledger that may be in use, through SQLite's own backup, and note the copy's head."""
    noted = chain.read_head(str(source))
    with (
        database_errors(str(target)),
        closing(_connect(str(source), "ro")) as old,
        closing(sqlite3.connect(target)) as new,
    ):
        old.backup(new)
        head = chain.verify_chain(new, str(source), noted)
    chain.head_path(str(target)).unlink(missing_ok=True)  # of an earlier backup
    chain.write_head(str(target), head)


@contextmanager
def database_errors(name: str) -> Iterator[None]:
    """Say what an error of the database means to the person who runs this.

    A full disk is a :class:`DiskError`; the run can be resumed when there is space again.
    """
    try:
        yield
    except sqlite3.Error as error:
        if "full" in str(error) or "disk I/O" in str(error):
            raise DiskError(
                name,
                f"cannot be written ({error})",
                "free some space and resume; what was charged is kept",
            ) from error
        if "locked" in str(error) or "busy" in str(error):
            raise LedgerError(
                name, "is in use by another process", "end that process, or try again later"
            ) from error
        raise LedgerError(
            name,
            f"cannot be used ({error})",
            "restore it from a backup; a run does not go on without its ledger",
        ) from error
