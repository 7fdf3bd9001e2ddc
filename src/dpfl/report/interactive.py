"""Charts for the page: the plain dictionaries that plotly.js draws."""

from __future__ import annotations

import math
from importlib import resources
from typing import Any

from dpfl.report.charts import Chart, Series

COLOURS = (
    "#1f6f8b",
    "#d1603d",
    "#5b8c3e",
    "#8a5a9e",
    "#b8860b",
    "#c44569",
    "#4a4e8f",
    "#2a9d8f",
    "#7f5539",
    "#6c757d",
)
_DASH = {"dashes": "dash"}


def plotly_script() -> str:
    """plotly.js, as the plotly package ships it."""
    return (
        resources.files("plotly")
        .joinpath("package_data", "plotly.min.js")
        .read_text(encoding="utf-8")
    )


def specification(chart: Chart) -> dict[str, Any]:
    """What ``Plotly.react`` takes: data and layout."""
    if chart.heat is not None:
        data: list[dict[str, Any]] = [
            {
                "type": "heatmap",
                "x": [_plain(name) for name in chart.heat.x],
                "y": [_plain(name) for name in chart.heat.y],
                "z": chart.heat.z,
                "colorscale": "Viridis",
                "hovertemplate": "%{x}, %{y}: %{z:.4g}<extra></extra>",
                "colorbar": {"thickness": 12},
            }
        ]
    else:
        data = [
            trace
            for number, series in enumerate(chart.series)
            for trace in _traces(series, colour_of(chart, number))
        ]
    axis = {"gridcolor": "#e6e6e6", "linecolor": "#999", "automargin": True, "zeroline": False}
    layout = {
        "xaxis": {
            **axis,
            "title": {"text": _plain(chart.x_label)},
            **_scale(chart.log_x, _xs(chart)),
            **_words(_xs(chart)),
        },
        "yaxis": {
            **axis,
            "title": {"text": _plain(chart.y_label)},
            **_scale(chart.log_y, _ys(chart)),
            **_rows(chart),
        },
        "barmode": "stack" if chart.stacked else "group",
        "margin": {"l": 60, "r": 16, "t": 16, "b": 48},
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#222"},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "hovermode": "closest",
        "showlegend": len(chart.series) > 1,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    }
    found: dict[str, Any] = finite({"data": data, "layout": layout})
    return found


def finite(value: Any) -> Any:
    """What JSON can carry: a number that is none becomes a gap."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list) else value


def _words(values: list[Any]) -> dict[str, Any]:
    """Names stay names, also where they look like numbers or dates."""
    return {"type": "category"} if any(isinstance(value, str) for value in values) else {}


def _rows(chart: Chart) -> dict[str, Any]:
    return {"type": "category"} if chart.heat is not None else {}


def colour_of(chart: Chart, number: int) -> str:
    """A dashed line has the colour of the solid one before it."""
    before = sum(series.kind != "dashes" for series in chart.series[: number + 1])
    return COLOURS[max(0, before - 1) % len(COLOURS)]


def _xs(chart: Chart) -> list[Any]:
    return (
        list(chart.heat.x)
        if chart.heat is not None
        else [x for series in chart.series for x in series.x]
    )


def _ys(chart: Chart) -> list[Any]:
    return [
        y
        for series in chart.series
        for y in (*series.y, *(series.low or ()), *(series.high or ()))
        if y is not None
    ]


def _scale(log: bool, values: list[Any]) -> dict[str, Any]:
    """A logarithmic axis where asked for; within one decade plotly would print bare digits, so
    ticks are said outright.
    """
    positive = [
        value for value in values if isinstance(value, int | float) and 0 < value < math.inf
    ]
    if not log or not positive:
        return {}
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    steps = (1,) if high - low > 3 else (1, 2, 5)
    ticks = [step * 10.0**power for power in range(low, high + 1) for step in steps]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _traces(series: Series, colour: str) -> list[dict[str, Any]]:
    places = [_plain(x) if isinstance(x, str) else x for x in series.x]
    name = _plain(series.name)
    trace: dict[str, Any] = {"name": name, "x": places, "y": series.y}
    if series.text is not None:
        told = [_plain(one) for one in series.text]
        trace |= {"text": told, "hovertemplate": "%{text}: %{y:.4g}<extra>" + name + "</extra>"}
    else:
        trace |= {"hovertemplate": "%{x}: %{y:.4g}<extra>" + name + "</extra>"}
    if series.kind == "bars":
        return [trace | {"type": "bar", "marker": {"color": colour}}]
    if series.kind in ("points", "rings"):
        symbol = (
            {"symbol": "circle-open", "size": 12}
            if series.kind == "rings"
            else {"size": 7, "opacity": 0.85}
        )
        trace |= {"type": "scatter", "mode": "markers", "marker": {"color": colour, **symbol}}
        if series.low is not None and series.high is not None:
            up = [high - y for high, y in zip(series.high, series.y, strict=True) if y is not None]
            trace["error_y"] = {"type": "data", "array": up, "color": colour}
        return [trace]
    line = {"color": colour, "width": 2, "dash": _DASH.get(series.kind, "solid")}
    few = len(series.x) <= 30 and series.kind == "line"
    trace |= {
        "type": "scatter",
        "mode": "lines+markers" if few else "lines",
        "line": line,
        "marker": {"size": 5},
    }
    if series.low is None or series.high is None:
        return [trace]
    around = {
        "type": "scatter",
        "mode": "lines",
        "x": [*series.x, *reversed(series.x)],
        "y": [*series.high, *reversed(series.low)],
        "fill": "toself",
        "fillcolor": colour + "26",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": series.name,
    }
    return [around, trace | {"legendgroup": series.name}]


def _plain(name: str) -> str:
    """plotly reads a little HTML in texts, and TeX between dollars: a name must stay a name."""
    return (
        name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("$", "&#36;")
    )
