"""Ledgers that somebody has edited: as bytes, or row by row, with or without a new hash chain."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from dpfl.privacy import chain
from tests.fuzz.mutations import altered, as_json, damaged, files

Tables = dict[str, list[list[Any]]]
_ODD = ["DROP TABLE charges", "CREATE TABLE more (x)", "CREATE VIEW v AS SELECT * FROM charges"]
_ODD += ["CREATE TRIGGER t AFTER INSERT ON charges BEGIN DELETE FROM charges; END"]
_ODD += ["DROP INDEX journal_by_run", "PRAGMA user_version = 7", "DELETE FROM chain"]


def change_ledger(data: st.DataObject, path: Path) -> None:
    """Change the ledger at ``path``, or what lies beside it, in one of many ways."""
    head = chain.head_path(str(path))
    match data.draw(
        st.sampled_from(["rows", "rows", "rows", "forged", "forged", "bytes", "beside"])
    ):
        case "bytes":
            path.write_bytes(data.draw(damaged(path.read_bytes())))
        case "beside":
            beside = data.draw(st.sampled_from([head, Path(f"{path}-wal"), Path(f"{path}-shm")]))
            valid = json.loads(head.read_text()) if head.exists() else {"format": chain.HEAD_FORMAT}
            beside.write_bytes(data.draw(files(valid, as_json)))
        case how:
            schema, tables = schema_of(path), data.draw(altered(read_tables(path)))
            write_tables(path, schema, tables if isinstance(tables, dict) else {}, how == "forged")
            if data.draw(st.integers(0, 9)) == 9:
                with closing(sqlite3.connect(path)) as book, book, suppress(sqlite3.Error):
                    book.execute(data.draw(st.sampled_from(_ODD)))


def schema_of(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as book:
        rows = book.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")
        return [sql for (sql,) in rows]


def read_tables(path: Path) -> Tables:
    """All rows of a ledger; privacy costs as the values that they hold."""
    with closing(sqlite3.connect(path)) as book:
        names = [
            name for (name,) in book.execute("SELECT name FROM sqlite_master WHERE type='table'")
        ]
        found = {
            name: [list(row) for row in book.execute(f"SELECT * FROM {name}")] for name in names
        }
    found["bills"] = [[digest, json.loads(body)] for digest, body in found["bills"]]
    return found


def write_tables(path: Path, schema: list[str], tables: dict[str, Any], forged: bool) -> None:
    """Write rows into a new file in place of the ledger, as far as the database takes them."""
    for end in ("", "-wal", "-shm"):
        Path(f"{path}{end}").unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as book, book:
        book.executescript(";".join(schema))
        for table, rows in tables.items():
            for row in rows if isinstance(rows, list) else ():
                cells = [*map(_cell, row if isinstance(row, list) else [row])]
                with suppress(sqlite3.Error, OverflowError, UnicodeError):
                    book.execute(
                        f"INSERT INTO {table} VALUES ({', '.join('?' * len(cells))})", cells
                    )
        if forged:
            with suppress(TypeError, ValueError, sqlite3.Error):
                _chain_anew(book, path)


def _cell(value: Any) -> Any:
    """A value as a database takes it."""
    return (
        json.dumps(value, sort_keys=True, default=str) if isinstance(value, dict | list) else value
    )


def _chain_anew(book: sqlite3.Connection, path: Path) -> None:
    """Compute all digests and the head again, as somebody can who may write both files."""
    for digest, body in book.execute("SELECT digest, body FROM bills").fetchall():
        new = hashlib.sha256(str(body).encode()).hexdigest()
        book.execute("UPDATE bills SET digest = ? WHERE digest = ?", (new, digest))
        for table in ("plans", "charges"):
            book.execute(f"UPDATE {table} SET bill = ? WHERE bill = ?", (new, digest))
    rows: dict[int, dict[str, list[Any]]] = {}
    for table in chain.TABLES:
        for *row, entry in book.execute(f"SELECT * FROM {table}").fetchall():
            rows.setdefault(entry, {}).setdefault(table, []).append(tuple(row))
    rows[0] = {"meta": book.execute("SELECT key, value FROM meta").fetchall()}
    book.execute("DELETE FROM chain")
    last = chain.Head(-1, "")
    for number in sorted(rows):
        last = chain.Head(number, chain.digest_of(number, last.digest, rows[number]))
        book.execute("INSERT INTO chain VALUES (?, ?)", last)
    book.commit()
    chain.head_path(str(path)).unlink(missing_ok=True)
    chain.write_head(str(path), last)
