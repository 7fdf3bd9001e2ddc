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
Servers do not countersign heads yet. The answers that a site keeps for sending again are not part
of the chain: they are replaced by later ones.
"""

import hashlib
import json
import os
import sqlite3
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dpfl.core.checks import check
from dpfl.core.errors import LedgerError, disk_error

Value = str | int | float | None
Row = tuple[Value, ...]

_COLUMNS = {
    "runs": "run seeded title",
    "grants": "account observer unit epsilon delta",
    "members": "account population",
    "plans": "run account observer bill releases delta",
    "charges": "run round account observer plan bill draw",
    "journal": "run round at",
}
_NUMBERS = dict.fromkeys(("epsilon", "delta", "at"), float)
_COUNTS = dict.fromkeys(("seeded", "releases", "round"), int)
# The tables that the chain covers and the types of their columns; each also has a column ``entry``.
TABLES: Mapping[str, Mapping[str, type]] = {
    table: {column: {**_NUMBERS, **_COUNTS}.get(column, str) for column in columns.split()}
    for table, columns in _COLUMNS.items()
}

HEAD_FORMAT = "dpfl-ledger-head-1"
_FORGED = "restore the ledger from a backup; nothing is released on a ledger that was changed"


@dataclass(frozen=True, kw_only=True)
class Head:
    """The newest entry of a chain: how many came before it, and its digest."""

    number: int
    digest: str

    def __str__(self) -> str:
        return f"{self.number}:{self.digest}"


def canonical(table: str, row: Sequence[Value]) -> Row:
    """Give every value the type of its column, so that it is hashed as it will be read."""
    pairs = zip(TABLES[table].values(), row, strict=True)
    return tuple(None if value is None else kind(value) for kind, value in pairs)


def digest_of(number: int, previous: str, rows: Mapping[str, Sequence[Row]]) -> str:
    """Hash one entry: its number, the digest before it, and its rows in a canonical order."""
    body = [number, previous, [[table, sorted(rows[table])] for table in sorted(rows)]]
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


class Entry:
    """The entry that a running transaction writes; it remembers its rows for the digest."""

    def __init__(self, connection: sqlite3.Connection, before: Head) -> None:
        self.connection = connection
        self.number = before.number + 1
        self._before = before
        self._rows: defaultdict[str, list[Row]] = defaultdict(list)

    def insert(self, table: str, rows: Iterable[Sequence[Value]]) -> None:
        """Insert rows of a chained table."""
        plain = [canonical(table, row) for row in rows]
        if plain:
            query = f"INSERT INTO {table} VALUES ({', '.join('?' * (len(plain[0]) + 1))})"
            taken = self.connection.executemany(query, [(*row, self.number) for row in plain])
            problem = f"took {taken.rowcount} of {len(plain)} rows into {table}"
            check(taken.rowcount == len(plain), "ledger", problem, _FORGED, LedgerError)
            self._rows[table] += plain

    def retract(self, table: str, rows: Iterable[Sequence[Value]]) -> None:
        """Take back rows that this very entry inserted."""
        same = " AND ".join(f"{column} IS ?" for column in [*TABLES[table], "entry"])
        for row in rows:
            plain = canonical(table, row)
            self._rows[table].remove(plain)
            self.connection.execute(f"DELETE FROM {table} WHERE {same}", (*plain, self.number))

    def seal(self) -> Head | None:
        """Append the entry to the chain; None if the transaction wrote no chained row."""
        rows = {table: own for table, own in self._rows.items() if own}
        if not rows:
            return None
        digest = digest_of(self.number, self._before.digest, rows)
        self.connection.execute("INSERT INTO chain VALUES (?, ?)", (self.number, digest))
        return Head(number=self.number, digest=digest)


def first_head(meta: Mapping[str, str]) -> Head:
    """Return entry 0, which fixes format, identity and filter."""
    return Head(number=0, digest=digest_of(0, "", {"meta": [tuple(item) for item in meta.items()]}))


def last_head(connection: sqlite3.Connection) -> Head:
    """Return the newest entry in the database."""
    query = "SELECT number, digest FROM chain ORDER BY number DESC LIMIT 1"
    number, digest = connection.execute(query).fetchone()
    return Head(number=number, digest=digest)


def verify_chain(connection: sqlite3.Connection, name: str) -> Head:
    """Recompute every digest from the rows; refuse a ledger whose rows and chain do not agree."""

    def holds(good: bool, problem: str) -> None:
        check(good, name, problem, _FORGED, LedgerError)

    rows = _rows_by_entry(connection)
    entries = connection.execute("SELECT number, digest FROM chain ORDER BY number").fetchall()
    meta = connection.execute("SELECT key, value FROM meta").fetchall()
    first = bool(entries) and entries[0][0] == 0 and _matches(0, "", {"meta": meta}, entries[0][1])
    holds(first, "its first entry (format, identity, filter) was changed")
    previous: str = entries[0][1]
    for number, (stored, digest) in enumerate(entries[1:], 1):
        own = rows.pop(number, {})
        holds(stored == number, f"entry {number} of its hash chain is missing")
        intact = bool(own) and _matches(number, previous, own, digest)
        holds(intact, f"entry {number} of {len(entries) - 1} was changed, deleted or moved")
        previous = digest
    holds(not rows, "holds rows that belong to no entry of its hash chain")
    costs = dict(connection.execute("SELECT digest, body FROM bills"))
    for (digest,) in connection.execute("SELECT bill FROM plans UNION SELECT bill FROM charges"):
        body = str(costs.get(digest, ""))
        intact = hashlib.sha256(body.encode()).hexdigest() == digest
        holds(intact, f"privacy cost {digest[:12]} is missing or was changed")
    return Head(number=len(entries) - 1, digest=previous)


def _rows_by_entry(connection: sqlite3.Connection) -> dict[int, dict[str, list[Row]]]:
    found: defaultdict[int, dict[str, list[Row]]] = defaultdict(dict)
    for table, columns in TABLES.items():
        own: defaultdict[int, list[Row]] = defaultdict(list)
        for row in connection.execute(f"SELECT {', '.join(columns)}, entry FROM {table}"):
            own[row[-1]].append(row[:-1])
        for entry, some in own.items():
            found[entry][table] = some
    return found


def _matches(number: int, previous: str, rows: Mapping[str, Sequence[Row]], digest: str) -> bool:
    try:
        return digest_of(number, previous, rows) == digest
    except (TypeError, ValueError):  # values of a kind that no writer of ours leaves
        return False


# -- the file beside the ledger --------------------------------------------------------------------


def head_path(name: str) -> Path:
    """Return where the head of this ledger is kept."""
    return Path(f"{name}.head")


def read_head(name: str) -> Head | None:
    """Read the head file; None if there is none."""
    path = head_path(name)
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["format"] != HEAD_FORMAT:
            raise ValueError(f"format {body['format']}")
        return Head(number=int(body["number"]), digest=str(body["hash"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = (
            "restore it; or check that this is the newest copy of the ledger, remove the file, and "
            f"run dpfl ledger verify {name} --accept-head"
        )
        raise LedgerError(str(path), f"cannot be read ({error})", remedy) from error


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


def check_ancestor(
    connection: sqlite3.Connection, name: str, noted: Head | None, newest: Head
) -> None:
    """Refuse a ledger that does not contain the head noted beside it."""
    number = 0 if noted is None else noted.number
    check(
        noted is not None or newest.number == 0,  # nothing was written yet
        name,
        f"its head file {head_path(name).name} is missing: this may be an old copy",
        f"put it back; or, if this is the newest copy, run dpfl ledger verify {name} --accept-head",
        LedgerError,
    )
    check(
        number <= newest.number,
        name,
        f"is an old copy: it ends at entry {newest.number}, and entry {number} was written",
        "restore the newest copy (with its -wal file): this one lacks the charges made since",
        LedgerError,
    )
    check(
        noted is None or contains(connection, noted),
        name,
        f"is another copy: its entry {number} is not the one that was written beside it",
        "put back the ledger that belongs to the head file: copies do not share charges",
        LedgerError,
    )


def contains(connection: sqlite3.Connection, head: Head) -> bool:
    """Whether the chain has this entry."""
    row = connection.execute("SELECT digest FROM chain WHERE number = ?", (head.number,)).fetchone()
    return row is not None and row[0] == head.digest
