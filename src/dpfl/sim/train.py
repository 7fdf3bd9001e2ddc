"""The two doors to the simulator: :func:`train` from Python, :func:`run_experiment` for a file and
its run folder.
"""

import copy
import math
import uuid
import warnings
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from dpfl.core.errors import ConfigurationError, FolderError, LedgerError
from dpfl.core.random import PublicSeed
from dpfl.data.federation import Federation
from dpfl.engine.evaluation import Scores
from dpfl.privacy.filters import FilterName
from dpfl.privacy.flags import Flag
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.statement import Statement
from dpfl.rounds import Run, first_state, write_buffers
from dpfl.rounds.members import Member
from dpfl.rounds.record import RoundRecord
from dpfl.runs.experiment import Experiment
from dpfl.runs.folder import Checkpoint, RunFolder
from dpfl.runs.result import Summary
from dpfl.sim.loop import Outcome, Progress, Simulation
from dpfl.sim.resume import resume as resume_from
from dpfl.strategy import Strategy

MOST_REHEARSED = 64
"""Clients whose noise is planned before a run starts: the hardest to serve. The others plan when
they are drawn.
"""


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
    progress: Progress | None = None,
) -> Result:
    """Simulate a federation. The model given is not changed; the trained one is in the result.

    ``seed=None`` draws all noise from the operating system; a number makes the run repeatable, and
    NOT PRIVATE. ``ledger`` names a file that spans runs: everything ever released from this data
    adds up there, as it must. A file that is not there is refused, since it may have been mislaid,
    unless ``new_ledger`` says that this is its first run. ``filter`` is how runs add up in a new
    ledger (:mod:`dpfl.privacy.filters`). Without a file, the run is accounted for alone and its
    ledger is gone with it. ``misreports`` claim a multiple of their epsilon; costs and noise
    rest on the true one.
    """
    if not (isinstance(rounds, int) and rounds >= 1):
        raise ConfigurationError(
            "train", f"rounds = {rounds!r}", "train for a whole number of rounds, at least one"
        )
    if not isinstance(strategy, Strategy) or not isinstance(federation, Federation):
        raise ConfigurationError(
            "train",
            "was not given a Federation and a Strategy",
            "build them: Federation.from_arrays(...), and a method such as those of dpfl.methods",
        )
    name = f"{strategy.name}-{uuid.uuid4().hex[:12]}"
    public = PublicSeed(seed or 0).child("run")
    with closing(_ledger(ledger, new_ledger, filter)) as book:
        book.register(name, seeded=seed is not None, title=_title(strategy))
        simulation = Simulation(
            model=copy.deepcopy(model),
            federation=federation,
            strategy=strategy,
            rounds=rounds,
            run=Run(name=name, ledger=book, seed=_secret_seed(seed), public=public),
            engine=engine,
            device=device,
            workers=workers,
            evaluate_every=evaluate_every,
            misreports=misreports,
        )
        result = _result(simulation, simulation.run(simulation.start(), [], progress))
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
    return _result(*_run_in(experiment, folder, resume, data_folder, workers, progress))


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
    return _run_in(experiment, folder, resume, data_folder, None, progress, until)[1].scores


def _run_in(
    experiment: Experiment,
    folder: Path,
    resume: bool,
    data_folder: Path | None,
    workers: int | None,
    progress: Progress | None,
    until: int | None = None,
) -> tuple[Simulation, Outcome]:
    place = RunFolder(folder)
    experiment.check()
    federation = experiment.federation(data_folder)
    strategy = experiment.strategy(len(federation.ids))
    model = experiment.build_model(federation)
    digest = f"{experiment.digest()}:{federation.fingerprint()}"
    if not resume:
        _plan(model, federation, strategy, experiment)
    seeded, public = experiment.run.noise == "seeded", experiment.public_seed()
    with place.locked():
        if resume:
            name, checkpoint = _interrupted(place, experiment, digest)
        else:
            place.create(experiment.to_toml())
            name, checkpoint = _new_name(experiment), None
            Ledger.create(place.ledger, name).close()
        with closing(Ledger.open(place.ledger, name)) as book:
            book.register(name, seeded=seeded, title=_title(strategy))
            seed = _secret_seed(public.value) if seeded else None
            simulation = Simulation(
                model=model,
                federation=federation,
                strategy=strategy,
                rounds=experiment.run.rounds,
                run=Run(name=name, ledger=book, seed=seed, public=public.child("run")),
                engine=experiment.run.engine,
                device=experiment.run.device,
                workers=workers or experiment.run.workers,
                evaluate_every=experiment.run.evaluate_every,
                misreports=experiment.run.misreports,
                dropout=experiment.run.dropout,
                folder=place,
                digest=digest,
            )
            begun = (
                (simulation.start(), [])
                if checkpoint is None
                else resume_from(simulation, checkpoint)
            )
            return simulation, simulation.run(*begun, progress, until)


def rehearse(experiment: Experiment, data_folder: Path | None = None) -> None:
    """Refuse what cannot be run, before anything is.

    The experiment is planned against a ledger in memory, noise of the clients that are hardest to
    serve included; nothing is written and nothing is charged.
    """
    experiment.check()
    federation = experiment.federation(data_folder)
    strategy = experiment.strategy(len(federation.ids))
    _plan(experiment.build_model(federation), federation, strategy, experiment)


def _plan(
    model: nn.Module, federation: Federation, strategy: Strategy, experiment: Experiment
) -> None:
    """Plan everything against a ledger in memory: what cannot be done is refused before a folder
    is made.
    """
    with closing(Ledger.create(":memory:", "rehearsal")) as book:
        simulation = Simulation(
            model=model,
            federation=federation,
            strategy=strategy,
            rounds=experiment.run.rounds,
            run=Run(name="rehearsal", ledger=book, seed=None, public=experiment.public_seed()),
            misreports=experiment.run.misreports,
        )

        def epsilon_and_size(member: Member) -> tuple[float, int]:
            return member.budget.epsilon if member.budget else math.inf, member.shard.examples

        # What cannot be done fails first where epsilon is smallest, or where few records make for
        # a high sampling rate.
        hardest = sorted(simulation.members.values(), key=epsilon_and_size)
        smallest = min(hardest, key=lambda member: member.shard.examples)
        for member in [*hardest[: MOST_REHEARSED - 1], smallest]:
            simulation.agreement.phases(member.participant)
        first_state(simulation.agreement, simulation.layout.read(model))


def _interrupted(
    place: RunFolder, experiment: Experiment, digest: str
) -> tuple[str, Checkpoint | None]:
    """Load the checkpoint; a run that was killed before its first one has released nothing and
    starts over.
    """
    if not place.experiment.exists():
        raise FolderError(str(place.path), "holds no run", "start one with dpfl run")
    if not place.checkpoint.exists() and not place.rounds.exists():
        if not place.ledger.exists():
            name = _new_name(experiment)
            Ledger.create(place.ledger, name).close()
            return name, None
        with closing(Ledger.open(place.ledger)) as known:
            if known.last_round(known.identity()) is None:
                return known.identity(), None
    Ledger.open(place.ledger).close()  # a ledger that cannot be charged is refused first
    found = place.load_state(digest)
    return found.run, found


def _new_name(experiment: Experiment) -> str:
    """Name a run: by its content where it can be repeated, by chance where it cannot."""
    name = f"{experiment.method.name}-{experiment.digest()[:16]}"
    return name if experiment.run.noise == "seeded" else f"{name}-{uuid.uuid4().hex[:8]}"


def _secret_seed(seed: int | None) -> PublicSeed | None:
    return None if seed is None else PublicSeed(seed).child("secret")


def _ledger(path: Path | str | None, new: bool, rule: FilterName) -> Ledger:
    if path is None:
        return Ledger.create(":memory:", "memory")
    if not new and not Path(path).exists():
        raise LedgerError(
            str(path),
            "there is no ledger",
            "check the path, or say new_ledger=True for its first run",
        )
    return Ledger.create(path, uuid.uuid4().hex, filter=rule) if new else Ledger.open(path)


def _title(strategy: Strategy) -> str:
    return (
        f"{strategy.name} ({Flag.HYPOTHETICAL})" if strategy.local.hypothetical else strategy.name
    )


def _result(simulation: Simulation, outcome: Outcome) -> Result:
    assert outcome.summary is not None
    simulation.layout.write(simulation.published(outcome.state), simulation.model)
    write_buffers(simulation.model, outcome.state.buffers)
    return Result(
        model=simulation.model,
        history=outcome.history,
        summary=outcome.summary,
        timings=simulation.timings,
    )
