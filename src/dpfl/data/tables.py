"""The user's own files: one CSV or Parquet file per client, columns of numbers, one the label.

A CSV file has a header line and one record a line; here ``ill`` is the label::

    age,dose,ill
    61,0.5,1
    47,0.25,0

Errors name the file, and the line or the record and the column where there is one.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from dpfl.core.errors import DataError, read_problem
from dpfl.core.files import check_regular, csv_records, text_of
from dpfl.data.cells import column_of
from dpfl.data.records import check_data
from dpfl.data.sources import Arrays, plain_columns

Columns = dict[str, Any]
"""The cells of each column, by its name."""

KINDS = (".csv", ".parquet")
"""How the names of tables end."""


def read_columns(path: Path) -> tuple[Columns, list[str]]:
    """Read a file as columns of whatever its cells hold, and say where each record stands in it."""
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path)
    names, records = _read_csv(path)
    columns = {name: [cells[at] for _, cells in records] for at, name in enumerate(names)}
    return columns, [f"line {line}" for line, _ in records]


def check_kind(path: Path) -> None:
    """Refuse a file whose name does not say what it is."""
    check_data(
        path.suffix.lower() in KINDS, str(path), "is neither .csv nor .parquet", "name the file so"
    )


def read_file(path: Path, label: str | None = None) -> Arrays:
    """Read one client's file: features (float32) and labels (float64).

    ``label`` names the label column; without it, the last column is taken.
    """
    check_kind(path)
    columns, rows = read_columns(path)
    return plain_columns(columns, label, str(path), rows)


def _not_a_table(path: Path, reason: object) -> DataError:
    return DataError(
        str(path),
        f"cannot be read as a table ({reason})",
        "use a header line, then one record a line, its cells separated by commas",
    )


def _read_csv(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Read the names of the columns, and each record's line and cells; blank lines are left out."""
    try:
        (_, names), *records = csv_records(text_of(path)) or [(1, [])]
    except OSError as error:
        raise DataError(
            str(path), f"cannot be read ({error.strerror})", "check the path"
        ) from error
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
        raise DataError(
            str(path), "needs pyarrow, which is not installed", "run: pip install 'dpfl[parquet]'"
        ) from error
    try:
        check_regular(path)
        table = parquet.read_table(path)
        columns = {name: column_of(table, name) for name in table.column_names}
    except (OSError, ValueError, TypeError, KeyError, ArrowException) as error:
        raise DataError(str(path), f"cannot be read ({error})", "check the file") from error
    return columns, [f"record {number}" for number in range(1, table.num_rows + 1)]
