"""This tree against another commit of the project, in one run: ``python -m bench.run --against COMMIT``.

The other commit is unpacked beside this one and brings its own side of every workload; only noise is
drawn by this tree's script. Both sides wait for each other round by round, with the same interpreter,
packages and kernels. What counts is processor time: other work on the machine changes it little.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import machine
from bench.sides import ROOT, Side, SideFailed, ended, environment, last_line, progress
from bench.table import WIDTH
from bench.workloads import WORKLOADS, write_data

ROUNDS = {"W1": 3, "W2": 12, "W3": 80, "dp_fed": 60, "noise": 20, "start": 5}
"""What is compared, and over how many rounds of each side."""

START = [
    "run",
    "--dataset",
    "heart_disease",
    "--method",
    "weiavg",
    "--budgets",
    "0.5,1,2,8",
    "--delta",
    "1e-3",
    "--clip",
    "1",
    "--rounds",
    "2",
]
"""The command whose processor time is that of starting up."""

Sides = Mapping[str, Path]


def unpack(commit: str, folder: Path) -> str:
    """Put the files of a commit into a folder; returns its full name."""
    revision = _git("rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip()
    archive = _git("archive", revision, "src", "bench", "pyproject.toml")
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(folder, filter="data")
    return revision


def _git(*words: str) -> bytes:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True)
    if done.returncode != 0:
        raise SideFailed(
            f"git {' '.join(words)}: {last_line(done.stderr.decode(errors='replace'))}"
        )
    return done.stdout


def rounds_of(
    key: str, trees: Sides, rounds: int, folder: Path
) -> dict[str, dict[str, list[float]]]:
    """Let both trees play the rounds of a workload in turns; each one's first is left out."""
    # One more than is measured: after the last a side goes on to evaluate.
    asked: dict[str, Any] = {"rounds": rounds + 2, "mode": "time", "variant": "private"}
    script = "bench.noise"
    if key in WORKLOADS:
        script = "bench.ours"
        asked |= {"workload": key, "small": False, "data": str(folder / "data.npz")}
        write_data(WORKLOADS[key], folder / "data.npz")
    sides: dict[str, Side] = {}
    with contextlib.ExitStack() as stack:
        for name, tree in trees.items():
            roots = (ROOT, tree / "src") if key == "noise" else (tree,)
            sides[name] = Side(name, script, sys.executable, asked, folder, roots)
            stack.enter_context(ended(sides[name]))
        for _ in range(rounds + 1):
            for side in sides.values():
                side.round(watch=False)
    return {
        name: {"seconds": side.seconds[1:], "processor seconds": side.processor_seconds[1:]}
        for name, side in sides.items()
    }


def starts_of(trees: Sides, rounds: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Run a small command from the shell, in turns; the first of each compiles the modules."""
    taken: dict[str, list[float]] = {name: [] for name in trees}
    for number in range(rounds + 1):
        for name, tree in trees.items():
            command = [sys.executable, "-c", "from dpfl.cli.main import main; main()", *START]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run(
                [*command, "--out", str(folder / f"{name}-{number}")],
                env=environment(folder, (tree,)), cwd=folder, capture_output=True, text=True,
            )  # fmt: skip
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            if done.returncode != 0:
                raise SideFailed(
                    f"{name}: it ended with {done.returncode}: {last_line(done.stderr)}"
                )
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            taken[name].append(seconds)
    return {name: {"processor seconds": seconds[1:]} for name, seconds in taken.items()}


def compared(measured: Mapping[str, Mapping[str, list[float]]]) -> dict[str, float | None]:
    """Medians of both sides, and this tree's over the other's.

    >>> found = compared({"this": {"seconds": [2.0, 1.0, 9.0]}, "other": {"seconds": [4.0]}})
    >>> found["seconds: this"], found["seconds: other"], found["seconds: ratio"]
    (2.0, 4.0, 0.5)
    """
    numbers: dict[str, float | None] = {}
    for clock in measured["this"]:
        medians = {name: statistics.median(side[clock]) for name, side in measured.items()}
        numbers |= {f"{clock}: {name}": value for name, value in medians.items()}
        usable = medians["other"] > 0 and medians["this"] > 0
        numbers[f"{clock}: ratio"] = medians["this"] / medians["other"] if usable else None
    return numbers


def too_slow(entries: Mapping[str, Mapping[str, float | None]], limit: float) -> list[str]:
    """The workloads that take more than ``limit`` times the other commit's processor time, or whose
    processor time is not known.

    >>> too_slow({"W2": {"processor seconds: ratio": 1.06}, "W3": {"processor seconds: ratio": 1.0}}, 1.05)
    ['W2']
    """
    ratios = {key: entry["processor seconds: ratio"] for key, entry in entries.items()}
    return [key for key, ratio in ratios.items() if ratio is None or ratio > limit]


def table(entries: Mapping[str, Mapping[str, float | None]], commit: str) -> Table:
    """One line for every workload."""
    columns = {
        "ms": "processor seconds: this",
        f"{commit[:10]} ms": "processor seconds: other",
        "ratio": "processor seconds: ratio",
        "ratio of wall time": "seconds: ratio",
    }
    shown = Table(title="Processor time of a round (median)", title_justify="left", box=None)
    shown.add_column("workload")
    for column in columns:
        shown.add_column(column, justify="right")
    for key, entry in entries.items():
        cells = []
        for column, name in columns.items():
            value = entry.get(name)
            scaled = value * 1000 if value is not None and column.endswith("ms") else value
            cells.append(
                "-"
                if scaled is None
                else f"{scaled:.1f}"
                if value is not scaled
                else f"{scaled:.3f}"
            )
        shown.add_row(key, *cells)
    return shown


def compare_commits(given: argparse.Namespace) -> int:
    """Measure what was asked for; 1 if a workload is slower than the limit allows."""
    keys = given.only.split(",") if given.only else list(ROUNDS)
    unknown = [key for key in keys if key not in ROUNDS]
    if unknown:
        progress(f"there is no '{unknown[0]}' to compare; choose from {', '.join(ROUNDS)}")
        return 2
    entries: dict[str, dict[str, float | None]] = {}
    with tempfile.TemporaryDirectory(prefix="dpfl-against-") as name:
        folder = Path(name)
        try:
            commit = unpack(given.against, folder / "other")
            for key in keys:
                rounds = given.repeats or (2 if given.quick else ROUNDS[key])
                place = folder / key
                place.mkdir()
                measure: Callable[..., Any] = starts_of
                words: tuple[Any, ...] = ({"this": ROOT, "other": folder / "other"}, rounds, place)
                if key != "start":
                    measure, words = rounds_of, (key, *words)
                entries[key] = compared(measure(*words))
                progress(f"{key}: {entries[key]['processor seconds: ratio'] or float('nan'):.3f}")
        except SideFailed as failure:
            progress(f"FAILED: {failure}")
            return 1
    Console(width=WIDTH, highlight=False).print(table(entries, commit))
    described = {"commit": commit, "machine": machine(), "workloads": entries}
    if given.out is not None:
        given.out.write_text(json.dumps(described, indent=1) + "\n")
        progress(f"numbers: {os.path.relpath(given.out)}")
    slow = too_slow(entries, given.limit) if given.limit else []
    if slow:
        progress(f"slower than {given.limit:g} times {commit[:10]}: {', '.join(slow)}")
    return 1 if slow else 0
