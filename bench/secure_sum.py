"""One secure sum, ours against Flower's SecAgg+ and a plain upload. ``make bench-secure-sum`` starts
it.

Members and server take turns in one process, each phase measured on its own; each side in a process
of its own, one after the other. Then the same between real sites over a SuperLink.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
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
LARGE = 1_000_000  # numbers from which one measurement has to do


def alone(work: Any, task: Task) -> dict[str, Any]:
    """Run something in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
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


def by_phase(entries: list[dict[str, Any]]) -> Table:
    """One block for every sum: seconds of a client and of the server, bytes a client sends."""
    title = "One secure sum: processor seconds, kB sent by a client (ratio: SecAgg+ / ours)"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("phase")
    for name in ("client s", "SecAgg+", "ratio", "server s", "SecAgg+", "ratio", "kB", "SecAgg+"):
        table.add_column(name, justify="right")
    for entry in entries:
        ours, peer, plain = (entry[name]["phases"] for name in SIDES)
        size = f"{entry['members']} members x {entry['numbers']:,}, {entry['dropouts']} drop out"
        table.add_row(f"[bold]{size}[/bold]" if table.rows else size)
        for phase in (*PHASES, "all"):
            own, other = ours[phase], peer.get(phase)
            cells: list[str] = []
            for side in ("client", "server"):
                cells += [_digits(own[side]), _digits(other and other[side])]
                times = ratio(other and other[side], own[side])
                cells.append("-" if times is None else f"{times:.1f}")
            sent = [f"{one['up'] / 1e3:,.1f}" if one else "-" for one in (own, other)]
            table.add_row(f"  {phase}", *cells, *sent)
        own = plain["all"]
        blank = ("", "")
        table.add_row(
            "  plain float32", _digits(own["client"]), *blank, _digits(own["server"]), *blank,
            f"{own['up'] / 1e3:,.1f}", "",
        )  # fmt: skip
    return table


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if value < 1 else f"{value:.2f}"
