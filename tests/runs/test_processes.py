"""Processes: who lives, who ends with whom, and who hears Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from dpfl.runs.processes import alive, ctrl_c_held


def _sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_a_process_that_has_ended_is_not_alive_even_before_anyone_asks() -> None:
    process = _sleeper()
    assert alive(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
    assert not alive(process.pid)
    process.wait()
    assert not alive(process.pid)
    assert alive(1)  # not ours, and there


def test_a_follower_ends_when_its_leader_is_killed() -> None:
    leader = _sleeper()
    code = f"from dpfl.runs.processes import end_with; import time; end_with({leader.pid}); print('on'); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE) as follower:
        try:
            assert follower.stdout is not None
            assert follower.stdout.readline() == b"on\n"
            time.sleep(1.2)
            assert follower.poll() is None
            leader.kill()  # and nobody asks how it ended
            assert follower.wait(timeout=15) == 1
        finally:
            follower.kill()
            leader.kill()
            leader.wait()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as usual, also where the tests themselves were started in the background, deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_is_held_back_not_lost_and_children_are_deaf_to_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        with ctrl_c_held():
            child = _sleeper()
            signal.raise_signal(signal.SIGINT)
            reached = True
        pytest.fail("Ctrl-C was lost")
    assert reached
    try:
        child.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
