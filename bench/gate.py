"""How a side talks to ``bench.run``: it waits before every round, so that the two sides take turns.
Standard library only.

One JSON object per line on stdout; everything else a side prints goes to stderr. ``{"event":
"ready"}`` asks for leave to start, a line on stdin gives it, ``{"event": "round", "seconds": ...}``
ends a round, ``{"event": "done", ...}`` the whole.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any


class Gate:
    """Keeps stdout for the protocol and times what happens between leave and end."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._began = 0.0

    def say(self, event: str, **values: Any) -> None:
        """Write one line of the protocol."""
        self._out.write(json.dumps({"event": event, **values}) + "\n")

    def wait(self) -> None:
        """Ask for leave to start a round, and start the clock when it is given."""
        self.say("ready")
        if not sys.stdin.readline():
            raise SystemExit("nobody waits for the result any more")
        self._began = time.perf_counter()

    def end_of_round(self) -> None:
        """Stop the clock."""
        self.say("round", seconds=time.perf_counter() - self._began)

    def done(self, packages: tuple[str, ...], **values: Any) -> None:
        """Say how much memory it took, and with which versions."""
        versions = {name: importlib.metadata.version(name) for name in packages}
        self.say(
            "done",
            peak_mib=peak_mib(),
            versions={"python": platform.python_version(), **versions},
            **values,
        )


def peak_mib() -> float:
    """Largest resident memory of this process; on Linux of this program alone, not of the one that
    started it.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest / (1024 * 1024 if sys.platform == "darwin" else 1024)


def spec() -> dict[str, Any]:
    """Return what this side was asked to do: the JSON document on its command line."""
    found: dict[str, Any] = json.loads(sys.argv[1])
    return found
