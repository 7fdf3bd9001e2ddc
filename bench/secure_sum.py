"""One secure sum, ours against Flower's SecAgg+ and a plain upload. ``make bench-secure-sum`` starts
it.

Members and server take turns in one process, each phase measured on its own; each side in a process
of its own, one after the other. Then the same between real sites over a SuperLink.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import ours_sum, superlink
from bench.peers import secagg_plus
from bench.phases import Task
from bench.run import LATEST, keep, progress, rounded
from bench.table import WIDTH, ratio, verdict

SIDES = {"ours": ours_sum.run, "peer": secagg_plus.run, "plain": ours_sum.plain}
PHASES = ("keys", "shares", "masked input", "signatures", "unmasking")
MOST_BYTES, LEAST_OF_CIPHER, SMALL_ERROR = 2.0, 0.75, 1e-5
LINKED = {"ours": superlink.ours, "plain": superlink.plain, "peer": superlink.secagg_plus}
# members, numbers, dropouts, measurements
WHOLE = ((50, 10**5, 5, 3), (50, 10**7, 5, 1))
QUICK = ((10, 2_000, 2, 1),)


def alone(work: Any, task: Task) -> dict[str, Any]:
    """Run something in a process of its own, where a small sum has loaded all it needs."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(work, Task(members=4, parameters=10, dropouts=1)).result()
        found: dict[str, Any] = pool.submit(work, task).result()
        return found


def measure(task: Task, repeats: int) -> dict[str, Any]:
    """Measure all sides of one sum in turns; return the medians of each."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    for number in range(repeats):
        for name, work in SIDES.items():
            runs[name].append(alone(work, task))
            progress(f"secure sum of {task.parameters:,}: {name}, {number + 1}/{repeats}")
    found: dict[str, Any] = {name: middle(several) for name, several in runs.items()}
    found["gb_per_second"] = alone(ours_sum.masks, task)
    return {"members": task.members, "numbers": task.parameters, "dropouts": task.dropouts} | found


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every number, and the sums over all phases."""
    phases = {
        phase: {
            name: statistics.median(one["phases"][phase][name] for one in runs) for name in values
        }
        for phase, values in runs[0]["phases"].items()
    }
    names = ("client", "server", "up", "down")
    phases["all"] = {name: sum(one[name] for one in phases.values()) for name in names}
    worst = {name: max(one[name] for one in runs) for name in ("error", "peak_mib")}
    return {"phases": phases, **worst}


def wrong(entry: dict[str, Any]) -> bool:
    """Whether a side has not added up right: ours must be exact, SecAgg+ is as good as its grid."""
    return entry["ours"]["error"] != 0 or not entry["peer"]["error"] < SMALL_ERROR


def verdicts(entry: dict[str, Any]) -> dict[str, str]:
    """What the goals say to a measurement."""
    ours, peer, plain = (entry[name]["phases"]["all"] for name in SIDES)
    speed = entry["gb_per_second"]
    share = speed["masks"] / speed["cipher"]
    faster = [ratio(peer[side], ours[side]) for side in ("client", "server")]
    return {
        "bytes of all phases / float32": f"{ours['up'] / plain['up']:.3f} "
        f"(SecAgg+ {peer['up'] / plain['up']:.3f}; {verdict(ours['up'] / plain['up'], at_most=MOST_BYTES)})",
        "masks / AES-CTR alone": f"{speed['masks']:.2f} / {speed['cipher']:.2f} GB/s = {share:.2f} "
        f"({verdict(share, at_least=LEAST_OF_CIPHER)})",
        "times as fast as SecAgg+": f"client {faster[0]:.1f}, server {faster[1]:.1f} "
        f"({verdict(min(one or 0.0 for one in faster), at_least=1.0)})",
        "peak MiB of a side": ", ".join(f"{n} {entry[n]['peak_mib']:.0f}" for n in SIDES),
        "error of the sum": f"ours {entry['ours']['error']:g} steps; SecAgg+ {entry['peer']['error']:.1e} of the mean",
    }


def by_phase(entry: dict[str, Any]) -> Table:
    """Seconds of a client and of the server by phase, and what a client sends."""
    size = (
        f"{entry['members']} members x {entry['numbers']:,} numbers, {entry['dropouts']} drop out"
    )
    title = f"{size}: processor seconds, kB sent by a client"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("phase")
    for name in ("client s", "SecAgg+", "ratio", "server s", "SecAgg+", "ratio", "kB", "SecAgg+"):
        table.add_column(name, justify="right")
    ours, peer, plain = (entry[name]["phases"] for name in SIDES)
    for phase in (*PHASES, "all"):
        own, other = ours[phase], peer.get(phase)
        cells: list[str] = []
        for side in ("client", "server"):
            cells += [_digits(own[side]), _digits(other and other[side])]
            times = ratio(other and other[side], own[side])
            cells.append("-" if times is None else f"{times:.1f}")
        sent = [f"{one['up'] / 1e3:,.1f}" if one else "-" for one in (own, other)]
        table.add_row(phase, *cells, *sent)
    own, blank = plain["all"], ("", "")
    table.add_row(
        "plain float32", _digits(own["client"]), *blank, _digits(own["server"]), *blank,
        f"{own['up'] / 1e3:,.1f}", "",
    )  # fmt: skip
    return table


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if value < 1 else f"{value:.2f}"


def between_sites(members: list[int], rounds: int) -> list[dict[str, Any]]:
    """The same over a SuperLink: seconds from the first question of a sum to its end.

    The first round is a warm-up and left out, unless there is one only.
    """
    found = []
    for number in members:
        entry: dict[str, Any] = {"sites": number, "numbers": superlink.NUMBERS, "rounds": rounds}
        for name, work in LINKED.items():
            with tempfile.TemporaryDirectory() as folder:
                lines = work(number, rounds, Path(folder))
            assert len(lines) == rounds, f"{name}: {len(lines)} of {rounds} rounds"
            kept = lines[1:] or lines
            phases = {
                phase: statistics.median(line["phases"][phase] for line in kept)
                for phase in kept[0]["phases"]
            }
            entry[name] = phases | {"all": statistics.median(line["seconds"] for line in kept)}
            progress(
                f"over a SuperLink: {number} sites, {name}: {entry[name]['all']:.1f} s a round"
            )
        found.append(entry)
    return found


def linked(entries: list[dict[str, Any]]) -> Table:
    """One line for every side: seconds of the phases between real sites."""
    title = f"A round over a SuperLink, {superlink.NUMBERS:,} numbers: seconds on the clock"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("sites", justify="right")
    table.add_column("side")
    for name in (*PHASES, "all"):
        table.add_column(name, justify="right")
    names = {"ours": "ours", "plain": "ours, plain upload", "peer": "SecAgg+"}
    for entry in entries:
        for side, name in names.items():
            own = dict(entry[side])
            own.setdefault("masked input", own.get("upload"))
            cells = [f"{own[one]:.2f}" if own.get(one) else "-" for one in (*PHASES, "all")]
            table.add_row(str(entry["sites"]), name, *cells)
    return table


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.secure_sum", description="One secure sum, ours and Flower's."
    )
    parser.add_argument("--quick", action="store_true", help="in miniature: does it run at all?")
    parser.add_argument("--sites", help="how many over a SuperLink (3,10); none: leave it out")
    parser.add_argument("--only-sites", action="store_true", help="over a SuperLink alone")
    parser.add_argument("--rounds", type=int, default=3, help="over a SuperLink")
    given = parser.parse_args()
    asked = given.sites or ("none" if given.quick else "3,10")
    given.sites = [] if asked == "none" else [int(one) for one in asked.split(",")]
    return given


def main() -> int:
    """Measure, print, keep; 1 if a sum is wrong."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))  # so that the sites are ended too
    given = arguments()
    sums = [
        measure(Task(members=members, parameters=numbers, dropouts=dropouts), repeats)
        for members, numbers, dropouts, repeats in (QUICK if given.quick else WHOLE)
        if not given.only_sites
    ]
    sites = between_sites(given.sites, given.rounds)
    report(sums, sites)
    if not given.quick:
        before = json.loads(LATEST.read_text()).get("secure_sum", {}) if LATEST.exists() else {}
        others = [one for one in before.get("sites", []) if one["sites"] not in given.sites]
        new = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": machine(),
            **({"sums": sums} if sums else {}),
            "sites": sorted(others + sites, key=lambda entry: entry["sites"]),
        }
        keep(LATEST, {"secure_sum": before | rounded(new)})
    return 1 if any(wrong(entry) for entry in sums) else 0


def machine() -> dict[str, Any]:
    """What it was measured on, and with which versions."""
    packages = ("flwr", "cryptography", "pycryptodome", "numpy")
    return {
        "cpus": os.cpu_count(),
        "system": platform.system(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def report(sums: list[dict[str, Any]], sites: list[dict[str, Any]]) -> None:
    """Print the tables, and what the goals say."""
    console = Console(width=WIDTH, highlight=False)
    for entry in sums:
        console.print(by_phase(entry))
        for name, words in verdicts(entry).items():
            console.print(f"  {name}: {words}", soft_wrap=True)
    if sites:
        console.print(linked(sites))


if __name__ == "__main__":
    sys.exit(main())
