"""Several experiments at once: one process each, as many at a time as there are workers.

A task runs in its own folder and can be repeated: a run that is there is read, one that was
interrupted or halted goes on, and its bits do not depend on how often it stopped.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.multiprocessing

from dpfl.core.errors import DpflError
from dpfl.engine.evaluation import Scores
from dpfl.rounds.record import RoundRecord
from dpfl.runs.experiment import Experiment
from dpfl.runs.folder import RunFolder
from dpfl.runs.processes import ctrl_c_held
from dpfl.sim.train import run_experiment, run_until
from dpfl.sim.workers import become_worker, end_workers

_counters: Any = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """One experiment and the folder it runs in.

    ``until`` halts it after so many rounds; it can go on later as if it had never halted.
    """

    experiment: Experiment
    folder: Path
    data_folder: Path | None = None
    until: int | None = None

    @property
    def rounds(self) -> int:
        """How many rounds it takes: the unit that progress is shown in."""
        return min(self.until or self.experiment.rounds, self.experiment.rounds)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a task ended: its scores, after so many rounds."""

    scores: Scores
    rounds: int


def run_task(task: Task, report: Callable[[int], None]) -> Ended:
    """Run an experiment, go on with it, or only read it, whatever its folder needs.

    ``report`` is told the number of rounds done.
    """
    folder = RunFolder(task.folder)
    experiment = task.experiment
    started = folder.experiment.exists() and _same(folder, experiment)
    known = _known(folder, task) if started else None
    if known is not None:
        report(task.rounds)
        return known

    def progress(done: int, total: int, record: RoundRecord) -> None:
        report(done)

    how: dict[str, Any] = {"resume": started, "data_folder": task.data_folder, "progress": progress}
    if task.rounds < experiment.rounds:
        scores = run_until(experiment, task.folder, task.rounds, **how)
        halted = Ended(scores=scores, rounds=task.rounds)
        return _known(folder, task) or halted  # it may have ended before
    summary = run_experiment(experiment, task.folder, **how).summary
    return Ended(scores=summary.scores, rounds=summary.rounds.done)


def _same(folder: RunFolder, experiment: Experiment) -> bool:
    """Whether a folder holds this experiment; how many workers it had does not matter."""
    try:
        return Experiment.from_file(folder.experiment).digest() == experiment.digest()
    except DpflError:
        return False  # of another version, or no experiment at all: creating a run there says so


def _known(folder: RunFolder, task: Task) -> Ended | None:
    """What is known of a run after so many rounds, if it has come so far."""
    summary = folder.read_summary() if folder.summary.exists() else None
    to_the_end = task.rounds >= task.experiment.rounds
    if summary is not None and (to_the_end or summary.rounds.ended_early):
        return Ended(scores=summary.scores, rounds=summary.rounds.done)
    scores = folder.halted_at(task.rounds)
    if scores is None:
        history = folder.read_rounds()
        if len(history) < task.rounds or (len(history) == task.rounds and summary is None):
            return None
        # It went further: take the scores it had then, or when it was last measured before.
        measured = [line.scores for line in history[: task.rounds] if line.scores]
        measured = measured or [line.scores for line in history if line.scores]
        scores = measured[-1] if measured else None
    return Ended(scores=scores, rounds=task.rounds) if scores else None


def _share(counters: Any) -> None:
    """Make a process a worker that reports its rounds in shared counters."""
    global _counters
    become_worker()
    _counters = counters


def _in_worker(number: int, task: Task) -> Ended:
    """Run a task in a worker process."""

    def report(done: int) -> None:
        _counters[number] = done

    return run_task(task, report)


def run_all(tasks: Sequence[Task], workers: int, progress: Callable[[int], None]) -> list[Ended]:
    """Run all tasks and return how they ended, in order.

    ``progress`` is told the number of rounds done by all tasks together.
    """
    if workers > 1 and len(tasks) > 1:
        return _in_processes(tasks, workers, progress)
    ended: list[Ended] = []
    for task in tasks:

        def report(done: int, before: int = sum(one.rounds for one in ended)) -> None:
            progress(before + done)

        ended.append(run_task(task, report))
    return ended


def _in_processes(
    tasks: Sequence[Task], workers: int, progress: Callable[[int], None]
) -> list[Ended]:
    """Run tasks in as many processes as there are workers; whatever ends this ends them."""
    context = torch.multiprocessing.get_context("spawn")
    counters = context.Array("i", len(tasks))
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_share, initargs=(counters,)
    ) as pool:
        try:
            with ctrl_c_held():
                futures = [pool.submit(_in_worker, n, task) for n, task in enumerate(tasks)]
            waiting = set(futures)
            while waiting:
                finished, waiting = wait(futures, timeout=0.2, return_when=FIRST_EXCEPTION)
                progress(sum(counters[:]))
                for future in finished:
                    future.result()
        except BaseException:
            end_workers()
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]
