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

from __future__ import annotations

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

from dpfl.core.errors import LedgerError, disk_error

Value = str | int | float | None
Row = tuple[Value, ...]

TABLES: Mapping[str, Mapping[str, type]] = {
    "runs": {"run": str, "seeded": int, "title": str},
    "grants": {"account": str, "observer": str, "unit": str, "epsilon": float, "delta": float},
    "members": {"account": str, "population": str},
    "plans": {
        "run": str,
        "account": str,
        "observer": str,
        "bill": str,
        "releases": int,
        "delta": float,
    },
    "charges": {
        "run": str,
        "round": int,
        "account": str,
        "observer": str,
        "plan": str,
        "bill": str,
        "draw": str,
    },
    "journal": {"run": str, "round": int, "at": float},
}
"""The tables that the chain covers and their columns; each also has a column ``entry``."""

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
    """Give every value the type its column has in the database, so that it is hashed as it will be
    read.
    """
    kinds = TABLES[table].values()
    return tuple(
        None if value is None else kind(value) for kind, value in zip(kinds, row, strict=True)
    )


def digest_of(number: int, previous: str, rows: Mapping[str, Sequence[Row]]) -> str:
    """Hash one entry: its number, the digest before it, and its rows by table in a canonical order."""
    body = [number, previous, [[table, sorted(rows[table])] for table in sorted(rows)]]
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


class Entry:
    """The entry that a running transaction writes: inserts rows and remembers them for the digest."""

    def __init__(self, connection: sqlite3.Connection, before: Head) -> None:
        self.connection = connection
        self._before = before
        self._rows: defaultdict[str, list[Row]] = defaultdict(list)

    def insert(self, table: str, rows: Iterable[Sequence[Value]]) -> None:
        """Insert rows of a chained table."""
        plain = [canonical(table, row) for row in rows]
        if plain:
            places = ", ".join("?" * (len(plain[0]) + 1))
            number = self._before.number + 1
            written = self.connection.executemany(
                f"INSERT INTO {table} VALUES ({places})",
                [(*row, number) for row in plain],
            )
            if written.rowcount != len(plain):
                problem = f"took {written.rowcount} of {len(plain)} rows into {table}"
                raise LedgerError("ledger", problem, _FORGED)
            self._rows[table] += plain

    def retract(self, table: str, rows: Iterable[Sequence[Value]]) -> None:
        """Take back rows that this very entry inserted."""
        same = " AND ".join(f"{column} IS ?" for column in TABLES[table])
        for row in rows:
            plain = canonical(table, row)
            self._rows[table].remove(plain)
            self.connection.execute(
                f"DELETE FROM {table} WHERE {same} AND entry = ?",
                (*plain, self._before.number + 1),
            )

    def seal(self) -> Head | None:
        """Append the entry to the chain; None if the transaction wrote no chained row."""
        rows = {table: own for table, own in self._rows.items() if own}
        if not rows:
            return None
        number = self._before.number + 1
        head = Head(number=number, digest=digest_of(number, self._before.digest, rows))
        self.connection.execute("INSERT INTO chain VALUES (?, ?)", (head.number, head.digest))
        return head


def first_head(meta: Mapping[str, str]) -> Head:
    """Return entry 0, which fixes format, identity and filter."""
    return Head(number=0, digest=digest_of(0, "", {"meta": [tuple(item) for item in meta.items()]}))


def last_head(connection: sqlite3.Connection) -> Head:
    """Return the newest entry in the database."""
    row = connection.execute(
        "SELECT number, digest FROM chain ORDER BY number DESC LIMIT 1"
    ).fetchone()
    return Head(number=row[0], digest=row[1])


def verify_chain(connection: sqlite3.Connection, name: str) -> Head:
    """Recompute every digest from the rows; refuse a ledger whose rows and chain do not agree."""
    rows = _rows_by_entry(connection)
    entries = connection.execute("SELECT number, digest FROM chain ORDER BY number").fetchall()
    meta = connection.execute("SELECT key, value FROM meta").fetchall()
    if not entries or entries[0][0] != 0 or not _matches(0, "", {"meta": meta}, entries[0][1]):
        raise LedgerError(name, "its first entry (format, identity, filter) was changed", _FORGED)
    previous: str = entries[0][1]
    for number, (stored, digest) in enumerate(entries[1:], 1):
        own = rows.pop(number, {})
        if stored != number:
            raise LedgerError(name, f"entry {number} of its hash chain is missing", _FORGED)
        if not own or not _matches(number, previous, own, digest):
            raise LedgerError(
                name, f"entry {number} of {len(entries) - 1} was changed, deleted or moved", _FORGED
            )
        previous = digest
    if rows:
        raise LedgerError(name, "holds rows that belong to no entry of its hash chain", _FORGED)
    _verify_bills(connection, name)
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


def _verify_bills(connection: sqlite3.Connection, name: str) -> None:
    """Check that every privacy cost that a plan or a charge names is stored, and is the one it
    names.
    """
    named = {
        row[0]
        for row in connection.execute("SELECT bill FROM plans UNION SELECT bill FROM charges")
    }
    stored = dict(connection.execute("SELECT digest, body FROM bills"))
    for digest in sorted(named):
        if (
            digest not in stored
            or hashlib.sha256(str(stored[digest]).encode()).hexdigest() != digest
        ):
            raise LedgerError(
                name, f"privacy cost {digest[:12]} is missing or was changed", _FORGED
            )


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
        raise LedgerError(
            str(path),
            f"cannot be read ({error})",
            "restore it; or check that this is the newest copy of the ledger, remove the file, and run "
            f"dpfl ledger verify {name} --accept-head",
        ) from error


def write_head(name: str, head: Head) -> None:
    """Replace the head file, unless another process has written a later one meanwhile.

    Without a sync of the folder: after a power cut the older head may be back, and the ledger is
    then ahead of it.
    """
    path = head_path(name)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.new")
    try:
        known = read_head(name)
        if known is not None and known.number >= head.number:
            return
        with draft.open("x", encoding="utf-8") as stream:
            stream.write(
                json.dumps({"format": HEAD_FORMAT, "number": head.number, "hash": head.digest})
                + "\n"
            )
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
    if noted is None:
        if newest.number == 0:
            return  # nothing was written yet
        raise LedgerError(
            name,
            f"its head file {head_path(name).name} is missing: an old copy cannot be told from the newest",
            f"put it back; or, if this is the newest copy, run dpfl ledger verify {name} --accept-head",
        )
    if noted.number > newest.number:
        raise LedgerError(
            name,
            f"is an old copy: it ends at entry {newest.number}, and entry {noted.number} was written",
            "restore the newest copy (with its -wal file): an old one has forgotten what was charged since",
        )
    if not contains(connection, noted):
        raise LedgerError(
            name,
            f"is another copy: its entry {noted.number} is not the one that was written beside it",
            "put back the ledger that belongs to the head file: two copies do not know each other's charges",
        )


def contains(connection: sqlite3.Connection, head: Head) -> bool:
    """Whether the chain has this entry."""
    row = connection.execute("SELECT digest FROM chain WHERE number = ?", (head.number,)).fetchone()
    return row is not None and row[0] == head.digest
