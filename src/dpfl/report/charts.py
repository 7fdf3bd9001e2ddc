"""The specification of a figure, from which both versions are drawn: the interactive one of a page
(``interactive``) and the file for a paper (``static``).

>>> line = Series(name="weiavg", x=[1, 2], y=[10.0, 20.0])
>>> chart = Chart(
...     name="accuracy", title="Accuracy", x_label="round", y_label="%", caption="", series=[line]
... )
>>> chart.xs, chart.ys, chart.colour(0)
([1, 2], [10.0, 20.0], '#1f6f8b')
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

from dpfl.core.types import Plain


def asset(name: str) -> str:
    """The text of a file in the folder ``assets``."""
    return resources.files("dpfl.report").joinpath("assets", name).read_text(encoding="utf-8")


def toml_asset(name: str) -> dict[str, Plain]:
    """A table of tables in the folder ``assets``."""
    return tomllib.loads(asset(name))


Place = int | float | str
"""A position along the x axis: a number, or a name."""

Kind = Literal["line", "points", "rings", "bars", "dashes"]

MANY = 40
"""Names that fit under an axis; more clients than this are numbered."""

_FIRST = ("#1f6f8b", "#d1603d", "#5b8c3e", "#8a5a9e", "#b8860b")
_SECOND = ("#c44569", "#4a4e8f", "#2a9d8f", "#7f5539", "#6c757d")
_THIRD = ("#3a86ff", "#fb8500", "#7cb518", "#d264b6", "#0b3954")
_FOURTH = ("#9d0208", "#00b4d8", "#a68a64", "#588157", "#7209b7")
COLOURS = (*_FIRST, *_SECOND, *_THIRD, *_FOURTH)
"""Enough for a comparison of the largest family, baselines included."""
_WORDS = toml_asset("figures.toml")


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, cloud of points or set of bars.

    ``low`` and ``high`` make a band around ``y``, or error bars on points. ``text`` names each
    point where a reader points at it. None in ``y`` is a gap.
    """

    name: str
    x: Sequence[Place]
    y: Sequence[float | None]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    text: Sequence[str] | None = None
    kind: Kind = "line"

    @classmethod
    def over_seeds(
        cls, name: str, x: Sequence[Place], columns: Sequence[Sequence[float]], kind: Kind = "line"
    ) -> Series:
        """Draw the mean of each column, with a band of one standard deviation if there are seeds.

        ``columns`` holds the values of all seeds at each place of ``x``.

        >>> Series.over_seeds("weiavg", [1, 2], [[10.0, 12.0], [20.0, 20.0]]).y
        [11.0, 20.0]
        """
        means = [statistics.mean(column) for column in columns]
        if all(len(column) == 1 for column in columns):
            return cls(name=name, x=x, y=means, kind=kind)
        spreads = [statistics.stdev(column) if len(column) > 1 else 0.0 for column in columns]
        low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
        high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
        return cls(name=name, x=x, y=means, low=low, high=high, kind=kind)


@dataclass(frozen=True, kw_only=True)
class Heat:
    """A matrix drawn as colours.

    ``x`` names its columns and ``y`` its rows; ``z`` holds its rows.
    """

    x: Sequence[str]
    y: Sequence[str]
    z: Sequence[Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure: its series, or one ``heat`` map.

    ``name`` identifies it on a page and is the name of its file. The caption says how to read it.
    ``stacked`` puts bars on each other instead of beside each other; ``log_x`` and ``log_y`` ask
    for logarithmic axes.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    caption: str
    series: Sequence[Series] = field(default_factory=list)
    heat: Heat | None = None
    log_x: bool = False
    log_y: bool = False
    stacked: bool = False

    @classmethod
    def of(cls, kind: str, series: Sequence[Series], **values: Any) -> Chart:
        """A figure whose words are in ``assets/figures.toml``, filled with these values.

        The values ``log_x`` and ``log_y`` ask for logarithmic axes.
        """
        words: Plain = {k: values[k] for k in ("log_x", "log_y") if k in values}
        for name, text in _WORDS[kind].items():
            words[name] = text.format(**values) if isinstance(text, str) else text
        return cls(series=series, **words)

    @property
    def xs(self) -> list[Place]:
        """Every position along the x axis."""
        return list(self.heat.x) if self.heat else [x for one in self.series for x in one.x]

    @property
    def ys(self) -> list[float]:
        """Every height, those of bands included."""
        heights = ((*one.y, *(one.low or ()), *(one.high or ())) for one in self.series)
        return [y for own in heights for y in own if y is not None]

    @property
    def has_names(self) -> bool:
        """Whether the x axis shows names, also where they look like numbers or dates."""
        return any(isinstance(x, str) for x in self.xs)

    def colour(self, number: int) -> str:
        """The colour of a series; a dashed line has that of the solid one before it."""
        before = sum(series.kind != "dashes" for series in self.series[: number + 1])
        return COLOURS[max(0, before - 1) % len(COLOURS)]


def wide(values: Sequence[Place]) -> bool:
    """Whether values are numbers that span so much that only a logarithmic axis shows them.

    >>> wide([1.0, 2.0]), wide([0.1, 2.0]), wide(["north", 2.0])
    (False, True, False)
    """
    numbers = [value for value in values if not isinstance(value, str)]
    if not numbers or len(numbers) < len(values):
        return False
    return min(numbers) > 0 and max(numbers) >= 5 * min(numbers)


def client_axis(clients: Sequence[str], order: str = "budget") -> tuple[Sequence[Place], str]:
    """Positions and label of an axis of clients in this order: names, or numbers if many.

    >>> client_axis(["north", "south"])
    (['north', 'south'], 'client')
    """
    if len(clients) <= MANY:
        return list(clients), "client"
    return list(range(1, len(clients) + 1)), f"clients, by {order}"
