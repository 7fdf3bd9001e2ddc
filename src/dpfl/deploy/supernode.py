"""A site's process: Flower's SuperNode, started, watched, and sure to end.

When a server restarts, two threads of a SuperNode may notice at once, and each asks the process to
end by the signal of Ctrl-C. In Flower 1.41 the second signal interrupts the ending, and leaves a
process that lives and does nothing: its site would be missing for good. Run as a program, this
module ignores the second signal, and the process ends with its main thread.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points

NAME = "flower-supernode"


def exit_with_server(main: Callable[[], object]) -> None:
    """Call a program's main function, and end the process with it, whatever its threads do."""
    # Flower falls back to this once it has begun to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
