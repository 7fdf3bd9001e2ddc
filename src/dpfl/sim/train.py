"""Train from Python: :func:`train` simulates a federation with a model and records of the caller's
own.
"""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from dpfl.core.checks import check
from dpfl.core.errors import CheckpointError, NotPrivateWarning
from dpfl.core.random import PublicSeed
from dpfl.core.types import Observer, Plain
from dpfl.data.federation import Federation
from dpfl.plugs.accounted_metric import AccountedMetric
from dpfl.privacy.filters import FilterName
from dpfl.rounds.record import RoundRecord
from dpfl.runs.folder import RunFolder
from dpfl.runs.progress import progress_bar
from dpfl.runs.training import Training
from dpfl.sim.arguments import check_arguments
from dpfl.sim.callbacks import AfterRound, Callback, EarlyStopping
from dpfl.sim.experiment import (
    rehearse as rehearse,
    run_experiment as run_experiment,
    run_until as run_until,
)
from dpfl.sim.loop import Progress
from dpfl.sim.opening import LedgerFile, Setup, in_folder, in_memory
from dpfl.sim.result import Result as Result, result_of
from dpfl.strategy import Strategy

_SEEDED = (
    "this training is seeded, and NOT PRIVATE: whoever knows the seed can subtract the noise; "
    "give seed=None to draw noise from the operating system"
)


def train(
    model: nn.Module,
    federation: Federation,
    strategy: Strategy,
    *,
    rounds: int | None = None,
    seed: int | None = 0,
    folder: Path | str | None = None,
    resume: bool = False,
    progress: bool | Progress = True,
    callbacks: Sequence[Callback] = (),
    early_stopping: EarlyStopping | None = None,
    engine: str = "stacked",
    device: str = "cpu",
    workers: int = 1,
    evaluate_every: int = 1,
    ledger: Path | str | None = None,
    new_ledger: bool = False,
    filter: FilterName = "renyi",  # noqa: A002 - as everywhere else
    misreports: Mapping[str, float] | None = None,
    accounted: AccountedMetric | None = None,
    personal_finish: bool = False,
) -> Result:
    """Simulate a federation, and return the trained model with what every client spent.

    Args:
        model: Any ``torch.nn.Module`` that fits the federation's task. It is not changed; the
            trained one is in the result.
        federation: The clients with their records, budgets and settings.
        strategy: A method with its settings, such as ``dpfl.weiavg(lr=0.1, ...)``.
        rounds: How many rounds to train; it may be left out for methods that plan them.
        seed: None draws all noise from the operating system. A number makes the run repeatable,
            and NOT PRIVATE, which a :class:`NotPrivateWarning` says.
        folder: Where the run is kept, as the command line keeps it: ledger, rounds, checkpoints,
            model and summary. A run in a folder survives Ctrl-C and a kill.
        resume: Go on with the run in ``folder``, if it holds one: the same bits where it is
            seeded, and no charge twice. A run that has ended is read. Another experiment's folder
            is refused.
        progress: Show a bar on stderr, if that is a terminal or a notebook. A function is called
            after every round instead, with the rounds done, the rounds planned and the record.
        callbacks: Functions that are called after every round with a :class:`dpfl.RoundEnd`. One
            that returns True or a reason, or calls its ``stop``, ends training; the model so far
            is kept, and flagged, since no epsilon covers that decision, unless ``stop`` is told
            that it is ``public``. After a resume the newest round is shown again.
        early_stopping: End training when a public or accounted metric stops improving.
        engine: How local work is executed; it never changes a result.
        device: The torch device to train on.
        workers: How many processes do local work; it never changes a result.
        evaluate_every: Every so many rounds the model is tried on test records.
        ledger: A file that spans runs: everything ever released from this data adds up there, as
            it must. A file that is not there is refused, since it may have been mislaid. Without
            one the run is accounted for alone: in a ledger of its folder, or in one that is gone
            with it.
        new_ledger: Make the file: this is its first run.
        filter: How runs add up in a new ledger file (:mod:`dpfl.privacy.filters`).
        misreports: Clients that claim a multiple of their epsilon; costs and noise rest on the
            true one.
        accounted: A metric that is measured every few rounds on private test records, with a share
            of every budget; it is in the round's record as ``measured``. Left out, it is the metric
            of ``early_stopping`` if that is an accounted one.
        personal_finish: At the end, compare the model with what each client could make of its own
            records; ``summary.finish`` has it by client.
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
        new_ledger=new_ledger,
        misreports=misreports,
        accounted=accounted,
        progress=progress,
        folder=folder,
        resume=resume,
        callbacks=callbacks,
        early_stopping=early_stopping,
        personal_finish=personal_finish,
    )
    if seed is not None and strategy.observer is not Observer.NOBODY:
        warnings.warn(_SEEDED, NotPrivateWarning, stacklevel=2)
    if accounted is None and early_stopping is not None:
        metric = early_stopping.metric
        accounted = metric if isinstance(metric, AccountedMetric) else None
    more: Plain = {
        "evaluate_every": evaluate_every,
        "misreports": dict(misreports or {}),
        "accounted": accounted,
    }
    described = early_stopping and early_stopping.described()
    training = Training.of(
        model, federation, strategy, rounds=rounds, seed=seed, stopping=described, **more
    )
    setup = Setup(
        model=copy.deepcopy(model),
        federation=federation,
        strategy=strategy,
        rounds=rounds,
        seed=PublicSeed(seed or 0),
        seeded=seed is not None,
        digest=training.digest,
        description=training.to_json(),
        python=True,
        settings={
            **more,
            "engine": engine,
            "device": device,
            "workers": workers,
            "personal_finish": personal_finish,
            "flags": early_stopping.flags if early_stopping else (),
        },
    )
    after = AfterRound(callbacks, early_stopping) if callbacks or early_stopping else None
    file = None
    if ledger is not None:
        file = LedgerFile(path=Path(ledger), new=new_ledger, filter=filter)
    begun = _begun(RunFolder(Path(folder)), training) if folder is not None and resume else None
    if begun:
        assert folder is not None
        return Result.load(folder, model=setup.model, task=federation.task)
    if folder is None:
        opened = in_memory(setup, file)
    else:
        opened = in_folder(setup, Path(folder), begun is not None, file)
    with (
        opened as simulation,
        _shown(progress, strategy.name, simulation.planned) as show,
    ):
        summary = simulation.play(show, after=after)
        result = result_of(simulation, summary, description=setup.description, python=True)
    ended = result.summary.rounds.ended_early
    if ended and (after is None or not after.stopped):
        warnings.warn(f"training ended {ended}", RuntimeWarning, stacklevel=2)
    return result


def _begun(place: RunFolder, training: Training) -> bool | None:
    """Whether the run in a folder has ended; None where none was begun.

    Another run's folder is refused.
    """
    if not place.holds_run:
        return None
    where = str(place.path)
    check(
        place.training.exists(),
        where,
        "holds the run of an experiment file",
        f"use dpfl run --resume {where}",
        CheckpointError,
    )
    check(
        Training.read(place.training).digest == training.digest,
        where,
        "holds another training: strategy, data, budgets, model, rounds or seed differ",
        "give the same arguments, or another folder",
        CheckpointError,
    )
    return place.summary.exists()


@contextmanager
def _shown(progress: bool | Progress, title: str, rounds: int) -> Iterator[Progress | None]:
    """Yield what shows progress: the caller's own function, or a bar."""
    if not isinstance(progress, bool):
        yield progress
        return
    with progress_bar(title, "", rounds, quiet=not progress) as update:

        def show(done: int, total: int, record: RoundRecord) -> None:
            scores = record.scores
            note = f"{scores.words.words} {scores.words.show(scores.value)}" if scores else ""
            update(completed=done, note=note)

        yield show
