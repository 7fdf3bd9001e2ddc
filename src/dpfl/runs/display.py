"""How results show themselves: sizes and times in words, figures and pandas frames in notebooks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpfl.core.errors import ConfigurationError
from dpfl.core.types import Plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Lines = Mapping[str, Mapping[int, float]]
"""Lines by name, each a value for every x."""

MOST_LABELLED = 8  # lines that a legend names


def size(number: float) -> str:
    """Bytes in a unit that people read.

    >>> size(512), size(3 * 2**20)
    ('512 B', '3.0 MiB')
    """
    if number < 1024:
        return f"{number:.0f} B"
    power = min(3, math.floor(math.log(number, 1024) + 1e-9))
    return f"{number / 1024**power:.1f} {' KMG'[power]}iB"


def duration(seconds: float) -> str:
    """Seconds in a unit that people read.

    >>> duration(3.21), duration(120), duration(7200)
    ('3.2 s', '2 min', '2.0 h')
    """
    if seconds < 90:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def frame_of(rows: Sequence[Plain], index: str | None = None) -> Any:
    """Return rows as a pandas frame; ``index`` names the column that becomes its index."""
    try:
        import pandas as pd  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigurationError(
            "to_pandas", "needs pandas, which is not installed", "run: pip install pandas"
        ) from error
    frame = pd.DataFrame(rows)
    return frame.set_index(index) if index is not None and len(frame) else frame


def line_figure(panels: Mapping[str, Lines], x_label: str) -> Figure:
    """Return a matplotlib figure with a panel for each group of lines that has any.

    ``panels`` are by the label of their y axis. A legend names a few lines; of many clients the
    lines are drawn without names.
    """
    from matplotlib.figure import Figure

    drawn = {label: lines for label, lines in panels.items() if any(lines.values())}
    figure = Figure(figsize=(4.2 * max(1, len(drawn)), 3.2), layout="constrained")
    axes = figure.subplots(1, max(1, len(drawn)), squeeze=False)[0]
    for axis, (label, lines) in zip(axes, drawn.items(), strict=False):
        for name, points in lines.items():
            axis.plot(list(points), list(points.values()), label=name, marker=".")
        axis.set_xlabel(x_label)
        axis.set_ylabel(label)
        axis.xaxis.get_major_locator().set_params(integer=True)
        if 1 < len(lines) <= MOST_LABELLED:
            axis.legend()
    return figure
