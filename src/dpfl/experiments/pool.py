"""Several experiments at once: one process each, as many at a time as there are workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.multiprocessing

from dpfl.core.errors import DpflError
from dpfl.rounds.record import RoundRecord
from dpfl.runs.experiment import Experiment
from dpfl.runs.folder import RunFolder
from dpfl.runs.processes import ctrl_c_held
from dpfl.sim.train import run_experiment, run_until
from dpfl.sim.workers import become_worker, end_workers

_counters: Any = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """One experiment and the folder it runs in."""

    experiment: Experiment
    folder: Path
    data_folder: Path | None = None
    until: int | None = None  # stop there for now; the run can go on later as if it never had

    @property
    def rounds(self) -> int:
        """How long it takes, in the unit that progress is shown in."""
        return min(self.until or self.experiment.run.rounds, self.experiment.run.rounds)


def run_task(task: Task, report: Callable[[int], None]) -> dict[str, Any]:
    """Run, go on with, or just read an experiment, whatever its folder needs."""
    place = RunFolder(task.folder)
    started = place.experiment.exists() and _same(place, task.experiment)
    known = _known(place, task.rounds, task.experiment.run.rounds) if started else None
    if known is not None:
        report(task.rounds)
        return known

    def watch(done: int, total: int, record: RoundRecord) -> None:
        report(done)

    if task.until is not None and task.until < task.experiment.run.rounds:
        scores = run_until(
            task.experiment,
            task.folder,
            task.until,
            resume=started,
            data_folder=task.data_folder,
            progress=watch,
        )
        return {
            "rounds": {
                "planned": task.experiment.run.rounds,
                "done": task.until,
                "ended_early": None,
            },
            **vars(scores),
        }
    result = run_experiment(
        task.experiment, task.folder, resume=started, data_folder=task.data_folder, progress=watch
    )
    return result.summary.to_dict()


def _same(place: RunFolder, experiment: Experiment) -> bool:
    """Whether a folder holds this experiment; how many workers it had does not matter."""
    try:
        return Experiment.from_file(place.experiment).digest() == experiment.digest()
    except DpflError:
        return False  # of another version, or no experiment at all: creating a run there says so


def _known(place: RunFolder, until: int, planned: int) -> dict[str, Any] | None:
    """What is known of a run after so many rounds, if it has come so far."""
    summary = place.read_summary().to_dict() if place.summary.exists() else None
    if summary is not None and (until >= planned or summary["rounds"]["ended_early"]):
        return summary
    halt = place.halted_at(until)
    if halt is not None:
        return {"rounds": {"planned": planned, "done": until, "ended_early": None}, **vars(halt)}
    history = place.read_lines(place.rounds)
    if len(history) < until or (len(history) == until and summary is None):
        return None
    # It went further: take the accuracy it had then, or when it was last measured before.
    measured = [line for line in history[:until] if "accuracy" in line] or [
        line for line in history if "accuracy" in line
    ]
    if not measured:
        return None
    rounds = {"planned": planned, "done": until, "ended_early": None}
    return {"rounds": rounds, "accuracy": measured[-1]["accuracy"], "loss": measured[-1]["loss"]}


def _share(counters: Any) -> None:
    global _counters
    become_worker()
    _counters = counters


def _in_worker(number: int, task: Task) -> dict[str, Any]:
    def report(done: int) -> None:
        _counters[number] = done

    return run_task(task, report)


def run_all(
    tasks: Sequence[Task], workers: int, progress: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Run all tasks and return their summaries in order; ``progress`` is told the rounds done in
    all.
    """
    if workers == 1 or len(tasks) == 1:
        done = [0] * len(tasks)
        summaries = []
        for number, task in enumerate(tasks):

            def report(rounds: int, number: int = number) -> None:
                done[number] = rounds
                progress(sum(done))

            summaries.append(run_task(task, report))
        return summaries
    context = torch.multiprocessing.get_context("spawn")
    counters = context.Array("i", len(tasks))
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_share, initargs=(counters,)
    ) as pool:
        try:
            with ctrl_c_held():
                futures: list[Future[dict[str, Any]]] = [
                    pool.submit(_in_worker, i, t) for i, t in enumerate(tasks)
                ]
            open_futures = set(futures)
            while open_futures:
                finished, open_futures = wait(
                    open_futures, timeout=0.2, return_when=FIRST_COMPLETED
                )
                progress(sum(counters[:]))
                for future in finished:
                    future.result()
                time.sleep(0.02)
        except BaseException:
            end_workers()
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]
