"""Draw a chart as an SVG, PNG or PDF file for a paper, with matplotlib and without a browser."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpfl.core.errors import disk_error
from dpfl.core.types import Plain
from dpfl.report.charts import MANY, Chart, Series

FORMATS = ("svg", "png")
_POINTS = {"marker": "o", "linestyle": ""}
_LOOKS: dict[str, Plain] = {
    "points": {**_POINTS, "markersize": 4},
    "rings": {**_POINTS, "markersize": 7, "markerfacecolor": "none"},
    "dashes": {"linestyle": "--"},
}


def write_figures(
    charts: Sequence[Chart], folder: Path, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Write all ``charts`` in every format, named after the chart; return the paths.

    ``folder`` is made if it does not exist. ``formats`` are file endings that matplotlib knows:
    "svg", "png", "pdf". The same chart gives the same bytes: files carry no date.
    """
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            figure = drawn(chart)
            for kind in formats:
                path = folder / f"{chart.name}.{kind}"
                with _style():
                    figure.savefig(path, metadata={"Date": None} if kind == "svg" else None)
                written.append(path)
    except OSError as error:
        raise disk_error(str(folder), error) from error
    return written


def _style() -> Any:
    """The look of all figures."""
    import matplotlib as mpl

    return mpl.rc_context(fname=Path(__file__).parent / "assets" / "paper.mplstyle")


def drawn(chart: Chart) -> Any:
    """Return a matplotlib figure, outside of pyplot's global state.

    It shows what the interactive version shows, with the legend beside the lines.
    """
    from matplotlib.figure import Figure

    with _style():
        figure = Figure(layout="constrained")
        axes = figure.subplots()
        if chart.heat is not None:
            image = axes.imshow(chart.heat.z, aspect="auto", interpolation="nearest")
            figure.colorbar(image, ax=axes)
            axes.set_yticks(range(len(chart.heat.y)), [_literal(name) for name in chart.heat.y])
            if len(chart.heat.x) <= MANY:
                axes.set_xticks(range(len(chart.heat.x)), [_literal(name) for name in chart.heat.x])
        elif chart.series and chart.series[0].kind == "bars":
            _draw_bars(axes, chart)
        else:
            for number, series in enumerate(chart.series):
                _draw_line(axes, series, chart.colour(number))
        axes.set(xlabel=_literal(chart.x_label), ylabel=_literal(chart.y_label))
        logarithmic = {"xscale": chart.log_x, "yscale": chart.log_y}
        axes.set(**{scale: "log" for scale, wanted in logarithmic.items() if wanted})
        if chart.has_names:
            axes.tick_params(axis="x", labelrotation=60)
        axes.grid()
        if len(chart.series) > 1:  # beside the lines, never on them
            figure.legend(loc="outside right center")
    return figure


def _draw_bars(axes: Any, chart: Chart) -> None:
    """Bars on each other if the chart is stacked, else beside each other."""
    count = len(chart.series)
    names = [_literal(str(x)) for x in chart.series[0].x]
    spots = np.arange(len(names))
    bottoms = np.zeros(len(names))
    width = 0.8 if chart.stacked else 0.8 / count
    for number, series in enumerate(chart.series):
        heights = np.asarray(series.y, dtype=float)
        shift = 0.0 if chart.stacked else (number - (count - 1) / 2) * width
        look = {"width": width, "color": chart.colour(number), "label": _literal(series.name)}
        axes.bar(spots + shift, heights, bottom=bottoms, **look)
        bottoms = bottoms + heights if chart.stacked else bottoms
    axes.set_xticks(spots, names)


def _draw_line(axes: Any, series: Series, colour: str) -> None:
    """A line, points, rings or dashes, with the band if there is one."""
    x: list[Any] = [_literal(place) if isinstance(place, str) else place for place in series.x]
    look = {"color": colour, "label": _literal(series.name), **_LOOKS.get(series.kind, {})}
    axes.plot(x, np.asarray(series.y, dtype=float), **look)  # gaps become nan
    if series.low is None or series.high is None:
        return
    if series.kind == "points":
        axes.vlines(x, series.low, series.high, color=colour)
    else:
        axes.fill_between(x, series.low, series.high, color=colour, alpha=0.15, linewidth=0)


def _literal(text: str) -> str:
    """matplotlib reads what is between dollars as mathematics: a name must stay a name."""
    return text.replace("$", r"\$")
