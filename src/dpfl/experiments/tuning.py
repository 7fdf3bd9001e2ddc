"""Choose settings: the same search for every method, never on test records.

A grid tries every candidate to the end. Successive halving (Karnin, Koren, Somekh 2013) halts all
of them after a quarter of the rounds and lets the better half go on, and again after half of the
rounds. Every run is planned for all its rounds from the start, noise included, so that a run that
goes on is the run that was halted.
"""

import hashlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dpfl.experiments.pool import Ended, Task, run_all
from dpfl.experiments.results import Trial
from dpfl.experiments.study import Cell, Sweep, Values, cells
from dpfl.runs.experiment import Experiment

Progress = Callable[[str, int, int], None]
"""Called with the stage, the rounds done and the rounds in all."""

HALTS = (0.25, 0.5)

UNACCOUNTED_TUNING = (
    "Tuned on the clients' own records: what was chosen depends on them, and no privacy cost "
    "covers that. Tune on public or proxy data (--tune-on) to avoid it."
)
PROXY_TUNING = "Tuned on {data}: what was chosen says nothing of the clients' records."


def remark(study: Sweep) -> str:
    """Say on whose records the choice rests; empty where nothing is tuned."""
    if study.tune is None:
        return ""
    on = study.tune.on
    named = on and (on.get("name") or on.get("folder"))
    return PROXY_TUNING.format(data=named) if on else UNACCOUNTED_TUNING


def _silent(stage: str, done: int, total: int) -> None:
    """Report no progress."""


@dataclass(frozen=True, kw_only=True)
class RunStore:
    """A folder in which runs are kept by content: what is there is not run again.

    ``kept`` is the folder, ``data_folder`` where data sets lie, ``workers`` how many runs go on at
    a time. ``progress`` is called with the stage, the rounds done and the rounds in all.
    """

    kept: Path = Path("runs/kept")
    data_folder: Path | None = None
    workers: int = 1
    progress: Progress = field(default=_silent)

    def task(self, experiment: Experiment) -> Task:
        """Return one run, in the folder that its content names."""
        folder = self.kept / kept_name(experiment, self.data_folder)
        return Task(experiment=experiment, folder=folder, data_folder=self.data_folder)

    def run(self, stage: str, tasks: Sequence[Task]) -> list[Ended]:
        """Run each distinct task once: two cells may ask for the same run."""
        if not tasks:
            return []
        distinct = list({task.folder: task for task in tasks}.values())
        total = sum(task.rounds for task in distinct)
        ended = run_all(distinct, self.workers, lambda done: self.progress(stage, done, total))
        found = {task.folder: one for task, one in zip(distinct, ended, strict=True)}
        return [found[task.folder] for task in tasks]


def kept_name(experiment: Experiment, data_folder: Path | None = None) -> str:
    """Name the folder of a run by its content; data from another place may be other data."""
    root = "" if data_folder is None else str(data_folder.resolve())
    digest = hashlib.sha256((root + experiment.content()).encode()).hexdigest()
    return f"{experiment.method.name}-{digest[:20]}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a search chose for one method, and what it tried."""

    chosen: Values = field(default_factory=dict)
    tried: tuple[Trial, ...] = ()


@dataclass(kw_only=True)
class _Candidate:
    """Values that are tried for one key, and how well they did so far."""

    key: str
    values: Values
    tasks: list[Task]
    accuracy: float = 0.0
    rounds: int = 0
    stage: float = 0.0  # the share of the rounds it was allowed

    @property
    def merit(self) -> tuple[float, float, list[float]]:
        """Further is better, then more accurate; of equals, the smaller values."""
        small = [-float(value) for value in self.values.values() if isinstance(value, int | float)]
        return self.stage, self.accuracy, small


def key_of(study: Sweep, cell: Cell) -> str:
    """Name a choice: cells with one key share it."""
    return repr((sorted(study.tuned_in(cell.case).items(), key=lambda pair: pair[0]), cell.label))


def choose(study: Sweep, store: RunStore) -> dict[str, Choice]:
    """Choose each method's values, by :func:`key_of` its cells."""
    asked = {
        key_of(study, cell): Cell(case=study.tuned_in(cell.case), label=cell.label)
        for cell in cells(study)
    }
    if study.tune is None:
        return dict.fromkeys(asked, Choice())
    tried = [one for key, cell in asked.items() for one in _candidates(study, key, cell, store)]
    halving, going = study.tune.search == "halving", tried
    for share in (*(HALTS if halving else ()), 1.0):
        _try(going, share, store)
        if share < 1.0:
            going = [one for key in asked for one in _better_half(going, key)]
    chosen = {key: Choice(chosen=study.tunable(cell.label)[0]) for key, cell in asked.items()}
    for key in {one.key for one in tried}:
        own = [one for one in tried if one.key == key]
        trials = [
            Trial(
                values=one.values,
                validation_accuracy=one.accuracy,
                rounds=one.rounds if halving else None,
            )
            for one in own
        ]
        best = max(own, key=lambda one: one.merit)
        chosen[key] = Choice(chosen=best.values, tried=tuple(trials))
    return chosen


def _candidates(study: Sweep, key: str, cell: Cell, store: RunStore) -> list[_Candidate]:
    """The candidates of one method in one case; none where there is nothing to choose from."""
    assert study.tune is not None
    options = study.tunable(cell.label)
    ids: tuple[str, ...] = ()
    if len(options) < 2:
        return []
    if study.tune.on is not None:  # lay the budgets of the federation over other records
        first = study.experiment(cell.case, cell.label, options[0], study.seeds[0])
        ids = first.federation(store.data_folder).ids
    found = []
    for values in options:
        runs = [
            study.rehearsal(cell.case, cell.label, values, seed, ids) for seed in study.tune.seeds
        ]
        found.append(_Candidate(key=key, values=values, tasks=[store.task(run) for run in runs]))
    return found


def _try(going: Sequence[_Candidate], share: float, store: RunStore) -> None:
    """Run candidates up to a share of their rounds, and note how accurate they are there."""
    tasks = [
        replace(task, until=math.ceil(share * task.experiment.run.rounds))
        for one in going
        for task in one.tasks
    ]
    stage = "tuning" if share == 1 else f"tuning, first {share:.0%} of the rounds"
    ended = iter(store.run(stage, tasks))
    for one in going:
        own = [next(ended) for _ in one.tasks]
        one.accuracy = statistics.mean(end.scores.accuracy for end in own)
        one.rounds, one.stage = own[0].rounds.done, share


def _better_half(candidates: Sequence[_Candidate], key: str) -> list[_Candidate]:
    """The candidates of one key that go on."""
    own = [one for one in candidates if one.key == key]
    return sorted(own, key=lambda one: one.merit, reverse=True)[: math.ceil(len(own) / 2)]
