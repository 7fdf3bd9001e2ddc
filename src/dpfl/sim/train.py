"""The two doors to the simulator: :func:`train` from Python, :func:`run_experiment` for a file and
its run folder.
"""

import copy
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from dpfl.core.checks import check
from dpfl.core.errors import FolderError
from dpfl.core.random import PublicSeed
from dpfl.data.federation import Federation
from dpfl.engine.evaluation import Scores
from dpfl.plugs.accounted_metric import AccountedMetric
from dpfl.privacy.filters import FilterName
from dpfl.privacy.flags import Flag
from dpfl.privacy.ledger import Ledger, open_ledger
from dpfl.privacy.statement import Statement
from dpfl.rounds import Run, write_buffers
from dpfl.rounds.record import RoundRecord
from dpfl.runs.experiment import Experiment
from dpfl.runs.folder import Checkpoint, RunFolder
from dpfl.runs.result import Summary
from dpfl.sim.arguments import check_arguments
from dpfl.sim.loop import Progress, Simulation
from dpfl.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Result:
    """What training gives back. ``spent[client]`` is a statement: an epsilon that names unit,
    adjacency and observer.
    """

    model: nn.Module
    history: list[RoundRecord]
    summary: Summary
    timings: list[dict[str, float]]

    @property
    def accuracy(self) -> float:
        """Accuracy of the final model on all clients' test records."""
        return self.summary.accuracy

    @property
    def spent(self) -> dict[str, Statement]:
        """What each client spent."""
        return {line.account: line for line in self.summary.statements}


def train(
    model: nn.Module,
    federation: Federation,
    strategy: Strategy,
    *,
    rounds: int,
    seed: int | None = 0,
    engine: str = "stacked",
    device: str = "cpu",
    workers: int = 1,
    evaluate_every: int = 1,
    ledger: Path | str | None = None,
    new_ledger: bool = False,
    filter: FilterName = "renyi",  # noqa: A002 - as everywhere else
    misreports: Mapping[str, float] | None = None,
    accounted: AccountedMetric | None = None,
    progress: Progress | None = None,
) -> Result:
    """Simulate a federation. The model given is not changed; the trained one is in the result.

    ``seed=None`` draws all noise from the operating system; a number makes the run repeatable, and
    NOT PRIVATE. ``ledger`` names a file that spans runs: everything ever released from this data
    adds up there, as it must. A file that is not there is refused, since it may have been mislaid,
    unless ``new_ledger`` says that this is its first run. ``filter`` is how runs add up in a new
    ledger (:mod:`dpfl.privacy.filters`). Without a file, the run is accounted for alone and its
    ledger is gone with it. ``misreports`` claim a multiple of their epsilon; costs and noise
    rest on the true one. ``accounted`` is a metric that is measured every few rounds on private
    test records, with a share of every budget; it is in the round's record as ``measured``.
    """
    check_arguments(
        model=model,
        federation=federation,
        strategy=strategy,
        rounds=rounds,
        seed=seed,
        engine=engine,
        workers=workers,
        evaluate_every=evaluate_every,
        ledger=ledger,
        misreports=misreports,
        progress=progress,
    )
    name = f"{strategy.name}-{uuid.uuid4().hex[:12]}"
    with closing(open_ledger(ledger, new_ledger, filter)) as book:
        simulation = Simulation(
            model=copy.deepcopy(model),
            federation=federation,
            strategy=strategy,
            rounds=rounds,
            run=_registered(name, book, strategy, PublicSeed(seed or 0), seed is not None),
            engine=engine,
            device=device,
            workers=workers,
            evaluate_every=evaluate_every,
            misreports=misreports or {},
            accounted=accounted,
        )
        result = _result(simulation, simulation.play(progress))
    if result.summary.rounds.ended_early:
        said = f"training ended {result.summary.rounds.ended_early}"
        warnings.warn(said, RuntimeWarning, stacklevel=2)
    return result


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

    ``folder`` must be new, or with ``resume`` hold the interrupted run of this very experiment.
    ``data_folder`` is where data sets that do not ship with dpfl lie. ``workers`` overrides the
    experiment's number of processes. ``progress`` is called after every round with its number, how
    many there are, and its record.
    """
    with _opened(experiment, folder, resume, data_folder, workers) as simulation:
        return _result(simulation, simulation.play(progress))


def run_until(
    experiment: Experiment,
    folder: Path,
    until: int,
    *,
    resume: bool = False,
    data_folder: Path | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Run only so many rounds of an experiment, and return how good its model is then.

    The run can go on later as if it had never halted: the same bits, and no charge twice.
    """
    with _opened(experiment, folder, resume, data_folder, None) as simulation:
        if summary := simulation.play(progress, until):
            return summary.scores
        scores = simulation.evaluate()
        RunFolder(folder).append_halt(simulation.state.round, scores)
        return scores


def rehearse(experiment: Experiment, data_folder: Path | None = None) -> None:
    """Refuse what cannot be run, before anything is.

    The experiment is planned against a ledger in memory, noise of the clients that are hardest to
    serve included; nothing is written and nothing is charged.
    """
    experiment.check()
    _plan(experiment, experiment.federation(data_folder))


@contextmanager
def _opened(
    experiment: Experiment, folder: Path, resume: bool, data: Path | None, workers: int | None
) -> Iterator[Simulation]:
    """Hold the folder of a run, its ledger open, and yield the simulation.

    A new run is planned as a whole before its folder is made. ``data`` is where data sets lie that
    do not ship with dpfl.
    """
    experiment.check()
    place, federation = RunFolder(folder), experiment.federation(data)
    digest = f"{experiment.digest()}:{federation.fingerprint()}"
    if not resume:
        _plan(experiment, federation)
    with place.locked():
        if resume:
            name, checkpoint = _interrupted(place, experiment, digest)
        else:
            place.create(experiment.to_toml())
            name, checkpoint = _new_ledger(place, experiment), None
        with closing(Ledger.open(place.ledger, name)) as book:
            more = {"workers": workers or experiment.run.workers, "folder": place, "digest": digest}
            simulation = _simulation(experiment, federation, name, book, **more)
            if checkpoint is not None:
                simulation.resume(checkpoint)
            yield simulation


def _simulation(
    experiment: Experiment, federation: Federation, name: str, ledger: Ledger, **more: Any
) -> Simulation:
    """The simulation that an experiment describes, registered in a ledger under a name.

    ``more`` are settings of the simulation that an experiment does not have.
    """
    own, strategy = experiment.run, experiment.strategy(len(federation.ids))
    seed, seeded = experiment.public_seed(), own.noise == "seeded"
    return Simulation(
        model=experiment.build_model(federation),
        federation=federation,
        strategy=strategy,
        rounds=own.rounds,
        run=_registered(name, ledger, strategy, seed, seeded),
        engine=own.engine,
        device=own.device,
        evaluate_every=own.evaluate_every,
        misreports=own.misreports,
        dropout=own.dropout,
        accounted=experiment.accounted_metric(),
        **more,
    )


def _plan(experiment: Experiment, federation: Federation) -> None:
    """Plan everything against a ledger in memory, before a folder is made."""
    with closing(Ledger.create(":memory:", "rehearsal")) as book:
        _simulation(experiment, federation, "rehearsal", book).rehearse()


def _interrupted(
    place: RunFolder, experiment: Experiment, digest: str
) -> tuple[str, Checkpoint | None]:
    """Load the checkpoint; a run that was killed before its first one has released nothing and
    starts over.
    """
    there = place.experiment.exists()
    check(there, str(place.path), "holds no run", "start one with dpfl run", FolderError)
    if not place.checkpoint.exists() and not place.rounds.exists():
        if not place.ledger.exists():
            return _new_ledger(place, experiment), None
        with closing(Ledger.open(place.ledger)) as known:
            if known.last_round(known.identity()) is None:
                return known.identity(), None
    Ledger.open(place.ledger).close()  # a ledger that cannot be charged is refused first
    found = place.load_state(digest)
    return found.run, found


def _new_ledger(place: RunFolder, experiment: Experiment) -> str:
    """Make the ledger of a run; its name is the run's: by content where it can be repeated."""
    name = f"{experiment.method.name}-{experiment.digest()[:16]}"
    if experiment.run.noise != "seeded":
        name += f"-{uuid.uuid4().hex[:8]}"
    Ledger.create(place.ledger, name).close()
    return name


def _registered(
    name: str, ledger: Ledger, strategy: Strategy, seed: PublicSeed, seeded: bool
) -> Run:
    """A run that its ledger knows of; ``seeded`` says that its noise comes from the seed, too."""
    hypothetical = f" ({Flag.HYPOTHETICAL})" if strategy.local.hypothetical else ""
    ledger.register(name, seeded=seeded, title=f"{strategy.name}{hypothetical}")
    secret = seed.child("secret") if seeded else None
    return Run(name=name, ledger=ledger, seed=secret, public=seed.child("run"))


def _result(simulation: Simulation, summary: Summary | None) -> Result:
    assert summary is not None
    model, history, timings = simulation.model, simulation.history, simulation.timings
    simulation.layout.write(simulation.published(), model)
    write_buffers(model, simulation.state.buffers)
    return Result(model=model, history=history, summary=summary, timings=timings)
