"""``dpfl compare``: several methods on the same federations, seeds and first models.

Seeds are paired: all methods see the same federation, the same first model and the same draws.
Runs are kept by content, so that repeating the command goes on where it was, and adding a method
runs only that method. Tables go to stdout, progress and flags to stderr.

Sweep, tune and study share what is here: the store with a progress bar, and the files they leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dpfl.report as pages
from dpfl.cli import console as c, options as o
from dpfl.cli.values import seeds_of
from dpfl.core.checks import check

if TYPE_CHECKING:
    from dpfl.experiments.results import StudyResult
    from dpfl.experiments.tuning import RunStore


@o.takes_experiment(o.MANY | o.STORE)
def compare(
    asked: o.Asked,
    seeds: str = o.SEEDS,
    tuned: Path | None = o.opt("Results of dpfl tune: every method with its best settings."),
    baselines: bool = o.flag("--baselines", "Add each client alone, and a trusted curator."),
) -> None:
    """Compare methods over paired seeds: one table per privacy unit, spread beside every mean.

    Every method meets the same federations, seeds and first models. Only methods that promise the
    same are ranked. A family, or all methods, comes with its baselines; --baselines adds them to
    methods that are named. Runs are kept by content: repeating the command, or adding a method,
    runs only what is missing.

    For instance: dpfl compare --dataset digits --clients 20 --budgets mixgauss1 --delta 1e-3
    --clip 1 --methods fedavg_dp,weiavg,robust_hdp
    """
    from dpfl.experiments import compare as library
    from dpfl.experiments.results import StudyResult
    from dpfl.methods import find, with_baselines

    values = asked.values()
    settings = {}
    if tuned is not None:
        searched = StudyResult.read(tuned, remedy := "name the folder of a dpfl tune")
        check(bool(searched.tuning), "--tuned", f"{tuned} holds no search", remedy)
        settings = searched.settings()
    names = asked.method_names(values, settings)
    numbers = seeds_of(seeds)
    names = with_baselines(names) if baselines else names
    for name in names if tuned else ():
        if name in settings:
            continue
        remedy = "tune it as well, or leave it out"
        check(find(name).baseline, "--tuned", f"{tuned} does not hold '{name}'", remedy)
        c.note(f"not tuned: the baseline '{name}' runs as the experiment has it")
    with open_store(asked, "compare") as store:
        result = library.compare(values, names, seeds=numbers, settings=settings, store=store)
    finish(result, asked, "compare", show_tables)


@contextmanager
def open_store(asked: o.Asked, title: str) -> Iterator[RunStore]:
    """Yield the store that the options ask for, behind a progress bar.

    Ctrl-C becomes a sentence that says how to go on.
    """
    from dpfl.experiments.tuning import RunStore

    stop = c.interruptible(asked.kept, lambda: "repeat the command: it goes on where it was")
    with stop, c.progress_bar(title, "", None, asked.quiet) as update:
        yield RunStore(
            kept=asked.kept,
            results=asked.folder,
            data_folder=asked.data,
            workers=asked.workers,
            progress=lambda stage, done, total: update(completed=done, total=total, note=stage),
        )


def finish(
    result: StudyResult, asked: o.Asked, stem: str, show: Callable[[StudyResult], None]
) -> Path:
    """Write the results, and a report where there are runs; print them; return the folder.

    ``stem`` names a new folder in ``runs/``, unless the options name one; ``show`` prints the
    result for people.
    """
    from dpfl.experiments.study import Sweep
    from dpfl.runs.folder import new_folder

    folder = asked.folder or new_folder(Path("runs"), stem)
    Sweep.from_dict(dict(result.study)).claim(folder)
    replace(result, kept=str(asked.kept.absolute())).write(folder / "results.json")
    written = {"Results": folder}
    if any(cell.runs for cell in result.cells):
        shown = pages.of_results(result, asked.kept)
        written["Report"] = pages.write_report(shown, folder / "report.html")
    c.answer(asked.json, {"folder": str(folder), **result.to_dict()}, show, result)
    c.note_files(written)
    return folder


def show_tables(result: StudyResult) -> None:
    """Print the tables of a comparison or a search, and the flags of its runs."""
    from dpfl.experiments.tables import raised_flags, study_tables

    tables, notes = study_tables(result)
    for table in tables:
        c.print_table(table.headings, table.rows, left=table.words, title=table.title)
        c.out.print()
    c.print_lines(*notes, "")
    c.warn(raised_flags(result))


def field_names(case: Iterable[str]) -> list[str]:
    """The varied fields of a case, without their sections."""
    return [field.rpartition(".")[2] for field in case]


def value_text(value: Any) -> str:
    """Show a value of a swept field; a table as NAME x FACTOR."""
    if isinstance(value, dict):
        return ", ".join(f"{name} x {factor:g}" for name, factor in value.items()) or "-"
    return f"{value:g}" if isinstance(value, float) else str(value)
