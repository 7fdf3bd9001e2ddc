"""The harness itself: it must notice every way in which a door can be broken."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings

from dpfl.core.errors import DataError, DpflError, Interrupted
from tests.audited import unheard
from tests.fuzz import doors
from tests.fuzz.doors import CURRENT, GIVEN, OUTSIDE, enter
from tests.fuzz.mutations import altered, as_json, as_toml, damaged


def _refuses() -> None:
    raise DataError("here", "it is wrong", "fix it")


def test_a_door_that_accepts_or_refuses_is_as_it_must_be() -> None:
    doors.COUNTS.pop("control", None)
    assert enter("control", lambda: (GIVEN / "x").write_text("inside")) == 6
    assert enter("control", _refuses) is None
    assert doors.COUNTS.pop("control") == {"accepted": 1, "refused": 1}


class Payload:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.path.join, ("a", "b")


def _hides_its_writing() -> None:
    try:
        (OUTSIDE / "x").write_text("x")
    except OSError as error:
        raise DataError("here", "it is wrong", "fix it") from error


def _forgives_everything() -> None:
    try:
        time.sleep(60)
    except Exception:
        return


BROKEN: dict[str, Callable[[], object]] = {
    "raises": lambda: {}["missing"],
    "an internal error": lambda: (_ for _ in ()).throw(DpflError("a", "b", "c")),
    "interrupted": lambda: (_ for _ in ()).throw(Interrupted("a", "b", "c")),
    "hangs": _forgives_everything,
    "takes memory": lambda: bytearray(8 << 30),
    "writes outside": lambda: (OUTSIDE / "x").write_text("x"),
    "writes outside, and refuses": _hides_its_writing,
    "writes by a relative path": lambda: Path("x").write_text("x"),
    "writes by a way around": lambda: (GIVEN / ".." / "x").write_text("x"),
    "overwrites": lambda: os.open(OUTSIDE / "canary.txt", os.O_RDWR),
    "removes": lambda: (OUTSIDE / "canary.txt").unlink(),
    "moves": lambda: (OUTSIDE / "canary.txt").rename(GIVEN / "canary.txt"),
    "makes a folder": lambda: (CURRENT / "x").mkdir(),
    "reads pickle": lambda: pickle.loads(pickle.dumps(Payload())),
    "runs something": lambda: subprocess.run(["true"], check=True),
}


READING: dict[str, Callable[[], object]] = {
    "reads elsewhere": lambda: (OUTSIDE / "canary.txt").read_text(),
    "looks into a folder": lambda: list(OUTSIDE.iterdir()),
    "opens a database": lambda: sqlite3.connect(OUTSIDE / "x.db"),
    "calls out": lambda: socket.create_connection(("127.0.0.1", 9)),
}


@pytest.mark.parametrize("kind", READING)
def test_a_message_that_makes_somebody_read_is_noticed(kind: str) -> None:
    with pytest.raises((AssertionError, OSError)):
        enter("control", READING[kind], peer=True)
    doors.COUNTS.pop("control", None)
    assert enter("control", lambda: list(GIVEN.iterdir()), peer=True) is not None
    doors.COUNTS.pop("control", None)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_door_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "LONGEST_SECONDS", 0.3)
    monkeypatch.chdir(CURRENT)
    with pytest.raises((AssertionError, KeyError, MemoryError, OSError)):
        enter("control", BROKEN[kind])
    doors.COUNTS.pop("control", None)
    assert (OUTSIDE / "canary.txt").read_text() == "precious"
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_what_no_hook_hears_of_is_seen_in_the_files() -> None:
    """SQLite opens files by itself."""
    code = f"open({str(OUTSIDE / 'canary.txt')!r}, 'a').write('x')"

    def writes() -> None:
        with unheard():
            subprocess.run([sys.executable, "-c", code], check=True)

    with pytest.raises(AssertionError, match="beside the given folder"):
        enter("control", writes)
    (OUTSIDE / "canary.txt").write_text("precious")
    doors.COUNTS.pop("control")


def test_a_command_that_ends_with_an_internal_error_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dpfl.cli.main._explained", lambda error: ("internal error", 1))
    with pytest.raises(AssertionError, match="exit code 1"):
        enter("control", doors.command("describe", GIVEN / "absent.toml"))
    monkeypatch.undo()
    assert enter("control", doors.command("describe", GIVEN / "absent.toml")) is None
    assert doors.COUNTS.pop("control") == {"refused": 1}


@given(altered({"a": {"b": [1, 2.5]}, "c": "text"}), damaged(b"some bytes"))
def test_what_is_altered_can_be_written(value: object, content: bytes) -> None:
    assert as_json(value)
    assert isinstance(as_toml(value), bytes)
    assert isinstance(content, bytes)


def test_a_door_that_breaks_at_one_value_in_many_is_found() -> None:
    """What mutation is for: one field, of one type, behind a structure that must be right."""

    @given(altered({"kind": "a", "settings": {"rounds": 3, "names": ["x", "y"]}}))
    def door(value: object) -> None:
        if isinstance(value, dict) and value.get("kind") == "a":
            rounds = value.get("settings", {})
            if isinstance(rounds, dict) and isinstance(rounds.get("rounds"), list):
                raise TypeError("not noticed by its author")

    with pytest.raises(TypeError):
        settings(max_examples=1000, database=None)(door)()
