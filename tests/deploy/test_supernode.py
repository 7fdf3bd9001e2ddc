"""A SuperNode ends when its main thread ends, and a second signal does not stop it from ending."""

from __future__ import annotations

import subprocess
import sys

import pytest

START = (
    "import os, signal, sys, threading, time; from dpfl.deploy.supernode import exit_with_server\n"
)
HOLD = (
    "    threading.Thread(target=time.sleep, args=(60,)).start()\n"  # would keep any process alive
)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("return", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('why')", 1),
        ("raise KeyboardInterrupt", 1),
        ("raise ValueError('why')", 1),
    ],
)
def test_the_end_of_the_main_thread_is_the_end(ending: str, code: int) -> None:
    program = f"{START}def main():\n{HOLD}    {ending}\nexit_with_server(main)\n"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == code
    assert ("ValueError: why" in done.stderr) == ("ValueError" in ending)


def test_a_second_signal_does_not_strike_into_the_end() -> None:
    program = f"""{START}
def main():
    def first(number, frame):
        signal.signal(signal.SIGINT, before)  # as Flower does, before it has arranged for its end
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        sys.exit(7)
    before = signal.signal(signal.SIGINT, first)
{HOLD}
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
exit_with_server(main)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (7, "")


def test_flower_s_own_program_is_what_runs() -> None:
    command = [sys.executable, "-m", "dpfl.deploy.supernode", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "flower-supernode" in done.stdout
    assert "--superlink" in done.stdout
