"""Read what a report shows: one run, several runs, or the results of a comparison.

Runs that cannot be compared are refused with a ``ConfigurationError``, folders that cannot be read
with a ``FolderError``. This is the only module of the report that reads files of runs.
"""

import sqlite3
import tomllib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, FolderError, read_problem
from dpfl.experiments.results import StudyResult
from dpfl.report.inputs import Case, ReportInput, ReportRun
from dpfl.runs.experiment import Experiment
from dpfl.runs.folder import RunFolder
from dpfl.runs.training import Training

_APART = "report them one by one"


def read_run(path: Path, *, finished: bool = True) -> ReportRun:
    """Read the folder of a run; ``finished=False`` also takes a run that is still running.

    A last line that was cut off by a kill is left out.
    """
    folder = RunFolder(path)
    check(
        folder.holds_run,
        str(path),
        "holds no run",
        "name the folder of a run, or of a comparison",
        FolderError,
    )
    text, experiment = _described(folder)
    go_on = f"dpfl run --resume {path}" if folder.experiment.exists() else "train with resume=True"
    ended = folder.summary.exists()
    check(
        ended or not finished,
        str(path),
        "has not come to its end",
        f"finish it: {go_on}; or dpfl watch {path}",
        FolderError,
    )
    summary = folder.read_summary() if ended else None
    stated = {line.account: line.budget for line in summary.statements} if summary else {}
    known = {client: budget for client, budget in stated.items() if budget is not None}
    return ReportRun(
        folder=path,
        experiment=experiment,
        toml=text,
        summary=summary,
        budgets=known if ended else _budgets(folder.ledger),
        history=folder.read_rounds(),
        timings=folder.read_timings(),
    )


def _described(folder: RunFolder) -> tuple[str, Experiment | Training]:
    """What was run: an experiment file, or a call from Python."""
    if folder.training.exists():
        found = Training.read(folder.training)
        return "\n".join(f"{step}: {words}" for step, words in found.pipeline), found
    where = str(folder.experiment)
    older = "report it with the dpfl that wrote it"
    try:
        text = folder.experiment.read_text()
        return text, Experiment.from_dict(tomllib.loads(text), where)
    except (OSError, ValueError, ConfigurationError) as error:
        raise FolderError(
            where, f"is not of this version ({read_problem(error)})", older
        ) from error


def _budgets(path: Path) -> dict[str, float]:
    """The clients' epsilons while a run is running; none if its ledger cannot be read now.

    The ledger is not checked, which takes long.
    """
    address = f"{path.absolute().as_uri()}?mode=ro"
    if not Path(f"{path}-wal").exists():
        address += "&immutable=1"  # nobody writes: leave no files beside it
    try:
        with closing(sqlite3.connect(address, uri=True)) as connection:
            return dict(connection.execute("SELECT account, epsilon FROM grants"))
    except sqlite3.Error:
        return {}


def of_folders(paths: Sequence[Path]) -> ReportInput:
    """Read folders (``paths``) of runs on one federation, or the folder of one comparison.

    Several runs are grouped by method. They must share the federation and the number of rounds, the
    runs of a method may differ in their seeds only, and all methods must have the same seeds.
    """
    if len(paths) == 1 and (paths[0] / "results.json").exists():
        results = StudyResult.read(paths[0])
        kept = Path(results.kept)
        beside = paths[0].resolve().parent / kept.name  # where the two were moved together
        return of_results(results, beside if beside.is_dir() and not kept.is_dir() else kept)
    runs = [read_run(path) for path in paths]
    for other in runs[1:]:
        _check_comparable(runs[0], other)
    methods: dict[str, list[ReportRun]] = {run.method: [] for run in runs}
    for run in sorted(runs, key=lambda run: run.seed):
        methods[run.method].append(run)
    for label, own in methods.items():
        first = own[0].experiment.settings_key()
        repeated = all(run.experiment.settings_key() == first for run in own)
        check(
            repeated and len({run.seed for run in own}) == len(own),
            "runs",
            f"two runs of '{label}' differ in settings or repeat a seed",
            _APART,
        )
    seeds = {tuple(run.seed for run in own) for own in methods.values()}
    check(
        len(seeds) == 1,
        "runs",
        "the methods were run with different seeds",
        "run each with the same ones, or report them one by one",
    )
    title = f"{runs[0].method}: one run" if len(runs) == 1 else f"{len(methods)} methods compared"
    return ReportInput(title=title, cases=[Case(methods=methods)])


def _check_comparable(one: ReportRun, other: ReportRun) -> None:
    """Refuse runs that say nothing about each other's methods."""
    pair = f"{one.folder} and {other.folder}"
    keys = one.experiment.federation_key()
    others = other.experiment.federation_key()
    check(
        one.experiment.python == other.experiment.python,
        "runs",
        f"{pair} are of different kinds",
        _APART,
    )
    for section in sorted(keys.keys() & others.keys()):
        check(
            keys[section] == others[section],
            "runs",
            f"{pair} differ in [{section}]: they cannot be compared",
            _APART,
        )
    planned = keys.keys() != others.keys()  # one of the methods plans its own
    same = one.experiment.rounds == other.experiment.rounds
    check(planned or same, "runs", f"{pair} differ in rounds", _APART)


def of_results(results: StudyResult, kept: Path) -> ReportInput:
    """Read the runs behind the results of a comparison or a sweep.

    ``kept`` is the folder that holds the folders of its runs.
    """
    check(
        any(cell.runs for cell in results.cells),
        "results",
        "hold a search and no final runs",
        "compare with --tuned, and report that",
        FolderError,
    )
    cases = []
    for case in results.cases:
        own = results.of_case(case)
        methods = {cell.label: [read_run(kept / run.folder) for run in cell.runs] for cell in own}
        cases.append(Case(values=case, methods=methods))
    return ReportInput(title=results.title, cases=cases, tuning=results.tuning)
