"""The user's own files: one CSV or Parquet file per client, numbers in columns, one of them the
label.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from dpfl.core.errors import DataError

Arrays = tuple[np.ndarray, np.ndarray]


def read_folder(folder: Path, label: str | None = None) -> dict[str, Arrays]:
    """Read every ``*.csv`` and ``*.parquet`` file of a folder; a file's name is its client's id.

    ``label`` names the label column; without it, the last column is taken. All files must have the
    same columns.
    """
    if not folder.is_dir():
        raise DataError(
            str(folder),
            "is not a folder",
            "name a folder with one .csv or .parquet file per client",
        )
    files = sorted(p for p in folder.iterdir() if p.suffix.lower() in {".csv", ".parquet"})
    if not files:
        raise DataError(
            str(folder), "holds no .csv or .parquet file", "put one file per client there"
        )
    clients: dict[str, Arrays] = {}
    first: list[str] | None = None
    for path in files:
        names, table = _read(path)
        first = first or names
        if names != first:
            raise DataError(
                str(path),
                f"has columns {names}, unlike {files[0].name}",
                "use the same columns in the same order",
            )
        if path.stem in clients:
            raise DataError(
                str(path), f"client '{path.stem}' has two files", "keep one file per client"
            )
        clients[path.stem] = _split(path, names, table, label)
    return clients


def read_file(path: Path, label: str | None = None) -> Arrays:
    """Read one client's file."""
    if path.suffix.lower() not in {".csv", ".parquet"}:
        raise DataError(str(path), "is neither .csv nor .parquet", "name the file so")
    names, table = _read(path)
    return _split(path, names, table, label)


def _read(path: Path) -> tuple[list[str], np.ndarray]:
    return _read_csv(path) if path.suffix.lower() == ".csv" else _read_parquet(path)


def _split(path: Path, names: list[str], table: np.ndarray, label: str | None) -> Arrays:
    if label is not None and label not in names:
        raise DataError(
            str(path), f"has no column '{label}'", f"choose the label among {', '.join(names)}"
        )
    column = names.index(label) if label is not None else len(names) - 1
    y = table[:, column]
    if len(y) == 0:
        raise DataError(str(path), "holds no record", "leave this client out")
    representable = np.isfinite(table) & (np.abs(table) < np.finfo(np.float32).max)
    if not np.all(representable):
        row, at = np.argwhere(~representable)[0]
        raise DataError(
            str(path),
            f"record {row + 1} has no number in '{names[at]}'",
            "fill or drop missing values first",
        )
    if np.any(y != np.round(y)) or np.any(y < 0):
        raise DataError(
            str(path),
            f"label column '{names[column]}' holds something else than 0, 1, 2, ...",
            "number the classes from 0",
        )
    return np.delete(table, column, axis=1).astype(np.float32), y.astype(np.int64)


def _no_table(path: Path, reason: str) -> DataError:
    remedy = "use a header line, then numbers separated by commas"
    return DataError(str(path), f"cannot be read as a table of numbers ({reason})", remedy)


def _read_csv(path: Path) -> tuple[list[str], np.ndarray]:
    """Read a header and numbers, as a spreadsheet saves them; an error names the line."""
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()))
    except OSError as error:
        raise DataError(
            str(path), f"cannot be read ({error.strerror})", "check the path"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise _no_table(path, str(error)) from error
    names = rows[0] if rows else []
    if not names:
        raise _no_table(path, "it is empty, or its first line is")
    if len(names) == 1 and ";" in names[0]:
        raise _no_table(path, "it is separated by semicolons")
    if all(map(_is_number, names)) and names != [str(number) for number in range(len(names))]:
        raise _no_table(path, "its first line holds numbers, not the columns' names")
    if len(set(names)) != len(names):
        raise _no_table(path, f"two columns have one name among {', '.join(names)}")
    table = []
    for number, row in enumerate(rows[1:], 2):
        if not row:
            continue
        if len(row) != len(names):
            raise _no_table(path, f"line {number} has {len(row)} cells for {len(names)} columns")
        try:
            table.append([float(cell) if cell.strip() else np.nan for cell in row])
        except ValueError as error:
            raise _no_table(path, f"line {number}: {error}") from error
    return names, np.array(table, dtype=np.float64).reshape(len(table), len(names))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _read_parquet(path: Path) -> tuple[list[str], np.ndarray]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            str(path), "needs pyarrow, which is not installed", "run: pip install 'dpfl[parquet]'"
        ) from error
    try:
        table = parquet.read_table(path)
        columns = [
            np.asarray(table.column(name).to_numpy(), dtype=np.float64)
            for name in table.column_names
        ]
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            str(path), f"cannot be read as a table of numbers ({error})", "use numeric columns"
        ) from error
    return list(table.column_names), np.stack(columns, axis=1)
