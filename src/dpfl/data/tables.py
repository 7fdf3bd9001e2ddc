"""The user's own files: one CSV or Parquet file per client, columns of numbers, one the label.

A CSV file has a header line and one record a line; here ``ill`` is the label::

    age,dose,ill
    61,0.5,1
    47,0.25,0

Errors name the file, and the line or the record and the column where there is one.
"""

import csv
import io
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dpfl.core.errors import DataError, read_problem
from dpfl.core.files import check_regular, text_of
from dpfl.data.records import check_data

Arrays = tuple[np.ndarray, np.ndarray]
Table = tuple[list[str], np.ndarray]
"""The names of the columns, and the numbers (float64), one row per record."""

_HEADER = "use a header line, then numbers separated by commas"


def read_folder(folder: Path, label: str | None = None) -> dict[str, Arrays]:
    """Read every ``*.csv`` and ``*.parquet`` file of a folder; a file's name is its client's id.

    ``label`` names the label column; without it, the last column is taken. All files must have the
    same columns. Returns features and labels by client.
    """
    clients: dict[str, Arrays] = {}
    first: list[str] = []
    files = files_of(folder)
    for path in files:
        names, table = _READERS[path.suffix.lower()](path)
        first, where = first or names, str(path)
        problem = f"has columns {names}, unlike {files[0].name}"
        check_data(names == first, where, problem, "use the same columns in the same order")
        check_data(len(table) > 0, where, "holds no record", "leave this client out")
        clients[path.stem] = _split(path, names, table, label)
    return clients


def files_of(folder: Path) -> list[Path]:
    """The ``*.csv`` and ``*.parquet`` files of a folder, one for each client."""
    where, remedy = str(folder), "name a folder with one .csv or .parquet file per client"
    check_data(folder.is_dir(), where, "is not a folder", remedy)
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in _READERS)
    remedy = "put one file per client there"
    check_data(bool(files), where, "holds no .csv or .parquet file", remedy)
    for number, path in enumerate(files):
        alone = all(path.stem != other.stem for other in files[:number])
        problem = f"client '{path.stem}' has two files"
        check_data(alone, str(path), problem, "keep one file per client")
    return files


def read_columns(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Read a file as columns of whatever its cells hold, and say where each record stands in it."""
    if path.suffix.lower() == ".parquet":
        table = arrow_table(path)
        columns = {name: table[name].to_pylist() for name in table.column_names}
        return columns, [f"record {number}" for number in range(1, table.num_rows + 1)]
    names, rows = _csv_rows(path)
    cells = {name: [row[at] for _, row in rows] for at, name in enumerate(names)}
    return cells, [f"line {number}" for number, _ in rows]


def read_file(path: Path, label: str | None = None) -> Arrays:
    """Read one client's file: features (float32) and labels (float64).

    ``label`` names the label column; without it, the last column is taken.
    """
    kind, problem = path.suffix.lower(), "is neither .csv nor .parquet"
    check_data(kind in _READERS, str(path), problem, "name the file so")
    return _split(path, *_READERS[kind](path), label)


def _split(path: Path, names: list[str], table: np.ndarray, label: str | None) -> Arrays:
    """Take the label column out of a table, and check that all cells are numbers."""
    where, remedy = str(path), f"choose the label among {', '.join(names)}"
    known = label is None or label in names
    check_data(known, where, f"has no column '{label}'", remedy)
    problem = "has no column beside the label"
    check_data(len(names) > 1, where, problem, "give at least one column of features")
    column = -1 if label is None else names.index(label)
    representable = np.isfinite(table) & (np.abs(table) < np.finfo(np.float32).max)
    for row, at in np.argwhere(~representable):
        problem = f"record {row + 1} has no number in '{names[at]}'"
        raise DataError(where, problem, "fill or drop missing values first")
    return np.delete(table, column, axis=1).astype(np.float32), table[:, column]


def _not_a_table(path: Path, reason: object, remedy: str = _HEADER) -> DataError:
    return DataError(str(path), f"cannot be read as a table of numbers ({reason})", remedy)


def _csv_rows(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Read the names of the columns, and each line's number and cells; blank lines are left out."""
    try:
        reader = csv.reader(io.StringIO(text_of(path), newline=""))
        rows, lines = [], [1]  # where each record begins
        for row in reader:
            rows.append(row)
            lines.append(reader.line_num + 1)
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise DataError(str(path), problem, "check the path") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise _not_a_table(path, read_problem(error)) from error
    names = rows[0] if rows else []
    numbers = False
    with suppress(ValueError):
        _ = [float(name) for name in names]
        numbers = names != [str(i) for i in range(len(names))]
    for wrong, reason in (
        (not names, "it is empty, or its first line is"),
        (len(names) == 1 and ";" in names[0], "it is separated by semicolons"),
        (len(names) == 1 and "\t" in names[0], "it is separated by tabs"),
        (numbers, "its first line holds numbers, not the columns' names"),
        (len(set(names)) != len(names), f"two columns have one name among {', '.join(names)}"),
    ):
        if wrong:
            raise _not_a_table(path, reason)
    filled = [(number, row) for number, row in zip(lines[1:], rows[1:], strict=False) if row]
    for number, row in filled:
        if len(row) != len(names):
            reason = f"line {number} has {len(row)} cells for {len(names)} columns"
            raise _not_a_table(path, reason)
    return names, filled


def _read_csv(path: Path) -> Table:
    """Read a header and numbers, as a spreadsheet saves them.

    Blank lines are left out, an empty cell is a missing number, and an error names the line.
    """
    names, rows = _csv_rows(path)
    table = []
    for number, row in rows:
        try:
            table.append([_number(cell) for cell in row])
        except ValueError as error:
            raise _not_a_table(path, f"line {number}: {error}") from error
    return names, np.array(table, dtype=np.float64).reshape(len(table), len(names))


def _number(cell: str) -> float:
    """Read a cell; an empty one is a missing number."""
    try:
        return float(cell) if cell.strip() else math.nan
    except ValueError:
        raise ValueError(f"{cell!r:.60} is not a number") from None


def arrow_table(path: Path) -> Any:
    """Read a Parquet file; pyarrow is imported only here."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        remedy = "run: pip install 'dpfl[parquet]'"
        raise DataError(str(path), "needs pyarrow, which is not installed", remedy) from error
    try:
        check_regular(path)
        return parquet.read_table(path)
    except (OSError, ValueError, TypeError, ArrowException) as error:
        raise _not_a_table(path, error, "check the file") from error


def _read_parquet(path: Path) -> Table:
    """Read numeric columns."""
    table = arrow_table(path)
    try:
        columns = [np.asarray(column.to_numpy(), dtype=np.float64) for column in table.columns]
    except (ValueError, TypeError) as error:
        raise _not_a_table(path, error, "use numeric columns") from error
    return list(table.column_names), np.stack(columns, axis=1)


_READERS = {".csv": _read_csv, ".parquet": _read_parquet}
