"""The hash chain of a ledger: every transaction is one entry, and holds the digest of the one
before.

*What it proves.* The digest of an entry is SHA-256 over its number, the digest before it and all
rows the transaction wrote. A row that is edited, deleted, added, or moved to another entry, and an
entry that is dropped or swapped, changes a digest and is noticed when the ledger is opened. The
newest entry's number and digest (the *head*) are also kept in a file beside the ledger, so that an
old copy of the ledger, or a copy that went its own way, is noticed as well: the ledger must contain
the head of that file. It may be ahead of it, because the file is written after the commit.

*What it does not prove.* The chain has no key. Whoever can write both files can compute a new chain
and a new head, or put back an old ledger together with its old head. Only a head that was noted
elsewhere, for instance in a printed report, reveals that: ``dpfl ledger verify FILE --head HASH``.
Servers countersign the entries of their studies, and so notice it too
(:mod:`dpfl.deploy.receipts`). The answers that a site keeps for sending again are not part of the
chain: they are replaced by later ones.
"""

import hashlib
import json
import os
import sqlite3
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dpfl.core.checks import check
from dpfl.core.errors import LedgerError, disk_error
from dpfl.core.files import parsed
from dpfl.core.types import Observer, Unit

Value = str | int | float | None
Row = tuple[Value, ...]
# The tables that the chain covers and the types of their columns, which ``entry`` follows.
TABLES: Mapping[str, tuple[type, ...]] = {
    "runs": (str, int, str),
    "grants": (str, Observer, Unit, float, float),
    "members": (str, str),
    "plans": (str, str, Observer, str, int, float),
    "charges": (str, int, str, Observer, str, str, str),
    "journal": (str, int, float),
    "withdrawn": (str, float),
}
HEAD_FORMAT = "dpfl-ledger-head-1"
_RESTORE = "restore it from a backup; nothing is released on a ledger that was changed"


def require(good: bool, where: str, problem: str, remedy: str = _RESTORE) -> None:
    """Refuse a ledger, or what is asked of it, unless ``good``."""
    check(good, where, problem, remedy, LedgerError)


class Head(NamedTuple):
    """The newest entry of a chain: how many came before it, and its digest."""

    number: int
    digest: str

    def __str__(self) -> str:
        return f"{self.number}:{self.digest}"


def digest_of(number: int, previous: str, rows: Mapping[str, Sequence[Row]]) -> str:
    """Hash one entry: its number, the digest before it, and its rows in a canonical order."""
    body = [number, previous, [[table, sorted(rows[table])] for table in sorted(rows)]]
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


def last_head(connection: sqlite3.Connection) -> Head:
    """Return the newest entry in the database."""
    query = "SELECT number, digest FROM chain ORDER BY number DESC LIMIT 1"
    return Head(*connection.execute(query).fetchone())


class Entry:
    """The entry that a running transaction writes; ``rows`` are hashed when it is sealed."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.rows: defaultdict[str, list[Row]] = defaultdict(list)
        self._before = last_head(connection)
        self._number = self._before.number + 1

    def insert(self, table: str, rows: Iterable[Row]) -> None:
        """Insert rows of a chained table.

        Every value gets the type of its column, so that it is hashed as it will be read.
        """
        pairs = [zip(TABLES[table], row, strict=True) for row in rows]
        plain = [tuple(None if v is None else kind(v) for kind, v in row) for row in pairs]
        query = f"INSERT INTO {table} VALUES ({'?, ' * len(TABLES[table])}?)"
        taken = self.connection.executemany(query, [(*row, self._number) for row in plain]).rowcount
        require(taken == len(plain), "ledger", f"took {taken} of {len(plain)} rows into {table}")
        self.rows[table] += plain

    def retract_plan(self, row: Row) -> None:
        """Take back a plan that this very entry inserted."""
        self.rows["plans"].remove(row)
        query = "DELETE FROM plans WHERE run = ? AND account = ? AND observer = ?"
        self.connection.execute(query, row[:3])

    def seal(self) -> Head | None:
        """Append the entry to the chain; None if the transaction wrote no chained row."""
        rows = {table: own for table, own in self.rows.items() if own}
        if not rows:
            return None
        head = Head(self._number, digest_of(self._number, self._before.digest, rows))
        self.connection.execute("INSERT INTO chain VALUES (?, ?)", head)
        return head


def verify_chain(
    connection: sqlite3.Connection, name: str, noted: Head | None, accept: bool = False
) -> Head:
    """Recompute every digest from the rows, and return the newest entry.

    A ledger is refused whose rows and chain do not agree, or whose chain does not contain the head
    noted beside it. Without a noted head, a ledger with entries must be accepted by a person.
    """
    rows: defaultdict[int, dict[str, list[Row]]] = defaultdict(dict)
    there = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    for table in sorted(there & set(TABLES)):  # only the ledger of a site has withdrawals
        for *row, entry in connection.execute(f"SELECT * FROM {table}"):
            rows[entry].setdefault(table, []).append(tuple(row))
    rows[0]["meta"] = connection.execute("SELECT key, value FROM meta").fetchall()
    head = Head(-1, "")
    for number, digest in connection.execute("SELECT number, digest FROM chain ORDER BY number"):
        expected = head.number + 1
        intact = False
        require(number == expected, name, f"entry {expected} of its hash chain is missing")
        own = rows.pop(number, {})
        with suppress(TypeError, ValueError):  # values of a kind that no writer of ours leaves
            intact = bool(own) and digest_of(number, head.digest, own) == digest and _typed(own)
        what = f"entry {number}" if number else "its first entry (format, identity, filter)"
        require(intact, name, f"{what} was changed, deleted or moved")
        head = Head(number, digest)
    require(not rows, name, "holds rows that belong to no entry of its hash chain")
    costs = dict(connection.execute("SELECT digest, body FROM bills"))
    for (digest,) in connection.execute("SELECT bill FROM plans UNION SELECT bill FROM charges"):
        intact = hashlib.sha256(str(costs.get(digest, "")).encode()).hexdigest() == digest
        require(intact, name, f"privacy cost {digest[:12]} is missing or was changed")
    if noted is None:
        problem = f"its head file {head_path(name).name} is missing: this may be an old copy"
        require(accept or head.number == 0, name, problem, f"put it back; or, {_accept(name)}")
        return head
    problem = f"is an old copy: it ends at entry {head.number}, and entry {noted.number} was made"
    remedy = "restore the newest copy (with its -wal file): this one lacks the charges made since"
    require(noted.number <= head.number, name, problem, remedy)
    problem = f"is another copy: its entry {noted.number} is not the one that was noted beside it"
    remedy = "put back the ledger that belongs to the head file: copies do not share charges"
    require(contains(connection, noted), name, problem, remedy)
    return head


def _typed(rows: Mapping[str, Sequence[Row]]) -> bool:
    """Whether all values of an entry are of the types that their columns have.

    What is not raises a TypeError or a ValueError, or says no.
    """
    return all(
        value is None or kind(value) == value
        for table, own in rows.items()
        for row in own
        for kind, value in zip(TABLES.get(table, (str, str)), row, strict=True)
    )


def contains(connection: sqlite3.Connection, head: Head) -> bool:
    """Whether the chain has this entry."""
    query = "SELECT number, digest FROM chain WHERE number = ?"
    return bool(connection.execute(query, head[:1]).fetchone() == head)


# -- the file beside the ledger --------------------------------------------------------------------


def head_path(name: str) -> Path:
    """Return where the head of this ledger is kept."""
    return Path(f"{name}.head")


def read_head(name: str) -> Head | None:
    """Read the head file; None if there is none."""
    path = head_path(name)
    try:
        body = parsed(path.read_text(encoding="utf-8"))
        if body["format"] != HEAD_FORMAT:
            raise ValueError(f"format {body['format']}")
        return Head(int(body["number"]), str(body["hash"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LedgerError(
            str(path), f"cannot be read ({error})", f"restore it; or remove it, and {_accept(name)}"
        ) from error


def _accept(name: str) -> str:
    return f"if this is the newest copy of the ledger, run dpfl ledger verify {name} --accept-head"


def write_head(name: str, head: Head) -> None:
    """Replace the head file, unless another process has written a later one meanwhile.

    The folder is not synced: after a power cut the older head may be back, and the ledger is then
    ahead of it.
    """
    path = head_path(name)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.new")
    try:
        known = read_head(name)
        if known is not None and known.number >= head.number:
            return
        with draft.open("x", encoding="utf-8") as stream:
            body = {"format": HEAD_FORMAT, "number": head.number, "hash": head.digest}
            stream.write(json.dumps(body) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise disk_error(str(path), error) from error
