"""What people see: results on stdout, progress and notes on stderr, nothing but plain text where
colour is off.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from dpfl.privacy.accountant import shown


class _Pipe(Console):
    """A console whose reader may leave: that is no error of ours."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


out = _Pipe(highlight=False, soft_wrap=False, markup=False)
err = _Pipe(stderr=True, highlight=False, markup=False)


def print_json(value: Any) -> None:
    """Write one JSON document to stdout."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def progress_bar() -> Progress:
    """A bar on stderr; silent where stderr is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=err,
        disable=not err.is_terminal,
    )


def table(*columns: str, title: str | None = None, left: int = 1) -> Table:
    """A table whose first ``left`` columns are words and the rest numbers."""
    made = Table(
        title=title,
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
        padding=(0, 2, 0, 0),
    )
    for number, column in enumerate(columns):
        words = number < left
        narrowest = 9 if number == 0 and left == 1 else None  # a row without its name says nothing
        made.add_column(
            column, justify="left" if words else "right", no_wrap=not words, min_width=narrowest
        )
    return made


def epsilon_text(value: Any) -> str:
    """Show an epsilon, rounded up."""
    return "infinite" if value in ("infinite", math.inf) else shown(float(value))


def three_text(values: dict[str, Any] | None) -> list[str]:
    """Show smallest, median, largest."""
    return (
        ["-"] * 3
        if not values
        else [epsilon_text(values[key]) for key in ("smallest", "median", "largest")]
    )


def bytes_text(count: float) -> str:
    """Show bytes in binary units.

    >>> bytes_text(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def mean_and_spread(values: Sequence[float], scale: float = 100.0) -> str:
    """Show a mean and, for more than one value, the standard deviation.

    >>> mean_and_spread([0.5, 0.7])
    '60.0 ± 14.1'
    """
    mean = statistics.mean(values) * scale
    return (
        f"{mean:.1f}"
        if len(values) == 1
        else f"{mean:.1f} ± {statistics.stdev(values) * scale:.1f}"
    )
