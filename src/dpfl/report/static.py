"""Charts as SVG, PNG or PDF files for papers, without a browser."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpfl.core.errors import disk_error
from dpfl.report.charts import MANY, Chart, Series
from dpfl.report.interactive import colour_of

FORMATS = ("svg", "png")


def write_figures(
    charts: Sequence[Chart], folder: Path, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Write every chart in every format."""
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _style():
            for chart in charts:
                figure = drawn(chart)
                for kind in formats:
                    path = folder / f"{chart.name}.{kind}"
                    figure.savefig(
                        path, dpi=200, metadata={"Date": None} if kind == "svg" else None
                    )
                    written.append(path)
    except OSError as error:
        raise disk_error(str(folder), error) from error
    return written


def _style() -> Any:
    """No date, and names of parts that do not change: the same figure is the same file."""
    import matplotlib as mpl

    return mpl.rc_context(
        {"svg.hashsalt": "dpfl", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False}
    )


def drawn(chart: Chart) -> Any:
    """A matplotlib figure, outside of pyplot's global state."""
    from matplotlib.figure import Figure

    with _style():
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        axes = figure.subplots()
        axes.spines["right"].set_visible(False)
        if chart.heat is not None:
            image = axes.imshow(chart.heat.z, aspect="auto", interpolation="nearest")
            figure.colorbar(image, ax=axes)
            axes.set_yticks(range(len(chart.heat.y)), [_literal(name) for name in chart.heat.y])
            if len(chart.heat.x) <= MANY:
                axes.set_xticks(range(len(chart.heat.x)), [_literal(name) for name in chart.heat.x])
        bottoms = [0.0] * len(chart.series[0].x) if chart.stacked else None
        for number, series in enumerate(chart.series):
            place = None if chart.stacked else (number, len(chart.series))
            _draw(axes, series, colour_of(chart, number), bottoms, place)
        axes.set_xlabel(_literal(chart.x_label))
        axes.set_ylabel(_literal(chart.y_label))
        if chart.log_x:
            axes.set_xscale("log")
        if chart.log_y:
            axes.set_yscale("log")
        words = (
            chart.series and isinstance(chart.series[0].x[0], str) if chart.heat is None else True
        )
        if words:
            axes.tick_params(axis="x", labelrotation=60)
        axes.grid(color="#e6e6e6", linewidth=0.6)
        axes.set_axisbelow(True)
        if len(chart.series) > 1:
            figure.legend(
                frameon=False, fontsize=8, loc="outside right center"
            )  # beside the lines, never on them
    return figure


def _draw(
    axes: Any,
    series: Series,
    colour: str,
    bottoms: list[float] | None,
    place: tuple[int, int] | None = None,
) -> None:
    x: list[Any] = [_literal(value) if isinstance(value, str) else value for value in series.x]
    name = _literal(series.name)
    y = [float("nan") if value is None else value for value in series.y]
    if series.kind == "bars":
        if place is None:
            axes.bar(x, y, bottom=bottoms, color=colour, label=name)
        else:  # beside each other
            number, count = place
            width = 0.8 / count
            at = [spot + (number - (count - 1) / 2) * width for spot in range(len(x))]
            axes.bar(at, y, width=width, color=colour, label=name)
            axes.set_xticks(range(len(x)), x)
        if bottoms is not None:
            bottoms[:] = [below + value for below, value in zip(bottoms, y, strict=True)]
        return
    if series.kind in ("points", "rings"):
        hollow = (
            {"markerfacecolor": "none", "markersize": 7}
            if series.kind == "rings"
            else {"markersize": 4}
        )
        axes.plot(x, y, "o", color=colour, label=name, **hollow)
        if series.low is not None and series.high is not None:
            axes.vlines(x, series.low, series.high, color=colour)
        return
    axes.plot(x, y, "--" if series.kind == "dashes" else "-", color=colour, label=name)
    if series.low is not None and series.high is not None:
        axes.fill_between(x, series.low, series.high, color=colour, alpha=0.15, linewidth=0)


def _literal(text: str) -> str:
    """matplotlib takes what is between dollars for mathematics."""
    return text.replace("$", r"\$")
