"""Draw a chart for a page: plain dictionaries for plotly.js.

Names are escaped, because plotly.js reads a little HTML in texts; numbers that JSON cannot carry
become gaps. Nothing here imports plotly: its script is taken from the files of the package.
"""

import html
import math
from collections.abc import Sequence
from importlib import resources
from typing import Any

from dpfl.core.types import Plain
from dpfl.report.charts import Chart, Heat, Place, Series, toml_asset

_STYLE = toml_asset("plotly.toml")


def plotly_script() -> str:
    """Return plotly.js, as the plotly package ships it."""
    script = resources.files("plotly").joinpath("package_data", "plotly.min.js")
    return script.read_text(encoding="utf-8")


def specification(chart: Chart) -> Plain:
    """Return what ``Plotly.react`` takes: data and layout, ready for JSON.

    >>> from dpfl.report.charts import Series
    >>> line = Series(name="a & b", x=[1, 2], y=[1.0, float("inf")])
    >>> chart = Chart(name="n", title="t", x_label="x", y_label="y", caption="", series=[line])
    >>> drawn = specification(chart)["data"][0]
    >>> drawn["name"], drawn["y"]
    ('a &amp; b', [1.0, None])
    """
    drawn = [_traces(series, chart.colour(n)) for n, series in enumerate(chart.series)]
    data = [_heat_map(chart.heat)] if chart.heat else [trace for own in drawn for trace in own]
    axis = _STYLE["axis"]
    x = {**axis, "title": {"text": _literal(chart.x_label)}, **_scale(chart.log_x, chart.xs)}
    y = {**axis, "title": {"text": _literal(chart.y_label)}, **_scale(chart.log_y, chart.ys)}
    layout = {
        **_STYLE["layout"],
        "xaxis": x | ({"type": "category"} if chart.has_names else _whole_ticks(chart)),
        "yaxis": y | ({"type": "category"} if chart.heat else {}),
        "barmode": "stack" if chart.stacked else "group",
        "showlegend": len(chart.series) > 1,
    }
    found: Plain = _finite({"data": data, "layout": layout})
    return found


def _heat_map(heat: Heat) -> Plain:
    """The one trace of a map."""
    x, y = ([_literal(name) for name in names] for names in (heat.x, heat.y))
    return {**_STYLE["heat"], "x": x, "y": y, "z": heat.z}


def _traces(series: Series, colour: str) -> list[Plain]:
    """The trace of a series, after that of its band if it has one; points have error bars."""
    name = _literal(series.name)
    x = [_literal(x) if isinstance(x, str) else x for x in series.x]
    where = "%{x}" if series.text is None else "%{text}"
    hover = f"{where}: %{{y:.4g}}<extra>{name}</extra>"
    trace: Plain = {"name": name, "x": x, "y": series.y, "hovertemplate": hover}
    if series.text is not None:
        trace["text"] = [_literal(one) for one in series.text]
    if series.kind == "bars":
        return [trace | {"type": "bar", "marker": {"color": colour}}]
    trace["type"] = "scatter"
    if series.kind in ("points", "rings"):
        trace |= {"mode": "markers", "marker": {"color": colour, **_STYLE[series.kind]}}
        if series.high is not None:
            up = [high - y for high, y in zip(series.high, series.y, strict=True) if y is not None]
            trace["error_y"] = {"type": "data", "array": up, "color": colour}
        return [trace]
    marked = len(series.x) <= 30 and series.kind == "line"
    dash = "dash" if series.kind == "dashes" else "solid"
    trace |= {"mode": "lines+markers" if marked else "lines", "marker": {"size": 5}}
    trace["line"] = {"color": colour, "width": 2, "dash": dash}
    if series.low is None or series.high is None:
        return [trace]
    around = {"x": [*x, *reversed(x)], "y": [*series.high, *reversed(series.low)]}
    band = {**_STYLE["band"], **around, "fillcolor": colour + "26", "legendgroup": name}
    return [band, trace | {"legendgroup": name}]


def _scale(log: bool, values: Sequence[Place]) -> Plain:
    """A logarithmic axis with labelled ticks: within a decade plotly would print bare digits."""
    positive = [v for v in values if isinstance(v, int | float) and 0 < v < math.inf]
    if not log or not positive:
        return {}
    low = math.floor(math.log10(min(positive)))
    high = math.ceil(math.log10(max(positive)))
    steps = (1,) if high - low > 3 else (1, 2, 5)
    decades = range(low, high + 1, 1 + (high - low) // 7)
    ticks = [step * 10.0**power for power in decades for step in steps]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _whole_ticks(chart: Chart) -> Plain:
    """Ticks at whole numbers: a few rounds would get halves between them."""
    few = all(isinstance(x, int) for x in chart.xs) and len(set(chart.xs)) <= 10
    return {"dtick": 1} if few and not chart.log_x else {}


def _finite(value: Any) -> Any:
    """What JSON can carry: a number that is not finite becomes a gap."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def _literal(name: str) -> str:
    """plotly reads a little HTML in texts, and TeX between dollars: a name must stay a name."""
    return html.escape(name, quote=False).replace("$", "&#36;")
