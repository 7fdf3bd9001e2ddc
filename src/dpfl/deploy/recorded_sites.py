"""Audit what real sites send: their folders, ledgers, policies and messages, in one process.

Sites and a server are made in a temporary folder (:class:`CanarySites`) and play a study over the
in-process grid: the code that answers is that of a deployed site, and what is audited are
the bytes of its answers, as they reach the server, or the models that it publishes. The claim is
read from the site's own ledger. Nothing outside that folder is touched, and no address is asked.
"""

import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, normalize

from dpfl.attacks.auditing.canaries import FILLERS, Bools, Game
from dpfl.attacks.auditing.plan import Audit
from dpfl.attacks.auditing.probes import Floats
from dpfl.attacks.observation import ObservedRound, Transcript
from dpfl.core.checks import check
from dpfl.core.layout import Layout
from dpfl.core.types import Adjacency, Observer, Plain, State
from dpfl.deploy.asking import Uploads
from dpfl.deploy.canary_sites import LONG, CanarySites
from dpfl.deploy.client_app import make_app
from dpfl.deploy.coordinator import Coordinator
from dpfl.deploy.in_process_grid import InProcessGrid
from dpfl.deploy.transport import Transport
from dpfl.plugs.base import Participant
from dpfl.privacy.events import History
from dpfl.rounds import Agreement, Plan, Run
from dpfl.rounds.record import RoundRecord
from dpfl.runs.deployment import StudyFile
from dpfl.strategy import Strategy
from dpfl.strategy.method import Method

RECORDS, SITES = 160, 12
"""Canaries in one study, at most: records of one site, or sites."""

_LEAST_SIZE = 64  # numbers of a record: weights are small at first, and no canary is certain
_MOST_RUNS, _MOST_HEAD_RUNS = 30, 6  # a study takes seconds
_MODELS: dict[str, Plain] = {
    "linear": {"name": "logistic"},
    "layered": {"name": "mlp", "hidden": 8},
    "head": {"features": "pixels"},
}
# Models that hardly move: canaries stay as long as they can be, before and after clipping.
_OF_RECORDS, _OF_CLIENTS = {"lr": 1e-3}, {"lr": 1e-2, "clip": 1e-3}


class RecordingCoordinator(Coordinator):
    """A server that keeps what it was sent."""

    def __init__(self, folder: Path, transport: Transport) -> None:
        super().__init__(folder, transport)
        self.transcript: Transcript | None = None
        self._seen: list[ObservedRound] = []

    def _ask(self, agreement: Agreement, state: State, plan: Plan) -> Uploads:
        uplinks, total = super()._ask(agreement, state, plan)
        self._seen += [ObservedRound(state=state, plan=plan, uplinks=tuple(uplinks), total=total)]
        return uplinks, total

    def _round(
        self, agreement: Agreement, state: State, run: Run, history: list[RoundRecord]
    ) -> tuple[State, str]:
        after, ended = super()._round(agreement, state, run, history)
        own = Transcript(agreement=agreement, run=run, final=after, rounds=self._seen)
        self.transcript = own if self._seen else None
        return after, ended


@dataclass(kw_only=True, eq=False)
class StudyTranscript(Transcript):
    """What left the sites of a study, and what the first victim says of it: ``charged`` are the
    histories in its own ledger.
    """

    victim: Participant
    charged: Mapping[Observer, History] = field(default_factory=dict)

    def participant(self, client: str) -> Participant:
        """The first victim; all others with canaries are like it."""
        return self.victim

    def history(self, client: str, observer: Observer) -> History:
        """What the first victim's ledger was charged."""
        check(
            observer in self.charged,
            "the site's ledger",
            f"it claims nothing against the {observer}",
            "look at another adversary",
        )
        return self.charged[observer]


@dataclass(frozen=True, kw_only=True)
class SiteGame(Game):
    """A game with canaries that is played by real sites; ``method`` and ``settings`` are what the
    study names.
    """

    method: Method
    settings: Plain

    @property
    def most_runs(self) -> int:
        """How often the game can be played in reasonable time."""
        return _MOST_HEAD_RUNS if self.probe == "head" else _MOST_RUNS

    @property
    def size(self) -> int:
        """How many numbers a record has."""
        return max(_LEAST_SIZE, super().size)

    def play(self, present: Bools, seed: int | None) -> StudyTranscript:
        """Play a study with the canaries that are ``present``; with a ``seed``, a rehearsal."""
        absent = -1.0 if self.adjacency is Adjacency.REPLACE_ONE else 0.0
        marks = np.where(present, 1.0, absent).reshape(len(self.clients), -1)
        with tempfile.TemporaryDirectory(prefix="dpfl-audit-") as folder:
            sites = CanarySites(
                folder=Path(folder),
                study=self._study(seed),
                promise=self.strategy.promise,
                victims=self.clients,
                fillers=self._fillers,
                budget=self.budget,
            )
            sites.write(marks, self.directions)
            own = {number + 1: sites.folder / name for number, name in enumerate(sites.names)}
            server = RecordingCoordinator(sites.server, Transport(InProcessGrid(own, make_app({}))))
            with warnings.catch_warnings():  # all records of a site are in one step
                warnings.filterwarnings("ignore", "clipped sums were cut off", RuntimeWarning)
                server.begin()
            seen = server.transcript
            first = self.clients[0]
            check(
                seen is not None,
                "audit",
                "no site answered",
                "look for the reason with dpfl deploy example",
            )
            assert seen is not None
            victim = sites.participant(first)
            charged = sites.histories(first)
            return StudyTranscript(**vars(seen), victim=victim, charged=charged)

    @property
    def _fillers(self) -> list[str]:
        return [f"f{number:05}" for number in range(self.fillers)]

    def _study(self, seed: int | None = None) -> StudyFile:
        """The study that is offered to the sites."""
        sites = [*self.clients, *self._fillers]
        about = {"name": "audit", "sites": sites, "feature_shape": [self.size], "classes": 2}
        run: Plain = {"round_timeout": 60.0, "enrol_timeout": 5.0, "rounds": self.rounds}
        noise = {} if seed is None else {"noise": "seeded", "seed": seed}
        method: Plain = {"name": self.method.name, **self.settings}
        run = {key: own for key, own in {**run, **noise}.items() if own is not None}
        model = _MODELS[self.probe]
        return StudyFile.from_dict({"study": about, "model": model, "method": method, "run": run})

    # -- what is seen ------------------------------------------------------------------------------

    def coordinates(self, vector: Tensor, state: State) -> Floats:
        """One number a direction: along the gradient of its canary, or along the difference
        between those of e_j and -e_j, in the weights that multiply the number that it has alone.
        """
        if self.probe == "head":
            return super().coordinates(vector, state)
        model, layout = self._model
        first = next(iter(layout))
        values = layout.unflatten(state.model)
        weights = values[first.name].requires_grad_()
        labels = torch.zeros(self.size, dtype=torch.int64)
        loss = torch.tensor(0.0)
        for sign in (1, -1) if self.adjacency is Adjacency.REPLACE_ONE else (1,):
            outputs = functional_call(model, values, sign * LONG * torch.eye(self.size))
            loss = loss + sign * cross_entropy(outputs, labels)
        (gradients,) = torch.autograd.grad(loss, [weights])
        found = vector[first.slice].view_as(weights) * normalize(gradients, dim=0)
        return np.asarray(found.detach().double().sum(dim=0))

    @cached_property
    def _model(self) -> tuple[nn.Module, Layout]:
        model = self._study().build_model()
        return model, Layout.of_module(model)


def site_games(
    method: Method, strategy: Strategy, how: Audit, observer: Observer, reading: Adjacency
) -> tuple[SiteGame, SiteGame]:
    """The two games of one adversary and reading, between sites."""
    head = method.model is not None
    layered = "two layers" in method.needs
    check(
        not head or reading is Adjacency.REPLACE_ONE,
        f"audit of '{method.name}', {reading}",
        "a record that is not there cannot be written into a site's file",
        "audit this reading without --sites",
    )
    settings = how.settings_of(method)
    clients = not strategy.unit.of_data
    slow = {**(_OF_CLIENTS if clients else _OF_RECORDS), **how.settings}
    many = SiteGame(
        strategy=strategy,
        probe="head" if head else "layered" if layered else "linear",
        adjacency=reading,
        observer=observer,
        budget=how.budget,
        rounds=None if head else how.rounds,
        canaries=min(how.canaries, SITES if clients else RECORDS),
        apart=clients,
        fillers=FILLERS,
        method=method,
        settings={name: slow.get(name, own) for name, own in settings.items()},
    )
    few = replace(many, apart=True, canaries=1)
    return many, replace(few, canaries=SITES if few.own_rows and not head else 1)
