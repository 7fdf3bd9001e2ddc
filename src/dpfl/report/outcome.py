"""Figures of every report: accuracy, budgets and spending, bytes and seconds.

Methods that protect different units never share an axis of accuracy, and epsilons of different
promises have figures of their own. Methods that protect nobody are drawn beside every unit.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

from dpfl.core.types import Promise
from dpfl.report.charts import Chart, Place, Series, client_axis, wide
from dpfl.report.inputs import Case, ReportInput, ReportRun

STAGES = ("open", "clients", "close", "evaluate")
BANDS = "Bands: one standard deviation over seeds."
BETTER = "Upper left is better."

Methods = Mapping[str, Sequence[ReportRun]]


def accuracy_charts(shown: ReportInput) -> list[Chart]:
    """Accuracy by epsilon, and by round or, in a sweep, over what was varied."""
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


def _accuracy_chart(
    name: str, title: str, x_label: str, caption: str, series: Sequence[Series], unit: str = ""
) -> Chart:
    """Accuracy over anything.

    ``unit`` is given where there are figures for several units, and is part of name and title then.
    The axis is logarithmic where numbers span much, unless they are rounds.
    """
    xs = [x for one in series for x in one.x]
    numbers = [x for x in xs if isinstance(x, int | float)]
    return Chart(
        name=f"{name}-{unit}" if unit else name,
        title=f"{title}, protecting a {unit}" if unit else title,
        x_label=x_label,
        y_label="test accuracy, %",
        caption=caption,
        series=series,
        log_x=x_label != "round" and len(numbers) == len(xs) and wide(numbers),
    )


def accuracy_by_round(case: Case) -> list[Chart]:
    """Draw one figure per unit; a run that is still running has a figure of its own."""
    finished = all(run.finished for run in case.first.values())
    groups = _by_unit(case) if finished else {"": case.methods}
    charts = []
    for unit, methods in groups.items():
        series = [one for label, runs in methods.items() if (one := _by_round(label, runs))]
        caption = "Measured on the clients' test records (simulation only)."
        if any(one.low for one in series):
            caption += f" {BANDS}"
        named = ("accuracy-by-round", "Accuracy over rounds", "round", caption)
        if series:
            charts.append(_accuracy_chart(*named, series, unit if len(groups) > 1 else ""))
    return charts


def _by_round(label: str, runs: Sequence[ReportRun]) -> Series | None:
    """The accuracy of one method by round, over seeds; None before the first test."""
    by_round: dict[int, list[float]] = {}
    for run in runs:
        for line in run.history:
            if line.scores is not None:
                by_round.setdefault(line.round + 1, []).append(100 * line.scores.accuracy)
    rounds = sorted(by_round)
    columns = [by_round[round_] for round_ in rounds]
    return Series.over_seeds(label, rounds, columns) if rounds else None


def accuracy_by_epsilon(shown: ReportInput) -> list[Chart]:
    """Accuracy against the epsilon of the median client, one figure per promise.

    A method has a point per case. Those whose epsilons bound nothing are left out.
    """
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
        name = f"accuracy-by-epsilon-{number}" if len(found) > 1 else "accuracy-by-epsilon"
        axis, caption = "epsilon spent, median over clients", f"Epsilon {promise}. {BETTER}"
        charts.append(_accuracy_chart(name, "Accuracy against epsilon", axis, caption, series))
    return charts


def accuracy_over_field(shown: ReportInput) -> list[Chart]:
    """The curves of a sweep, one figure per unit.

    The first varied field is the axis, the others are part of the names.
    """
    first, *others = shown.varied
    units, charts = _by_unit(shown.cases[0]), []
    for unit in units:
        columns: dict[str, dict[Place, list[float]]] = {}
        for case in shown.cases:
            rest = ", ".join(f"{name.rpartition('.')[2]} {case.values[name]}" for name in others)
            value = case.values[first]
            place: Place = value if isinstance(value, int | float | str) else str(value)
            for label, runs in _by_unit(case).get(unit, {}).items():
                own = columns.setdefault(f"{label} ({rest})" if rest else label, {})
                own[place] = [100 * run.result.accuracy for run in runs]
        series = [Series.over_seeds(n, list(own), list(own.values())) for n, own in columns.items()]
        named = (f"accuracy-by-{first.rpartition('.')[2]}", f"Accuracy over {first}", first, BANDS)
        charts.append(_accuracy_chart(*named, series, unit if len(units) > 1 else ""))
    return charts


def budget_chart(label: str, run: ReportRun) -> Chart | None:
    """What each site may spend and has spent, in order of budget.

    None where no site has a budget, or the method is shown for reference only.
    """
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
    """Bytes and seconds of one run per method; nothing of a run that has not begun."""
    begun = {label: run for label, run in runs.items() if run.history}
    return [chart for chart in (_bytes(begun), _seconds(runs)) if chart.xs]


def _bytes(runs: Mapping[str, ReportRun]) -> Chart:
    """What all clients sent and received, by method."""

    def mebibytes(way: str) -> list[float]:
        return [sum(getattr(one, way) for one in run.history) / 2**20 for run in runs.values()]

    return Chart(
        name="bytes",
        title="Bytes sent",
        x_label="method",
        y_label="MiB, all clients and rounds",
        caption="Up: from clients to the server. Down: from the server to clients.",
        series=[
            Series(name="up", x=list(runs), y=mebibytes("bytes_up"), kind="bars"),
            Series(name="down", x=list(runs), y=mebibytes("bytes_down"), kind="bars"),
        ],
    )


def _seconds(runs: Mapping[str, ReportRun]) -> Chart:
    """How long the stages of a round took, by method."""

    def mean(run: ReportRun, stage: str) -> float:
        return statistics.mean([line[stage] for line in run.timings if stage in line] or [0.0])

    timed = [s for s in STAGES if any(s in line for run in runs.values() for line in run.timings)]
    return Chart(
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
