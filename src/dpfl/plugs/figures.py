"""Pictures that explain a plug, declared by the plug as data and drawn by the report.

A plug names the metrics it reports and how they are best looked at. It draws nothing itself, and
the report knows no plug by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


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


@dataclass(frozen=True, kw_only=True)
class FigureSpec:
    """One figure. ``metrics`` maps keys (or endings of keys) to what a legend or title calls them;
    the key ``update_norm`` stands for the norm of the round's update.
    """

    name: str
    title: str
    kind: FigureKind
    metrics: Mapping[str, str]
    x_label: str = "round"
    y_label: str = ""
    caption: str = ""
    log_y: bool = False
    threshold: str = ""


def by_round(
    name: str, title: str, y_label: str, metrics: Mapping[str, str], caption: str
) -> FigureSpec:
    """Numbers over rounds, on a logarithmic axis."""
    return FigureSpec(
        name=name,
        title=title,
        kind=FigureKind.BY_ROUND,
        metrics=metrics,
        y_label=y_label,
        caption=caption,
        log_y=True,
    )


def spectrum_figure(
    name: str, title: str, metric: str, y_label: str, caption: str, *, threshold: str = ""
) -> FigureSpec:
    """Singular values of the last round that reports any; logarithmic without a threshold."""
    return FigureSpec(
        name=name,
        title=title,
        kind=FigureKind.SPECTRUM,
        metrics={metric: "first slice" if threshold else ""},
        x_label="direction",
        y_label=y_label,
        caption=caption,
        log_y=not threshold,
        threshold=threshold,
    )


def against_true_noise(name: str, metric: str) -> FigureSpec:
    """Estimates of each client's noise beside what was really added."""
    return FigureSpec(
        name=name,
        title="estimated and true noise",
        kind=FigureKind.AGAINST_TRUE_NOISE,
        metrics={metric: "clients"},
        x_label="true noise variance",
        y_label="estimated",
        caption="A point a client, means over rounds. Only ratios between clients matter.",
    )
