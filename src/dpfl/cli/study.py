"""``dpfl study``: a table of a paper, from one file: tuned by one rule, several seeds, recorded.

Every method is tuned by the same rule on records that are set aside, then run with other seeds and
tested once. ``--record`` writes the results beside the file, with the versions and the machine.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from dpfl.cli import compare as r
from dpfl.cli import options as o
from dpfl.cli.console import answer, mean_and_spread, note, print_lines, print_table

if TYPE_CHECKING:
    from dpfl.experiments.results import CellResult, StudyResult

NOISE = "noise_over_least"


def study(
    file: Path = o.arg("Study file (TOML)."),
    data: Path | None = o.DATA,
    workers: int = o.WORKERS,
    folder: Path | None = o.opt(
        "Folder of the runs; what is there is not run again.", None, "--out"
    ),
    record: bool = o.flag("--record", "Write the results beside the study file."),
    show_recorded: bool = o.flag("--show", "Run nothing; show the recorded results."),
    json: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Run a study: tune every method by the same rule, then the final seeds; or show what was
    recorded.

    A study file holds one base experiment, what varies, the methods, how they are tuned and the
    seeds. Runs that are in the folder already are not repeated.

    For instance: dpfl study studies/pfa/table2.toml --record
    """
    from dpfl.experiments.compare import run_study
    from dpfl.experiments.results import StudyResult
    from dpfl.experiments.study import Sweep

    asked_for, recorded = Sweep.from_file(file), file.with_suffix(".json")
    if show_recorded:
        result = StudyResult.read(recorded, "run the study with --record first")
    else:
        kept = folder or Path("runs") / f"study-{file.stem}"
        asked = o.Asked(data=data, workers=workers, quiet=quiet, kept=kept)
        with r.open_store(asked, asked_for.title) as store:
            result = run_study(asked_for, store)
        if record:
            result.write(recorded)
            note(f"Recorded: {recorded}")
    answer(json, result.to_dict(), show, result)


def show(result: StudyResult) -> None:
    """Print a line per method and case: mean and spread of the final accuracy, the tuned values,
    the noise left.
    """
    runs = [run for cell in result.cells for run in cell.runs]
    noisy = any(NOISE in run.metrics for run in runs)
    fields = r.field_names(result.cells[0].case)
    headings = [*fields, "method", "accuracy %", "tuned", *(["noise ratio"] if noisy else [])]
    rows = [_row(cell)[: len(headings)] for cell in result.cells]
    print_table(headings, rows, title=result.title, left=len(fields) + 1)
    print_lines(*sorted({f"epsilon: {run.promise}" for run in runs if run.protects}))
    seeds = f"mean ± standard deviation, {len(result.cells[0].runs)} seed(s)"
    print_lines(f"accuracy: final model, test records, {seeds}")
    if noisy:
        print_lines("noise ratio: noise variance in the aggregate over the optimal variance, mean")


def _row(cell: CellResult) -> list[str]:
    """One method in one case, as cells of a table; the last is the noise ratio."""
    ratios = [run.metrics[NOISE]["mean"] for run in cell.runs if NOISE in run.metrics]
    return [
        *map(r.value_text, cell.case.values()),
        cell.label,
        mean_and_spread([run.accuracy for run in cell.runs]),
        ", ".join(map(r.value_text, cell.chosen.values())) or "-",
        f"{statistics.mean(ratios):.3g}" if ratios else "-",
    ]
