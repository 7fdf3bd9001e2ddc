"""Other processes: whether they live, ending with them, and starting some that leave Ctrl-C to
us.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path


def alive(process: int) -> bool:
    """Whether a process is running; one that has ended and that nobody has asked about yet is
    not.
    """
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return not Path(
            "/proc/self/stat"
        ).exists()  # where there is no /proc, the signal has answered


def noted_process(path: Path) -> int | None:
    """The process that wrote its id there, if it is still running."""
    try:
        process = int(path.read_text())
    except (OSError, ValueError):
        return None
    return process if process > 0 and alive(process) else None


def end_with(process: int) -> None:
    """End this process at once when another ends, as a kill would: what we do can be resumed."""

    def follow() -> None:
        while alive(process):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def ctrl_c_held() -> Iterator[None]:
    """Hold Ctrl-C back while processes are started: they are deaf to it from birth, and we hear it
    afterwards.
    """
    resource_tracker.ensure_running()  # starting it would let Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_ctrl_c() -> None:
    """In a process that was started under ``ctrl_c_held``: leave Ctrl-C to whoever started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
