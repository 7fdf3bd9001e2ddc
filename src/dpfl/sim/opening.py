"""Open a simulation: with a ledger in memory or in a file, or in a run folder that survives a kill.

:func:`dpfl.train` and :func:`dpfl.sim.experiment.run_experiment` say what is simulated
(:class:`Setup`); here it gets a name, a ledger and a folder.
"""

import math
import uuid
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from dpfl.core.random import PublicSeed
from dpfl.core.types import Plain
from dpfl.data.federation import Federation
from dpfl.privacy.filters import FilterName
from dpfl.privacy.flags import IN_TITLE
from dpfl.privacy.ledger import Ledger, open_ledger
from dpfl.rounds import Run
from dpfl.rounds.members import Member
from dpfl.runs.folder import RunFolder
from dpfl.sim.loop import Simulation
from dpfl.sim.resume import resume as go_on
from dpfl.strategy import Strategy

MOST_REHEARSED = 64  # clients whose noise is planned before a run starts


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is simulated, before it has a ledger.

    ``seed`` is the root of public randomness; ``seeded`` says that noise comes from it, too.
    ``digest`` names the experiment and its data, for whoever resumes it. ``description`` is the
    text that a folder keeps of it, of a run that ``python`` started or of an experiment file.
    ``settings`` are further arguments of the simulation.
    """

    model: nn.Module
    federation: Federation
    strategy: Strategy
    rounds: int | None
    seed: PublicSeed
    seeded: bool
    digest: str
    description: str
    python: bool = False
    settings: Plain = field(default_factory=dict)

    def simulation(self, name: str, ledger: Ledger, **more: Any) -> Simulation:
        """Return the simulation, registered in a ledger under a name.

        ``more`` are arguments of the simulation that differ between calls.
        """
        told = "".join(f" ({flag})" for flag in self.strategy.flags if flag in IN_TITLE)
        ledger.register(name, seeded=self.seeded, title=f"{self.strategy.name}{told}")
        secret = self.seed.child("secret") if self.seeded else None
        return Simulation(
            model=self.model,
            federation=self.federation,
            strategy=self.strategy,
            rounds=self.rounds,
            run=Run(name=name, ledger=ledger, seed=secret, public=self.seed.child("run")),
            **self.settings,
            **more,
        )

    def rehearse(self) -> None:
        """Plan everything against a ledger in memory; what cannot be done is refused."""
        with closing(Ledger.create(":memory:", "rehearsal")) as book:
            simulation = self.simulation("rehearsal", book)
            for member in _hardest(simulation.members.values()):
                simulation.agreement.phases(member.participant)

    def new_name(self) -> str:
        """Name the run at random. A name is published, with a ledger for instance, and whoever
        guesses private records or budgets could try their guess against a digest of them.
        """
        return f"{self.strategy.name}-{uuid.uuid4().hex[:12]}"


def _hardest(members: Iterable[Member]) -> list[Member]:
    """The clients that are hardest to serve; others plan their noise when they are drawn.

    Planning fails first where epsilon is smallest, or where few records make for a high sampling
    rate.
    """

    def epsilon_and_size(member: Member) -> tuple[float, int]:
        return member.budget.epsilon if member.budget else math.inf, member.shard.examples

    ordered = sorted(members, key=epsilon_and_size)
    smallest = min(ordered, key=lambda member: member.shard.examples)
    return [*ordered[: MOST_REHEARSED - 1], smallest]


@dataclass(frozen=True, kw_only=True)
class LedgerFile:
    """A ledger that spans runs.

    ``path`` is its file. One that does not exist is refused, since it may have been mislaid, unless
    it is ``new``; ``filter`` is then how runs add up in it.
    """

    path: Path
    new: bool = False
    filter: FilterName = "renyi"

    def open(self, *, resume: bool = False) -> Ledger:
        """Open the ledger, or make a new one; a run that is resumed may have made it."""
        new = self.new and not (resume and self.path.exists())
        return open_ledger(self.path, new, self.filter)


@contextmanager
def in_memory(setup: Setup, file: LedgerFile | None = None) -> Iterator[Simulation]:
    """Yield the simulation of a ``setup`` without a folder.

    It is charged to a ledger ``file``, or to a ledger that is gone with it.
    """
    with closing(file.open() if file else open_ledger(None, True, "renyi")) as ledger:
        yield setup.simulation(setup.new_name(), ledger)


@contextmanager
def in_folder(
    setup: Setup, folder: Path, resume: bool, file: LedgerFile | None = None
) -> Iterator[Simulation]:
    """Hold the ``folder`` of a run, its ledger open, and yield the simulation of a ``setup``.

    A new run is planned as a whole before its folder is made. With ``resume`` the run that the
    folder holds goes on, which must be this very one. It is charged to a ledger ``file`` that spans
    runs, or to one in the folder.
    """
    place = RunFolder(folder)
    if not resume:
        setup.rehearse()
    with place.locked():
        checkpoint = None
        if not resume:
            place.create(setup.description, python=setup.python)
        elif place.checkpoint.exists() or place.rounds.exists() or _charged(place):
            Ledger.open(file.path if file else place.ledger).close()  # first of all
            checkpoint = place.load_state(setup.digest)
        name = checkpoint.run if checkpoint else _new_name(place, setup, file)
        own = file.open(resume=resume) if file else Ledger.open(place.ledger, name)
        with closing(own) as ledger:
            simulation = setup.simulation(
                name, ledger, folder=place, digest=setup.digest, tried=not resume
            )
            if checkpoint is not None:
                go_on(simulation, checkpoint)
            yield simulation


def _charged(place: RunFolder) -> bool:
    """Whether the ledger of a folder holds a charge; a run that has none starts over."""
    if not place.ledger.exists():
        return False
    with closing(Ledger.open(place.ledger)) as ledger:
        return ledger.last_charged(ledger.identity()) is not None


def _new_name(place: RunFolder, setup: Setup, file: LedgerFile | None) -> str:
    """Name a run that starts; a ledger of the folder's own is made, and has the run's name."""
    if file is not None:
        return setup.new_name()
    if place.ledger.exists():
        with closing(Ledger.open(place.ledger)) as ledger:
            return ledger.identity()
    name = setup.new_name()
    Ledger.create(place.ledger, name).close()
    return name
