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
from dpfl.core.errors import DataError

_HALVES = re.compile("[\ud800-\udfff]")  # of characters
_NUMERIC = re.compile("u?int|float|double")  # types of Arrow

MISSING_VALUES = ("?", "NA", "N/A", "#N/A", "<NA>", "NaN", "null", "None")
"""Texts that mean a missing value, in capitals or not, where a schema names no others."""


def column_names(table: Any) -> list[str]:
    """The names of a table's columns: a frame, an Arrow table, a dataset or a dict of columns."""
    names = getattr(table, "column_names", None)  # Arrow and Hugging Face
    if names is None:
        names = table.keys() if isinstance(table, Mapping) else getattr(table, "columns", None)
    remedy = "give a pandas or polars frame, a Hugging Face dataset, or a dict of columns"
    check(names is not None, "table", f"{type(table).__name__} has no columns", remedy)
    found = [] if names is None else list(names)
    odd = [name for name, count in Counter(found).items() if count > 1 or not isinstance(name, str)]
    remedy = "give every column a name of its own, as text"
    problem = f"column {next(iter(odd), '')!r} is there twice, or its name is not text"
    check(not odd, "table", problem, remedy, DataError)
    return found


def column_of(table: Any, name: str) -> Any:
    """The cells of one column, as an array or a list."""
    cells = table[name]
    if hasattr(cells, "to_pylist") and (cells.null_count or not _NUMERIC.match(str(cells.type))):
        return cells.to_pylist()
    if hasattr(cells, "to_numpy"):
        return cells.to_numpy()
    return cells if isinstance(cells, np.ndarray) else list(cells)


def _nothing(cell: Any) -> bool:
    """Whether a cell is empty: nothing, not a number, or pandas' NA."""
    blank = cell is None or type(cell).__name__ in ("NAType", "NaTType")
    return blank or (isinstance(cell, float | np.floating) and math.isnan(cell))


def cell_text(cell: Any) -> str:
    """A cell as text, "" where there is none.

    2.0 is "2", since frames turn whole numbers with gaps into floats.
    """
    if isinstance(cell, str):
        return cell.strip()
    if _nothing(cell):
        return ""
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        return str(int(cell))
    return str(cell).strip()


def missing_texts(missing_values: Iterable[str]) -> set[str]:
    """Missing values as :func:`cell_text` gives them, in small letters; empty cells are one."""
    return {"", *(text.strip().casefold() for text in missing_values)}


def person_id(cell: Any) -> str:
    """A person's id as text: one text however its accents are stored, "" where there is none.

    >>> person_id(" Zoe\u0308 ") == person_id("Zo\u00eb")
    True
    """
    text = unicodedata.normalize("NFC", cell_text(cell))
    problem = "cannot be written as UTF-8"
    check(not _HALVES.search(text), f"id {text!r}", problem, "write it in characters", DataError)
    return text
