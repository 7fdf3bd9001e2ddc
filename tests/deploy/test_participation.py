"""Taking part, without a network: what a site does when its server comes, goes, or refuses it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Error, Message as FlowerMessage, MessageType
from flwr.supercore.task_identity import TaskIdentity

from dpfl.core.errors import DataError, DiskError, FolderError, PeerError
from dpfl.core.files import hold_folder
from dpfl.deploy import participation as module
from dpfl.deploy.fleet import NotTaken, ServerAway, StillConnected, pack, unpack
from dpfl.deploy.messages import SUM, Message
from dpfl.deploy.participation import Inbox, Participation, take_part
from dpfl.deploy.site import Site, answered
from dpfl.deploy.sum_phases import KEYS, SHARES, SURVIVORS, UNMASK
from dpfl.deploy.transport import from_record, to_record
from tests.deploy.federation import Desk, make_site, study_values


class Stop(BaseException):
    """Ends a site that would go on for ever."""


class Away(Exception):
    """What a script says where the server is away."""


def flower(message: Message) -> FlowerMessage:
    """A message as it comes from the network."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    made = FlowerMessage(to_record(message), dst_node_id=7, message_type=MessageType.TRAIN)
    made.metadata.__dict__["_message_id"] = f"message-{id(message)}"
    return made


class FakeFleet:
    """A connection that plays a script: messages, None for silence, or an error to raise."""

    script: list[Any]
    events: list[str]
    still_connected: int = 0
    not_taken: bool = False

    def __init__(self, address: str, certificate: Path | None, key: Path | None) -> None:
        self.pushed: list[FlowerMessage] = []

    def __enter__(self) -> "FakeFleet":
        return self

    def __exit__(self, *_: object) -> None:
        self.events.append("left")

    def connect(self) -> int:
        if type(self).still_connected > 0:
            type(self).still_connected -= 1
            raise StillConnected
        self.events.append("connected")
        return 7

    def disconnect(self, node: int) -> None:
        self.events.append(f"disconnected {node}")
        type(self).still_connected = 0

    def pull(self) -> FlowerMessage | None:
        if not self.script:
            raise Stop
        said = self.script.pop(0)
        if isinstance(said, BaseException):
            raise said
        return said  # type: ignore[no-any-return]

    def confirm(self, message: FlowerMessage) -> None:
        self.events.append("confirmed")

    def push(self, reply: FlowerMessage) -> None:
        if self.not_taken:
            raise NotTaken("it answered 500")
        answer = from_record(reply.content)
        self.events.append(f"pushed {answer.accepted}")
        replies.append(answer)


replies: list[Message] = []


@pytest.fixture
def play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[list[str], list[str]]]:
    """Run a site in this process against a script; returns what happened and what was told."""
    site = make_site(tmp_path / "a", "a")
    monkeypatch.setattr(module, "Fleet", FakeFleet)
    monkeypatch.setattr(module, "check_server", lambda *_: None)
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    monkeypatch.setattr(
        module.Worker, "answer", lambda self, asked, tell: answered(site.folder, asked)
    )
    replies.clear()

    def run(*script: Any, still_connected: int = 0) -> tuple[list[str], list[str]]:
        FakeFleet.script, FakeFleet.events = list(script), []
        FakeFleet.still_connected = still_connected
        told: list[str] = []
        with pytest.raises(Stop):
            Participation(site, told.append).run("127.0.0.1:1", None, None)
        return FakeFleet.events, told

    return run


def test_messages_are_kept_before_they_are_confirmed_and_answered_in_order(
    play: Any, tmp_path: Path
) -> None:
    desk = Desk(study_values())
    events, told = play(None, flower(desk.hello()), None, flower(desk.terms()))
    assert events == ["connected", *["confirmed", "pushed True"] * 2, "left"]
    assert sum("answered" in line for line in told) == 2
    assert any("bytes" in line for line in told)
    assert not (tmp_path / "a" / "inbox.bin").exists()
    assert not (tmp_path / "a" / "connected.json").exists()


def kept(folder: Path, message: FlowerMessage, server: str = "127.0.0.1:1 ") -> None:
    inbox = Inbox(folder / "inbox.bin")
    inbox.server = server
    inbox.keep(message)


def test_a_message_of_another_server_is_not_answered_to_this_one(play: Any, tmp_path: Path) -> None:
    """What a site works out for one server is not for the next that it is connected to."""
    kept(tmp_path / "a", flower(Desk(study_values()).hello()), "other:1 ")
    events, told = play(None)
    assert events == ["connected", "left"]
    assert any("another address or certificate" in line for line in told)
    assert not (tmp_path / "a" / "inbox.bin").exists()
    assert not (tmp_path / "a" / "sent.jsonl").exists()


def test_a_message_that_nobody_waits_for_any_more_costs_nothing(play: Any, tmp_path: Path) -> None:
    message = flower(Desk(study_values()).hello())
    message.metadata.__dict__["_created_at"] -= message.metadata.ttl + 1
    kept(tmp_path / "a", message)
    events, told = play(None)
    assert events == ["connected", "left"]
    assert any("does not wait" in line for line in told)


@pytest.mark.parametrize("content", [b"", b"garbage", b"127.0.0.1:1 \ngarbage", b"\n\n"])
def test_a_damaged_inbox_stops_no_site(content: bytes, play: Any, tmp_path: Path) -> None:
    (tmp_path / "a" / "inbox.bin").write_bytes(content)
    events, told = play(flower(Desk(study_values()).hello()))
    assert events == ["connected", "confirmed", "pushed True", "left"]
    assert any("is not answered" in line for line in told)


def test_a_worker_that_cannot_live_is_refused_without_details_and_logged(
    play: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object) -> Message:
        raise DataError("worker process", "ended 4 times", f"see {tmp_path}")

    monkeypatch.setattr(module.Worker, "answer", dies)
    events, _ = play(flower(Desk(study_values()).hello()))
    assert events == ["connected", "confirmed", "pushed False", "left"]
    assert str(tmp_path) not in replies[0].reason
    assert len((tmp_path / "a" / "sent.jsonl").read_text().splitlines()) == 1
    assert "ended 4 times" in (tmp_path / "a" / "site.log").read_text()


def test_a_message_that_was_kept_when_the_site_was_killed_is_answered_first(
    play: Any, tmp_path: Path
) -> None:
    message = flower(Desk(study_values()).hello())
    kept(tmp_path / "a", message)
    assert unpack(pack(message)).metadata.message_id == message.metadata.message_id
    events, _ = play(None)
    assert events == ["connected", "pushed True", "left"]
    assert not (tmp_path / "a" / "inbox.bin").exists()


def test_an_answer_that_a_restarted_server_does_not_take_is_dropped(
    play: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept, it would be sent for ever, and the site would never hear the next question."""
    message = flower(Desk(study_values()).hello())
    kept(tmp_path / "a", message)
    monkeypatch.setattr(FakeFleet, "not_taken", True)
    events, told = play(None)
    assert events == ["connected", "left"]
    assert any("did not take this answer" in line for line in told)
    assert not (tmp_path / "a" / "inbox.bin").exists()


def test_a_refusal_is_shown_on_the_site_s_own_screen(play: Any) -> None:
    desk = Desk(study_values(sites=["b", "c"]))
    _, told = play(flower(desk.hello()))
    assert any("refused" in line and "is not named in the study" in line for line in told)


@pytest.mark.parametrize("phase", [KEYS, SHARES, SURVIVORS, UNMASK, "<b>"])
def test_a_phase_of_a_secure_sum_is_named_on_the_screen(play: Any, phase: str) -> None:
    header = {**Desk(study_values()).terms().header, "kind": SUM, "round": 1, "phase": phase}
    _, told = play(flower(Message(header=header)))
    named = [line for line in told if line.startswith("Round 2, secure sum, ")]
    assert len(named) == 1
    assert ("a phase" in named[0]) == (phase == "<b>")


def test_a_site_connects_again_when_its_server_was_away(play: Any) -> None:
    desk = Desk(study_values())
    events, told = play(ServerAway("it answered 401"), flower(desk.hello()))
    assert events == ["connected", "left", "connected", "confirmed", "pushed True", "left"]
    assert sum("went away" in line for line in told) == 1


def test_an_earlier_connection_of_this_very_folder_is_ended_at_once(
    play: Any, tmp_path: Path
) -> None:
    own = module._identity(tmp_path / "a")
    noted = {"node": 5, "folder": own}
    (tmp_path / "a" / "connected.json").write_text(json.dumps(noted))
    events, _ = play(None, still_connected=1)
    assert events == ["disconnected 5", "connected", "left"]


def test_a_copy_of_the_folder_waits_and_is_refused_while_the_other_is_connected(
    play: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = {"node": 5, "folder": ["another machine", 1, 2]}
    (tmp_path / "a" / "connected.json").write_text(json.dumps(noted))
    events, told = play(None, still_connected=3)
    assert events == ["connected", "left"]  # the other one was gone after a while
    assert any("earlier connection" in line for line in told)
    now = iter(range(0, 10_000, 20))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(now)))
    FakeFleet.still_connected, FakeFleet.script = 100, []
    with pytest.raises(PeerError, match="copy of a site's folder"):
        Participation(make_site(tmp_path / "b", "b"), told.append).run("127.0.0.1:1", None, None)


def test_what_is_no_message_of_dpfl_is_refused_and_the_site_goes_on(play: Any) -> None:
    garbage = flower(Message(header={}))
    garbage.content.config_records.clear()
    events, _ = play(garbage, flower(Desk(study_values()).hello()))
    assert events == ["connected", "confirmed", "pushed False", "confirmed", "pushed True", "left"]


def test_a_folder_that_is_in_use_or_lacks_its_ledger_is_refused(tmp_path: Path) -> None:
    site = make_site(tmp_path / "a", "a")
    with hold_folder(site.folder), pytest.raises(FolderError, match="in use"):
        take_part(site.folder, print, insecure=True)


def test_a_message_without_content_is_refused_and_the_site_goes_on(play: Any) -> None:
    """Kept in the folder, it would end the site again at every start."""
    empty = FlowerMessage(Error(code=1, reason="none"), reply_to=flower(Message(header={})))
    empty.metadata.__dict__["_message_id"] = "empty"
    events, _ = play(empty, flower(Desk(study_values()).hello()))
    assert events == ["connected", "confirmed", "pushed False", "confirmed", "pushed True", "left"]


def test_a_refusal_is_said_again_after_something_was_answered(play: Any) -> None:
    desk, other = Desk(study_values()), Desk(study_values(sites=["b", "c"]))
    messages = (other.hello(), other.hello(), desk.hello(), other.hello())
    _, told = play(*map(flower, messages))
    assert sum("is not named in the study" in line for line in told) == 2


def test_a_full_disk_ends_the_site_and_loses_no_message(
    play: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Message:
        raise DiskError("sent.jsonl", "cannot be written", "free some space")

    monkeypatch.setattr(module.Worker, "answer", full)
    FakeFleet.script, FakeFleet.events = [flower(Desk(study_values()).hello())], []
    with pytest.raises(DiskError):
        Participation(Site(tmp_path / "a"), print).run("127.0.0.1:1", None, None)
    assert (tmp_path / "a" / "inbox.bin").exists()
    assert FakeFleet.events == ["connected", "confirmed", "left"]


def test_a_site_that_waits_has_no_torch_in_memory() -> None:
    program = "import sys, dpfl.deploy.participation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
