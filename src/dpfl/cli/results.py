"""What compare, sweep, tune and study share: a store with a progress bar, tables of results, and
the files they leave.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfl.cli import console as c
from dpfl.cli.options import Asked
from dpfl.core.errors import Interrupted

if TYPE_CHECKING:
    from dpfl.experiments.ranking import Standing
    from dpfl.experiments.results import StudyResult
    from dpfl.experiments.tuning import RunStore
    from dpfl.runs.result import Spread

COMPOSE = "Runs are accounted separately; releases on the same data compose."
LEGEND = """\
accuracy: mean ± standard deviation on all clients' test records; gap: points below the best of \
those that promise the same; p: paired t-test against it, Holm's adjustment; left: clients whose \
budget ran out early"""


@contextmanager
def open_store(asked: Asked, title: str) -> Iterator[RunStore]:
    """Yield the store that the options ask for, behind a progress bar.

    Ctrl-C becomes a sentence that says how to go on.
    """
    from dpfl.experiments.tuning import RunStore

    with c.progress_bar(asked.quiet) as bar:
        task = bar.add_task(title, total=None, note="")

        def progress(stage: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, note=stage)

        try:
            yield RunStore(
                kept=asked.kept, data_folder=asked.data, workers=asked.workers, progress=progress
            )
        except KeyboardInterrupt:
            remedy = "repeat the command: it goes on where it was"
            raise Interrupted(str(asked.kept), "stopped by you", remedy) from None


def finish(
    result: StudyResult, asked: Asked, stem: str, show: Callable[[StudyResult], None]
) -> Path:
    """Write the results, and a report where there are runs; print them; return the folder.

    ``stem`` names a new folder in ``runs/``, unless the options name one; ``show`` prints the
    result for people.
    """
    from dpfl.report.page import write_report
    from dpfl.report.reading import of_results
    from dpfl.runs.folder import free_name

    folder = asked.folder or free_name(Path("runs"), stem)
    folder.mkdir(parents=True, exist_ok=True)
    replace(result, kept=str(asked.kept.absolute())).write(folder / "results.json")
    ran = any(cell.runs for cell in result.cells)
    if ran:
        write_report(of_results(result, asked.kept), folder / "report.html")
    told = {"folder": str(folder), **result.to_dict()}
    c.answer(asked.json, lambda: told, lambda: show(result))
    c.note(f"Results: {folder}")
    if ran:
        c.note(f"Report: {folder / 'report.html'}")
    return folder


def show_standings(lines: Sequence[Standing]) -> None:
    """Print outcome and privacy, one pair of tables per unit; methods of different units are never
    ranked together.
    """
    from dpfl.experiments.ranking import grouped, remarks

    for unit, mine in grouped(lines).items():
        title = f"Protecting a {unit}: outcome over {len(mine[0].runs)} seed(s)"
        outcome = c.table("method", "accuracy %", "gap", "p", "left", "up", "down", title=title)
        headings = ("spent: min", "median", "max", "budget: min", "median", "max")
        privacy = c.table("method", *headings, title="Epsilon over clients (averaged over seeds)")
        for one in mine:
            outcome.add_row(one.label, *_outcome(one))
            spent = [run.epsilon.spent for run in one.runs if run.epsilon]
            budgets = [run.epsilon.budget for run in one.runs if run.epsilon]
            privacy.add_row(one.label, *_averaged(spent), *_averaged(budgets))
        c.out.print(outcome)
        c.out.print()
        c.out.print(privacy)
        protecting = [one for one in mine if one.runs[0].protects and one.runs[0].epsilon]
        for meaning in sorted(set(map(_meaning, protecting))):
            c.out.print(meaning)
        c.out.print(LEGEND)
        for remark in remarks(mine):
            c.out.print(remark)
        c.out.print(COMPOSE)
        c.out.print()
    _show_flags(lines)


def _outcome(one: Standing) -> list[str]:
    """The outcome of one method, as cells of a table."""

    def mean(name: str) -> float:
        return statistics.mean(float(getattr(run, name)) for run in one.runs)

    return [
        c.mean_and_spread(one.accuracies),
        _gap(one),
        "-" if one.p_value is None else f"{one.p_value:.2g}",
        f"{mean('clients_left'):g}/{one.runs[0].clients}",
        c.bytes_text(mean("bytes_up")),
        c.bytes_text(mean("bytes_down")),
    ]


def _gap(one: Standing) -> str:
    """Its gap to the best, or why it has none."""
    if one.reference:
        return "reference"
    if one.best or one.alone:
        return "best" if one.best else "alone"
    return "-" if one.gap is None else f"{100 * one.gap:.1f}"


def _show_flags(lines: Sequence[Standing]) -> None:
    """Print the flags that void or limit privacy, each with the methods that raise it."""
    raised: dict[str, list[str]] = {}
    for one in lines:
        for flag in one.runs[0].flags:
            if flag.flag.voids_privacy:
                raised.setdefault(str(flag), []).append(one.label)
    c.warn(f"{flag} [{', '.join(dict.fromkeys(who))}]" for flag, who in sorted(raised.items()))


def _averaged(spreads: Sequence[Spread | None]) -> list[str]:
    """Means over seeds of smallest, median and largest."""
    from dpfl.runs.result import Spread

    known = [vars(spread) for spread in spreads if spread]
    if not known:
        return c.format_spread(None)
    return c.format_spread(
        Spread(**{name: statistics.mean(one[name] for one in known) for name in known[0]})
    )


def _meaning(one: Standing) -> str:
    """What the epsilons of a method are about."""
    epsilon = one.runs[0].epsilon
    by = f", by {', '.join(epsilon.accountants)}" if epsilon and epsilon.accountants else ""
    return f"epsilon: {one.promise}{by}; rounded up"


def value_text(value: Any) -> str:
    """Show a value of a swept field; a table as NAME x FACTOR."""
    if isinstance(value, dict):
        return ", ".join(f"{name} x {factor:g}" for name, factor in value.items()) or "-"
    return f"{value:g}" if isinstance(value, float) else str(value)
