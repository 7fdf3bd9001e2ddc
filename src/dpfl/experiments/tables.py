"""Tables of studies, for a terminal, for ``print`` and for notebooks, and pandas frames."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from dpfl.core.html import html_table
from dpfl.core.types import Plain
from dpfl.experiments.ranking import Standing, grouped, remarks, standings
from dpfl.experiments.results import CellResult, StudyResult
from dpfl.privacy.accountant import shown
from dpfl.runs.display import frame_of, size

COMPOSE = "Runs are accounted separately; releases on the same data compose."
LEGEND = """\
score: mean ± standard deviation on all clients' test records; gap: distance to the best of those \
that promise the same; p: paired t-test against it, Holm's adjustment; with no p, or one above \
0.05, seeds are too few to tell a method from the best; left: clients whose budget ran out early"""


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table of texts: its title, its headings, and its rows below them."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def comparison_tables(result: StudyResult) -> tuple[list[TextTable], list[str]]:
    """Return what a comparison or a sweep shows, and the notes below it.

    Each case has a pair of tables per unit, outcome and privacy: methods of different units are
    never ranked together.
    """
    tables = []
    meanings: dict[str, None] = {}
    remarked: dict[str, None] = {}
    for case in result.cases:
        for unit, lines in grouped(standings(result.of_case(case))).items():
            about = f"Protecting a {unit}: outcome over {len(lines[0].runs)} seed(s)"
            score = lines[0].words.title
            outcome = TextTable(
                title=", ".join([*filter(None, [_settings(case)]), about]),
                headings=("method", score, "gap", "p", "left", "up", "down"),
                rows=[_outcome(line) for line in lines],
            )
            privacy = TextTable(
                title="Epsilon over clients (averaged over seeds)",
                headings=("method", "spent: min", "median", "max", "budget: min", "median", "max"),
                rows=[_privacy(line) for line in lines],
            )
            tables += [outcome, privacy]
            protecting = [line for line in lines if line.runs[0].protects and line.runs[0].epsilon]
            meanings |= dict.fromkeys(sorted(map(_meaning, protecting)))
            remarked |= dict.fromkeys(remarks(lines))
    return tables, [*meanings, LEGEND, *remarked, COMPOSE]


def html_of_study(result: StudyResult) -> str:
    """Return the tables of each case and unit that is protected, or of what a search has chosen.

    ``result`` is that of a comparison, a sweep or a search.
    """
    parts = [f"<h4>{escape(result.title)}</h4>"]
    if not any(cell.runs for cell in result.cells):
        found = ("method", "chosen", "validation", "tried")
        parts.append(html_table(found, map(_search_row, result.cells)))
    else:
        tables, notes = comparison_tables(result)
        for table in tables:
            parts += [f"<p>{escape(table.title)}</p>", html_table(table.headings, table.rows)]
        parts += [f"<p>{escape(note)}</p>" for note in notes]
    runs = [run for cell in result.cells for run in cell.runs]
    flags = {str(flag) for run in runs for flag in run.flags if flag.flag.voids_privacy}
    parts += [f"<p>{escape(result.tuning)}</p>"] if result.tuning else []
    return "".join([*parts, *(f"<p><b>{escape(flag)}</b></p>" for flag in sorted(flags))])


def frame_of_study(result: StudyResult) -> Any:
    """Return a pandas frame of a ``result``: a row per run, or per candidate of a search."""
    rows: list[Plain] = []
    for cell in result.cells:
        for trial in cell.tried if not cell.runs else ():
            score = {f"validation_{trial.metric}": trial.validation}
            chosen = {"chosen": trial.values == cell.chosen}
            rows.append({**cell.case, "method": cell.label, **trial.values, **score, **chosen})
        for run in cell.runs:
            spent = vars(run.epsilon.spent) if run.epsilon else {}
            costs = {f"epsilon_{name}": value for name, value in spent.items()}
            scored = {"method": cell.label, "seed": run.seed, run.metric: run.value}
            more = {name: getattr(run, name) for name in ("loss", "clients_left", "bytes_up")}
            rows.append({**cell.case, **scored, **costs, **more})
    return frame_of(rows)


def _outcome(one: Standing) -> list[str]:
    """The outcome of one method, as cells of a table."""

    def mean(name: str) -> float:
        return statistics.mean(float(getattr(run, name)) for run in one.runs)

    kinds = {"reference": one.reference, "best": one.best, "alone": one.alone}
    gap = "-" if one.gap is None else one.words.number(one.gap)
    return [
        one.label,
        one.words.spread(one.values),
        next((kind for kind, holds in kinds.items() if holds), gap),
        "-" if one.p_value is None else f"{one.p_value:.2g}",
        f"{mean('clients_left'):g}/{one.runs[0].clients}",
        size(mean("bytes_up")),
        size(mean("bytes_down")),
    ]


def _privacy(one: Standing) -> list[str]:
    """What clients spent with one method, beside their budgets: means over seeds of smallest,
    median and largest, as cells of a table.
    """
    cells = [one.label]
    for name in ("spent", "budget"):
        spreads = [getattr(run.epsilon, name, None) for run in one.runs]
        columns = zip(*(vars(spread).values() for spread in spreads if spread), strict=True)
        cells += [shown(statistics.mean(epsilons)) for epsilons in columns] or ["-"] * 3
    return cells


def _meaning(one: Standing) -> str:
    """What the epsilons of a method are about."""
    epsilon = one.runs[0].epsilon
    by = f", by {', '.join(epsilon.accountants)}" if epsilon and epsilon.accountants else ""
    return f"epsilon: {one.promise}{by}; rounded up"


def _search_row(cell: CellResult) -> list[object]:
    """One method of a search as cells: what was chosen, how well it did, of how many."""
    best = (one for one in cell.tried if one.values == cell.chosen)
    score = next((f"{one.words.words} {one.words.show(one.validation)}" for one in best), "-")
    return [cell.label, _settings(cell.chosen) or "-", score, len(cell.tried)]


def _settings(values: Plain) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())
