"""Messages: what a site is asked, what a server is answered, and the bytes that both send."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch
from flwr.app import ConfigRecord, Message as FlowerMessage, RecordDict
from hypothesis import given, settings, strategies as st

import dpfl.core.errors
from dpfl.core.grid import Grid
from dpfl.core.types import Claims, Downlink
from dpfl.deploy.coordinator import Coordinator
from dpfl.deploy.fleet import pack
from dpfl.deploy.in_process_grid import InProcessGrid
from dpfl.deploy.messages import Introduction, Message, Reply, read_header, write_header
from dpfl.deploy.participation import Inbox, Unusable
from dpfl.deploy.records import Records
from dpfl.deploy.site import answered
from dpfl.deploy.site_folder import LOG
from dpfl.deploy.transport import RECORD, Transport, from_record, replied, to_record
from dpfl.privacy.site_ledger import SiteLedger
from dpfl.rounds import codec
from dpfl.runs.deployment import StudyFile
from dpfl.runs.experiment import Experiment
from tests.audited import unheard
from tests.fuzz import examples
from tests.fuzz.doors import GIVEN, enter, fresh
from tests.fuzz.mutations import PATHS, altered, as_json, damaged
from tests.fuzz.test_folders import change_file, tensors

few = settings(max_examples=max(settings.default.max_examples // 3, 1))
"""For doors behind which a whole study is played."""

# -- bytes -----------------------------------------------------------------------------------------

RUN, CLIENT, NUMBERS = "run", "a", torch.linspace(-1, 1, 10)
GRID = Grid(2.0**-10)
DOWNLOAD = codec.encode_download(
    Downlink(round=0, start=NUMBERS, shared={"weights": {"x": NUMBERS[:3].clone()}}, drawn=2)
)


@st.composite
def uploads(draw: Any, round_: int) -> tuple[bytes, Grid | None]:
    """An upload that was damaged, with a checksum that fits in half of the cases."""
    grid = draw(st.sampled_from([None, GRID]))
    whole = codec.encode_upload(NUMBERS, RUN, round_, CLIENT, grid)
    content = draw(damaged(whole))
    if len(content) >= codec.FRAME_BYTES and draw(st.booleans()):
        body = content[codec.FRAME_BYTES :]
        content = content[: codec.FRAME_BYTES - 4] + struct.pack("<I", zlib.crc32(body)) + body
    return content, grid


@given(st.data(), st.sampled_from([0, 3, -1]), st.sampled_from([None, 10]))
def test_uploads(data: st.DataObject, round_: int, length: int | None) -> None:
    payload, grid = data.draw(uploads(round_))
    enter(
        "upload", lambda: codec.decode_upload(payload, length, RUN, round_, CLIENT, grid), peer=True
    )
    enter(
        "upload of integers",
        lambda: codec.decode_integers(payload, length, RUN, round_, CLIENT),
        peer=True,
    )


@given(tensors(DOWNLOAD))
def test_downloads(payload: bytes) -> None:
    enter("download", lambda: codec.decode_download(payload, 10), peer=True)


# -- what a site is asked --------------------------------------------------------------------------


def keys_of_files() -> Iterator[tuple[str, str]]:
    """Every key of a section of an experiment or a study: a message may hold any of them."""
    for file in (Experiment, StudyFile):
        for name, field in file.model_fields.items():
            for kind in (field.annotation, *get_args(field.annotation)):
                yield from ((name, key) for key in getattr(kind, "model_fields", ()))


KEYS = sorted(set(keys_of_files()))


@st.composite
def messages(draw: Any, asked: list[examples.Asked]) -> examples.Asked:
    """A message of a server whose header was altered, or whose payload was damaged."""
    folder, message = draw(st.sampled_from(asked))
    header, payload = dict(message.header), message.payload
    kind = draw(st.sampled_from(["header", "header", "header", "name", "payload", "both"]))
    if kind == "name":
        (section, key), study = draw(st.sampled_from(KEYS)), header["study"]
        own = {**study.get(section, {}), key: draw(st.sampled_from(PATHS))}
        header["study"] = {**study, section: own}
    elif kind != "payload":
        told = draw(altered(header, header, header["study"]))
        header = told if isinstance(told, dict) else {"kind": told}
    if kind in ("payload", "both") and payload:
        is_tensors = payload[8:9] == b"{"
        payload = draw(tensors(payload) if is_tensors else damaged(payload))
    return folder, Message(header=read_back(header), payload=payload)


def read_back(header: Any) -> Any:
    """A header as it arrives; what no JSON can carry is sent as text."""
    return json.loads(as_json(header))


def site_answers(folder: Path, message: Message) -> Message:
    """Let a site answer; whatever it could not foresee is a broken door."""
    header = read_header(write_header(message.header))
    answer = answered(folder, Message(header=header, payload=message.payload), Records())
    if answer.header.get("code") == 1:  # what went wrong stays at the site
        line = (folder / LOG).read_text().splitlines()[-1].partition(" ")[2]
        known = getattr(dpfl.core.errors, line.partition(":")[0], None)
        assert known is not None and "failed in round" not in line, line
    SiteLedger.open(folder / "ledger.sqlite").close()
    from_record(to_record(answer))
    return answer


@given(st.data())
def test_requests(data: st.DataObject) -> None:
    folder, message = data.draw(messages(examples.plain_messages()))
    fresh(folder)
    enter("request to a site", lambda: site_answers(GIVEN, message), peer=True)


@given(st.data())
def test_requests_of_secure_sums(data: st.DataObject) -> None:
    folder, message = data.draw(messages(examples.sum_messages()))
    fresh(folder)
    enter("request of a secure sum", lambda: site_answers(GIVEN, message), peer=True)


@given(st.data())
def test_records_of_flower(data: st.DataObject) -> None:
    """Anything that Flower can carry, at a site."""
    folder, message = examples.plain_messages()[-1]
    header = write_header(message.header)
    value = st.one_of(st.integers(-9, 9), st.floats(), st.text(), st.binary(), st.booleans())
    text = st.one_of(st.just(header), damaged(header.encode()).map(lambda b: b.decode("latin-1")))
    record = {
        "header": data.draw(st.one_of(text, value)),
        "payload": data.draw(st.one_of(st.just(message.payload), value)),
    }
    name = data.draw(st.sampled_from([RECORD, RECORD, "x"]))
    fresh(folder)
    InProcessGrid({})  # which gives messages an identity
    sent = FlowerMessage(
        RecordDict({name: ConfigRecord(record)}), dst_node_id=1, message_type="train"
    )
    enter(
        "record of Flower",
        lambda: replied(sent, lambda asked: site_answers(GIVEN, asked)),
        peer=True,
    )


@given(st.data())
def test_inboxes(data: st.DataObject) -> None:
    _, message = examples.plain_messages()[-1]
    InProcessGrid({})
    sent = FlowerMessage(to_record(message), dst_node_id=1, message_type="train")
    inbox = Inbox(fresh() / "inbox.bin")
    inbox.keep(sent)
    inbox.path.write_bytes(data.draw(damaged(inbox.path.read_bytes(), b"\n" + pack(sent))))

    def door() -> None:
        try:
            found = inbox.read()
            if found is not None:
                replied(found, lambda asked: asked)
        except Unusable:
            pass

    enter("inbox", door)


# -- what a server is answered ---------------------------------------------------------------------

CLAIMS = Claims(epsilon=1.0, delta=1e-3, examples=10)
INTRODUCTION = Introduction(site="a", claims=CLAIMS, token="t", version="1").to_message().header


@given(
    altered(INTRODUCTION), st.one_of(st.just({"ok": False}), altered({"ok": True, "more": True}))
)
def test_introductions_and_replies(introduced: Any, answer: Any) -> None:
    told = read_back(introduced)
    if isinstance(told, dict):
        enter(
            "introduction",
            lambda: Introduction.from_header(read_header(write_header(told))),
            peer=True,
        )
    said = read_back(answer)
    enter(
        "reply",
        lambda: Reply.of(Message(header=read_header(as_json(said).decode()))).problem,
        peer=True,
    )


class Liar(InProcessGrid):
    """Changes the answers of the first site on their way."""

    def __init__(self, sites: dict[int, Path], data: st.DataObject) -> None:
        super().__init__(sites)
        self.at = data.draw(st.integers(0, 6), label="which answer")
        self.data, self.seen = data, 0
        self.faults[1] = self.lie

    def lie(self, message: FlowerMessage, answer: Any) -> FlowerMessage | None:
        reply, self.seen = answer(), self.seen + 1
        if self.seen != self.at + 1:
            return reply
        said = from_record(reply.content)
        payloads = st.one_of(st.just(said.payload), damaged(said.payload or b"x"))
        with unheard():  # hypothesis keeps tables in files of its own
            header = read_back(self.data.draw(altered(dict(said.header))))
            payload = self.data.draw(payloads)
        record = ConfigRecord({"header": as_json(header).decode(), "payload": payload})
        return FlowerMessage(RecordDict({RECORD: record}), reply_to=message)


def coordinated(folder: Path, grid: InProcessGrid) -> None:
    made = Coordinator(folder, Transport(grid))
    made.sites.transport.wait = lambda seconds: None  # type: ignore[method-assign]
    made.begin()


@few
@given(st.data())
def test_answers_of_sites(data: st.DataObject) -> None:
    folder = fresh(examples.started_federation())
    grid = Liar({1: folder / "a", 2: folder / "b"}, data)
    enter("answer of a site", lambda: coordinated(folder / "server", grid), peer=True)


@few
@given(st.data())
def test_answers_in_secure_sums(data: st.DataObject) -> None:
    folder = fresh(examples.started_sum())
    sites = {n + 1: folder / name for n, name in enumerate(("a", "b", "c"))}
    enter(
        "answer in a secure sum",
        lambda: coordinated(folder / "server", Liar(sites, data)),
        peer=True,
    )


@few
@given(st.data())
def test_folders_of_servers_that_go_on(data: st.DataObject) -> None:
    folder = fresh(examples.interrupted_federation())
    names = sorted(
        str(path.relative_to(folder / "server"))
        for path in (folder / "server").rglob("*")
        if path.is_file() and path.name != ".lock" and "ledger.sqlite" not in path.name
    )
    change_file(data, folder / "server" / data.draw(st.sampled_from(names)))
    grid = InProcessGrid({1: folder / "a", 2: folder / "b"})
    enter("folder of a server", lambda: coordinated(folder / "server", grid))
