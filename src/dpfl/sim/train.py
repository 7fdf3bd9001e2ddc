"""The two doors to the simulator: :func:`train` from Python, :func:`run_experiment` for a file and
its run folder.
"""

from __future__ import annotations

import copy
import math
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dpfl.core.errors import ConfigurationError, FolderError, LedgerError
from dpfl.core.random import PublicSeed
from dpfl.data.federation import Federation
from dpfl.privacy.filters import FilterName
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.statement import Statement
from dpfl.rounds import Run, first_state
from dpfl.runs.experiment import Experiment
from dpfl.runs.folder import RunFolder
from dpfl.sim.loop import Outcome, Progress, Simulation
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
    history: list[dict[str, Any]]
    spent: dict[str, Statement]
    summary: dict[str, Any]
    timings: list[dict[str, float]]

    @property
    def accuracy(self) -> float:
        """Accuracy of the final model on all clients' test records."""
        return float(self.summary["accuracy"])


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
    liars: Mapping[str, float] | None = None,
    progress: Progress | None = None,
) -> Result:
    """Simulate a federation. The model given is not changed; the trained one is in the result.

    ``seed=None`` draws all noise from the operating system; a number makes the run repeatable, and
    NOT PRIVATE. ``ledger`` names a file that spans runs: everything ever released from this data
    adds up there, as it must. A file that is not there is refused, since it may have been mislaid,
    unless ``new_ledger`` says that this is its first run. ``filter`` is how runs add up in a new
    ledger (:mod:`dpfl.privacy.filters`). Without a file, the run is accounted for alone and its
    ledger is gone with it. ``liars`` claim a multiple of their epsilon; bills and noise rest on the
    true one.
    """
    if not (isinstance(rounds, int) and rounds >= 1):
        raise ConfigurationError(
            "train", f"rounds = {rounds!r}", "train for a whole number of rounds, at least one"
        )
    if not isinstance(strategy, Strategy) or not isinstance(federation, Federation):
        raise ConfigurationError(
            "train",
            "was not given a Federation and a Strategy",
            "build them, as dpfl.weiavg(...) does",
        )
    name = f"{strategy.name}-{uuid.uuid4().hex[:12]}"
    book = _book(ledger, new_ledger, filter)
    try:
        book.register(name, seeded=seed is not None, title=_title(strategy))
        run = Run(
            name=name,
            ledger=book,
            seed=_secret_seed(seed),
            public=PublicSeed(seed or 0).child("run"),
        )
        simulation = Simulation(
            model=copy.deepcopy(model), federation=federation, strategy=strategy, rounds=rounds, run=run, engine=engine,
            device=device, workers=workers, evaluate_every=evaluate_every, liars=liars,
        )  # fmt: skip
        outcome = simulation.run(simulation.start(), [], progress)
        if outcome.summary["rounds"]["ended_early"]:
            warnings.warn(
                f"training ended {outcome.summary['rounds']['ended_early']}",
                RuntimeWarning,
                stacklevel=2,
            )
        return _result(simulation, outcome)
    finally:
        book.close()


def run_experiment(
    experiment: Experiment,
    folder: Path,
    *,
    resume: bool = False,
    data_folder: Path | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    until: int | None = None,
) -> Result:
    """Run an experiment in its folder, or go on with one that was interrupted; with ``until``, only
    so many rounds of it.
    """
    place = RunFolder(folder)
    experiment.check()
    federation = experiment.federation(data_folder)
    strategy = experiment.strategy(len(federation.ids))
    model = experiment.build_model(federation)
    digest = f"{experiment.digest()}:{federation.fingerprint()}"
    if not resume:
        _plan(model, federation, strategy, experiment)
    with place.locked():
        if resume:
            state, name, private = _interrupted(place, experiment, digest)
            book = Ledger.open(place.ledger, name)
        else:
            state, private = None, {}
            place.create(experiment.to_toml())
            name = f"{experiment.method.name}-{experiment.digest()[:16]}"
            if experiment.run.noise == "system":
                name += f"-{uuid.uuid4().hex[:8]}"
            book = Ledger.create(place.ledger, name)
        try:
            seeded = experiment.run.noise == "seeded"
            book.register(name, seeded=seeded, title=_title(strategy))
            public = experiment.public_seed()
            seed = _secret_seed(public.value) if seeded else None
            simulation = Simulation(
                model=model, federation=federation, strategy=strategy, rounds=experiment.run.rounds,
                run=Run(name=name, ledger=book, seed=seed, public=public.child("run")),
                engine=experiment.run.engine, device=experiment.run.device, workers=workers or experiment.run.workers,
                evaluate_every=experiment.run.evaluate_every, liars=experiment.run.liars, folder=place, digest=digest,
            )  # fmt: skip
            history: list[dict[str, Any]] = []
            if state is None:
                state = simulation.start()
            else:
                state, history = simulation.resume(state, private)
            return _result(simulation, simulation.run(state, history, progress, until))
        finally:
            book.close()


def rehearse(experiment: Experiment, data_folder: Path | None = None) -> None:
    """Refuse what cannot be run, before anything is."""
    experiment.check()
    federation = experiment.federation(data_folder)
    _plan(
        experiment.build_model(federation),
        federation,
        experiment.strategy(len(federation.ids)),
        experiment,
    )


def _plan(
    model: nn.Module, federation: Federation, strategy: Strategy, experiment: Experiment
) -> None:
    """Plan everything against a ledger in memory, so that what cannot be done is refused before a
    folder is made.
    """
    book = Ledger.create(":memory:", "rehearsal")
    try:
        run = Run(name="rehearsal", ledger=book, seed=None, public=experiment.public_seed())
        simulation = Simulation(
            model=model, federation=federation, strategy=strategy, rounds=experiment.run.rounds, run=run,
            liars=experiment.run.liars,
        )  # fmt: skip
        # What cannot be done fails first where epsilon is smallest, or where few records make for a
        # high sampling rate.
        hardest = sorted(
            simulation.members.values(),
            key=lambda member: (
                member.budget.epsilon if member.budget else math.inf,
                member.shard.examples,
            ),
        )
        smallest = min(hardest, key=lambda member: member.shard.examples)
        for member in [*hardest[: MOST_REHEARSED - 1], smallest]:
            simulation.agreement.phases(member.participant)
        first_state(simulation.agreement, simulation.layout.read(model))
    finally:
        book.close()


def _interrupted(
    place: RunFolder, experiment: Experiment, digest: str
) -> tuple[Any, str, dict[str, Tensor]]:
    """Load the checkpoint; a run that was killed before its first one has released nothing and
    starts over.
    """
    if not place.experiment.exists():
        raise FolderError(str(place.path), "holds no run", "start one with dpfl run")
    if not place.checkpoint.exists() and not place.rounds.exists():
        name = f"{experiment.method.name}-{experiment.digest()[:16]}"
        if not place.ledger.exists():
            Ledger.create(place.ledger, name).close()
            return None, name, {}
        with_name = Ledger.open(place.ledger)
        try:
            name = with_name.identity()
            if with_name.last_round(name) is None:
                return None, name, {}
        finally:
            with_name.close()
    return place.load_state(digest)


def _secret_seed(seed: int | None) -> PublicSeed | None:
    return None if seed is None else PublicSeed(seed).child("secret")


def _book(path: Path | str | None, new: bool, rule: FilterName) -> Ledger:
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
        f"{strategy.name} (HYPOTHETICAL grants)" if strategy.local.hypothetical else strategy.name
    )


def _result(simulation: Simulation, outcome: Outcome) -> Result:
    simulation.layout.write(outcome.state.model, simulation.model)
    return Result(
        model=simulation.model,
        history=outcome.history,
        spent=outcome.statements,
        summary=outcome.summary,
        timings=simulation.timings,
    )
