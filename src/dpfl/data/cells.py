"""Cells of tables as people have them: frames of pandas and polars, Arrow tables, Hugging Face
datasets and dicts of columns are read alike, without importing any of them.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from dpfl.core.checks import check
from dpfl.core.errors import DataError

_HALVES = re.compile("[\ud800-\udfff]")  # of characters


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
    for read in ("to_pylist", "to_numpy"):  # Arrow; pandas and polars
        if hasattr(cells, read):
            return getattr(cells, read)()
    return cells if isinstance(cells, np.ndarray) else list(cells)


def _nothing(cell: Any) -> bool:
    """Whether a cell is empty: nothing, blank text, not a number, or pandas' NA."""
    if isinstance(cell, str):
        return not cell.strip()
    blank = cell is None or type(cell).__name__ in ("NAType", "NaTType")
    return blank or (isinstance(cell, float | np.floating) and math.isnan(cell))


def cell_text(cell: Any) -> str:
    """A cell as text, "" where there is none.

    2.0 is "2", since frames turn whole numbers with gaps into floats.
    """
    if _nothing(cell):
        return ""
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        return str(int(cell))
    return str(cell).strip()


def person_id(cell: Any) -> str:
    """A person's id as text: one text however its accents are stored, "" where there is none.

    >>> person_id(" Zoe\u0308 ") == person_id("Zo\u00eb")
    True
    """
    text = unicodedata.normalize("NFC", cell_text(cell))
    problem = "cannot be written as UTF-8"
    check(not _HALVES.search(text), f"id {text!r}", problem, "write it in characters", DataError)
    return text
