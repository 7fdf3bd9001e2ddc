"""The page of a run or a comparison, and the page of a run that is still running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dpfl.report import tables, words
from dpfl.report.charts import Chart
from dpfl.report.diagnostics import diagnostics
from dpfl.report.meaning import meaning_in_run
from dpfl.report.outcome import accuracy_by_round, accuracy_charts, budget_chart, cost_charts
from dpfl.report.public import public_page
from dpfl.report.reading import Case, ReportInput, ReportRun, of_folders
from dpfl.report.rendering import Page, write_page
from dpfl.report.tables import Notice, Table


def write_report(
    source: ReportInput | Path | str | Sequence[Path | str],
    path: Path | str,
    *,
    public: bool = False,
) -> Path:
    """Write a report as one HTML file that needs no network, and return its path.

    ``source`` is the folder of a run or of a comparison, several folders of runs on the same
    federation, or what :func:`dpfl.report.of_folders` read of them. ``public`` writes the page for
    everyone instead of the operator's: without names, participation and measured accuracy.

    Example::

        dpfl.report.write_report("runs/weiavg-digits-1", "report.html")
    """
    if isinstance(source, Path | str):
        source = [source]
    shown = source if isinstance(source, ReportInput) else of_folders([Path(one) for one in source])
    return write_page(public_page(shown) if public else full_page(shown), Path(path))


def all_charts(shown: ReportInput) -> list[Chart]:
    """Every figure of the full page, for files."""
    return list(full_page(shown).charts)


def full_page(shown: ReportInput) -> Page:
    """The operator's page: everything that is known of the runs."""
    case, run = shown.cases[0], shown.single
    budgets = {label: budget_chart(label, one) for label, one in case.first.items()}
    outcome, inside, cost = accuracy_charts(shown), _inside(case.first), cost_charts(case.first)
    meaning = None
    if run is not None and run.protects:
        meaning = meaning_in_run(run.result.statements, run.folder / "ledger.sqlite")
    charts_of_meaning = meaning.charts("run") if meaning else []
    values = {
        "flags": _notices(shown),
        "sentences": words.result(run.result) if run else _lead(shown),
        "tiles": tables.run_tiles(run) if run else [],
        "tables": _result_tables(shown),
        "first_case": ", ".join(f"{name} = {value}" for name, value in case.values.items()),
        "sites": [
            (label, budgets[label], tables.site_table(label, one))
            for label, one in case.first.items()
            if one.protects and one.result.statements
        ],
        "meanings": [(meaning, tables.group_table(meaning, "run"), charts_of_meaning)]
        if meaning
        else [],
        "outcome": outcome,
        "diagnostics": inside,
        "cost": cost,
        "promises": words.promises({label: one.result for label, one in case.first.items()}),
        "experiments": {label: one.toml for label, one in case.first.items()},
    }
    drawn = [chart for chart in budgets.values() if chart]
    charts = [*drawn, *charts_of_meaning, *outcome, *_flat(inside), *cost]
    return Page(title=shown.title, template="run", values=values, charts=charts)


def running_page(run: ReportRun) -> Page:
    """The page of a run that has not ended."""
    only = {run.method: run}
    outcome = accuracy_by_round(Case(methods={run.method: [run]}))
    inside, cost = _inside(only), cost_charts(only)
    values = {
        "method": run.method,
        "flags": [Notice.of(raised) for raised in run.flags],
        "done": len(run.history),
        "rounds": run.rounds,
        "tiles": tables.running_tiles(run),
        "outcome": outcome,
        "diagnostics": inside,
        "cost": cost,
        "experiments": {run.method: run.toml},
    }
    charts = [*outcome, *_flat(inside), *cost]
    title = f"{run.method}: running"
    return Page(title=title, template="running", values=values, charts=charts, finished=False)


def _inside(runs: Mapping[str, ReportRun]) -> dict[str, list[Chart]]:
    """The diagnostics of each method that has any."""
    found = {label: diagnostics(label, run) for label, run in runs.items()}
    return {label: charts for label, charts in found.items() if charts}


def _flat(inside: Mapping[str, list[Chart]]) -> list[Chart]:
    return [chart for charts in inside.values() for chart in charts]


def _notices(shown: ReportInput) -> list[Notice]:
    """Every flag once, the grave ones first, with its methods where not all raise it."""
    labels = {label for case in shown.cases for label in case.methods}
    owners: dict[Notice, set[str]] = {}
    for case in shown.cases:
        for label, run in case.first.items():
            for raised in run.flags:
                owners.setdefault(Notice.of(raised), set()).add(label)
    return [
        notice
        if own == labels
        else Notice(f"{notice.text} [{', '.join(sorted(own))}]", notice.grave)
        for notice, own in sorted(owners.items(), key=lambda pair: not pair[0].grave)
    ]


def _lead(shown: ReportInput) -> list[str]:
    """What was compared."""
    first, seeds = shown.runs[0], len({run.seed for run in shown.runs})
    cases = f"{len(shown.cases)} cases" if len(shown.cases) > 1 else "one federation"
    lead = (
        f"{words.count(len(shown.cases[0].methods), 'method')} on {cases} of "
        f"{words.count(first.result.clients, 'client')}, {words.count(seeds, 'seed')}, "
        f"{words.count(first.rounds, 'round')} each. "
        "Methods are ranked only against those that promise the same."
    )
    return [lead, shown.tuning] if shown.tuning else [lead]


def _result_tables(shown: ReportInput) -> list[Table]:
    if shown.single is not None:
        return []
    if len(shown.cases) > 1:
        return tables.sweep_tables(shown)
    return [tables.ranking_table(ranking) for ranking in shown.cases[0].rankings()]
