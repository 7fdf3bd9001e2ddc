"""``dpfl tune``: the same search for every method, never on test records.

All methods get the same candidates and the same number of runs. Tuning on private records costs
privacy that no epsilon here covers: ``--tune-on`` searches on a public data set instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from dpfl.cli import options as o
from dpfl.cli import results as r
from dpfl.cli.console import note, out, table
from dpfl.cli.values import data_values, lists_of

if TYPE_CHECKING:
    from dpfl.experiments.results import CellResult, StudyResult


@o.takes_experiment(o.MANY, o.STORE)
def tune(
    asked: o.Asked,
    over: o.Over = None,
    search: Annotated[str, o.opt("grid, or halving: half of them stop early, twice.")] = "grid",
    tune_on: Annotated[
        str | None, o.opt("A public or proxy data set (or folder) to tune on.")
    ] = None,
    seeds: Annotated[int, o.opt("Seeds per candidate.", min=1)] = 1,
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
    first = {name: {**grid, **own.get(name, {})} for name in candidates}
    named = {
        name: {key.removeprefix("method."): choices[0] for key, choices in searched.items()}
        for name, searched in first.items()
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
    for cell in result.cells:
        experiment = study.experiment(cell.case, cell.label, cell.chosen, seed)
        write_safely(folder / f"{cell.label}.toml", experiment.to_toml().encode())
    if not asked.json:
        files = ", ".join(str(folder / f"{cell.label}.toml") for cell in result.cells)
        note(f"Ready to run: {files}")
        note(f"Compare with these settings: dpfl compare ... --tuned {folder}")


def show(result: StudyResult) -> None:
    """Print what won, and over how much."""
    headings = ("method", "chosen", "validation %", "worst %", "tried")
    lines = table(*headings, left=2, title=result.title)
    for cell in result.cells:
        lines.add_row(*_row(cell))
    out.print(lines)
    if any(trial.rounds is not None for cell in result.cells for trial in cell.tried):
        out.print(
            "halving: candidates that were dropped were judged after a quarter or half of their "
            "rounds"
        )
    out.print(result.tuning)


def _row(cell: CellResult) -> list[str]:
    """What was chosen for a method, as cells of a table."""
    chosen = [f"{name.removeprefix('method.')} = {value}" for name, value in cell.chosen.items()]
    tried = [f"{100 * one.validation_accuracy:.1f}" for one in cell.tried]
    best = [one for one in cell.tried if one.values == cell.chosen]
    return [
        cell.label,
        ", ".join(chosen) or "-",
        f"{100 * best[0].validation_accuracy:.1f}" if best else "-",
        min(tried, key=float, default="-"),
        str(len(tried)),
    ]
