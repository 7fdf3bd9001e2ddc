"""Figures of every report: scores, budgets and spending, bytes and seconds.

Methods that protect different units never share an axis of scores, and epsilons of different
promises have figures of their own. Methods that protect nobody are drawn beside every unit.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dpfl.core.types import Promise
from dpfl.report.charts import Chart, Place, Series, client_axis, wide
from dpfl.report.inputs import Case, ReportInput, ReportRun
from dpfl.tasks import MetricWords

STAGES = ("open", "clients", "close", "evaluate")
BANDS = " Bands: one standard deviation over seeds."


def score_charts(shown: ReportInput) -> list[Chart]:
    """The score by epsilon, and by round or, in a sweep, over what was varied."""
    several = len(shown.cases) > 1
    first = score_over_field(shown) if several else score_by_round(shown.cases[0])
    return [*first, *score_by_epsilon(shown)]


def _per_unit(kind: str, found: Mapping[str, Sequence[Series]], **values: object) -> list[Chart]:
    """One figure of scores per unit, which is part of name and title where there are several.

    The axis is logarithmic where numbers span much, unless they are rounds.
    """
    charts = []
    for unit, series in found.items():
        bands = BANDS if any(one.low for one in series) else ""
        log_x = kind != "score-by-round" and wide([x for one in series for x in one.x])
        chart = Chart.of(kind, series, log_x=log_x, bands=bands, **values)
        if len(found) > 1:
            title = f"{chart.title}, protecting a {unit}"
            chart = replace(chart, name=f"{chart.name}-{unit}", title=title)
        charts += [chart] if series else []
    return charts


def _words(run: ReportRun) -> dict[str, str]:
    """How figures name the metric of a run."""
    scores = run.scores
    words = MetricWords("accuracy") if scores is None else scores.words
    return {
        "metric": words.words,
        "Metric": words.words[0].upper() + words.words[1:],
        "percent": ", %" if words.share else "",
        "file": words.name.replace("_", "-"),
        "better": "Upper" if scores is None or scores.higher_is_better else "Lower",
    }


def _score(run: ReportRun) -> float:
    """The ranking metric of a run that has ended, as it is drawn."""
    return run.result.scores.words.scale * run.result.value


def score_by_round(case: Case) -> list[Chart]:
    """Draw one figure per unit; a run that is still running has a figure of its own.

    The legend is in the order in which the curves end, the highest first.
    """
    finished = all(run.finished for run in case.first.values())
    found: dict[str, list[Series]] = {}
    for unit, methods in (case.by_unit() if finished else {"": case.methods}).items():
        drawn = [_by_round(label, runs) for label, runs in methods.items()]
        shown = [series for series in drawn if series.x]
        found[unit] = sorted(shown, key=lambda series: -(series.y[-1] or 0.0))
    first = next(iter(case.first.values()))
    return _per_unit("score-by-round", found, **_words(first))


def _by_round(label: str, runs: Sequence[ReportRun]) -> Series:
    """The score of one method by round, over seeds; empty before the first test."""
    by_round: dict[int, list[float]] = {}
    for run in runs:
        for line in run.history:
            if line.scores is not None:
                by_round.setdefault(line.round + 1, []).append(
                    line.scores.words.scale * line.scores.value
                )
    rounds = sorted(by_round)
    return Series.over_seeds(label, rounds, [by_round[round_] for round_ in rounds])


def score_over_field(shown: ReportInput) -> list[Chart]:
    """The curves of a sweep, one figure per unit.

    The first varied field is the axis, the others are part of the names.
    """
    first, *others = shown.varied
    curves: dict[str, dict[str, dict[Place, list[float]]]] = {}
    for case in shown.cases:
        rest = ", ".join(f"{name.rpartition('.')[2]} {case.values[name]}" for name in others)
        value = case.values[first]
        place: Place = value if isinstance(value, int | float | str) else str(value)
        for unit, methods in case.by_unit().items():
            for label, runs in methods.items():
                name = f"{label} ({rest})" if rest else label
                own = curves.setdefault(unit, {}).setdefault(name, {})
                own[place] = [_score(run) for run in runs]
    found = {
        unit: [Series.over_seeds(n, list(own), list(own.values())) for n, own in named.items()]
        for unit, named in curves.items()
    }
    words = _words(next(iter(shown.cases[0].first.values())))
    short = first.rpartition(".")[2]
    return _per_unit("score-by-field", found, field=first, short=short, **words)


def score_by_epsilon(shown: ReportInput) -> list[Chart]:
    """The score against the epsilon of the median client, one figure per promise.

    A method has a point per case. Those whose epsilons bound nothing are left out.
    """
    found: dict[Promise, dict[str, list[tuple[float, list[float]]]]] = {}
    for case in shown.cases:
        for label, runs in case.methods.items():
            spent = [run.result.epsilon.spent.median for run in runs if run.result.epsilon]
            if len(spent) < len(runs) or not math.isfinite(sum(spent)) or runs[0].score.reference:
                continue
            point = (statistics.mean(spent), [_score(run) for run in runs])
            found.setdefault(runs[0].result.promise, {}).setdefault(label, []).append(point)
    charts = []
    words = _words(next(iter(shown.cases[0].first.values())))
    for number, promise in enumerate(sorted(found), start=1):
        series = []
        for label, points in found[promise].items():
            x, columns = map(list, zip(*sorted(points), strict=True))
            series.append(Series.over_seeds(label, x, columns, "line" if len(x) > 1 else "points"))
        part = f"-{number}" if len(found) > 1 else ""
        more = {"number": part, "promise": promise, **words}
        charts += _per_unit("score-by-epsilon", {"": series}, **more)
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
    if not lines or run.score.reference:
        return None
    budgets, names, spent = (list(column) for column in zip(*lines, strict=True))
    x, axis = client_axis(names)
    series = [
        Series(name="budget", x=x, y=budgets, text=names, kind="rings"),
        Series(name="spent", x=x, y=spent, text=names, kind="points"),
    ]
    words = {"label": label, "axis": axis, "promise": run.result.promise}
    return Chart.of("epsilon", series, log_y=wide([*budgets, *spent]), **words)


def cost_charts(runs: Mapping[str, ReportRun]) -> list[Chart]:
    """Bytes of all clients and rounds, and seconds of a round by stage, of one run per method.

    There is nothing of a run that has not begun.
    """
    begun = {label: run for label, run in runs.items() if run.history}

    def mebibytes(run: ReportRun, way: str) -> float:
        return float(sum(getattr(line, f"bytes_{way}") for line in run.history) / 2**20)

    def seconds(run: ReportRun, stage: str) -> float:
        return statistics.mean([line[stage] for line in run.timings if stage in line] or [0.0])

    timings = [line for run in runs.values() for line in run.timings]
    stages = [stage for stage in STAGES if any(stage in line for line in timings)]
    sent = _bars("bytes", begun, ("up", "down"), mebibytes)
    return [chart for chart in (sent, _bars("seconds", runs, stages, seconds)) if chart.xs]


def _bars(
    kind: str,
    runs: Mapping[str, ReportRun],
    names: Sequence[str],
    value: Callable[[ReportRun, str], float],
) -> Chart:
    """One set of bars per name, with a bar per method."""
    heights = {name: [value(run, name) for run in runs.values()] for name in names}
    series = [Series(name=n, x=list(runs), y=own, kind="bars") for n, own in heights.items()]
    return Chart.of(kind, series)
