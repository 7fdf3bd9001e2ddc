"""A progress bar on stderr, for terminals and notebooks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Update = Callable[..., None]


@contextmanager
def progress_bar(
    title: str, note: str, total: int | None, quiet: bool, console: "Console | None" = None
) -> Iterator[Update]:
    """Show a bar on stderr, if that is a terminal or a notebook, and yield the function that moves
    it.

    ``title`` and ``note`` say what is going on, ``total`` counts the rounds, ``quiet`` shows
    nothing. ``console`` is written to instead of stderr. A notebook needs ipywidgets.
    """
    from rich import progress as p
    from rich.console import Console

    where = console or Console(stderr=True, highlight=False, markup=False)
    notebook = where.is_jupyter and find_spec("ipywidgets") is not None
    counts = (p.BarColumn(), p.MofNCompleteColumn(), "rounds")
    times = (p.TimeElapsedColumn(), p.TimeRemainingColumn())
    columns = ("{task.description}", *counts, *times, "{task.fields[note]}")
    shown = not quiet and (notebook or (where.is_terminal and not where.is_jupyter))
    with p.Progress(*columns, console=where, disable=not shown) as bar:
        yield partial(bar.update, bar.add_task(title, total=total, note=note))
