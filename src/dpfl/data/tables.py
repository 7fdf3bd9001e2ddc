"""The user's own files: one CSV or Parquet file per client, columns of numbers, one the label.

A CSV file has a header line and one record a line; here ``ill`` is the label::

    age,dose,ill
    61,0.5,1
    47,0.25,0

Errors name the file, and the line or the record and the column where there is one.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dpfl.core.errors import DataError, read_problem
from dpfl.core.files import check_regular, csv_records, text_of
from dpfl.data.cells import column_of
from dpfl.data.columns import Column
from dpfl.data.records import check_data

Arrays = tuple[np.ndarray, np.ndarray]
Columns = dict[str, Any]
"""The cells of each column, by its name."""

_KINDS = (".csv", ".parquet")


def read_folder(folder: Path, label: str | None = None) -> dict[str, Arrays]:
    """Read every ``*.csv`` and ``*.parquet`` file of a folder; a file's name is its client's id.

    ``label`` names the label column; without it, the last column is taken. All files must have the
    same columns. Returns features and labels by client.
    """
    clients: dict[str, Arrays] = {}
    first: list[str] = []
    files = files_of(folder)
    for path in files:
        columns, rows = read_columns(path)
        first = first or list(columns)
        where = str(path)
        problem = f"has columns {list(columns)}, unlike {files[0].name}"
        check_data(list(columns) == first, where, problem, "use the same columns in the same order")
        check_data(bool(rows), where, "holds no record", "leave this client out")
        clients[path.stem] = _split(where, columns, rows, label)
    return clients


def files_of(folder: Path) -> list[Path]:
    """The ``*.csv`` and ``*.parquet`` files of a folder, one for each client."""
    where, remedy = str(folder), "name a folder with one .csv or .parquet file per client"
    check_data(folder.is_dir(), where, "is not a folder", remedy)
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in _KINDS)
    remedy = "put one file per client there"
    check_data(bool(files), where, "holds no .csv or .parquet file", remedy)
    for number, path in enumerate(files):
        alone = all(path.stem != other.stem for other in files[:number])
        problem = f"client '{path.stem}' has two files"
        check_data(alone, str(path), problem, "keep one file per client")
    return files


def read_columns(path: Path) -> tuple[Columns, list[str]]:
    """Read a file as columns of whatever its cells hold, and say where each record stands in it."""
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path)
    names, records = _read_csv(path)
    columns = {name: [cells[at] for _, cells in records] for at, name in enumerate(names)}
    return columns, [f"line {line}" for line, _ in records]


def read_file(path: Path, label: str | None = None) -> Arrays:
    """Read one client's file: features (float32) and labels (float64).

    ``label`` names the label column; without it, the last column is taken.
    """
    problem = "is neither .csv nor .parquet"
    check_data(path.suffix.lower() in _KINDS, str(path), problem, "name the file so")
    return _split(str(path), *read_columns(path), label)


def _split(where: str, columns: Columns, rows: Sequence[str], label: str | None) -> Arrays:
    """Take the label column out of a table, in which all cells must be numbers."""
    names = list(columns)
    remedy = f"choose the label among {', '.join(names)}"
    check_data(label in (None, *names), where, f"has no column '{label}'", remedy)
    problem = "has no column beside the label"
    check_data(len(names) > 1, where, problem, "give at least one column of features")
    numbers = {}
    for name, cells in columns.items():
        column = Column(name=name, type="number")
        numbers[name], _ = column.as_target(where, column.read(where, cells, rows), rows)
    labels = numbers.pop(names[-1] if label is None else label)
    return np.stack(list(numbers.values()), axis=1).astype(np.float32), labels


def _not_a_table(path: Path, reason: object) -> DataError:
    remedy = "use a header line, then one record a line, its cells separated by commas"
    return DataError(str(path), f"cannot be read as a table ({reason})", remedy)


def _read_csv(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Read the names of the columns, and each record's line and cells; blank lines are left out."""
    try:
        (_, names), *records = csv_records(text_of(path)) or [(1, [])]
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise DataError(str(path), problem, "check the path") from error
    except ValueError as error:
        raise _not_a_table(path, read_problem(error)) from error
    numbers = False
    with suppress(ValueError):
        _ = [float(name) for name in names]
        numbers = names != [str(i) for i in range(len(names))]
    for wrong, reason in (
        (not names, "it is empty"),
        (len(names) == 1 and ";" in names[0], "it is separated by semicolons"),
        (len(names) == 1 and "\t" in names[0], "it is separated by tabs"),
        (numbers, "its first line holds numbers, not the columns' names"),
        (len(set(names)) != len(names), f"two columns have one name among {', '.join(names)}"),
    ):
        if wrong:
            raise _not_a_table(path, reason)
    for line, cells in records:
        if len(cells) != len(names):
            reason = f"line {line} has {len(cells)} cells for {len(names)} columns"
            raise _not_a_table(path, reason)
    return names, records


def _read_parquet(path: Path) -> tuple[Columns, list[str]]:
    """Read a Parquet file; pyarrow is imported only here."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        remedy = "run: pip install 'dpfl[parquet]'"
        raise DataError(str(path), "needs pyarrow, which is not installed", remedy) from error
    try:
        check_regular(path)
        table = parquet.read_table(path)
        columns = {name: column_of(table, name) for name in table.column_names}
    except (OSError, ValueError, TypeError, KeyError, ArrowException) as error:
        raise DataError(str(path), f"cannot be read ({error})", "check the file") from error
    return columns, [f"record {number}" for number in range(1, table.num_rows + 1)]
