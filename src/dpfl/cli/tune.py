"""``dpfl tune``: the same search for every method, never on test records.

All methods get the same candidates and the same number of runs. Tuning on private records costs
privacy that no epsilon here covers: ``--tune-on`` searches on a public data set instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpfl.cli import compare as r
from dpfl.cli import options as o
from dpfl.cli.console import note, out, print_table
from dpfl.cli.values import data_values, lists_of

if TYPE_CHECKING:
    from dpfl.experiments.results import CellResult, StudyResult


@o.takes_experiment(o.MANY, o.STORE)
def tune(
    asked: o.Asked,
    over: list[str] | None = o.OVER,
    search: str = o.opt("grid, or halving: half of them stop early, twice.", "grid"),
    tune_on: str | None = o.opt("A public or proxy data set (or folder) to tune on."),
    seeds: int = o.opt("Seeds per candidate.", 1, min=1),
) -> None:
    """Choose every method's settings by the same search, on records that are neither trained nor
    tested on.

    By default lr, clip and what a method declares as its own are searched. The folder holds the
    results and one experiment file per method, ready to run. What is chosen depends on the clients'
    records, which no privacy cost covers, unless --tune-on names public or proxy data.

    For instance: dpfl tune experiment.toml --methods weiavg,pfa --tune-on breast_cancer
    """
    from dpfl.core.files import write_safely
    from dpfl.experiments import compare as library
    from dpfl.experiments.study import Sweep, set_fields

    lists, values = lists_of(over or []), asked.values()
    candidates, _ = asked.candidates()
    own = {} if lists else library.own_searches(values, candidates, asked.data)
    grid = lists or library.GRID
    named = {
        name: {
            key.removeprefix("method."): choices[0]
            for key, choices in {**grid, **own.get(name, {})}.items()
        }
        for name in candidates
    }
    start = set_fields(values, {field: choices[0] for field, choices in grid.items()})
    names = asked.method_names(start, named)
    on = data_values(tune_on, values.get("data", {}).get("label")) if tune_on else None
    with r.open_store(asked, "tune") as store:
        result = library.tune(
            values, names, over=lists or None, search=search, on=on, seeds=seeds, store=store
        )
    folder = r.finish(result, asked, "tune", show)
    study, seed = Sweep.from_dict(dict(result.study)), values.get("run", {}).get("seed", 0)
    files = [folder / f"{cell.label}.toml" for cell in result.cells]
    for file, cell in zip(files, result.cells, strict=True):
        experiment = study.experiment(cell.case, cell.label, cell.chosen, seed)
        write_safely(file, experiment.to_toml().encode())
    if not asked.json:
        note(f"Ready to run: {', '.join(map(str, files))}")
        note(f"Compare with these settings: dpfl compare ... --tuned {folder}")


def show(result: StudyResult) -> None:
    """Print what won, and over how much."""
    headings = ("method", "chosen", "validation %", "worst %", "tried")
    print_table(headings, map(_row, result.cells), left=2, title=result.title)
    if any(trial.rounds is not None for cell in result.cells for trial in cell.tried):
        dropped = "candidates that were dropped were judged after a quarter or half of their rounds"
        out.print(f"halving: {dropped}")
    out.print(result.tuning)


def _row(cell: CellResult) -> list[str]:
    """What was chosen for a method, as cells of a table."""
    chosen = [f"{name.removeprefix('method.')} = {value}" for name, value in cell.chosen.items()]
    tried = [(one.values, f"{100 * one.validation_accuracy:.1f}") for one in cell.tried]
    best = next((accuracy for values, accuracy in tried if values == cell.chosen), "-")
    worst = min((accuracy for _, accuracy in tried), key=float, default="-")
    return [cell.label, ", ".join(chosen) or "-", best, worst, str(len(tried))]
