"""The progress bar: in a terminal, and nowhere else."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dpfl.runs.progress import progress_bar


@pytest.mark.parametrize(
    ("terminal", "quiet", "shown"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_a_bar_is_shown_in_a_terminal_only(terminal: bool, quiet: bool, shown: bool) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120, force_jupyter=False)
    with progress_bar("weiavg", "", 3, quiet, console) as update:
        update(completed=2, note="accuracy 50.0 %")
    said = stream.getvalue()
    assert ("2/3" in said and "accuracy 50.0 %" in said) is shown
    assert bool(said) is shown


def test_a_notebook_without_widgets_is_left_alone() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_jupyter=True, width=120)
    with progress_bar("weiavg", "", 3, False, console) as update:
        update(completed=3)
    assert not stream.getvalue()
