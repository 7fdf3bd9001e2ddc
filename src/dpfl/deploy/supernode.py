"""Flower's SuperNode as a process that surely ends.

When a server was restarted, two threads of a SuperNode may find out at once, and each asks the
process to end by the signal of Ctrl-C. The second one strikes Flower 1.41 in the middle of its own
ending, and what is left is a process that lives and does nothing: its site would be missing for
good. Here the second one is not heard, and the end of the main thread is the end.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points

NAME = "flower-supernode"


def exit_with_server(main: Callable[[], object]) -> None:
    """Call a program's main function, and end the process with it, whatever its threads do. Never
    returns.
    """
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # what Flower falls back to once it has begun to end
    code = 1
    try:
        main()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)


if __name__ == "__main__":
    (found,) = entry_points(group="console_scripts", name=NAME)
    sys.argv[0] = NAME
    exit_with_server(found.load())
