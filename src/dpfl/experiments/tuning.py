"""Choose settings: the same search for every method, never on test records.

A grid tries every candidate to the end. Successive halving (Karnin, Koren, Somekh 2013) halts all
of them after a quarter of the rounds and lets the better half go on, and again after half of the
rounds. Every run is planned for all its rounds from the start, noise included, so that a run that
goes on is the run that was halted.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpfl.experiments.pool import Task, run_all
from dpfl.experiments.study import Cell, Study, Values, cells
from dpfl.runs.experiment import Experiment

Told = Callable[[str, int, int], None]
"""Told the stage, the rounds done and the rounds in all."""

HALTS = (0.25, 0.5)

UNACCOUNTED_TUNING = (
    "Tuned on the clients' own records: what was chosen depends on them, and no bill covers that. "
    "Tune on public or proxy data (--tune-on) where it must not."
)
PROXY_TUNING = "Tuned on {data}: what was chosen says nothing of the clients' records."


def remark(study: Study) -> str:
    """Say whose records the choice rests on."""
    assert study.tune is not None
    on = study.tune.on
    return (
        UNACCOUNTED_TUNING
        if on is None
        else PROXY_TUNING.format(data=on.get("name") or on.get("folder"))
    )


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where runs are kept and found again."""

    kept: Path
    data_folder: Path | None
    workers: int
    told: Told

    def task(self, experiment: Experiment) -> Task:
        """One run, in the folder that its content names."""
        folder = self.kept / kept_name(experiment, self.data_folder)
        return Task(experiment=experiment, folder=folder, data_folder=self.data_folder)

    def run(self, stage: str, tasks: Sequence[Task]) -> list[dict[str, Any]]:
        """Run each distinct task once: two cells may ask for the same run."""
        if not tasks:
            return []
        distinct = list({task.folder: task for task in tasks}.values())
        total = sum(task.rounds for task in distinct)
        summaries = run_all(distinct, self.workers, lambda done: self.told(stage, done, total))
        by_folder = {
            task.folder: summary for task, summary in zip(distinct, summaries, strict=True)
        }
        return [by_folder[task.folder] for task in tasks]


def kept_name(experiment: Experiment, data_folder: Path | None = None) -> str:
    """The folder of a run that is kept by content; data from another place may be other data."""
    root = "" if data_folder is None else str(data_folder.resolve())
    return f"{experiment.method.name}-{hashlib.sha256((root + experiment.content()).encode()).hexdigest()[:20]}"


def key_of(study: Study, cell: Cell) -> str:
    """Cells with one key share one choice."""
    return repr((sorted(study.tuned_in(cell.case).items(), key=lambda pair: pair[0]), cell.label))


@dataclass(kw_only=True)
class _Candidate:
    key: str
    values: Values
    tasks: list[Task]
    accuracy: float = 0.0
    rounds: int = 0
    stage: float = 0.0  # how far it was let go


def choose(study: Study, place: Place) -> dict[str, dict[str, Any]]:
    """Choose each method's values, by key of the case it is tuned in."""
    asked: dict[str, tuple[Values, str]] = {}
    for cell in cells(study):
        asked.setdefault(key_of(study, cell), (study.tuned_in(cell.case), cell.label))
    if study.tune is None:
        return {key: {"chosen": {}, "tried": []} for key in asked}
    tried: list[_Candidate] = []
    for key, (case, label) in asked.items():
        if len(study.tunable(label)) > 1:
            ids = _ids(study, case, label, place.data_folder)
            for values in study.tunable(label):
                runs = [
                    study.rehearsal(case, label, values, seed, ids) for seed in study.tune.seeds
                ]
                tried.append(
                    _Candidate(key=key, values=values, tasks=[place.task(run) for run in runs])
                )
    going = tried
    for share in (*(HALTS if study.tune.search == "halving" else ()), 1.0):
        _try(going, share, place)
        if share < 1.0:
            going = [
                one for key in asked for one in _better_half([c for c in going if c.key == key])
            ]
    chosen: dict[str, dict[str, Any]] = {}
    for key, (_, label) in asked.items():
        mine = [one for one in tried if one.key == key]
        if not mine:  # nothing to choose from
            chosen[key] = {"chosen": study.tunable(label)[0], "tried": []}
            continue
        best = max(mine, key=_merit)
        told = [
            {"values": one.values, "validation_accuracy": one.accuracy}
            | ({"rounds": one.rounds} if study.tune.search == "halving" else {})
            for one in mine
        ]
        chosen[key] = {"chosen": best.values, "tried": told}
    return chosen


def _ids(study: Study, case: Values, label: str, data_folder: Path | None) -> tuple[str, ...]:
    """Who is in the federation: needed only to lay its budgets over other records."""
    assert study.tune is not None
    if study.tune.on is None:
        return ()
    first = study.tunable(label)[0]
    return study.experiment(case, label, first, study.seeds[0]).federation(data_folder).ids


def _try(going: Sequence[_Candidate], share: float, place: Place) -> None:
    tasks = [
        replace(task, until=math.ceil(share * task.experiment.run.rounds))
        for one in going
        for task in one.tasks
    ]
    summaries = iter(
        place.run("tuning" if share == 1 else f"tuning, first {share:.0%} of the rounds", tasks)
    )
    for one in going:
        ended = [next(summaries) for _ in one.tasks]
        one.accuracy = statistics.mean(summary["accuracy"] for summary in ended)
        one.rounds, one.stage = ended[0]["rounds"]["done"], share


def _better_half(candidates: list[_Candidate]) -> list[_Candidate]:
    return sorted(candidates, key=_merit, reverse=True)[: math.ceil(len(candidates) / 2)]


def _merit(one: _Candidate) -> tuple[float, float, list[float]]:
    """Further is better, then more accurate; of equals, the smaller values."""
    small = [-float(value) for value in one.values.values() if isinstance(value, int | float)]
    return one.stage, one.accuracy, small
