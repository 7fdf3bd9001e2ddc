"""Run the workloads, ours and the peers' in turns, and say how they compare. ``make bench`` starts
it.

The peers live in virtual environments of their own under ``bench/.venvs``, made once; remove that
folder to make them anew. Results go to stdout, progress to stderr, and numbers to
``bench/results/latest.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
from rich.console import Console

from bench.table import (
    WIDTH,
    agreement,
    comparison,
    growth,
    median_after_warm_up,
    mismatched,
    ratio,
    relative_error,
)
from bench.workloads import KEYS, SCALE, Workload, workload, write_data

HERE = Path(__file__).resolve().parent
LATEST = HERE / "results" / "latest.json"
SCRIPTS = {
    "ours": "bench.ours",
    "opacus": "bench.peers.opacus_round",
    "pfl": "bench.peers.pfl_round",
    "flower": "bench.peers.flower_opacus",
}
PEER_NAMES = {"opacus": "Opacus", "pfl": "pfl", "flower": "Flower"}
PATIENCE = 1800.0  # seconds without a word after which a side is given up


class SideFailed(Exception):
    """A side ended, or fell silent, before it had said all it should."""


def progress(text: str) -> None:
    """Tell whoever waits, on stderr."""
    print(text, file=sys.stderr, flush=True)


# -- environments ----------------------------------------------------------------------------------


def python_of(peer: str) -> Path:
    """Return the interpreter of a peer's environment, which is made if it is not there."""
    place = HERE / ".venvs" / peer
    python, stamp = place / "bin" / "python", place / ".set-up"
    wanted = (HERE / f"requirements-{peer}.txt").read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    progress(f"making the environment of {PEER_NAMES[peer]} (once; some minutes)")
    torch = next(line for line in wanted.splitlines() if line.startswith("torch=="))
    index = os.environ.get("TORCH_INDEX")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    commands = [
        *([] if python.exists() else [[sys.executable, "-m", "venv", str(place)]]),
        [*pip, *(["--index-url", index] if index else []), torch],
        [*pip, "-r", str(HERE / f"requirements-{peer}.txt")],
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise SideFailed(f"its environment could not be made: {_last_line(done.stderr)}")
    stamp.write_text(wanted)
    return python


def _last_line(text: str) -> str:
    """The last line that says something; the whole machine is left out of what goes into results."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error" in line]
    found = (errors or lines or ["it gave no reason"])[-1]
    return found.replace(str(HERE.parent), ".")[:300]


# -- sides -----------------------------------------------------------------------------------------


class Side:
    """One script in its own process. It waits before every round until it is told to go."""

    alive: ClassVar[set[Side]] = set()
    over: ClassVar[bool] = False  # the whole run was interrupted: nothing more is started

    def __init__(self, name: str, python: Path | str, asked: dict[str, Any], folder: Path) -> None:
        if Side.over:
            raise SideFailed("the run was interrupted")
        self.seconds: list[float] = []
        self.peak_of_all = 0.0
        self._error_file = folder / f"{name}.stderr"
        self._errors = self._error_file.open("w")
        environment = {
            **os.environ,
            "PYTHONPATH": str(HERE.parent),
            "DPFL_CACHE": tempfile.mkdtemp(
                prefix="cache-", dir=folder
            ),  # what was worked out earlier does not help
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_HOME": str(folder / "flwr"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DISABLE_IMPORT_WARNING": "1",
        }
        self._process = subprocess.Popen(
            [str(python), "-m", SCRIPTS[name.split()[0]], json.dumps(asked)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment,
            cwd=HERE.parent, start_new_session=True,
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
            why = _last_line(self._error_file.read_text(errors="replace"))
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
        self.go()
        try:
            self.seconds.append(self.expect("round")["seconds"])
        finally:
            over.set()
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


def memory_of_tree(root: int) -> float:
    """Memory of a process and all its descendants in MiB, shared pages counted once; 0 where /proc
    has none.
    """
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            parents[int(entry.name)] = int(
                (entry / "stat").read_text().rpartition(")")[2].split()[1]
            )
    family = {root}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        family |= more
        grown = bool(more)
    total = 0
    for pid in family:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


@contextlib.contextmanager
def ended(*sides: Side) -> Iterator[None]:
    """See to it that no side outlives its measurement."""
    try:
        yield
    finally:
        for side in sides:
            side.stop()


# -- one workload ----------------------------------------------------------------------------------


def once(name: str, python: Path | str, asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a side to its end without taking turns."""
    side = Side(name, python, asked, folder)
    with ended(side):
        return side.finish()


def check(
    work: Workload, python: Path, asked: dict[str, Any], cases: list[dict[str, Any]], folder: Path
) -> dict[str, float]:
    """Let the peer repeat our noiseless steps; return the largest relative error (of both sides,
    for a deep network).
    """
    errors, peer_errors = [], []
    for number, case in enumerate(cases):
        file = folder / "theirs.npy"
        once(work.peer, python, {**asked, **case, "mode": "check", "update": str(file)}, folder)
        ours, theirs = np.load(f"{asked['update']}.{number}.npy"), np.load(file)
        exact = np.load(f"{asked['update']}.{number}.exact.npy") if work.deep else theirs
        errors.append(relative_error(ours, exact))
        peer_errors.append(relative_error(theirs, exact))
    return {"error": max(errors), **({"peer_error": max(peer_errors)} if work.deep else {})}


def take_turns(
    sides: dict[str, Side], work: Workload, rounds: int, failures: dict[str, str]
) -> None:
    """Play the rounds, one side after the other; a side that fails is out, and the others go on."""
    for number in range(rounds):
        for name, side in sides.items():
            if name in failures:
                continue
            try:
                seconds = side.round(watch=work.workers > 1)
            except SideFailed as failure:
                failures[name] = str(failure)
                progress(f"{work.key}: {name} FAILED: {failure}")
                continue
            label = "warm-up" if number == 0 else f"round {number}/{rounds - 1}"
            progress(f"{work.key}: {label}, {name}: {seconds:.3f} s")


def measure(
    work: Workload, *, small: bool, repeats: int, with_peer: bool, folder: Path
) -> dict[str, Any]:
    """Check and time one workload."""
    entry: dict[str, Any] = {
        "about": work.about,
        "peer_name": PEER_NAMES[work.peer],
        "goal": work.goal,
    }
    data, start, update = folder / "data.npz", folder / "start.npz", folder / "ours"
    write_data(work, data)
    asked = {
        "workload": work.key, "small": small, "data": str(data), "start": str(start), "update": str(update),
        "rounds": repeats + 1, "variant": "private",
    }  # fmt: skip
    failures: dict[str, str] = {}
    sides: dict[str, Side] = {}
    python: Path | None = None
    own: dict[str, Any] = {}
    if with_peer:
        try:
            own = once("ours", sys.executable, {**asked, "mode": "check"}, folder)
            entry["parameters"] = own["parameters"]
        except SideFailed as failure:
            failures["ours"] = str(failure)
            progress(f"{work.key}: ours FAILED: {failure}")
    if with_peer and "ours" not in failures:
        entry["check"] = {"error": None}
        try:
            python = python_of(work.peer)
            entry["check"] = check(work, python, asked, own["cases"], folder)
            progress(f"{work.key}: check against {PEER_NAMES[work.peer]}: {agreement(entry)}")
        except SideFailed as failure:
            failures["peer"] = str(failure)
            progress(f"{work.key}: {PEER_NAMES[work.peer]} FAILED: {failure}")
    with contextlib.ExitStack() as stack:
        wanted = [] if "ours" in failures else [("ours", "ours", sys.executable, "private")]
        if wanted and work.plain_goal is not None:
            wanted.append(("plain", "ours plain", sys.executable, "plain"))
        if python is not None and "peer" not in failures:
            wanted.append(("peer", work.peer, python, "private"))
        for name, script, interpreter, variant in wanted:
            sides[name] = Side(
                script, interpreter, {**asked, "mode": "time", "variant": variant}, folder
            )
            stack.enter_context(ended(sides[name]))
        take_turns(sides, work, repeats + 1, failures)
        for name, side in sides.items():
            entry[name] = {"seconds": side.seconds, "median": median_after_warm_up(side.seconds)}
            if name not in failures:
                said = side.finish()
                entry[name] |= {
                    "peak_mib": side.peak_of_all or said["peak_mib"],
                    "versions": said["versions"],
                }
    for name, why in failures.items():
        entry[name] = {**entry.get(name, {}), "failure": why, "median": None}
    entry.setdefault("ours", {"median": None})
    entry["ratio"] = ratio((entry.get("peer") or {}).get("median"), entry["ours"]["median"])
    if "plain" in entry:
        entry["plain_goal"] = work.plain_goal
        entry["plain_ratio"] = ratio(entry["ours"]["median"], entry["plain"]["median"])
    return entry


def measure_scale(*, small: bool, repeats: int, folder: Path) -> list[dict[str, Any]]:
    """Time ever larger populations, each within its limit."""
    sizes = []
    for population in (SCALE.small() if small else SCALE).populations:
        size: dict[str, Any] = {"population": population, "seconds": []}
        sizes.append(size)
        side = Side(
            "ours",
            sys.executable,
            {"mode": "scale", "population": population, "rounds": repeats + 1},
            folder,
        )
        deadline = time.monotonic() + SCALE.seconds_allowed
        with ended(side):
            try:
                while (said := side.next(deadline - time.monotonic()))["event"] != "done":
                    _note(size, said)
                size |= {"peak_mib": said["peak_mib"], "versions": said["versions"]}
            except SideFailed as failure:
                limit = time.monotonic() >= deadline
                size["failure"] = (
                    f"not done after {SCALE.seconds_allowed:.0f} s"
                    if limit
                    else f"FAILED: {failure}"
                )
        rounds = ", ".join(f"{seconds:.3f}" for seconds in size["seconds"])
        progress(
            f"scale: {population:,} clients, rounds of {rounds or '-'} s {size.get('failure', '')}"
        )
    return sizes


def _note(size: dict[str, Any], said: dict[str, Any]) -> None:
    if said["event"] == "round":
        size["seconds"].append(said["seconds"])
    elif said["event"] == "data":
        size["data_mib"] = said["peak_mib"]
    else:
        size[{"built": "build", "started": "start", "ended": "end"}[said["event"]]] = said[
            "seconds"
        ]


# -- the whole -------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.run", description="Measure dpfl against its peers."
    )
    parser.add_argument("--only", help=f"some of {','.join(KEYS)}")
    parser.add_argument(
        "--repeats", type=int, help="measured rounds of each side, after one to warm up"
    )
    parser.add_argument(
        "--quick", action="store_true", help="everything in miniature: does it run at all?"
    )
    parser.add_argument("--skip-peers", action="store_true", help="time our own side alone")
    parser.add_argument(
        "--out", type=Path, help="where the numbers go; otherwise, unless --quick, bench/results"
    )
    given = parser.parse_args()
    given.only = given.only.split(",") if given.only else list(KEYS)
    unknown = [key for key in given.only if key not in KEYS]
    if unknown:
        parser.error(f"there is no workload '{unknown[0]}'; choose from {', '.join(KEYS)}")
    if given.repeats is not None and given.repeats < 1:
        parser.error("--repeats must be at least 1")
    return given


def keep(path: Path, found: dict[str, Any]) -> None:
    """Write the numbers; workloads that were not run this time keep those of their last run."""
    before = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**before, **found}, indent=1) + "\n")


def rounded(value: Any) -> Any:
    """Four significant digits are more than a clock on a shared machine gives."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value


def run_one(key: str, given: argparse.Namespace) -> dict[str, Any]:
    """Measure one workload in a folder of its own."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {
            "cpus": os.cpu_count(),
            "system": platform.system(),
            "architecture": platform.machine(),
        },
        "quick": given.quick,
    }
    folder = Path(tempfile.mkdtemp(prefix="dpfl-bench-"))
    try:
        if key == SCALE.key:
            repeats = given.repeats or (1 if given.quick else SCALE.repeats)
            return {
                **found,
                "sizes": measure_scale(small=given.quick, repeats=repeats, folder=folder),
            }
        work = workload(key, given.quick)
        repeats = given.repeats or (1 if given.quick else work.repeats)
        return found | measure(
            work, small=given.quick, repeats=repeats, with_peer=not given.skip_peers, folder=folder
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Run what was asked for; 1 if a result differs from a peer's or our own side failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))  # so that the sides are ended too
    given = arguments()
    out = given.out or (None if given.quick else LATEST)
    found: dict[str, Any] = {}
    at_once = 2 if given.quick else 1  # a quick run measures nothing that another one could disturb
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for key, entry in zip(
                given.only, pool.map(run_one, given.only, itertools.repeat(given)), strict=True
            ):
                found[key] = entry
                if out is not None:
                    keep(out, {key: rounded(entry)})
        except BaseException:
            Side.over = True
            pool.shutdown(wait=False, cancel_futures=True)
            for side in list(Side.alive):
                side.stop()
            raise
    return report(found, out)


def report(found: dict[str, Any], out: Path | None) -> int:
    """Print the tables and what went wrong."""
    console = Console(width=WIDTH, highlight=False)
    compared = {key: entry for key, entry in found.items() if key != SCALE.key}
    if compared:
        console.print(comparison(compared))
        console.print(
            "ratio: peer's seconds / ours; W1 / plain: our DP-SGD / our plain SGD. check: relative error of"
        )
        console.print(
            "the update against the peer's, noise off. MiB: peak memory of a side, all its processes."
        )
        for key, entry in compared.items():
            if "peer_error" in (entry.get("check") or {}):
                theirs = entry["check"]["peer_error"]
                console.print(
                    f"* {key}: against double precision, where {entry['peer_name']} is off by {theirs:.1e}."
                )
    if SCALE.key in found:
        console.print(growth(found[SCALE.key]["sizes"]))
    failed = False
    for size in (found.get(SCALE.key) or {"sizes": []})["sizes"]:
        if size.get("failure"):
            console.print(f"{size['population']:,} clients: {size['failure']}", soft_wrap=True)
            failed = True
    for key, entry in compared.items():
        for name in ("ours", "plain", "peer"):
            why = (entry.get(name) or {}).get("failure")
            if why:
                console.print(
                    f"{key}: {entry['peer_name'] if name == 'peer' else name} FAILED: {why}",
                    soft_wrap=True,
                )
                failed |= name != "peer"
        if mismatched(entry):
            error = entry["check"]["error"]
            console.print(
                f"{key}: MISMATCH: our update differs from that of {entry['peer_name']} by {error:.1e} of it"
            )
            failed = True
    if out is not None:
        progress(f"numbers: {os.path.relpath(out)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
