"""Read what a report shows: one run, several runs, or the results of a comparison.

Runs that cannot be compared, and folders that cannot be read, are refused.
"""

from __future__ import annotations

import json
import sqlite3
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, FolderError
from dpfl.core.types import Observer, Promise
from dpfl.experiments import ranking
from dpfl.privacy.flags import Flag, RaisedFlag
from dpfl.rounds.record import RoundRecord
from dpfl.runs.experiment import Experiment
from dpfl.runs.folder import RESULTS_FORMAT, RunFolder
from dpfl.runs.result import Summary

_FEDERATION = ("data", "partition", "budgets", "model", "clients", "client_settings")
"""Sections that make a federation: runs that differ in one of them do not compare."""

_APART = "report them one by one"
_FLOAT_LEDGER = "dpfl-ledger-1"
"""The format of ledgers written by versions whose noise was rounded to floats."""


@dataclass(frozen=True, kw_only=True)
class ReportRun:
    """One run, as its folder describes it.

    ``toml`` is the text of ``experiment``; ``summary`` is None while the run is running;
    ``timings`` holds the seconds of each round by stage; ``float_noise`` marks a run of 0.1.
    """

    folder: Path
    experiment: Experiment
    toml: str
    summary: Summary | None = None
    history: Sequence[RoundRecord] = ()
    timings: Sequence[Mapping[str, float]] = ()
    float_noise: bool = False

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.experiment.method.name

    @property
    def seed(self) -> int:
        """The public seed."""
        return self.experiment.run.seed

    @property
    def rounds(self) -> int:
        """How many rounds were planned."""
        return self.experiment.run.rounds

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return self.summary is not None

    @property
    def result(self) -> Summary:
        """The summary of a finished run."""
        assert self.summary is not None
        return self.summary

    @property
    def promise(self) -> Promise:
        """What the epsilons of a finished run are about."""
        return self.result.promise

    @property
    def protects(self) -> bool:
        """Whether the method of a finished run protects anybody."""
        return self.promise.observer is not Observer.NOBODY

    @property
    def reference(self) -> bool:
        """Whether a finished run protects nobody, or only in a hypothetical federation."""
        hypothetical = any(raised.flag is Flag.HYPOTHETICAL for raised in self.flags)
        return hypothetical or not self.protects

    @property
    def flags(self) -> list[RaisedFlag]:
        """What must be said wherever the run is shown."""
        if self.summary is not None:
            raised = list(self.summary.flags)
        else:
            raised = [RaisedFlag(Flag.SEEDED)] if self.experiment.run.noise == "seeded" else []
        return [*raised, RaisedFlag(Flag.FLOAT_NOISE)] if self.float_noise else raised


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A method in one case. ``gap`` is how far it is below the best of those that promise the
    same, ``p_value`` says how surely; None where it is not ranked.
    """

    label: str
    runs: Sequence[ReportRun]
    best: bool
    gap: float | None
    p_value: float | None

    @property
    def results(self) -> list[Summary]:
        """What came of the run of each seed."""
        return [run.result for run in self.runs]

    @property
    def reference(self) -> bool:
        """Whether it is shown for reference, and not ranked."""
        return self.runs[0].reference


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The methods that protect one unit, and remarks that belong below their table."""

    ranks: Sequence[Rank]
    remarks: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One federation and what was tried on it: the runs of each method, by seed.

    ``values`` are those of the fields in which the cases of a sweep differ.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    methods: Mapping[str, Sequence[ReportRun]]

    @property
    def first(self) -> dict[str, ReportRun]:
        """One run per method to look into: that of the first seed."""
        return {label: runs[0] for label, runs in self.methods.items()}

    def rankings(self) -> dict[str, Ranking]:
        """Rank the methods among those that promise the same, one ranking per unit."""
        cells = [
            {"label": label, "runs": [_score(run) for run in runs]}
            for label, runs in self.methods.items()
        ]
        grouped = ranking.grouped(ranking.standings(cells))
        return {
            str(unit): Ranking(
                ranks=[
                    Rank(
                        label=one.label,
                        runs=self.methods[one.label],
                        best=one.best,
                        gap=one.behind,
                        p_value=one.p_value,
                    )
                    for one in lines
                ],
                remarks=ranking.remarks(lines),
            )
            for unit, lines in grouped.items()
        }


def _score(run: ReportRun) -> dict[str, Any]:
    """The run in the form that :mod:`dpfl.experiments.ranking` takes."""
    told = run.result.to_dict()
    return {
        **told,
        "seed": run.seed,
        "stamps": [str(raised) for raised in run.flags],
        "epsilon": {**told["epsilon"], **run.promise.to_dict()},
    }


@dataclass(frozen=True, kw_only=True)
class ReportInput:
    """Everything a report shows. ``tuning`` says how settings were chosen, if they were."""

    title: str
    cases: Sequence[Case]
    tuning: str = ""

    @property
    def runs(self) -> list[ReportRun]:
        """The runs of all cases, methods and seeds."""
        return [run for case in self.cases for runs in case.methods.values() for run in runs]

    @property
    def float_noise(self) -> bool:
        """Whether any run was made with noise that had holes."""
        return any(run.float_noise for run in self.runs)

    @property
    def varied(self) -> list[str]:
        """The fields in which the cases differ."""
        return list(self.cases[0].values)

    @property
    def single(self) -> ReportRun | None:
        """The run, if there is only one."""
        return self.runs[0] if len(self.runs) == 1 else None


def read_run(path: Path, *, finished: bool = True) -> ReportRun:
    """Read the folder of a run; ``finished=False`` also takes a run that is still running.

    A last line that was cut off by a kill is left out.
    """
    folder = RunFolder(path)
    remedy = "name the folder of a run, or of a comparison"
    check(folder.experiment.exists(), str(path), "holds no run", remedy, FolderError)
    where = str(folder.experiment)
    try:
        text = folder.experiment.read_text()
        experiment = Experiment.from_dict(tomllib.loads(text), where)
    except (OSError, ValueError, ConfigurationError) as error:
        remedy = "report it with the dpfl that wrote it"
        raise FolderError(where, f"is not of this version ({error})", remedy) from error
    remedy = f"finish it: dpfl run --resume {path}; or dpfl watch {path}"
    ended = folder.summary.exists()
    check(ended or not finished, str(path), "has not come to its end", remedy, FolderError)
    return ReportRun(
        folder=path,
        experiment=experiment,
        toml=text,
        summary=folder.read_summary() if ended else None,
        history=folder.read_rounds(),
        timings=folder.read_lines(folder.timings),
        float_noise=_ledger_format(folder.ledger) == _FLOAT_LEDGER,
    )


def _ledger_format(path: Path) -> str:
    """Look up the format of a ledger without opening it as one; empty if it cannot be told."""
    if not path.is_file():
        return ""
    try:  # immutable: reading leaves no files beside it
        address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(address, uri=True)) as connection:
            row = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    except sqlite3.Error:
        return ""
    return str(row[0]) if row else ""


def of_folders(paths: Sequence[Path]) -> ReportInput:
    """Read the folders of runs on one federation, or the folder of one comparison."""
    if len(paths) == 1 and (paths[0] / "results.json").exists():
        results = read_results(paths[0])
        kept = Path(results["kept"])
        beside = paths[0].resolve().parent / kept.name  # where the two were moved together
        return of_results(results, beside if beside.is_dir() and not kept.is_dir() else kept)
    runs = [read_run(path) for path in paths]
    for other in runs[1:]:
        _check_comparable(runs[0], other)
    methods: dict[str, list[ReportRun]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        methods.setdefault(run.method, []).append(run)
    for label, own in methods.items():
        repeated = len({_settings(run) for run in own}) == 1
        good = repeated and len({run.seed for run in own}) == len(own)
        check(good, "runs", f"two runs of '{label}' differ in settings or repeat a seed", _APART)
    seeds = {tuple(run.seed for run in own) for own in methods.values()}
    remedy = "run each with the same ones, or report them one by one"
    check(len(seeds) == 1, "runs", "the methods were run with different seeds", remedy)
    given = dict.fromkeys(run.method for run in runs)  # in the order of the folders
    title = f"{runs[0].method}: one run" if len(runs) == 1 else f"{len(methods)} methods compared"
    return ReportInput(title=title, cases=[Case(methods={name: methods[name] for name in given})])


def _settings(run: ReportRun) -> str:
    """Everything but the seed, and what never changes a result."""
    own = run.experiment.run.model_dump(exclude={"seed", "workers"})
    return json.dumps([run.experiment.method.model_dump(), own], sort_keys=True)


def _check_comparable(one: ReportRun, other: ReportRun) -> None:
    pair = f"{one.folder} and {other.folder}"
    for section in _FEDERATION:
        same = getattr(one.experiment, section) == getattr(other.experiment, section)
        check(same, "runs", f"{pair} differ in [{section}]: they cannot be compared", _APART)
    check(one.rounds == other.rounds, "runs", f"{pair} differ in rounds", _APART)


def read_results(path: Path, remedy: str = "name the folder of a comparison") -> dict[str, Any]:
    """Read the results of a study: a results.json, or a folder that holds one."""
    file = path / "results.json" if path.is_dir() else path
    try:
        results = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise FolderError(str(file), f"cannot be read ({error})", remedy) from error
    known = isinstance(results, dict) and results.get("format") == RESULTS_FORMAT
    problem = "does not hold results of a study of this version"
    check(known, str(file), problem, remedy, FolderError)
    found: dict[str, Any] = results
    return found


def of_results(results: Mapping[str, Any], kept: Path) -> ReportInput:
    """Read the runs behind the results of a comparison or a sweep, from the folder ``kept``."""
    final = any(cell["runs"] for cell in results["cells"])
    remedy = "compare with --tuned, and report that"
    check(final, "results", "hold a search and no final runs", remedy, FolderError)
    values: list[Mapping[str, Any]] = []
    methods: list[dict[str, Sequence[ReportRun]]] = []
    for cell in results["cells"]:
        if cell["case"] not in values:
            values.append(cell["case"])
            methods.append({})
        runs = [read_run(kept / run["folder"]) for run in cell["runs"]]
        methods[values.index(cell["case"])][cell["label"]] = runs
    cases = [Case(values=own, methods=tried) for own, tried in zip(values, methods, strict=True)]
    return ReportInput(title=results["title"], cases=cases, tuning=results.get("tuning", ""))
