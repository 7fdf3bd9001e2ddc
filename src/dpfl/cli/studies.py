"""``dpfl sweep``, ``dpfl tune`` and ``dpfl study``: many runs, one question.

``sweep`` shows what a field does to the score, from one end of a list to the other. Any field of
the experiment may vary, budgets included; the report draws the score over it, with bands over
seeds.

``tune`` searches the same way for every method, never on test records. Tuning on private records
costs privacy that no epsilon here covers: ``--tune-on`` searches on a public data set instead.

``study`` makes a table of a paper from one file: every method is tuned by the same rule on records
that are set aside, then run with other seeds and tested once. ``--record`` writes the results
beside the file, with the versions and the machine.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from dpfl.cli import console as c, options as o
from dpfl.cli.compare import field_names, finish, open_store, show_tables, value_text
from dpfl.cli.private_search import tune_privately
from dpfl.cli.values import MOST_SEEDS, Values, data_values, lists_of, seeds_of
from dpfl.core.checks import check

if TYPE_CHECKING:
    from dpfl.experiments.results import CellResult, StudyResult

NOISE = "noise_over_least"
_FOLDER = "Folder of the runs; what is there is not run again."


@o.takes_experiment(o.MANY | o.STORE)
def sweep(asked: o.Asked, over: list[str] | None = o.OVER, seeds: str = o.SEEDS) -> None:
    """Vary fields (budgets.scale, partition.clients, method.k, server.lr, ...): score by value,
    for each method.

    Several --over are crossed. A method that lacks a varied setting runs once.

    For instance: dpfl sweep experiment.toml --methods weiavg,pfa --over budgets.scale=0.5,1,2
    """
    from dpfl.experiments import compare as library
    from dpfl.experiments.study import set_fields

    lists = lists_of(over or [])
    values = asked.values()
    check(bool(lists), "--over", "was not given", "give for instance --over budgets.scale=0.5,1,2")
    first = set_fields(values, {field: choices[0] for field, choices in lists.items()})
    names = asked.method_names(first)
    numbers = seeds_of(seeds)
    with open_store(asked, "sweep") as store:
        result = library.sweep(values, lists, names, seeds=numbers, store=store)
    finish(result, asked, "sweep", show_sweep)


def show_sweep(result: StudyResult) -> None:
    """Print one table per unit; the best of each promise is marked.

    Methods stand side by side where there are few, else below each other.
    """
    from dpfl.experiments.ranking import grouped, standings

    cases = [(case, standings(result.of_case(case))) for case in result.cases]
    fields = field_names(cases[0][0])
    first = cases[0][1]
    for unit, mine in grouped(first).items():
        labels = [one.label for one in mine]
        wide = len(labels) <= c.MOST_COLUMNS
        rows = []
        for case, ranked in cases:
            shown = {one.label: one.words.spread(one.values) + "*" * one.best for one in ranked}
            values = [value_text(value) for value in case.values()]
            if wide:
                rows.append([*values, *(shown[label] for label in labels)])
                continue
            for label in labels:
                rows.append([*values, label, shown[label]])
                values = [""] * len(values)  # they stand in the first of its lines
        score = mine[0].words.title
        headings = labels if wide else ["method", score]
        title = f"Protecting a {unit}: {score}"
        c.print_table([*fields, *headings], rows, title=title, left=len(fields) + (not wide))
        spread = f"mean ± standard deviation over {len(first[0].runs)} seed(s)"
        c.out.print(f"{spread}; * best of those that promise the same\n")


@o.takes_experiment(o.MANY | o.STORE)
def tune(
    asked: o.Asked,
    over: list[str] | None = o.OVER,
    search: str = o.opt("grid, or halving: half of them stop early, twice.", "grid"),
    tune_on: str | None = o.opt("A public or proxy data set (or folder) to tune on."),
    seeds: int = o.opt("Seeds per candidate.", 1, min=1, max=MOST_SEEDS),
    accounted: float | None = o.opt("Search at a stated privacy cost: so many runs on average."),
    score: str = o.opt("With --accounted: accuracy, loss or auc.", "accuracy"),
    score_share: float | None = o.opt("With --accounted: the score's share of every budget."),
    score_bound: float | None = o.opt("With --score loss: the largest loss of a record."),
    most_epsilon: float | None = o.opt("With --accounted: refuse a search that costs more."),
) -> None:
    """Choose every method's settings by the same search, on records that are neither trained nor
    tested on.

    By default lr, clip and what a method declares as its own are searched. The folder holds the
    results and one experiment file per method, ready to run. What is chosen depends on the clients'
    records, which no privacy cost covers, unless --tune-on names public or proxy data.

    With --accounted the search itself has a privacy cost: a random number of runs of one method,
    each scored with noise, of which the best is kept (Papernot and Steinke 2022).

    For instance: dpfl tune experiment.toml --methods weiavg,pfa --tune-on breast_cancer
    """
    from dpfl.core.files import write_safely
    from dpfl.experiments import compare as library
    from dpfl.experiments.study import Sweep

    lists = lists_of(over or [])
    values = asked.values()
    candidates, _ = asked.candidates()
    if accounted is not None:
        check(
            tune_on is None and search == "grid" and seeds == 1,
            "--accounted",
            "--tune-on, --search or --seeds was given as well",
            "leave them out: candidates are drawn at random",
        )
        metric = {"metric": score, "share": score_share, "bound": score_bound}
        tune_privately(asked, values, lists, accounted, metric, most_epsilon)
        return
    own = {} if lists else library.own_searches(values, candidates, asked.data)
    first: dict[str, Values] = {}
    for name in candidates:
        searched = {**(lists or library.GRID), **own.get(name, {})}
        first[name] = {key.removeprefix("method."): one[0] for key, one in searched.items()}
    names = asked.method_names(values, first)
    on = data_values(tune_on) if tune_on else None
    if on and "folder" in on and "label" in values.get("data", {}):
        on["label"] = values["data"]["label"]
    with open_store(asked, "tune") as store:
        result = library.tune(
            values, names, over=lists or None, search=search, on=on, seeds=seeds, store=store
        )
    folder = finish(result, asked, "tune", show_tables)
    study = Sweep.from_dict(dict(result.study))
    seed = values.get("run", {}).get("seed", 0)
    files = [folder / f"{cell.label}.toml" for cell in result.cells]
    for file, cell in zip(files, result.cells, strict=True):
        experiment = study.experiment(cell.case, cell.label, cell.chosen, seed)
        write_safely(file, experiment.to_toml().encode())
    if not asked.json:
        c.note(f"Ready to run: {', '.join(map(str, files))}")
        c.note(f"Compare with these settings: dpfl compare ... --tuned {folder}")


def study(
    file: Path = o.arg("Study file (TOML)."),
    data: Path | None = o.DATA,
    workers: int = o.WORKERS,
    folder: Path | None = o.opt(_FOLDER, None, "--out"),
    record: bool = o.flag("--record", "Write the results beside the study file."),
    show_recorded: bool = o.flag("--show", "Run nothing; show the recorded results."),
    json: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Run a study: tune every method by the same rule, then the final seeds; or show what was
    recorded.

    A study file holds one base experiment, what varies, the methods, how they are tuned and the
    seeds. Runs that are in the folder already are not repeated.

    For instance: dpfl study studies/pfa/logistic.toml --record
    """
    from dpfl.experiments.compare import run_study
    from dpfl.experiments.results import StudyResult
    from dpfl.experiments.study import Sweep

    asked_for = Sweep.from_file(file)
    recorded = file.with_suffix(".json")
    if record and recorded.exists():
        StudyResult.read(recorded, "move it away: --record replaces recorded results only")
    if show_recorded:
        result = StudyResult.read(recorded, "run the study with --record first")
    else:
        kept = folder or Path("runs") / f"study-{file.stem}"
        asked = o.Asked(data=data, workers=workers, quiet=quiet, kept=kept)
        with open_store(asked, asked_for.title) as store:
            result = run_study(asked_for, store)
        if record:
            result.write(recorded)
            c.note(f"Recorded: {recorded}")
    c.answer(json, result.to_dict(), show_study, result)


def show_study(result: StudyResult) -> None:
    """Print a line per method and case: mean and spread of the final score, the tuned values,
    the noise left.
    """
    runs = [run for cell in result.cells for run in cell.runs]
    noisy = any(NOISE in run.metrics for run in runs)
    fields = field_names(result.cells[0].case)
    score = runs[0].words
    headings = [*fields, "method", score.title, "tuned", *(["noise ratio"] if noisy else [])]
    rows = [_study_row(cell)[: len(headings)] for cell in result.cells]
    c.print_table(headings, rows, title=result.title, left=len(fields) + 1)
    c.print_lines(*sorted({f"epsilon: {run.promise}" for run in runs if run.protects}))
    seeds = f"mean ± standard deviation, {len(result.cells[0].runs)} seed(s)"
    c.print_lines(f"{score.words}: final model, test records, {seeds}")
    if noisy:
        c.print_lines(
            "noise ratio: noise variance in the aggregate over the optimal variance, mean"
        )


def _study_row(cell: CellResult) -> list[str]:
    """One method in one case, as cells of a table; the last is the noise ratio."""
    ratios = [run.metrics[NOISE]["mean"] for run in cell.runs if NOISE in run.metrics]
    return [
        *map(value_text, cell.case.values()),
        cell.label,
        cell.runs[0].words.spread([run.value for run in cell.runs]),
        ", ".join(map(value_text, cell.chosen.values())) or "-",
        f"{statistics.mean(ratios):.3g}" if ratios else "-",
    ]
