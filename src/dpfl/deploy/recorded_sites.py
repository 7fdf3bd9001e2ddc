"""Audit what real sites send: their folders, ledgers, policies and messages, in one process.

Three sites and a server are made in a temporary folder, with records that are canaries, and play a
study over the in-process grid: the code that answers is that of a deployed site, and what is
audited are the bytes of its answers. The claim is read from the site's own ledger. Nothing outside
that folder is touched, and no address is ever asked.

The model is a logistic regression. A canary is a record LONG e_j, whose gradient is clipped and
lies in the j-th weights of both classes; one that is not there is a record of zeros. That moves the
biases alone, which are not looked at: what is scored is no further apart than under zero-out.
"""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
from flwr.app import Message as FlowerMessage

from dpfl.attacks.audit_plan import TESTS, Audit, check_audited
from dpfl.attacks.audit_result import AuditLine
from dpfl.attacks.claims import Claim
from dpfl.attacks.lower_bounds import Trials, canary_bounds
from dpfl.attacks.probes import Floats
from dpfl.attacks.support import NOT_RUN
from dpfl.core.checks import check
from dpfl.core.types import Adjacency, Observer, Plain
from dpfl.deploy.coordinator import Coordinator
from dpfl.deploy.in_process_grid import InProcessGrid
from dpfl.deploy.messages import TRAIN, Message
from dpfl.deploy.site import Site
from dpfl.deploy.transport import Transport, from_record
from dpfl.rounds.codec import FRAME_BYTES
from dpfl.runs.deployment import STUDY_FILE, StudyFile
from dpfl.runs.site_file import SITE_FILE, SiteFile
from dpfl.strategy.method import Method

VICTIM, SITES = "a", ("a", "b", "c")
ROWS = 200
"""Records of a site; a fifth is set aside for testing."""

LONG = 10.0


class RecordingGrid(InProcessGrid):
    """Keeps what the nodes have answered to questions about a round, in order."""

    def __init__(self, sites: dict[int, Path]) -> None:
        super().__init__(sites)
        self.sent: dict[int, list[Message]] = {node: [] for node in sites}

    def _reply(self, message: FlowerMessage, node: int) -> FlowerMessage:
        reply = super()._reply(message, node)
        if from_record(message.content).header.get("kind") == TRAIN and not reply.has_error():
            self.sent[node].append(from_record(reply.content))
        return reply


def audit_sites(method: Method, how: Audit) -> Iterator[AuditLine]:
    """Audit a method that protects records, by the messages of a site; a line for every reading."""
    strategy, where = check_audited(method, how), f"audit of '{method.name}' between sites"
    rows = strategy.channel.sees_rows and strategy.unit.of_data and not strategy.local.pooled
    problem, remedy = "no site sends a row that protects its records", "audit it without --sites"
    check(rows and method.model is None, where, problem, remedy)
    for reading in how.readings:
        yield _line(method, how, reading)


def _line(method: Method, how: Audit, reading: Adjacency) -> AuditLine:
    coins, found, claim = np.random.default_rng(how.coins), [], None
    for _ in range(-(-how.canaries // (ROWS * 4 // 5))):
        with tempfile.TemporaryDirectory(prefix="dpfl-audit-") as folder:
            trials, claim = _played(Path(folder), method, how, reading, coins)
            found.append(trials)
    assert claim is not None
    together = Trials(
        scores=np.concatenate([one.scores for one in found]),
        present=np.concatenate([one.present for one in found]),
    )
    return AuditLine(
        method=f"{method.name}, site",
        promise=claim.promise,
        reading=reading,
        delta=claim.delta,
        claimed=claim.epsilon(),
        bounds=tuple(canary_bounds(together, claim, 1 - (1 - how.confidence) / TESTS)),
        support=NOT_RUN,
    )


def _played(
    folder: Path, method: Method, how: Audit, reading: Adjacency, coins: np.random.Generator
) -> tuple[Trials, Claim]:
    """One study: what the victim's messages show of its canaries, and what its ledger claims."""
    present = coins.random(ROWS) < 0.5
    marks = np.where(present, 1.0, -1.0 if reading is Adjacency.REPLACE_ONE else 0.0)
    values = _study(method, how)
    for name in SITES:
        own = folder / name
        own.mkdir()
        factor = 1.0 if name == VICTIM else 1.5  # some methods need claims that differ
        _write_records(own, np.ones(ROWS) if name == VICTIM else np.zeros(ROWS))
        (own / SITE_FILE).write_text(SiteFile.from_dict(_site(name, how, factor)).to_toml())
        Site(own).prepare()
    trained = _trained_rows(folder / VICTIM)
    _write_records(folder / VICTIM, marks)
    server = folder / "server"
    server.mkdir()
    (server / STUDY_FILE).write_text(StudyFile.from_dict(values).to_toml())
    grid = RecordingGrid({number + 1: folder / name for number, name in enumerate(SITES)})
    with warnings.catch_warnings():  # all records of a site are in one step
        warnings.filterwarnings("ignore", "clipped sums were cut off", RuntimeWarning)
        Coordinator(server, Transport(grid)).begin()
    rounds = [_directions(message) for message in grid.sent[1] if message.accepted]
    check(bool(rounds), "audit", "the site answered no round", "look at its log")
    scores = np.sum(rounds, axis=0)[trained]
    site = Site(folder / VICTIM)
    with closing(site.ledger(reading=True)) as ledger:
        history = ledger.history(VICTIM, Observer.SERVER)
    promise = replace(method.build(how.settings_of(method)).promise, adjacency=reading)
    claim = Claim(history=history, adjacency=reading, delta=how.budget.delta, promise=promise)
    return Trials(scores=scores, present=present[trained]), claim


def _directions(message: Message) -> Floats:
    """What an upload shows of every direction: the difference of both classes' weights."""
    numbers = np.frombuffer(message.payload, "<f4", offset=FRAME_BYTES).astype(np.float64)
    first, second = numbers[: 2 * ROWS].reshape(2, ROWS)
    found: Floats = (first - second) / np.sqrt(2)
    return found


def _write_records(folder: Path, marks: Floats) -> None:
    """Write a CSV file whose row j is a canary in direction j, times its mark."""
    lines = [",".join([*(f"x{i}" for i in range(ROWS)), "label"])]
    for row, mark in enumerate(marks.tolist()):
        cells = ["0"] * ROWS
        cells[row] = f"{LONG * mark:g}"
        lines.append(",".join([*cells, str(int(row % ROWS == ROWS - 1))]))
    (folder / "records.csv").write_text("\n".join(lines) + "\n")


def _trained_rows(folder: Path) -> np.ndarray:
    """Which rows of the file the site trains on; the others it keeps for testing."""
    features = Site(folder).member().shard.features.numpy()
    found: np.ndarray = np.sort(features.argmax(axis=1))
    return found


def _site(name: str, how: Audit, factor: float) -> Plain:
    budget = {"epsilon": factor * how.budget.epsilon, "delta": how.budget.delta}
    return {
        "site": {"id": name},
        "data": {"file": "records.csv", "classes": 2},
        "budget": {**budget, "filter": "allotments"},
        "policy": {"least_noise_multiplier": 0.0},
    }


def _study(method: Method, how: Audit) -> Plain:
    times = {"round_timeout": 60.0, "enrol_timeout": 5.0}
    study = {"name": "audit", "sites": list(SITES), "feature_shape": [ROWS], "classes": 2}
    settings = {"name": method.name, **how.settings_of(method)}
    return {"study": study, "method": settings, "run": {"rounds": how.rounds, **times}}
