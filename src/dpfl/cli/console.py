"""What people see: results on stdout, progress and notes on stderr.

Tables fit 80 columns. Where colour is off, or the output is not a terminal, everything is plain
text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from dpfl.core.errors import Interrupted
from dpfl.runs.display import duration as duration, size as size

if TYPE_CHECKING:
    from rich.console import JustifyMethod

    from dpfl.privacy.flags import RaisedFlag
    from dpfl.runs.result import Spread

MOST_LINES = 24
"""Clients or accounts that a table shows; JSON has them all."""

MOST_COLUMNS = 3
"""Methods side by side in a terminal of 80 columns."""

Rows = Iterable[Iterable[str]]
Update = Callable[..., None]


class _Pipe(Console):
    """A console whose reader may leave, which is not an error."""

    def on_broken_pipe(self) -> None:
        """Let the caller end quietly."""
        raise BrokenPipeError


out = _Pipe(highlight=False, soft_wrap=False, markup=False)
err = _Pipe(stderr=True, highlight=False, markup=False)


def note(text: str) -> None:
    """Print a line on stderr, however long."""
    err.print(text, soft_wrap=True)


def print_line(text: str) -> None:
    """Print a line on stdout, however long."""
    out.print(text, soft_wrap=True)


def warn(flags: Iterable[RaisedFlag | str]) -> None:
    """Print flags and warnings on stderr, in yellow; a terminal breaks them between words."""
    for flag in flags:
        err.print(str(flag), style="yellow", soft_wrap=not err.is_terminal)


def note_files(written: Mapping[str, object]) -> None:
    """Say on stderr what was written where."""
    for kind, place in written.items():
        note(f"{kind}: {place}")


def print_json(value: Any) -> None:
    """Write one JSON document to stdout."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def answer(as_json: bool, document: Any, show: Callable[..., None], *shown: Any) -> None:
    """Write a result as a JSON document, or show it for people.

    ``show`` prints what people read, and is called with ``shown``. Notes and warnings go to stderr
    in both cases, so that stdout holds one document or one answer.
    """
    if as_json:
        print_json(document)
    else:
        show(*shown)


@contextmanager
def interruptible(where: Path, remedy: Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C into an error that says how to go on.

    ``where`` is the folder that was worked on. ``remedy`` is asked for when it happens: it may
    depend on how far the command got.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(str(where), "stopped by you", remedy()) from None


def progress_bar(
    title: str, note: str, total: int | None, quiet: bool
) -> AbstractContextManager[Update]:
    """Show a bar on stderr, if that is a terminal, and yield the function that moves it.

    ``note`` says what is going on, ``total`` counts the rounds.
    """
    from dpfl.runs.progress import progress_bar

    return progress_bar(title, note, total, quiet, err)


def print_table(columns: Sequence[str], rows: Rows, title: str = "", left: int = 1) -> None:
    """Print a table whose first ``left`` columns are words and the rest numbers.

    Words are wrapped where the terminal is narrow, numbers never are. With one column of words, as
    for a table of methods, that column keeps at least nine characters.
    """
    lines = Table(title=title or None, title_justify="left", min_width=len(title), box=None)
    lines.pad_edge = False
    lines.padding = (0, 2, 0, 0)
    for number, column in enumerate(columns):
        words = number < left
        narrowest = 9 if number == 0 and left == 1 else None  # a row needs its name
        side: JustifyMethod = "left" if words else "right"
        lines.add_column(column, justify=side, no_wrap=not words, min_width=narrowest)
    for row in rows:
        lines.add_row(*row)
    out.print(lines)


def print_lines(*lines: str) -> None:
    """Print lines on stdout, wrapped to its width."""
    for line in lines:
        out.print(line)


def print_facts(facts: Mapping[str, str]) -> None:
    """Print names and values in two columns."""
    print_table(("", ""), facts.items(), left=2)


def number_text(value: float | None, form: str = "g") -> str:
    """Show a number in a format; a dash where there is none."""
    return "-" if value is None else format(value, form)


def epsilon_text(value: Any, digits: int = 3) -> str:
    """Show an epsilon, rounded up; infinity may be a word, as in JSON, and None is a dash."""
    from dpfl.privacy.accountant import shown

    return value or "-" if value in (None, "infinite") else shown(value, digits)


def format_spread(spread: Spread | None) -> list[str]:
    """Show smallest, median and largest, rounded up."""
    return [epsilon_text(value) for value in vars(spread).values()] if spread else ["-"] * 3
