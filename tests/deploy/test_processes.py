"""Processes that an earlier start has left: found by id and start, ended, or named."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpfl.core.errors import ConfigurationError, PeerError
from dpfl.deploy import processes
from dpfl.deploy.processes import Started, end_leftovers, note_process, noted_process, program
from dpfl.runs.processes import alive


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_a_noted_process_is_the_very_one(tmp_path: Path) -> None:
    note_process(tmp_path / "note", os.getpid())
    assert noted_process(tmp_path / "note") == os.getpid()
    pid, began = (tmp_path / "note").read_text().split()
    (tmp_path / "note").write_text(f"{pid} {int(began) + 1}\n")  # another that has the same id
    assert noted_process(tmp_path / "note") is None
    (tmp_path / "note").write_text("no process")
    assert noted_process(tmp_path / "note") is None
    assert noted_process(tmp_path / "absent") is None


@pytest.mark.parametrize("text", ["", "none", "-1", "0", "999999999", "1 x", "\x00"])
def test_a_note_that_names_no_process_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "note").write_text(text)
    assert noted_process(tmp_path / "note") is None
    assert noted_process(tmp_path / "absent") is None


def test_what_an_earlier_start_has_left_is_ended_and_named(tmp_path: Path) -> None:
    told: list[str] = []
    with sleeper() as left:
        note_process(tmp_path / "note", left.pid)
        end_leftovers({"the SuperLink": tmp_path / "note"}, told.append)
        assert left.wait(timeout=10) < 0
    assert len(told) == 1
    assert "the SuperLink" in told[0]
    assert str(left.pid) in told[0]
    assert not (tmp_path / "note").exists()


def test_another_process_under_a_noted_id_is_left_alone(tmp_path: Path) -> None:
    told: list[str] = []
    with sleeper() as other:
        (tmp_path / "note").write_text(f"{other.pid} 1\n")
        end_leftovers({"the SuperLink": tmp_path / "note"}, told.append)
        assert other.poll() is None
        other.kill()
    assert told == []


def test_one_that_cannot_be_ended_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note_process(tmp_path / "note", os.getpid())
    real = os.kill

    def refused(process: int, sign: int) -> None:
        if sign == 0:
            return real(process, sign)
        raise PermissionError

    monkeypatch.setattr(processes.os, "kill", refused)
    with pytest.raises(PeerError, match=rf"process {os.getpid()}.*another user"):
        end_leftovers({"the proxy": tmp_path / "note"}, lambda _: None)


def test_a_program_of_flower_s_ends_with_its_parent(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="pip install"):
        program("flower-nothing")
    started = f"""
import subprocess, sys, time
from dpfl.deploy.processes import program
child = subprocess.Popen([*program("flower-superlink"), "--insecure", "--host", "127.0.0.1",
                          "--port", "{processes.free_port()}"])
print(child.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", started], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(1)
        parent.kill()
        parent.wait()
        until = time.monotonic() + 60
        while alive(child) and time.monotonic() < until:
            time.sleep(0.2)
    assert not alive(child)


def test_nobody_is_sent_to_an_empty_log(tmp_path: Path) -> None:
    (tmp_path / "some.log").write_text("earlier\n")
    with sleeper() as process:
        one = Started(process=process, log=tmp_path / "some.log", began=8)
        assert "some.log" not in one.see
        (tmp_path / "some.log").write_text("earlier\nand now\n")
        assert "some.log" in one.see
        process.kill()
