"""Figures of what happens inside a method.

Weights and noise are shown for every method. Everything else is declared by the components of its
strategy (:mod:`dpfl.plugs.base`) and drawn from the metrics that they report: one function here
per kind of figure, and none that knows a method. A new kind needs a function and a line in
``_DRAWN``.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpfl.core.errors import DpflError
from dpfl.plugs.base import FigureKind, FigureSpec
from dpfl.report.charts import Chart, Heat, Series, client_axis, wide
from dpfl.report.inputs import ReportRun
from dpfl.rounds.record import RoundRecord

Value = float | int | str | list[float]

LEAST = " Weights in inverse proportion to the true noise leave the least noise."


def diagnostics(label: str, run: ReportRun) -> list[Chart]:
    """All figures about the inside of a method, from one of its runs.

    ``label`` is what the report calls the method: it is part of the names of the figures, so that
    those of several methods can stand on one page.
    """
    general = [chart for chart in (weights(label, run), noise_ratio(label, run)) if chart]
    declared = [_DRAWN[figure.spec.kind](figure) for figure in _declared(label, run)]
    return [*general, *(chart for charts in declared for chart in charts)]


# -- every method ----------------------------------------------------------------------------------


def weights(label: str, run: ReportRun) -> Chart | None:
    """The weight of each client's update, beside the weights that leave the least noise.

    Both are means over the rounds in which the client took part. The latter are known to a
    simulator only. None if all weights are equal.
    """
    own = _means(line.weights for line in run.history)
    least = _means(line.true_noise.weights for line in run.history if line.true_noise)
    known = [values for values in (own, least) if values]
    if not own or all(max(one.values()) < 1.0001 * min(one.values()) for one in known):
        return None
    budgets = run.budgets
    clients = sorted(own, key=lambda client: (budgets.get(client, 0.0), client))
    order = "from the smallest to the largest budget" if budgets else "by name"
    x, axis = client_axis(clients, "budget" if budgets else "name")
    series = [Series(name="weight", x=x, y=[own[c] for c in clients], text=clients, kind="points")]
    if least:
        name = "least noise (simulation only)"
        y = [least.get(client) for client in clients]
        series.insert(0, Series(name=name, x=x, y=y, text=clients, kind="rings"))
    log_y = wide([*own.values(), *least.values()])
    words = {"label": label, "axis": axis, "order": order}
    return Chart.of("weights", series, log_y=log_y, least=LEAST if least else "", **words)


def _means(lines: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Each client's mean over the rounds it appears in."""
    values: dict[str, list[float]] = {}
    for line in lines:
        for client, value in line.items():
            values.setdefault(client, []).append(value)
    return {client: statistics.mean(own) for client, own in values.items()}


def noise_ratio(label: str, run: ReportRun) -> Chart | None:
    """How much more noise than necessary the aggregate carried, round by round.

    None where the true noise is not known, or rows are not what was sent.
    """
    ratios = {line.round: line.true_noise.ratio for line in run.history if line.true_noise}
    line = _over_rounds(label, ratios)
    return (
        Chart.of("noise-ratio", [line], log_y=max(y for y in line.y if y) > 20, label=label)
        if line
        else None
    )


def _over_rounds(name: str, values: Mapping[int, Value | None]) -> Series | None:
    """A line of the rounds that have a number; None if no round has."""
    known = {n + 1: float(own) for n, own in values.items() if isinstance(own, int | float)}
    return Series(name=name, x=list(known), y=list(known.values())) if known else None


# -- what components declare -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Figure:
    """A declared figure, with the rounds of a run and what the component reports of each."""

    label: str
    spec: FigureSpec
    rounds: Sequence[tuple[RoundRecord, Mapping[str, Value]]]

    def last(self, wanted: Callable[[str], bool]) -> tuple[RoundRecord, Mapping[str, Value]] | None:
        """The last round that reports a metric with such a key."""
        return next((one for one in reversed(self.rounds) if any(map(wanted, one[1]))), None)

    def chart(self, series: Sequence[Series] = (), *, title: str = "", **more: Any) -> Chart:
        """The figure with these series; ``title`` is added to the declared one."""
        same = {k: getattr(self.spec, k) for k in ("x_label", "y_label", "caption", "log_y")}
        words = {"name": f"{self.spec.name}-{self.label}", "series": series, **same, **more}
        return Chart(title=f"{self.label}: {self.spec.title}{title}", **words)


def _declared(label: str, run: ReportRun) -> Iterator[_Figure]:
    """The figures that the run's strategy declares.

    None are shown where the strategy cannot be built: its method may be someone else's, and not
    installed here.
    """
    clients = {client for line in run.history for client in line.cohort}
    try:
        count = run.summary.clients if run.summary else len(clients)
        figures = run.experiment.figures(count)
    except DpflError:
        return
    for slot, spec in figures:
        rounds = [(line, line.metrics.get(slot, {})) for line in run.history]
        yield _Figure(label=label, spec=spec, rounds=rounds)


def _by_round(figure: _Figure) -> list[Chart]:
    """Numbers over rounds, one line per metric; rounds that do not report it are left out.

    A component that never reports anything has no figure, also where it asks for the update's norm.
    """
    series = []
    for key, name in figure.spec.metrics.items():
        values = {
            line.round: line.update_norm if key == "update_norm" else metrics.get(key)
            for line, metrics in figure.rounds
        }
        series.append(_over_rounds(name, values))
    known = [one for one in series if one and any(metrics for _, metrics in figure.rounds)]
    return [figure.chart(known)] if known else []


def _spectrum(figure: _Figure) -> list[Chart]:
    """Lists of the last round that has any, and the levels that they are compared with.

    A list that consists of slices is drawn by its first one.
    """
    endings = tuple(figure.spec.metrics)
    level = figure.spec.threshold
    found = figure.last(lambda key: key.endswith(endings))
    if found is None:
        return []
    (line, metrics), series = found, []
    for key, values in metrics.items():
        ending = next((ending for ending in endings if key.endswith(ending)), None)
        if ending is None or not isinstance(values, list):
            continue
        owner = key.removesuffix(ending)
        name = owner if len(endings) == 1 else f"{owner}, {figure.spec.metrics[ending]}"
        slices = metrics.get(f"{owner}/slices", 1)
        part = len(values) // int(slices) if isinstance(slices, int | float) else len(values)
        series.append(Series(name=name, x=list(range(1, part + 1)), y=values[:part]))
        height = metrics.get(owner + level) if level else None
        if isinstance(height, int | float):
            name = f"{owner}, threshold"
            y = [float(height)] * 2
            series.append(Series(name=name, x=[1, part], y=y, kind="dashes"))
    return [figure.chart(series, title=f", round {line.round + 1}")]


def _against_true_noise(figure: _Figure) -> list[Chart]:
    """A number per client against the noise that was really added, both means over rounds.

    Often only ratios between clients matter: the dashed line is the median ratio times the truth.
    """
    series: list[Series] = []
    for key, name in figure.spec.metrics.items():
        pairs = [
            (dict(zip(line.weights or line.arrived, found, strict=False)), line.true_noise)
            for line, metrics in figure.rounds
            if isinstance(found := metrics.get(key), list) and line.true_noise is not None
        ]
        seen = _means(own for own, _ in pairs)
        true = _means(truth.variances for _, truth in pairs)
        clients = sorted(client for client in seen if true.get(client, 0.0) > 0)
        if not clients:
            continue
        x = [true[c] for c in clients]
        y = [seen[c] for c in clients]
        scale = statistics.median(b / a for a, b in zip(x, y, strict=True))
        ends = [min(x), max(x)]
        line = [scale * end for end in ends]
        series.append(Series(name=name, x=x, y=y, text=clients, kind="points"))
        series.append(Series(name=f"{scale:.3g} times the truth", x=ends, y=line, kind="dashes"))
    return [figure.chart(series, log_x=True, log_y=True)] if series else []


def _client_map(figure: _Figure) -> list[Chart]:
    """A map per metric, of the last round that reports it, with a column per client."""
    charts = []
    for key, name in figure.spec.metrics.items():
        line, metrics = figure.last(key.__eq__) or (None, {})
        values = metrics.get(key)
        if line is None or not isinstance(values, list) or not line.arrived:
            continue
        clients = list(line.arrived)
        height = len(values) // len(line.arrived)
        rows = [values[n * len(clients) : (n + 1) * len(clients)] for n in range(height)]
        heat = Heat(x=clients, y=[str(n) for n in range(height)], z=rows)
        title = f" {name}, round {line.round + 1}"
        file = f"{figure.spec.name}-{name.replace(' ', '-')}-{figure.label}"
        charts.append(figure.chart(title=title, name=file, heat=heat))
    return charts


_DRAWN: dict[FigureKind, Callable[[_Figure], list[Chart]]] = {
    FigureKind.BY_ROUND: _by_round,
    FigureKind.SPECTRUM: _spectrum,
    FigureKind.AGAINST_TRUE_NOISE: _against_true_noise,
    FigureKind.CLIENT_MAP: _client_map,
}
