"""Audit what real sites send: their folders, ledgers, policies and messages, in one process.

Sites and a server are made in a temporary folder (:class:`CanarySites`) and play a study over the
in-process grid: the code that answers is that of a deployed site, and what is audited are
the bytes of its answers, as they reach the server, or the models that it publishes. The claim is
read from the site's own ledger. Nothing outside that folder is touched, and no address is asked.

Site folders whose records are canaries, and the study that is offered to them.

The model is a logistic regression, a small network for methods that split a model in two, or the
head that a method brings along. A canary is a record LONG e_j, whose gradient is clipped; what is
looked at are the weights of the first layer that multiply its j-th number. A canary that is not
there is a record of zeros, whose gradient is zero in all of them: no further apart than under
zero-out, unless a method mixes these weights with others before it publishes anything. A client
whose presence is guessed has canaries alone, or zeros alone. The models of heads centre every
record, so that zeros count: there canaries are e_j or -e_j only.
"""

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
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
from dpfl.core.promise import Promise
from dpfl.core.random import PublicSeed
from dpfl.core.types import Adjacency, Budget, Observer, Plain, State
from dpfl.data.units import UnitKey, row_bytes, units_to_test
from dpfl.deploy.asking import Uploads
from dpfl.deploy.client_app import make_app
from dpfl.deploy.coordinator import Coordinator
from dpfl.deploy.example import pin_identities
from dpfl.deploy.in_process_grid import InProcessGrid
from dpfl.deploy.records import UNITS_KEY
from dpfl.deploy.site import Site
from dpfl.deploy.transport import Transport
from dpfl.plugs.base import Participant
from dpfl.privacy.events import History
from dpfl.rounds import Agreement, Plan, Run
from dpfl.rounds.record import RoundRecord
from dpfl.runs.deployment import STUDY_FILE, StudyFile
from dpfl.runs.site_file import SITE_FILE, SiteFile
from dpfl.strategy import Strategy
from dpfl.strategy.method import Method

LONG = 10.0
OWN_RECORDS = 5
"""Records of a site with one canary, and of one without any; a fifth is set aside for testing."""

_RECORDS, _SERVER = "records.csv", "server"


@dataclass(frozen=True, kw_only=True)
class CanarySites:
    """A study in a ``folder`` that holds nothing else, with a folder for each of its sites.

    ``promise`` is that of the method. ``victims`` and ``fillers`` are the names of sites with
    canaries, whose budget is ``budget``, and without, who have half as much again: some methods
    need claims that differ.
    """

    folder: Path
    study: StudyFile
    promise: Promise
    victims: Sequence[str]
    fillers: Sequence[str]
    budget: Budget

    @property
    def names(self) -> list[str]:
        """The sites of the study, those with canaries first."""
        return [*self.victims, *self.fillers]

    @property
    def server(self) -> Path:
        """The server's folder."""
        return self.folder / _SERVER

    def write(self, marks: Floats, directions: np.ndarray) -> None:
        """Write all folders; ``marks`` has a row for each victim, a number for each canary of it.

        1 and -1 are a canary in its direction, or the opposite one, 0 is none. Where clients are
        protected, the only canary of a victim is all of its records.
        """
        self.server.mkdir()
        (self.server / STUDY_FILE).write_text(self.study.to_toml())
        size = self.study.study.feature_shape[0]
        own = np.split(directions, len(marks))
        for name, mark, direction in zip(self.victims, marks, own, strict=True):
            self._write_site(name, self.budget.epsilon)
            rows = max(OWN_RECORDS, -(-5 * len(mark) // 4))
            features = np.zeros((rows, size))
            if self.promise.unit.of_data:
                features[: len(mark)][np.arange(len(mark)), direction] = LONG * mark
                self._make_trained(name, features)
            else:
                features[:, direction] = LONG * mark
            self._write_records(name, features)
        for name in self.fillers:
            self._write_site(name, 1.5 * self.budget.epsilon)
            self._write_records(name, np.zeros((OWN_RECORDS, size)))
        if self.study.secure_sum is not None:
            pin_identities([self.folder / name for name in self.names])

    def _write_site(self, name: str, epsilon: float) -> None:
        """Write the file of a site, and make its ledger and its keys."""
        own = self.folder / name
        own.mkdir()
        world = self.promise.observer is not Observer.SERVER
        about = {"unit": str(self.promise.unit), "observer": "world" if world else "server"}
        limits = {"epsilon": epsilon, "delta": self.budget.delta, "filter": "allotments"}
        accepted = {"trust_server": world, "allow_seeded": self.study.seeded}
        values: Plain = {
            "site": {"id": name},
            "data": {"file": _RECORDS, "classes": 2},
            "budget": {**limits, **about},
            "policy": {"least_noise_multiplier": 0.0, **accepted},
        }
        (own / SITE_FILE).write_text(SiteFile.from_dict(values).to_toml())
        self._write_key(name, UnitKey.of(PublicSeed(0).child(name)).value)
        Site(own).prepare()

    def _write_key(self, name: str, key: bytes) -> None:
        """Write the key under which a site marks its units: the same in every trial."""
        (self.folder / name / UNITS_KEY).write_text(key.hex())

    def _write_records(self, name: str, features: Floats) -> None:
        lines = [",".join([*(f"x{number}" for number in range(features.shape[1])), "label"])]
        lines += [",".join([*(f"{value:g}" for value in row), "0"]) for row in features.tolist()]
        (self.folder / name / _RECORDS).write_text("\n".join(lines) + "\n")

    def _make_trained(self, name: str, features: Floats) -> None:
        """Make a site's canaries longer, by thousandths, until it trains on all of them.

        Zeros alone are then tested on, whichever canaries are there. Where no length does it, the
        site gets another key.
        """
        key = Site(self.folder / name).units_key

        def hashes(rows: Floats) -> list[bytes]:
            records = row_bytes(rows.astype(np.float32), np.zeros(len(rows)))
            return key.hashes("split", key.marks(records))

        there = features.any(axis=1)
        largest = sorted(hashes(features[~there]))[units_to_test(len(features)) - 1]
        for row in np.flatnonzero(there):
            tries = features[row] * (1 + np.arange(100)[:, None] / 1000)
            fitting = [number for number, value in enumerate(hashes(tries)) if value > largest]
            if not fitting:
                self._write_key(name, key.hash("another"))
                return self._make_trained(name, features)
            features[row] = tries[fitting[0]]
        return None

    # -- what a victim says afterwards -------------------------------------------------------------

    def participant(self, name: str) -> Participant:
        """A site with its budget, as noise is planned for it."""
        return Site(self.folder / name).member().participant

    def histories(self, name: str) -> dict[Observer, History]:
        """What a site's own ledger was charged against every adversary that it was planned for."""
        with closing(Site(self.folder / name).ledger(reading=True)) as ledger:
            return {one: ledger.history(name, one) for one in ledger.observers(name)}


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
