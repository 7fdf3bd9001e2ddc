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
from dataclasses import dataclass, replace
from pathlib import Path

from dpfl.experiments.pool import Ended, Task, run_all
from dpfl.experiments.results import CellResult, Trial
from dpfl.experiments.study import Sweep, Values
from dpfl.runs.experiment import Experiment

Progress = Callable[[str, int, int], None]
"""Called with the stage, the rounds done and the rounds in all."""

HALTS = (0.25, 0.5)

UNACCOUNTED_TUNING = (
    "Tuned on the clients' own records: what was chosen depends on them, and no privacy cost "
    "covers that. Tune on public or proxy data to avoid it (--tune-on, or on=... in Python)."
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
    ``results`` is where the results will be written: the folder is taken before anything runs.
    """

    kept: Path = Path("runs/kept")
    results: Path | None = None
    data_folder: Path | None = None
    workers: int = 1
    progress: Progress = _silent

    def claim(self, study: Sweep) -> None:
        """Take the folder of the results for this study; another study's is refused."""
        if self.results is not None:
            study.claim(self.results)

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


@dataclass(kw_only=True)
class _Candidate:
    """Values that are tried for a method, and how well they did so far."""

    values: Values
    tasks: list[Task]
    value: float = 0.0
    sign: int = 1  # -1 where less is better
    metric: str = "accuracy"
    rounds: int = 0
    stage: float = 0.0  # the share of the rounds it was allowed

    @property
    def merit(self) -> tuple[float, float, list[float]]:
        """Further is better, then the better score; of equals, the smaller values."""
        small = [-float(value) for value in self.values.values() if isinstance(value, int | float)]
        return self.stage, self.sign * self.value, small

    def trial(self, halving: bool) -> Trial:
        """How it did; how far it went is said where a search drops candidates early."""
        rounds = self.rounds if halving else None
        return Trial(
            values=self.values,
            validation=self.value,
            metric=self.metric,
            higher_is_better=self.sign > 0,
            rounds=rounds,
        )


def choose(study: Sweep, store: RunStore) -> list[CellResult]:
    """Choose the settings of each method in each case; nothing is run with them yet.

    The folder of the results is taken first: another study's is refused before anything runs.
    """
    store.claim(study)
    asked = {}  # cells that are tuned in the same case share what is tried
    for case, label in study.cells():
        asked[_key(study, case, label)] = (study.tuned_in(case), label)
    tried = {key: _candidates(study, *cell, store) for key, cell in asked.items()}
    halving = study.tune is not None and study.tune.search == "halving"
    going = list(tried.values())
    for share in (*(HALTS if halving else ()), 1.0):
        _try([one for own in going for one in own], share, store)
        going = [_better_half(own) for own in going]
    found = []
    for case, label in study.cells():
        own = tried[_key(study, case, label)]
        best = max(own, key=lambda one: one.merit).values if own else study.tunable(label)[0]
        trials = tuple(one.trial(halving) for one in own)
        method = study.method(label)
        found.append(CellResult(case=case, label=label, method=method, chosen=best, tried=trials))
    return found


def _key(study: Sweep, case: Values, label: str) -> str:
    """Name what is tried for a method in the case in which this case is tuned."""
    return repr((sorted(study.tuned_in(case).items(), key=lambda pair: pair[0]), label))


def _candidates(study: Sweep, case: Values, label: str, store: RunStore) -> list[_Candidate]:
    """The candidates of one method in one case; none where there is nothing to choose from."""
    options = study.tunable(label)
    ids: tuple[str, ...] = ()
    if study.tune is None or len(options) < 2:
        return []
    if study.tune.on is not None:  # lay the budgets of the federation over other records
        first = study.experiment(case, label, options[0], study.seeds[0])
        ids = first.federation(store.data_folder).ids
    found = []
    for values in options:
        runs = [study.rehearsal(case, label, values, seed, ids) for seed in study.tune.seeds]
        found.append(_Candidate(values=values, tasks=[store.task(run) for run in runs]))
    return found


def _try(going: Sequence[_Candidate], share: float, store: RunStore) -> None:
    """Run candidates up to a share of their rounds, and note how good they are there."""
    tasks = [
        replace(task, until=math.ceil(share * task.experiment.rounds))
        for one in going
        for task in one.tasks
    ]
    stage = "tuning" if share == 1 else f"tuning, first {share:.0%} of the rounds"
    ended = iter(store.run(stage, tasks))
    for one in going:
        own = [next(ended) for _ in one.tasks]
        one.value = statistics.mean(end.scores.value for end in own)
        first = own[0].scores
        one.metric = first.metric
        one.sign = 1 if first.higher_is_better else -1
        one.rounds = own[0].rounds
        one.stage = share


def _better_half(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """The candidates that go on."""
    ranked = sorted(candidates, key=lambda one: one.merit, reverse=True)
    return ranked[: math.ceil(len(ranked) / 2)]
