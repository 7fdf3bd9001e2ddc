"""The processes that a benchmark measures: each waits before every round until it is told to go, so
that several take turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

ROOT = Path(__file__).resolve().parent.parent
_CPUCLOCK_SCHED = (
    2  # Linux: the clock of process N is (~N << 3) | 2, as clock_getcpuclockid(3) makes it
)
PATIENCE = 1800.0  # seconds without a word after which a side is given up


class SideFailed(Exception):
    """A side ended, or fell silent, before it had said all it should."""


def progress(text: str) -> None:
    """Tell whoever waits, on stderr."""
    print(text, file=sys.stderr, flush=True)


def last_line(text: str) -> str:
    """The last line that says something; the whole machine is left out of what goes into results."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error" in line]
    found = (errors or lines or ["it gave no reason"])[-1]
    return found.replace(str(ROOT), ".")[:300]


def environment(folder: Path, roots: Sequence[Path]) -> dict[str, str]:
    """The variables of a side: its own cache, one thread, and the kernels that the processor would
    get anywhere (``OPENBLAS_*`` may hold one side back and not the other).
    """
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")
    }
    inherited.pop("PYTHONDONTWRITEBYTECODE", None)
    # What was worked out earlier does not help.
    cache = tempfile.mkdtemp(prefix="cache-", dir=folder)
    return inherited | {
        "PYTHONPATH": os.pathsep.join(str(part) for root in roots for part in (root, root / "src")),
        "PYTHONHASHSEED": "0",
        "DPFL_CACHE": cache,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_HOME": str(folder / "flwr"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
    }


class Side:
    """One script in its own process. It waits before every round until it is told to go."""

    alive: ClassVar[set[Side]] = set()
    over: ClassVar[bool] = False  # the whole run was interrupted: nothing more is started

    def __init__(
        self,
        name: str,
        script: str,
        python: Path | str,
        asked: dict[str, Any],
        folder: Path,
        roots: Sequence[Path] = (ROOT,),
    ) -> None:
        if Side.over:
            raise SideFailed("the run was interrupted")
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []
        self.peak_of_all = 0.0
        self._error_file = folder / f"{name}.stderr"
        self._errors = self._error_file.open("w")
        self._process = subprocess.Popen(
            [str(python), "-m", script, json.dumps(asked)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env=environment(folder, roots), cwd=roots[0], start_new_session=True,
        )  # fmt: skip
        Side.alive.add(self)
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()

    def _listen(self, stdout: IO[str]) -> None:
        for line in stdout:
            self._lines.put(line)
        self._lines.put(None)

    def next(self, patience: float = PATIENCE) -> dict[str, Any]:
        """Return the next thing it says."""
        try:
            line = self._lines.get(timeout=max(patience, 0.01))
        except queue.Empty:
            self.stop()
            raise SideFailed(f"it was given up after {patience:.0f} s") from None
        if line is None:
            self._process.wait()
            why = last_line(self._error_file.read_text(errors="replace"))
            raise SideFailed(f"it ended with code {self._process.returncode}: {why}")
        found: dict[str, Any] = json.loads(line)
        return found

    def expect(self, event: str) -> dict[str, Any]:
        """Return the next thing it says, which must be this."""
        said = self.next()
        if said["event"] != event:
            raise SideFailed(f"it said '{said['event']}' where '{event}' was due")
        return said

    def go(self) -> None:
        """Give it leave to start a round."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def round(self, *, watch: bool) -> float:
        """Let it play a round and return the seconds it took; ``watch`` adds up the memory of all
        its processes.
        """
        self.expect("ready")
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(over,), daemon=True)
        if watch:
            watcher.start()
        before = processor_seconds(self._process.pid)
        self.go()
        try:
            self.seconds.append(self.expect("round")["seconds"])
        finally:
            over.set()
        self.processor_seconds.append(processor_seconds(self._process.pid) - before)
        return self.seconds[-1]

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(0.5):
            self.peak_of_all = max(self.peak_of_all, memory_of_tree(self._process.pid))

    def finish(self) -> dict[str, Any]:
        """Let it come to its end; return what it says of itself."""
        while (said := self.next())["event"] != "done":
            if said["event"] == "ready":
                self.go()
        self._process.wait(timeout=120)
        return said

    def stop(self) -> None:
        """End it and what it has started, if it still runs."""
        Side.alive.discard(self)
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._errors.close()


def tree_of(root: int) -> set[int]:
    """A process and all its descendants, by their ids; the process alone where there is no /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            parents[int(entry.name)] = int(
                (entry / "stat").read_text().rpartition(")")[2].split()[1]
            )
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def memory_of_tree(root: int) -> float:
    """Memory of a process and all its descendants in MiB, shared pages counted once; 0 where /proc
    has none.
    """
    total = 0
    for pid in tree_of(root):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def processor_seconds(root: int) -> float:
    """Processor time of a process and its descendants that are still there; 0 where it cannot be
    read.
    """
    total = 0.0
    for pid in tree_of(root):
        with contextlib.suppress(OSError):
            total += time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
    return total


@contextlib.contextmanager
def ended(*sides: Side) -> Iterator[None]:
    """See to it that no side outlives its measurement."""
    try:
        yield
    finally:
        for side in sides:
            side.stop()
