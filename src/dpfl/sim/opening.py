"""Open a simulation: with a ledger in memory or in a file, or in a run folder that survives a kill.

:func:`dpfl.train` and :func:`dpfl.sim.experiment.run_experiment` say what is simulated
(:class:`Setup`); here it gets a name, a ledger and a folder.
"""

import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from dpfl.core.checks import check
from dpfl.core.errors import LedgerError
from dpfl.core.random import PublicSeed
from dpfl.core.types import Plain
from dpfl.data.federation import Federation
from dpfl.privacy.filters import FilterName
from dpfl.privacy.flags import Flag
from dpfl.privacy.ledger import Ledger
from dpfl.rounds import Run
from dpfl.runs.folder import Checkpoint, RunFolder
from dpfl.sim.loop import Simulation
from dpfl.sim.resume import resume as go_on
from dpfl.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is simulated, before it has a ledger.

    ``seed`` is the root of public randomness; ``seeded`` says that noise comes from it, too.
    ``name`` is what the run is called, if it can be repeated; ``digest`` names the experiment and
    its data. ``description`` is the text that a folder keeps of it, of a run that ``python``
    started or of an experiment file. ``settings`` are further arguments of the simulation.
    """

    model: nn.Module
    federation: Federation
    strategy: Strategy
    rounds: int
    seed: PublicSeed
    seeded: bool
    name: str
    digest: str
    description: str
    python: bool = False
    settings: Plain = field(default_factory=dict)

    def simulation(self, name: str, ledger: Ledger, **more: Any) -> Simulation:
        """Return the simulation, registered in a ledger under a name.

        ``more`` are arguments of the simulation that differ between calls.
        """
        hypothetical = f" ({Flag.HYPOTHETICAL})" if self.strategy.local.hypothetical else ""
        title = f"{self.strategy.name}{hypothetical}"
        ledger.register(name, seeded=self.seeded, title=title)
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
            self.simulation("rehearsal", book).rehearse()

    def new_name(self) -> str:
        """Name the run: by content where it can be repeated."""
        return self.name if self.seeded else f"{self.name}-{uuid.uuid4().hex[:8]}"


@contextmanager
def in_folder(setup: Setup, folder: Path, resume: bool) -> Iterator[Simulation]:
    """Hold the folder of a run, its ledger open, and yield the simulation.

    A new run is planned as a whole before its folder is made. With ``resume`` the run that the
    folder holds goes on, which must be this very one.
    """
    place = RunFolder(folder)
    if not resume:
        setup.rehearse()
    with place.locked():
        if resume:
            name, checkpoint = _interrupted(place, setup)
        else:
            place.create(setup.description, python=setup.python)
            name, checkpoint = _new_ledger(place, setup), None
        with closing(Ledger.open(place.ledger, name)) as book:
            simulation = setup.simulation(name, book, folder=place, digest=setup.digest)
            if checkpoint is not None:
                go_on(simulation, checkpoint)
            yield simulation


@contextmanager
def in_ledger(
    setup: Setup, path: Path | str | None, new: bool, rule: FilterName
) -> Iterator[Simulation]:
    """Yield the simulation, charged to a ledger file that spans runs, or to one in memory.

    A file that does not exist is refused, unless it is ``new``; ``rule`` is then its filter.
    """
    if path is None:
        ledger = Ledger.create(":memory:", "memory")
    else:
        remedy = "check the path, or say new_ledger=True for its first run"
        check(new or Path(path).exists(), str(path), "there is no ledger", remedy, LedgerError)
        identity = uuid.uuid4().hex
        ledger = Ledger.create(path, identity, filter=rule) if new else Ledger.open(path)
    with closing(ledger):
        yield setup.simulation(f"{setup.strategy.name}-{uuid.uuid4().hex[:12]}", ledger)


def _interrupted(place: RunFolder, setup: Setup) -> tuple[str, Checkpoint | None]:
    """Load the checkpoint; a run that was killed before its first one has released nothing and
    starts over.
    """
    if not place.checkpoint.exists() and not place.rounds.exists():
        if not place.ledger.exists():
            return _new_ledger(place, setup), None
        with closing(Ledger.open(place.ledger)) as known:
            if known.last_round(known.identity()) is None:
                return known.identity(), None
    Ledger.open(place.ledger).close()  # a ledger that cannot be charged is refused first
    found = place.load_state(setup.digest)
    return found.run, found


def _new_ledger(place: RunFolder, setup: Setup) -> str:
    """Make the ledger of a run, under the run's name."""
    name = setup.new_name()
    Ledger.create(place.ledger, name).close()
    return name
