"""The page of a run or a comparison, and the page of a run that is still running."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpfl.privacy.flags import Flag, RaisedFlag
from dpfl.report import tables, words
from dpfl.report.charts import Chart
from dpfl.report.diagnostics import diagnostics
from dpfl.report.meaning import meaning_in_run
from dpfl.report.outcome import accuracy_by_round, accuracy_charts, budget_chart, cost_charts
from dpfl.report.public import public_page
from dpfl.report.reading import Case, ReportInput, ReportRun, of_folders
from dpfl.report.rendering import Page, write_page

RUN_AGAIN = "dpfl run experiment.toml"


def full_page(shown: ReportInput) -> Page:
    """The operator's page: everything that is known of the runs."""
    case, run = shown.cases[0], shown.single
    protecting = {label: one for label, one in case.first.items() if one.protects}
    sites = [
        (label, [chart] if (chart := budget_chart(label, one)) else [], tables.site_table(label, one))
        for label, one in protecting.items()
        if one.result.statements
    ]
    meaning = None
    if run is not None and run.protects:
        meaning = meaning_in_run(run.result.statements, run.folder / "ledger.sqlite")
    values = {
        **_shared(case.first),
        "flags": flags_of(shown),
        "sentences": words.result(run.result) if run else _lead(shown),
        "tiles": tables.run_tiles(run) if run else [],
        "tables": _result_tables(shown),
        "notes": [] if run else [words.RANKING_NOTE, words.COMPOSE],
        "first_case": ", ".join(f"{name} = {value}" for name, value in case.values.items()),
        "sites": sites,
        "meaning": meaning,
        "groups": tables.group_table(meaning, "run") if meaning else None,
        "meaning_charts": meaning.charts("run") if meaning else [],
        "outcome": accuracy_charts(shown),
        "promises": promises_of(case.first),
    }
    return _page(shown.title, "run", values)


def running_page(run: ReportRun) -> Page:
    """The page of a run that has not ended."""
    values = {
        **_shared({run.method: run}),
        "method": run.method,
        "flags": _graded([(raised, "") for raised in run.flags]),
        "done": len(run.history),
        "rounds": run.rounds,
        "tiles": tables.running_tiles(run),
        "outcome": accuracy_by_round(Case(methods={run.method: [run]})),
    }
    return _page(f"{run.method}: running", "running", values, finished=False)


def _shared(runs: dict[str, ReportRun]) -> dict[str, object]:
    """Values that both pages show: diagnostics, costs and the experiments."""
    found = {label: diagnostics(label, run) for label, run in runs.items()}
    return {
        "diagnostics": {label: charts for label, charts in found.items() if charts},
        "cost": cost_charts(runs),
        "experiments": {label: run.toml for label, run in runs.items()},
        "command": RUN_AGAIN,
    }
