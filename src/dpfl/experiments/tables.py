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

HALVING = """\
halving: candidates that were dropped were judged after a quarter or half of their rounds"""
COMPOSE = "Runs are accounted separately; releases on the same data compose."
LEGEND = """\
score: mean ± standard deviation on all clients' test records; gap: distance to the best of those \
that promise the same; p: paired t-test against it, Holm's adjustment; with no p, or one above \
0.05, seeds are too few to tell a method from the best; left: clients whose budget ran out early"""


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table of texts: its title, its headings, and its rows below them.

    The first ``words`` columns hold words, the others numbers.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1


def study_tables(result: StudyResult) -> tuple[list[TextTable], list[str]]:
    """Return what a comparison, a sweep or a search shows, and the notes below it.

    Each case has a pair of tables per unit, outcome and privacy: methods of different units are
    never ranked together. A search has one table.
    """
    if not any(cell.runs for cell in result.cells):
        return _search_tables(result)
    notes: list[str] = []
    tables: list[TextTable] = []
    for case in result.cases:
        lines = standings(result.of_case(case))
        protecting = [line for line in lines if line.runs[0].protects and line.runs[0].epsilon]
        notes += [*sorted(map(_meaning, protecting)), LEGEND, *remarks(lines)]
        for unit, group in grouped(lines).items():
            about = f"Protecting a {unit}: outcome over {len(group[0].runs)} seed(s)"
            outcome = TextTable(
                title=", ".join(filter(None, [_settings(case), about])),
                headings=("method", group[0].words.title, "gap", "p", "left", "up", "down"),
                rows=[_outcome(line) for line in group],
            )
            privacy = TextTable(
                title="Epsilon over clients (averaged over seeds)",
                headings=("method", "spent: min", "median", "max", "budget: min", "median", "max"),
                rows=[_privacy(line) for line in group],
            )
            tables += [outcome, privacy]
    return tables, [*filter(None, dict.fromkeys([*notes, result.tuning])), COMPOSE]


def raised_flags(result: StudyResult) -> list[str]:
    """Return the flags that void or restrict what is promised, each with its methods."""
    labels: dict[str, dict[str, None]] = {}
    for cell in result.cells:
        for raised in cell.runs[0].flags if cell.runs else ():
            if raised.flag.voids_privacy or raised.flag.reference:
                labels.setdefault(str(raised), {})[cell.label] = None
    return [f"{flag} [{', '.join(methods)}]" for flag, methods in sorted(labels.items())]


def html_of_study(result: StudyResult) -> str:
    """Return the tables, the notes and the flags of a ``result`` as HTML."""
    tables, notes = study_tables(result)
    parts = [f"<h4>{escape(result.title)}</h4>"]
    for table in tables:
        parts += [f"<p>{escape(table.title)}</p>", html_table(table.headings, table.rows)]
    parts += [f"<p>{escape(note)}</p>" for note in notes]
    return "".join([*parts, *(f"<p><b>{escape(flag)}</b></p>" for flag in raised_flags(result))])


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


def _search_tables(result: StudyResult) -> tuple[list[TextTable], list[str]]:
    """What won, over how much, and on what the choice rests."""
    trials = [trial for cell in result.cells for trial in cell.tried]
    scores = {trial.words.title for trial in trials}
    table = TextTable(
        title="Settings chosen by the search",
        headings=("method", "chosen", f"validation {', '.join(scores)}", "worst", "tried"),
        rows=[_search_row(cell) for cell in result.cells],
        words=2,
    )
    halved = any(trial.rounds is not None for trial in trials)
    return [table], [*([HALVING] if halved else []), result.tuning]


def _search_row(cell: CellResult) -> list[str]:
    """What was chosen for a method, as cells of a table."""
    tried = sorted(cell.tried, key=lambda one: one.validation)
    shown = [one.words.number(one.validation) for one in tried]
    own = [text for one, text in zip(tried, shown, strict=True) if one.values == cell.chosen]
    less_is_worse = not tried or tried[0].higher_is_better
    best = own[0] if own else "-"
    worst = shown[0 if less_is_worse else -1] if shown else "-"
    return [cell.label, _settings(cell.chosen) or "-", best, worst, str(len(shown))]


def _settings(values: Plain) -> str:
    return ", ".join(f"{key.removeprefix('method.')} = {value}" for key, value in values.items())
