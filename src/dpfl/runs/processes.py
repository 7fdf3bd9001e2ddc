"""Other processes: whether they run, how to end with them, and who handles Ctrl-C."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path


def alive(process: int) -> bool:
    """Whether a process is running. A zombie, which has ended and was not waited for, is not.

    >>> alive(os.getpid())
    True
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
        return not Path("/proc/self/stat").exists()  # without /proc the signal has answered


def end_with(process: int) -> None:
    """End this process at once when another one ends.

    It ends as by a kill: only work that can be resumed may be done in it.
    """

    def follow() -> None:
        while alive(process):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def ctrl_c_held() -> Iterator[None]:
    """Hold Ctrl-C back while processes are started.

    They inherit the blocked signal, so that it reaches none of them before :func:`ignore_ctrl_c`.
    This process gets it afterwards.
    """
    resource_tracker.ensure_running()  # starting it would let Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_ctrl_c() -> None:
    """Leave Ctrl-C to the parent, in a process that was started under :func:`ctrl_c_held`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
