"""Results of studies for notebooks: small HTML tables, and pandas frames."""

import statistics
from html import escape
from typing import Any

from dpfl.core.html import html_table
from dpfl.core.types import Plain
from dpfl.experiments.ranking import Standing, grouped, remarks, standings
from dpfl.experiments.results import CellResult, StudyResult
from dpfl.runs.display import frame_of


def html_of_study(result: StudyResult) -> str:
    """Return a table for each case and unit that is protected, or of what a search has chosen.

    ``result`` is that of a comparison, a sweep or a search.
    """
    parts = [f"<h4>{escape(result.title)}</h4>"]
    if not any(cell.runs for cell in result.cells):
        found = ("method", "chosen", "validation", "tried")
        parts.append(html_table(found, map(_search_row, result.cells)))
    for case in result.cases if len(parts) == 1 else ():
        for unit, lines in grouped(standings(result.of_case(case))).items():
            about = f"protecting a {unit}, {len(lines[0].runs)} seed(s)"
            parts.append(f"<p>{escape(', '.join(filter(None, [_settings(case), about])))}</p>")
            headings = ("method", lines[0].runs[0].words.title, "gap", "p", "epsilon spent")
            parts.append(html_table(headings, map(_row, lines)))
            parts += [f"<p>{escape(said)}</p>" for said in remarks(lines)]
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


def _row(one: Standing) -> list[str]:
    """One method as cells: mean and spread, gap to the best, p value, epsilon."""
    scale = one.runs[0].words.scale
    values = [scale * run.value for run in one.runs]
    spread = f" ± {statistics.stdev(values):.3g}" if len(values) > 1 else ""
    kinds = {"reference": one.reference, "best": one.best, "alone": one.alone}
    gap = "-" if one.gap is None else f"{scale * one.gap:.3g}"
    spent = [run.epsilon.words for run in one.runs if run.epsilon]
    return [
        one.label,
        f"{statistics.mean(values):.4g}{spread}",
        next((kind for kind, holds in kinds.items() if holds), gap),
        "-" if one.p_value is None else f"{one.p_value:.2g}",
        spent[0] if spent else "-",
    ]


def _search_row(cell: CellResult) -> list[object]:
    """One method of a search as cells: what was chosen, how well it did, of how many."""
    best = (one for one in cell.tried if one.values == cell.chosen)
    score = next((f"{one.words.words} {one.words.show(one.validation)}" for one in best), "-")
    return [cell.label, _settings(cell.chosen) or "-", score, len(cell.tried)]


def _settings(values: Plain) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())
