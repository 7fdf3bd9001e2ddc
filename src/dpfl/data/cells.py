"""Cells of tables as people have them: frames of pandas and polars, Arrow tables, Hugging Face
datasets and dicts of columns are read alike, without importing any of them.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, DataError

_HALVES = re.compile("[\ud800-\udfff]")  # of characters

MISSING_VALUES = ("?", "NA", "N/A", "#N/A", "<NA>", "NaN", "null", "None")
"""Texts that mean a missing value, in capitals or not, where a schema names no others."""


def column_names(table: Any) -> list[str]:
    """The names of a table's columns: a frame, an Arrow table, a dataset or a dict of columns."""
    names = getattr(table, "column_names", None)  # Arrow and Hugging Face
    if names is None:
        names = table.keys() if isinstance(table, Mapping) else getattr(table, "columns", None)
    remedy = "give a pandas or polars frame, a Hugging Face dataset, or a dict of columns"
    if names is None:
        raise ConfigurationError("table", f"{type(table).__name__} has no columns", remedy)
    for name, count in Counter(names).items():
        if count > 1 or not isinstance(name, str):
            raise DataError(
                "table",
                f"column {name!r} is there twice, or its name is not text",
                "give every column a name of its own, as text",
            )
    return list(names)


def column_of(table: Any, name: str) -> Any:
    """The cells of one column, as an array or a list."""
    cells = table[name]
    if hasattr(cells, "to_pylist"):  # Arrow
        numeric = re.match("u?int|float|double", str(cells.type))
        return cells.to_numpy() if numeric and not cells.null_count else cells.to_pylist()
    if hasattr(cells, "to_numpy"):
        return cells.to_numpy()
    return cells if isinstance(cells, np.ndarray) else list(cells)


def cell_text(cell: Any) -> str:
    """A cell as text, "" where there is none: nothing, blank text, not a number, or pandas' NA.

    2.0 is "2", since frames turn whole numbers with gaps into floats.
    """
    if isinstance(cell, float | np.floating):
        if math.isnan(cell):
            return ""
        cell = int(cell) if float(cell).is_integer() else cell
    nothing = cell is None or type(cell).__name__ in ("NAType", "NaTType")
    return "" if nothing else str(cell).strip()


def missing_texts(missing_values: Iterable[str]) -> set[str]:
    """Missing values as :func:`cell_text` gives them, in small letters; empty cells are one."""
    return {"", *(text.strip().casefold() for text in missing_values)}


def person_id(cell: Any) -> str:
    """A person's id as text: one text however its accents are stored, "" where there is none.

    >>> person_id(" Zoe\u0308 ") == person_id("Zo\u00eb")
    True
    """
    text = unicodedata.normalize("NFC", cell_text(cell))
    check(
        not _HALVES.search(text),
        f"id {text!r}",
        "cannot be written as UTF-8",
        "write it in characters",
        DataError,
    )
    return text
