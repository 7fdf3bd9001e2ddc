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
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bench.against import compare_commits
from bench.machine import machine
from bench.sides import Side, SideFailed, ended, last_line, progress
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
            raise SideFailed(f"its environment could not be made: {last_line(done.stderr)}")
    stamp.write_text(wanted)
    return python


# -- one workload ----------------------------------------------------------------------------------


def once(name: str, python: Path | str, asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a side to its end without taking turns."""
    side = Side(name, SCRIPTS[name], python, asked, folder)
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
            wanted.append(("plain", "ours", sys.executable, "plain"))
        if python is not None and "peer" not in failures:
            wanted.append(("peer", work.peer, python, "private"))
        for name, script, interpreter, variant in wanted:
            timed = {**asked, "mode": "time", "variant": variant}
            sides[name] = Side(name, SCRIPTS[script], interpreter, timed, folder)
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
        asked = {"mode": "scale", "population": population, "rounds": repeats + 1}
        side = Side("ours", SCRIPTS["ours"], sys.executable, asked, folder)
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
        "--against", metavar="COMMIT", help="time our own side against that of another commit"
    )
    parser.add_argument(
        "--limit", type=float, help="with --against: fail where it takes this many times as long"
    )
    parser.add_argument(
        "--out", type=Path, help="where the numbers go; otherwise, unless --quick, bench/results"
    )
    given = parser.parse_args()
    if given.against:
        return given
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
        "machine": machine(),
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
    if given.against:
        return compare_commits(given)
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
