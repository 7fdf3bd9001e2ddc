"""Run an experiment file in its folder, to the end or so far, or rehearse it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpfl.core.checks import check
from dpfl.core.errors import FolderError
from dpfl.engine.evaluation import Scores
from dpfl.runs.experiment import Experiment
from dpfl.runs.folder import RunFolder
from dpfl.sim.loop import Progress, Simulation
from dpfl.sim.opening import Setup, in_folder
from dpfl.sim.result import Result, result_of

_REHEARSED: set[tuple[str, Path | None]] = set()
"""Experiments that this process has planned before, by their digest and where their data lie."""


def run_experiment(
    experiment: Experiment,
    folder: Path,
    *,
    resume: bool = False,
    data_folder: Path | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Result:
    """Run an experiment in its folder, or go on with one that was interrupted.

    ``experiment`` is what is run. ``folder`` must be new, or with ``resume`` hold the interrupted
    run of this very experiment. ``data_folder`` is where data sets that do not ship with dpfl lie.
    ``workers`` overrides the experiment's number of processes. ``progress`` is called after every
    round with its number, how many there are, and its record.
    """
    with _opened(experiment, folder, resume, data_folder, workers) as simulation:
        summary = simulation.play(progress)
        told = experiment.to_toml()
        return result_of(simulation, summary, description=told, python=False)


def run_until(
    experiment: Experiment,
    folder: Path,
    until: int,
    *,
    resume: bool = False,
    data_folder: Path | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Run only ``until`` so many rounds of an experiment, and return how good its model is then.

    The run can go on later as if it had never halted: the same bits, and no charge twice. The other
    arguments, ``experiment``, ``folder``, ``resume``, ``data_folder`` and ``progress``, are those
    of :func:`run_experiment`.
    """
    with _opened(experiment, folder, resume, data_folder, None) as simulation:
        if summary := simulation.play(progress, until):
            return summary.scores
        scores = simulation.evaluate()
        RunFolder(folder).append_halt(simulation.state.round, scores)
        return scores


def rehearse(experiment: Experiment, data_folder: Path | None = None) -> None:
    """Plan an experiment as a run would, and refuse what it would refuse.

    Everything is planned against a ledger in memory, noise of the clients that are hardest to serve
    included; nothing is written and nothing is charged. ``data_folder`` is where data sets lie that
    do not ship with dpfl.
    """
    question = experiment.digest(), data_folder
    if question not in _REHEARSED:
        setup_of(experiment, data_folder).rehearse()
        _REHEARSED.add(question)


def setup_of(
    experiment: Experiment, data_folder: Path | None = None, workers: int | None = None
) -> Setup:
    """Build what an ``experiment`` describes; ``workers`` overrides its number of processes.

    ``data_folder`` is where data sets lie that do not ship with dpfl.
    """
    experiment.check()
    own = experiment.run
    federation = experiment.federation(data_folder)
    return Setup(
        model=experiment.build_model(federation),
        federation=federation,
        strategy=experiment.strategy(len(federation.ids)),
        rounds=own.rounds,
        seed=experiment.public_seed(),
        seeded=own.noise == "seeded",
        digest=f"{experiment.digest()}:{federation.fingerprint()}",
        description=experiment.to_toml(),
        settings={
            "engine": own.engine,
            "device": own.device,
            "workers": workers or own.workers,
            "evaluate_every": own.evaluate_every,
            "misreports": own.misreports,
            "dropout": own.dropout,
            "accounted": experiment.accounted_metric(),
            "built": experiment.built_model(federation),
            "personal_finish": bool(own.personal_finish),
        },
    )


@contextmanager
def _opened(
    experiment: Experiment, folder: Path, resume: bool, data: Path | None, workers: int | None
) -> Iterator[Simulation]:
    """Hold the folder of a run, its ledger open, and yield the simulation."""
    setup = setup_of(experiment, data, workers)
    check(
        not resume or RunFolder(folder).experiment.exists(),
        str(folder),
        "holds no run",
        "start one with dpfl run",
        FolderError,
    )
    with in_folder(setup, folder, resume) as simulation:
        yield simulation
