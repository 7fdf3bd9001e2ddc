"""Pictures that explain a plug, declared by the plug as data and drawn by the report.

A plug names the metrics it reports and how they are best looked at. It draws nothing itself, and
the report knows no plug by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial


class FigureKind(StrEnum):
    """How metrics are looked at."""

    BY_ROUND = "by_round"
    """Numbers over rounds, one line a metric."""

    SPECTRUM = "spectrum"
    """Lists of numbers of the last round that reports any, one line a metric: every metric whose
    key ends with one of ``metrics``, named by what comes before. ``<name>/slices`` splits a list
    into so many equal parts, of which the first is drawn. ``threshold`` ends the key of a level
    to draw.
    """

    AGAINST_TRUE_NOISE = "against_true_noise"
    """A number per client of the cohort against the noise that was really added (simulation only).
    """

    CLIENT_MAP = "client_map"
    """A map with a column per client that arrived: a flat list, row by row, of the last round that
    reports one; one map a metric."""


@dataclass(frozen=True)
class FigureSpec:
    """One figure. ``metrics`` maps keys (or endings of keys) to what a legend or title calls them;
    the key ``update_norm`` stands for the norm of the round's update.
    """

    kind: FigureKind
    name: str
    title: str
    y_label: str
    metrics: Mapping[str, str]
    caption: str
    x_label: str = "round"
    log_y: bool = False
    threshold: str = ""


by_round = partial(FigureSpec, FigureKind.BY_ROUND, log_y=True)
spectrum = partial(FigureSpec, FigureKind.SPECTRUM, x_label="direction")
