"""Figures of every report: accuracy, budgets and spending, bytes and seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from dpfl.core.types import Promise
from dpfl.report.charts import Chart, Place, Series, client_axis, wide
from dpfl.report.reading import Case, ReportInput, ReportRun

FEW = 3
"""Methods whose lines of bytes can be told apart, two each."""

STAGES = ("open", "clients", "close", "evaluate")
ACCURACY = "test accuracy, %"

Methods = Mapping[str, Sequence[ReportRun]]


def accuracy_charts(shown: ReportInput) -> list[Chart]:
    """Accuracy by round, or over what was varied; and by epsilon."""
    several = len(shown.cases) > 1
    first = accuracy_over_field(shown) if several else accuracy_by_round(shown.cases[0])
    return [*first, *accuracy_by_epsilon(shown)]


def _by_unit(case: Case) -> dict[str, Methods]:
    """The methods that protect each unit; those that protect nobody belong to every unit.

    Methods that protect different things do not share an axis.
    """
    units = {label: str(run.promise.unit) for label, run in case.first.items()}
    named = {units[label] for label, run in case.first.items() if not run.reference}
    return {
        unit: {
            label: runs
            for label, runs in case.methods.items()
            if units[label] == unit or not runs[0].protects
        }
        for unit in sorted(named or set(units.values()))
    }


def accuracy_by_round(case: Case) -> list[Chart]:
    """Draw one figure per unit; a run that is still running has a figure of its own."""
    finished = all(run.finished for run in case.first.values())
    groups = _by_unit(case) if finished else {"": case.methods}
    charts = []
    for unit, methods in groups.items():
        series = [one for label, runs in methods.items() if (one := _by_round(label, runs))]
        bands = any(one.low for one in series)
        chart = Chart(
            name=f"accuracy-by-round{_only_if(len(groups) > 1, f'-{unit}')}",
            title=f"Accuracy over rounds{_only_if(len(groups) > 1, f', protecting a {unit}')}",
            x_label="round",
            y_label=ACCURACY,
            caption="Measured on the clients' test records (simulation only)."
            + _only_if(bands, " Bands: one standard deviation over seeds."),
            series=series,
        )
        charts += [chart] if series else []
    return charts


def _only_if(condition: bool, text: str) -> str:
    return text if condition else ""


def _by_round(label: str, runs: Sequence[ReportRun]) -> Series | None:
    by_round: dict[int, list[float]] = {}
    for run in runs:
        for line in run.history:
            if line.scores is not None:
                by_round.setdefault(line.round + 1, []).append(100 * line.scores.accuracy)
    rounds = sorted(by_round)
    columns = [by_round[round_] for round_ in rounds]
    return Series.over_seeds(label, rounds, columns) if rounds else None


def accuracy_by_epsilon(shown: ReportInput) -> list[Chart]:
    """Accuracy against the epsilon of the median client, one figure per promise."""
    found: dict[Promise, dict[str, list[tuple[float, list[float]]]]] = {}
    for case in shown.cases:
        for label, runs in case.methods.items():
            spent = [run.result.epsilon.spent.median for run in runs if run.result.epsilon]
            if len(spent) < len(runs) or not math.isfinite(sum(spent)) or runs[0].reference:
                continue
            point = (statistics.mean(spent), [100 * run.result.accuracy for run in runs])
            found.setdefault(runs[0].promise, {}).setdefault(label, []).append(point)
    charts = []
    for number, (promise, methods) in enumerate(sorted(found.items()), start=1):
        series = []
        for label, points in methods.items():
            points.sort()
            x, columns = [x for x, _ in points], [column for _, column in points]
            series.append(Series.over_seeds(label, x, columns, "line" if len(x) > 1 else "points"))
        chart = Chart(
            name=f"accuracy-by-epsilon{_only_if(len(found) > 1, f'-{number}')}",
            title="Accuracy against epsilon",
            x_label="epsilon spent, median over clients",
            y_label=ACCURACY,
            caption=f"Epsilon {promise}. Upper left is better.",
            series=series,
        )
        charts.append(_log_x_if_wide(chart))
    return charts


def _log_x_if_wide(chart: Chart) -> Chart:
    numbers = [x for x in chart.xs if isinstance(x, int | float) and not isinstance(x, bool)]
    all_numbers = len(numbers) == len(chart.xs)
    return replace(chart, log_x=all_numbers and wide(numbers))


def accuracy_over_field(shown: ReportInput) -> list[Chart]:
    """The curves of a sweep, one figure per unit.

    The first varied field is the axis, the others are part of the names.
    """
    first, *others = shown.varied
    units = _by_unit(shown.cases[0])
    charts = []
    for unit in units:
        columns: dict[str, dict[Place, list[float]]] = {}
        for case in shown.cases:
            rest = ", ".join(f"{name.rpartition('.')[2]} {case.values[name]}" for name in others)
            value = case.values[first]
            place: Place = value if isinstance(value, int | float | str) else str(value)
            for label, runs in _by_unit(case).get(unit, {}).items():
                own = columns.setdefault(f"{label} ({rest})" if rest else label, {})
                own[place] = [100 * run.result.accuracy for run in runs]
        chart = Chart(
            name=f"accuracy-by-{first.rpartition('.')[2]}{_only_if(len(units) > 1, f'-{unit}')}",
            title=f"Accuracy over {first}{_only_if(len(units) > 1, f', protecting a {unit}')}",
            x_label=first,
            y_label=ACCURACY,
            caption="Bands: one standard deviation over seeds.",
            series=[
                Series.over_seeds(name, list(own), list(own.values()))
                for name, own in columns.items()
            ],
        )
        charts.append(_log_x_if_wide(chart))
    return charts


def budget_chart(label: str, run: ReportRun) -> Chart | None:
    """What each site may spend and has spent; None where no site has a budget."""
    lines = sorted(
        (line.budget, line.account, line.epsilon)
        for line in run.result.statements
        if line.budget is not None and math.isfinite(line.epsilon)
    )
    if not lines or run.reference:
        return None
    budgets, names, spent = (list(column) for column in zip(*lines, strict=True))
    x, axis = client_axis(names)
    return Chart(
        name=f"epsilon-{label}",
        title=f"{label}: budget and spent",
        x_label=axis,
        y_label="epsilon",
        caption=f"Epsilon {run.promise}. No site can spend more than its budget.",
        series=[
            Series(name="budget", x=x, y=budgets, text=names, kind="rings"),
            Series(name="spent", x=x, y=spent, text=names, kind="points"),
        ],
        log_y=wide([*budgets, *spent]),
    )


def cost_charts(runs: Mapping[str, ReportRun]) -> list[Chart]:
    """Bytes and seconds of one run per method."""
    found = [_bytes_by_round(runs) if len(runs) <= FEW else _bytes_in_all(runs), _seconds(runs)]
    return [chart for chart in found if chart is not None]


def _bytes_in_all(runs: Mapping[str, ReportRun]) -> Chart:
    up = [sum(line.bytes_up for line in run.history) / 2**20 for run in runs.values()]
    down = [sum(line.bytes_down for line in run.history) / 2**20 for run in runs.values()]
    return Chart(
        name="bytes",
        title="Bytes sent",
        x_label="method",
        y_label="MiB, all clients and rounds",
        caption="Up: from clients to the server. Down: from the server to clients.",
        series=[
            Series(name="up", x=list(runs), y=up, kind="bars"),
            Series(name="down", x=list(runs), y=down, kind="bars"),
        ],
    )


def _bytes_by_round(runs: Mapping[str, ReportRun]) -> Chart | None:
    series = []
    for label, run in runs.items():
        rounds = [line.round + 1 for line in run.history]
        up = [total / 2**20 for total in accumulate(line.bytes_up for line in run.history)]
        down = [total / 2**20 for total in accumulate(line.bytes_down for line in run.history)]
        series.append(Series(name=f"{label}, up", x=rounds, y=up))
        series.append(Series(name=f"{label}, down", x=rounds, y=down, kind="dashes"))
    chart = Chart(
        name="bytes",
        title="Bytes sent so far",
        x_label="round",
        y_label="MiB, all clients",
        caption="Solid: from clients to the server. Dashed: from the server to clients.",
        series=series,
    )
    return chart if chart.xs else None


def _seconds(runs: Mapping[str, ReportRun]) -> Chart | None:
    def mean(run: ReportRun, stage: str) -> float:
        return statistics.mean([line[stage] for line in run.timings if stage in line] or [0.0])

    timed = [s for s in STAGES if any(s in line for run in runs.values() for line in run.timings)]
    chart = Chart(
        name="seconds",
        title="Seconds per round and stage",
        x_label="method",
        y_label="seconds",
        caption="open: charges and draws; clients: local work; close: work of the server; "
        "evaluate: testing. Mean over rounds, on the machine of the run.",
        series=[
            Series(name=s, x=list(runs), y=[mean(run, s) for run in runs.values()], kind="bars")
            for s in timed
        ],
        stacked=True,
    )
    return chart if timed else None
