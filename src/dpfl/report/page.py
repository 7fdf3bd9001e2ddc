"""The page of a run or a comparison, and the page of a run that is still running.

Python chooses what a page shows: objects of the library for words and tables, and charts. How it
looks is a matter of the templates ``run.html.j2`` and ``running.html.j2``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dpfl.privacy.flags import RaisedFlag
from dpfl.report import words
from dpfl.report.charts import Chart
from dpfl.report.diagnostics import diagnostics
from dpfl.report.inputs import Case, ReportInput, ReportRun
from dpfl.report.meaning import meaning_in_run
from dpfl.report.outcome import budget_chart, cost_charts, score_by_round, score_charts
from dpfl.report.public import public_page
from dpfl.report.reading import of_folders
from dpfl.report.rendering import Page, write_page

Charts = Sequence[Chart]


def write_report(
    source: ReportInput | Path | str | Sequence[Path | str],
    path: Path | str,
    *,
    public: bool = False,
) -> Path:
    """Write a report as one HTML file that needs no network, and return its path.

    ``source`` is the folder of a run or of a comparison, several folders of runs on the same
    federation, or what :func:`dpfl.report.of_folders` read of them. ``public`` writes the page for
    everyone instead of the operator's: without names, participation and measured scores.

    Example::

        dpfl.report.write_report("runs/weiavg-digits-1", "report.html")
    """
    if isinstance(source, Path | str):
        source = [source]
    shown = source if isinstance(source, ReportInput) else of_folders([Path(one) for one in source])
    return write_page(public_page(shown) if public else full_page(shown), Path(path))


def all_charts(shown: ReportInput) -> list[Chart]:
    """Every figure of the full page of what is ``shown``, for files.

    Their names are unique, and are the names of files that :func:`dpfl.report.write_figures` makes.
    """
    return list(full_page(shown).charts)


def full_page(shown: ReportInput) -> Page:
    """The operator's page: everything that is known of the runs.

    It holds names, participation and measured scores, and is not meant for others; see
    :func:`dpfl.report.public.public_page`. Methods are looked into by the run of their first seed.
    """
    runs = shown.cases[0].first
    run = shown.runs[0] if len(shown.runs) == 1 else None
    budgets = {label: budget_chart(label, one) for label, one in runs.items()}
    meaning = None
    if run is not None and run.score.protects:
        meaning = meaning_in_run(run.result.statements, run.folder / "ledger.sqlite")
    sites = [
        (label, budgets[label], one)
        for label, one in runs.items()
        if one.score.protects and one.result.statements
    ]
    return _page(
        shown.title,
        runs,
        score_charts(shown),
        [*filter(None, budgets.values()), *(meaning.charts if meaning else [])],
        flags=_flags(shown),
        shown=shown,
        run=run,
        rankings=[] if run else [case.rankings() for case in shown.cases],
        sites=sites,
        meanings=[meaning] if meaning else [],
        promises=words.promises({label: one.result for label, one in runs.items()}),
    )


def running_page(run: ReportRun) -> Page:
    """The page of a run that has not ended: how far it has come, and what is known so far."""
    outcome = score_by_round(Case(methods={run.method: [run]}))
    flags = [(raised, "") for raised in run.flags]
    return _page(f"{run.method}: running", {run.method: run}, outcome, [], flags=flags, run=run)


def _page(
    title: str, runs: Mapping[str, ReportRun], outcome: Charts, before: Charts, **values: object
) -> Page:
    """A page with what both have: diagnostics and cost of each method, and its experiment.

    ``outcome`` are the figures of scores, ``before`` those that come before them.
    """
    found = {label: diagnostics(label, run) for label, run in runs.items()}
    inside = {label: own for label, own in found.items() if own}
    cost = cost_charts(runs)
    values |= {"outcome": outcome, "diagnostics": inside, "cost": cost}
    values["experiments"] = {label: run.toml for label, run in runs.items()}
    values["from_python"] = any(run.experiment.python for run in runs.values())
    charts = [*before, *outcome, *(chart for own in inside.values() for chart in own), *cost]
    finished = all(run.finished for run in runs.values())
    template = "run" if finished else "running"
    return Page(title=title, template=template, values=values, charts=charts, finished=finished)


def _flags(shown: ReportInput) -> list[tuple[RaisedFlag, str]]:
    """Every flag once, the grave ones first, with its methods where not all raise it."""
    labels = {label for case in shown.cases for label in case.methods}
    owners: dict[RaisedFlag, set[str]] = {}
    for case in shown.cases:
        for label, run in case.first.items():
            for raised in run.flags:
                owners.setdefault(raised, set()).add(label)
    return [
        (raised, "" if own == labels else ", ".join(sorted(own)))
        for raised, own in sorted(owners.items(), key=lambda pair: not words.grave(pair[0]))
    ]
