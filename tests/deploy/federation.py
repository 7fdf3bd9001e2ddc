"""Small federations for the tests of a deployment: sites in folders, a study, and the messages of
an honest server.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message as FlowerMessage, RecordDict

from dpfl.core.layout import Layout
from dpfl.core.types import Claims, Downlink, Observer
from dpfl.core.version import __version__
from dpfl.deploy.coordinator import Coordinator
from dpfl.deploy.in_process_grid import InProcessGrid
from dpfl.deploy.messages import Message, terms_to_dict
from dpfl.deploy.records import UNITS_KEY
from dpfl.deploy.requests import HELLO, TERMS, TRAIN
from dpfl.deploy.site import Site
from dpfl.deploy.transport import Transport, from_record, to_record
from dpfl.privacy.events import History
from dpfl.rounds import Agreement, buffer_shapes, enrol
from dpfl.rounds.codec import FRAME_BYTES, encode_download
from dpfl.runs.deployment import STUDY_FILE, StudyFile
from dpfl.runs.site_file import SiteFile

SITES = ("a", "b", "c")
FEATURES = 60
DELTA = 1e-2
# As in a simulation, whose ledger knows one study: its whole price is taken when it begins.
RECORD = {"epsilon": 4.0, "delta": DELTA, "filter": "allotments"}
CLIENT = {
    "epsilon": 4.0,
    "delta": DELTA,
    "unit": "client",
    "observer": "world",
    "filter": "allotments",
}
METHOD = {"lr": 0.1, "clip": 1.0, "batch_size": 8, "local_steps": 2}
SIGNER = "00" * 32  # the server's public key, where nothing is signed
ANSWERED_BY_HAND = 7  # any code


def write_csv(path: Path, seed: int = 0, records: int = 40, features: int = FEATURES) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(records, features)).round(3)
    x[:2, 0] = -1.0, 1.0  # both classes are there
    y = (x[:, 0] > 0).astype(int)
    path.parent.mkdir(parents=True, exist_ok=True)
    head = ",".join([*(f"x{i}" for i in range(features)), "ill"])
    lines = [
        ",".join([*map(str, row), str(label)])
        for row, label in zip(x.tolist(), y.tolist(), strict=True)
    ]
    path.write_text("\n".join([head, *lines]) + "\n")


def write_site_file(
    folder: Path,
    name: str,
    budget: Mapping[str, Any] | None = RECORD,
    policy: Mapping[str, Any] | None = None,
) -> None:
    trusting = budget is not None and budget.get("observer") == "world"
    own = {"least_noise_multiplier": 0.0, "trust_server": trusting, **(policy or {})}
    values = {
        "site": {"id": name},
        "data": {"file": "records.csv", "classes": 2},
        **({} if budget is None else {"budget": dict(budget)}),
        "policy": own,
    }
    (folder / "site.toml").write_text(SiteFile.from_dict(values).to_toml())


def make_site(
    folder: Path,
    name: str,
    budget: Mapping[str, Any] | None = RECORD,
    policy: Mapping[str, Any] | None = None,
) -> Site:
    write_csv(folder / "records.csv", seed=sum(map(ord, name)))
    write_site_file(folder, name, budget, policy)
    # Which records are tested on follows from the site's secret, and with it every score.
    (folder / UNITS_KEY).write_text(hashlib.sha256(name.encode()).hexdigest())
    site = Site(folder)
    site.prepare()
    return site


def study_values(
    method: str = "weiavg",
    rounds: int = 3,
    sites: Sequence[str] = SITES,
    run: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    settings = {**METHOD, **more}
    if method == "fedavg":
        settings.pop("clip", None)
    times = {"round_timeout": 20.0, "enrol_timeout": 2.0}
    return {
        "study": {"name": "demo", "sites": list(sites), "feature_shape": [FEATURES], "classes": 2},
        "method": {"name": method, **settings},
        "run": {"rounds": rounds, **times, **(run or {})},
    }


def make_server(folder: Path, values: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STUDY_FILE).write_text(StudyFile.from_dict(dict(values)).to_toml())
    return folder


@dataclass
class Desk:
    """An honest server's messages to a lone site; every number can be changed into a lie."""

    values: dict[str, Any]
    run: str = "run-1"
    epsilon: float = 4.0

    def study(self) -> StudyFile:
        return StudyFile.from_dict(self.values)

    def agreement(self) -> Agreement:
        study = self.study()
        claims = {
            site: Claims(epsilon=self.epsilon, delta=DELTA, examples=32)
            for site in study.study.sites
        }
        strategy, model = study.strategy(), study.build_model()
        shapes = buffer_shapes(model, strategy.releases)
        layout, measured = Layout.of_module(model), study.measurements()
        return enrol(strategy, claims, study.run.rounds, layout, shapes, measured)

    def header(self, kind: str, **more: Any) -> dict[str, Any]:
        return {
            "kind": kind,
            "dpfl": __version__,
            "study": self.study().offer(),
            "run": self.run,
            **more,
        }

    def hello(self, **more: Any) -> Message:
        return Message(header=self.header(HELLO, **more))

    def told(self, **lies: Any) -> dict[str, Any]:
        return {**terms_to_dict(self.agreement().terms), **lies}

    def terms(self, *, binding: bool = True, **lies: Any) -> Message:
        return Message(
            header=self.header(TERMS, terms=self.told(**lies), binding=binding, signer=SIGNER)
        )

    def download(self, round_: int, drawn: int | None = None) -> bytes:
        study = self.study()
        start = Layout.of_module(study.build_model()).read(study.build_model())
        drawn = len(study.study.sites) if drawn is None else drawn
        return encode_download(Downlink(round=round_, start=start, shared={}, drawn=drawn))

    def train(self, round_: int = 0, *, payload: bytes | None = None, **lies: Any) -> Message:
        payload = self.download(round_) if payload is None else payload
        return Message(
            header=self.header(TRAIN, terms=self.told(**lies), signer=SIGNER, round=round_),
            payload=payload,
        )


def upload_of(answer: Message, step: float = 1.0) -> torch.Tensor:
    """The numbers of an upload; where noise was added on a grid, multiples of its step."""
    on_grid = answer.payload[5] == 1
    kind = torch.int32 if on_grid else torch.float32
    numbers = torch.frombuffer(bytearray(answer.payload[FRAME_BYTES:]), dtype=kind)
    return numbers.double() * step if on_grid else numbers


def history_of(site: Site, observer: Observer) -> History:
    ledger = site.ledger()
    try:
        return ledger.history(site.id, observer)
    finally:
        ledger.close()


def charged(site: Site, observer: Observer = Observer.SERVER) -> set[int]:
    """Rounds that the site's ledger holds, over all runs."""
    ledger = site.ledger()
    try:
        return {round_ for run in ledger.titles() for round_, _ in ledger.charged(run, observer)}
    finally:
        ledger.close()


class WatchedGrid(InProcessGrid):
    """Keeps everything that went over it, as (site's folder name, message)."""

    def __init__(self, sites: Mapping[int, Path]) -> None:
        super().__init__(sites)
        self.heard: list[tuple[int, Message, Message]] = []  # node, question, answer
        self.names: dict[str, tuple[int, Message]] = {}

    def push_messages(self, messages: Iterable[FlowerMessage]) -> list[str]:
        kept = list(messages)
        ids = super().push_messages(kept)
        for name, message in zip(ids, kept, strict=True):
            self.names[name] = (message.metadata.dst_node_id, from_record(message.content))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[FlowerMessage]:
        found = super().pull_messages(message_ids)
        for reply in found:
            if not reply.has_error() and reply.metadata.reply_to_message_id in self.names:
                node, question = self.names[reply.metadata.reply_to_message_id]
                try:
                    self.heard.append((node, question, from_record(reply.content)))
                except Exception:
                    continue
        return found

    def asked_to_train(self) -> list[tuple[int, int]]:
        """(node, round) of every round that was asked for."""
        messages = [(m.metadata.dst_node_id, from_record(m.content)) for m in self.asked]
        return [
            (node, message.header["round"])
            for node, message in messages
            if message.header["kind"] == TRAIN
        ]


@dataclass
class Federation:
    """Sites a, b, c and a server in one folder, on the in-process grid."""

    base: Path
    server: Path
    grid: WatchedGrid
    sites: dict[str, Site] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        base: Path,
        values: Mapping[str, Any],
        budget: Mapping[str, Any] | None = RECORD,
        policy: Mapping[str, Any] | None = None,
        budgets: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Federation:
        names = values["study"]["sites"]
        sites = {
            name: make_site(base / name, name, (budgets or {}).get(name, budget), policy)
            for name in names
        }
        grid = WatchedGrid({number + 1: base / name for number, name in enumerate(names)})
        return cls(base=base, server=make_server(base / "server", values), grid=grid, sites=sites)

    def coordinator(self, grid: InProcessGrid | None = None) -> Coordinator:
        made = Coordinator(self.server, Transport(grid or self.grid))
        made.sites.transport.wait = lambda seconds: None  # type: ignore[method-assign]
        return made

    def play(self) -> dict[str, Any]:
        self.coordinator().begin()
        return self.summary()

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.server / "summary.json").read_text())
        return found

    def lines(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (self.server / "rounds.jsonl").read_text().splitlines()
        ]


def kind_of(message: FlowerMessage) -> str:
    return str(from_record(message.content).header["kind"])


def round_of(message: FlowerMessage) -> int:
    return int(from_record(message.content).header["round"])


def reply_with(
    message: FlowerMessage, header: Mapping[str, Any], payload: bytes = b""
) -> FlowerMessage:
    return FlowerMessage(to_record(Message(header=header, payload=payload)), reply_to=message)


def changed(
    reply: FlowerMessage, message: FlowerMessage, change: Callable[[Message], Message]
) -> FlowerMessage:
    """The site's own answer, changed on the way."""
    return FlowerMessage(to_record(change(from_record(reply.content))), reply_to=message)


def empty(message: FlowerMessage) -> FlowerMessage:
    return FlowerMessage(RecordDict({}), reply_to=message)
