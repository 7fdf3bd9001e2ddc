"""Read runs for a report: one folder, many, or the results of a comparison; what cannot be compared
is refused.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpfl.core.errors import ConfigurationError, FolderError
from dpfl.experiments.ranking import Standing, standings
from dpfl.runs.experiment import Experiment
from dpfl.runs.folder import RESULTS_FORMAT, RunFolder

_SAME = ("data", "partition", "budgets", "model", "clients", "practices")
"""Sections that make a federation: runs that differ in one of them say nothing about each other's
methods.
"""


@dataclass(frozen=True, kw_only=True)
class ReadRun:
    """One run as its folder tells it; ``summary`` is empty while it goes on."""

    folder: Path
    experiment: Mapping[str, Any]
    toml: str
    summary: Mapping[str, Any]
    history: list[dict[str, Any]]
    timings: list[dict[str, Any]]

    @property
    def method(self) -> str:
        """Its name."""
        return str(self.experiment["method"]["name"])

    @property
    def seed(self) -> int:
        """Of everything public."""
        return int(self.experiment["run"]["seed"])

    @property
    def rounds(self) -> int:
        """Planned."""
        return int(self.experiment["run"]["rounds"])

    @property
    def finished(self) -> bool:
        """Whether it has come to its end."""
        return bool(self.summary)

    def told(self) -> dict[str, Any]:
        """The run as a comparison's results tell it."""
        keys = ("accuracy", "loss", "rounds", "clients", "bytes_up", "bytes_down", "stamps")
        meaning = {name: self.summary[name] for name in ("unit", "adjacency", "observer")}
        also = {
            name: self.summary[name]
            for name in ("tested", "epsilon_by_observer")
            if name in self.summary
        }
        return (
            {name: self.summary[name] for name in keys}
            | also
            | {
                "seed": self.seed,
                "clients_left": len(self.summary["clients_left"]),
                "epsilon": {**self.summary["epsilon"], **meaning},
            }
        )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One federation and what was tried on it: each method's runs, by seed."""

    values: Mapping[str, Any] = field(default_factory=dict)
    methods: Mapping[str, Sequence[ReadRun]]

    def standings(self) -> list[Standing]:
        """Who did best, among those that promise the same."""
        return standings(
            [
                {"label": label, "runs": [run.told() for run in runs]}
                for label, runs in self.methods.items()
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Material:
    """Everything a report shows."""

    title: str
    cases: Sequence[Case]
    tuning: str = ""

    @property
    def runs(self) -> list[ReadRun]:
        """All of them."""
        return [run for case in self.cases for runs in case.methods.values() for run in runs]

    @property
    def varied(self) -> list[str]:
        """The fields in which the cases differ."""
        return list(self.cases[0].values)

    @property
    def single(self) -> ReadRun | None:
        """The run, if there is but one."""
        return self.runs[0] if len(self.runs) == 1 else None


def read_run(path: Path, *, finished: bool = True) -> ReadRun:
    """Read one folder. A last line that a kill cut off is left out; a run that goes on is read only
    where asked for.
    """
    place = RunFolder(path)
    if not place.experiment.exists():
        raise FolderError(str(path), "holds no run", "name the folder of a run, or of a comparison")
    try:
        text = place.experiment.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise FolderError(
            str(place.experiment), f"cannot be read ({error})", "restore it from a backup"
        ) from error
    experiment = _experiment(place, text)
    summary: Mapping[str, Any] = {}
    if finished or place.summary.exists():
        if not place.summary.exists():
            raise FolderError(
                str(path),
                "has not come to its end",
                f"finish it: dpfl run --resume {path}; or dpfl watch {path}",
            )
        summary = place.read_summary().to_dict()
    history, timings = place.read_lines(place.rounds), place.read_lines(place.timings)
    return ReadRun(
        folder=path,
        experiment=experiment,
        toml=text,
        summary=summary,
        history=history,
        timings=timings,
    )


def _experiment(place: RunFolder, text: str) -> dict[str, Any]:
    try:
        return Experiment.from_dict(tomllib.loads(text), str(place.experiment)).to_dict()
    except (tomllib.TOMLDecodeError, ConfigurationError) as error:
        raise FolderError(
            str(place.experiment),
            f"is not of this version ({error})",
            "report it with the dpfl that wrote it",
        ) from error


def of_folders(paths: Sequence[Path]) -> Material:
    """Read the folders that were named: runs, or one comparison."""
    if len(paths) == 1 and (paths[0] / "results.json").exists():
        results = read_results(paths[0])
        kept = Path(results["kept"])
        beside = paths[0].resolve().parent / kept.name  # where the two were moved together
        return of_results(results, beside if beside.is_dir() and not kept.is_dir() else kept)
    runs = [read_run(path) for path in paths]
    first = runs[0]
    for other in runs[1:]:
        _check_comparable(first, other)
    methods: dict[str, list[ReadRun]] = {}
    for run in runs:
        methods.setdefault(run.method, []).append(run)
    for label, own in methods.items():
        if len({_same_run(run) for run in own}) > 1 or len({run.seed for run in own}) < len(own):
            raise ConfigurationError(
                "runs",
                f"two runs of '{label}' differ in settings or repeat a seed",
                "report them one by one",
            )
        own.sort(key=lambda run: run.seed)
    seeds = {tuple(run.seed for run in own) for own in methods.values()}
    if len(seeds) > 1:
        raise ConfigurationError(
            "runs",
            "the methods were run with different seeds",
            "run each with the same ones, or report them one by one",
        )
    title = f"{first.method}: one run" if len(runs) == 1 else f"{len(methods)} methods compared"
    return Material(title=title, cases=[Case(methods=methods)])


def read_results(path: Path, remedy: str = "name the folder of a comparison") -> dict[str, Any]:
    """Read a results.json, or a folder that holds one."""
    place = path / "results.json" if path.is_dir() else path
    try:
        results = json.loads(place.read_text())
    except (OSError, ValueError) as error:
        raise FolderError(str(place), f"cannot be read ({error})", remedy) from error
    if not isinstance(results, dict) or results.get("format") != RESULTS_FORMAT:
        raise FolderError(str(place), "holds no results of a study of this version", remedy)
    return results


def _same_run(run: ReadRun) -> str:
    """Everything but the seed, and what never changes a result."""
    own = {
        name: value
        for name, value in run.experiment["run"].items()
        if name not in ("seed", "workers")
    }
    return json.dumps([run.experiment["method"], own], sort_keys=True)


def _check_comparable(one: ReadRun, other: ReadRun) -> None:
    for section in _SAME:
        if one.experiment.get(section) != other.experiment.get(section):
            raise ConfigurationError(
                "runs",
                f"{one.folder} and {other.folder} differ in [{section}]: they cannot be compared",
                "report them one by one",
            )
    if one.rounds != other.rounds:
        raise ConfigurationError(
            "runs", f"{one.folder} and {other.folder} differ in rounds", "report them one by one"
        )


def of_results(results: Mapping[str, Any], kept: Path) -> Material:
    """Read the runs behind a comparison's or a sweep's results."""
    if not any(cell["runs"] for cell in results["cells"]):
        raise FolderError(
            "results", "hold a search and no final runs", "compare with --tuned, and report that"
        )
    cases: list[Case] = []
    for cell in results["cells"]:
        runs = [read_run(kept / run["folder"]) for run in cell["runs"]]
        known = next((case for case in cases if case.values == cell["case"]), None)
        if known is None:
            known = Case(values=cell["case"], methods={})
            cases.append(known)
        assert isinstance(known.methods, dict)
        known.methods[cell["label"]] = runs
    return Material(title=results["title"], cases=cases, tuning=results.get("tuning", ""))
