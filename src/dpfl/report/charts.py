"""Figures as plain data, drawn twice: in the page, where one can point at things, and as files for
papers.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dpfl.experiments.results import RunScore
from dpfl.report.reading import Case, Material, ReadRun

Values = list[Any]
FEW = 3  # methods whose lines can be told apart, two each
MANY = 40  # clients whose names still fit under an axis


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, cloud of points or set of bars; ``low`` and ``high`` make a band."""

    name: str
    x: Values
    y: list[float | None]
    low: list[float] | None = None
    high: list[float] | None = None
    text: list[str] | None = None
    kind: Literal["line", "points", "rings", "bars", "dashes"] = "line"


@dataclass(frozen=True, kw_only=True)
class Heat:
    """A picture of a matrix."""

    x: list[str]
    y: list[str]
    z: list[list[float]]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure. ``name`` is its file's; the caption says how to read it."""

    name: str
    title: str
    x_label: str
    y_label: str
    caption: str
    series: list[Series] = field(default_factory=list)
    heat: Heat | None = None
    log_x: bool = False
    log_y: bool = False
    stacked: bool = False
    part: str = "outcome"


def chosen(case: Case) -> dict[str, ReadRun]:
    """One run a method to look into: the first seed's."""
    return {label: runs[0] for label, runs in case.methods.items()}


def outcome_charts(material: Material) -> list[Chart]:
    """What came out: accuracy by round, by epsilon, and over what was varied."""
    charts = []
    if len(material.cases) == 1:
        case = material.cases[0]
        charts += [*accuracy_by_round(case), *accuracy_by_epsilon(material)]
    else:
        charts += [*accuracy_over_field(material), *accuracy_by_epsilon(material)]
    return charts


def _band(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and one standard deviation to either side."""
    mean = statistics.mean(values)
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return mean, mean - spread, mean + spread


def _banded(name: str, x: Values, columns: Sequence[Sequence[float]], **more: Any) -> Series:
    bands = [_band(column) for column in columns]
    several = any(len(column) > 1 for column in columns)
    return Series(
        name=name,
        x=x,
        y=[mean for mean, _, _ in bands],
        low=[low for _, low, _ in bands] if several else None,
        high=[high for _, _, high in bands] if several else None,
        **more,
    )


def _units(case: Case) -> list[str]:
    """Units that are protected here, in order; a federation of references alone has one."""
    units = sorted(
        {
            run.summary["unit"]
            for runs in case.methods.values()
            for run in runs[:1]
            if not _reference(run)
        }
    )
    return units or sorted({runs[0].summary["unit"] for runs in case.methods.values()})


def _reference(run: ReadRun) -> bool:
    return RunScore.from_dict(run.told()).reference


def _promise(run: ReadRun) -> tuple[str, str, str]:
    unit, adjacency, observer = (run.summary[name] for name in ("unit", "adjacency", "observer"))
    return unit, adjacency, observer


def _in_unit(case: Case, unit: str) -> dict[str, Sequence[ReadRun]]:
    return {
        label: runs
        for label, runs in case.methods.items()
        if runs[0].summary["unit"] == unit or runs[0].summary["observer"] == "nobody"
    }


def accuracy_by_round(case: Case) -> list[Chart]:
    """One figure a unit: methods that protect different things do not share an axis."""
    unfinished = any(not run.finished for runs in case.methods.values() for run in runs)
    groups = (
        {"": case.methods} if unfinished else {unit: _in_unit(case, unit) for unit in _units(case)}
    )
    charts = []
    for unit, methods in groups.items():
        series = []
        for label, runs in methods.items():
            by_round: dict[int, list[float]] = {}
            for run in runs:
                for line in run.history:
                    if "accuracy" in line:
                        by_round.setdefault(line["round"] + 1, []).append(100 * line["accuracy"])
            if by_round:
                rounds = sorted(by_round)
                series.append(_banded(label, rounds, [by_round[round_] for round_ in rounds]))
        if series:
            several = any(one.low for one in series)
            charts.append(
                Chart(
                    name=f"accuracy-by-round{'-' + unit if len(groups) > 1 else ''}",
                    title="Accuracy over rounds"
                    + (f", protecting a {unit}" if len(groups) > 1 else ""),
                    x_label="round",
                    y_label="test accuracy, %",
                    caption="Measured on the clients' test records, which only a simulation may see."
                    + (" Bands: one standard deviation over seeds." if several else ""),
                    series=series,
                )
            )
    return charts


def accuracy_by_epsilon(material: Material) -> list[Chart]:
    """What privacy cost: the median client's epsilon against accuracy; one figure a promise."""
    found: dict[tuple[str, str, str], dict[str, list[tuple[float, list[float]]]]] = {}
    for case in material.cases:
        for label, runs in case.methods.items():
            spent = [
                run.summary["epsilon"].get("spent", {}).get("median")
                for run in runs
                if run.finished
            ]
            numbers = [value for value in spent if isinstance(value, int | float)]
            if numbers and len(numbers) == len(runs) and not _reference(runs[0]):
                point = (statistics.mean(numbers), [100 * run.summary["accuracy"] for run in runs])
                found.setdefault(_promise(runs[0]), {}).setdefault(label, []).append(point)
    charts = []
    for number, ((unit, adjacency, observer), methods) in enumerate(sorted(found.items())):
        series = []
        for label, points in methods.items():
            points.sort(key=lambda point: point[0])
            kind: Literal["line", "points"] = "line" if len(points) > 1 else "points"
            series.append(_banded(label, [x for x, _ in points], [y for _, y in points], kind=kind))
        charts.append(
            Chart(
                name=f"accuracy-by-epsilon{'-' + str(number + 1) if len(found) > 1 else ''}",
                title="Accuracy against epsilon",
                x_label="epsilon spent, median over clients",
                y_label="test accuracy, %",
                caption=f"Epsilon per {unit}, {adjacency} adjacency, against the {observer}. Left and high is good.",
                series=series,
                log_x=wide([x for one in series for x in one.x]),
            )
        )
    return charts


def wide(values: Sequence[float]) -> bool:
    """Whether values span so much that only a logarithmic axis shows them."""
    return min(values) > 0 and max(values) >= 5 * min(values)


def accuracy_over_field(material: Material) -> list[Chart]:
    """A sweep's curve: one figure a unit, the first varied field along the axis, the others in the
    names.
    """
    first, *others = material.varied
    charts = []
    units = _units(material.cases[0])
    for unit in units:
        columns: dict[str, dict[Any, list[float]]] = {}
        for case in material.cases:
            rest = ", ".join(f"{name.rpartition('.')[2]} {case.values[name]}" for name in others)
            for label, runs in _in_unit(case, unit).items():
                name = f"{label} ({rest})" if rest else label
                columns.setdefault(name, {})[_plain(case.values[first])] = [
                    100 * r.summary["accuracy"] for r in runs
                ]
        numbers = all(
            isinstance(x, int | float) and x > 0 for column in columns.values() for x in column
        )
        xs = [x for column in columns.values() for x in column]
        charts.append(
            Chart(
                name=f"accuracy-by-{first.rpartition('.')[2]}{'-' + unit if len(units) > 1 else ''}",
                title=f"Accuracy over {first}"
                + (f", protecting a {unit}" if len(units) > 1 else ""),
                x_label=first,
                y_label="test accuracy, %",
                caption="Bands: one standard deviation over seeds.",
                series=[
                    _banded(name, list(column), list(column.values()))
                    for name, column in columns.items()
                ],
                log_x=bool(numbers and wide(xs)),
            )
        )
    return charts


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str) else str(value)


def privacy_charts(material: Material) -> list[Chart]:
    """What each site granted and spent, one figure a method (of the first seed)."""
    charts = []
    for label, run in chosen(material.cases[0]).items():
        lines = [line for line in run.summary.get("statements", []) if line["budget"] is not None]
        lines = [line for line in lines if isinstance(line["epsilon"], int | float)]
        if not lines or _reference(run):
            continue
        lines.sort(key=lambda line: (line["budget"], line["account"]))
        names = [line["account"] for line in lines]
        x: Values = names if len(names) <= MANY else list(range(1, len(names) + 1))
        charts.append(
            Chart(
                name=f"epsilon-{label}",
                title=f"{label}: granted and spent",
                x_label="client" if len(names) <= MANY else "clients, by what they granted",
                y_label="epsilon",
                caption=f"Per {run.summary['unit']}, {run.summary['adjacency']} adjacency, against the "
                f"{run.summary['observer']}. No site can spend more than it granted.",
                series=[
                    Series(
                        name="budget",
                        x=x,
                        y=[line["budget"] for line in lines],
                        text=names,
                        kind="rings",
                    ),
                    Series(
                        name="spent",
                        x=x,
                        y=[line["epsilon"] for line in lines],
                        text=names,
                        kind="points",
                    ),
                ],
                log_y=wide([line[key] for line in lines for key in ("budget", "epsilon")]),
                part="privacy",
            )
        )
    return charts


def cost_charts(material: Material) -> list[Chart]:
    """Bytes and seconds."""
    runs = chosen(material.cases[0])
    return [*(_bytes_by_round(runs) if len(runs) <= FEW else _bytes_in_all(runs)), *_seconds(runs)]


def _bytes_in_all(runs: Mapping[str, ReadRun]) -> list[Chart]:
    return [
        Chart(
            name="bytes",
            title="Bytes sent",
            x_label="method",
            y_label="MiB, all clients and rounds",
            caption="Up: from clients to the server. Down: from the server to clients.",
            series=[
                Series(
                    name=name,
                    x=list(runs),
                    y=[_total(run, key) / 2**20 for run in runs.values()],
                    kind="bars",
                )
                for name, key in (("up", "bytes_up"), ("down", "bytes_down"))
            ],
            part="cost",
        )
    ]


def _total(run: ReadRun, key: str) -> int:
    return sum(line.get(key, 0) for line in run.history)


def _bytes_by_round(runs: Mapping[str, ReadRun]) -> list[Chart]:
    series = []
    for label, run in runs.items():
        for name, key in (("up", "bytes_up"), ("down", "bytes_down")):
            sums, total = [], 0
            for line in run.history:
                total += line.get(key, 0)
                sums.append(total / 2**20)
            series.append(
                Series(
                    name=f"{label}, {name}",
                    x=[line["round"] + 1 for line in run.history],
                    y=list(sums),
                    kind="line" if name == "up" else "dashes",
                )
            )
    if not any(one.x for one in series):
        return []
    return [
        Chart(
            name="bytes",
            title="Bytes sent so far",
            x_label="round",
            y_label="MiB, all clients",
            caption="Solid: from clients to the server. Dashed: from the server to clients.",
            series=series,
            part="cost",
        )
    ]


def _seconds(runs: Mapping[str, ReadRun]) -> list[Chart]:
    charts = []
    stages = [
        name
        for name in ("open", "clients", "close", "evaluate")
        if any(name in t for r in runs.values() for t in r.timings)
    ]
    if stages:
        charts.append(
            Chart(
                name="seconds",
                title="Seconds per round and stage",
                x_label="method",
                y_label="seconds",
                caption="open: bills and draws; clients: local work; close: what the server does; evaluate: testing. "
                "Mean over rounds, of this machine.",
                series=[
                    Series(
                        name=stage,
                        x=list(runs),
                        y=[_mean_of(run.timings, stage) for run in runs.values()],
                        kind="bars",
                    )
                    for stage in stages
                ],
                stacked=True,
                part="cost",
            )
        )
    return charts


def _mean_of(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    values = [line[name] for line in lines if name in line]
    return statistics.mean(values) if values else 0.0
