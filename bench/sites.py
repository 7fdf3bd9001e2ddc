"""Many sites of one study on this machine: what each takes, and what a message costs.

A server and its sites run over TLS, each site with a command and a worker of its own, as on a
machine of its own. Reported are the memory of a site during the study and after it (proportional
set size: pages that several processes share are divided among them), the processor seconds of all
sites for each message, and the seconds that a round takes.

    python -m bench.sites --sites 20 --rounds 3
    python -m bench.sites --sites 2 --rounds 3 --records 150000   # a table of 34 MB
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from dpfl.deploy.example import write_site
from dpfl.deploy.processes import free_port
from dpfl.deploy.serving import make_study
from dpfl.runs.deployment import StudyFile

DPFL = [sys.executable, "-m", "dpfl.cli.main"]
FEATURES = 13
TICKS = os.sysconf("SC_CLK_TCK")


def table(records: int, seed: int) -> bytes:
    """Return a CSV of random records with a label that depends on them."""
    rows = np.random.default_rng(seed).normal(size=(records, FEATURES))
    lines = [",".join([*(f"x{i}" for i in range(FEATURES)), "ill"])]
    lines += [",".join([*(f"{x:.15f}" for x in row), str(int(row.sum() > 0))]) for row in rows]
    return ("\n".join(lines) + "\n").encode()


def prepare(
    folder: Path, sites: int, rounds: int, records: int, **sections: dict[str, Any]
) -> dict[str, Path]:
    """Write the study and its sites; return the sites' folders.

    ``sections`` of the study's file are used instead of those that it would have.
    """
    names = [f"site{number:02d}" for number in range(sites)]
    study = StudyFile.from_dict(
        {
            "study": {
                "name": "many",
                "sites": names,
                "feature_shape": [FEATURES],
                "classes": 2,
            },
            "model": {"name": "logistic"},
            "method": {
                "name": "weiavg",
                "lr": 1.0,
                "clip": 1.0,
                "batch_size": 32,
                "local_steps": 10,
            },
            "run": {
                "rounds": rounds,
                "round_timeout": 900,
                "enrol_timeout": 900,
                "least_sites": sites,
            },
            "network": {"port": free_port()},
            **sections,
        },
        "bench",
    )
    make_study(folder / "server", study)
    homes = {name: folder / "sites" / name for name in names}
    for number, home in enumerate(homes.values()):
        epsilon = (1.0, 4.0, 8.0)[number % 3]
        write_site(home, study, epsilon, table(records, number), folder / "server")
    return homes


def tree(process: int) -> list[int]:
    """Return a process and those that it started."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return []
    return [process, *(pid for child in children for pid in tree(int(child)))]


def pss(process: int) -> float:
    """Return the proportional set size of a process and its children, in MiB."""
    total = 0
    for pid in tree(process):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def processor_seconds(process: int) -> float:
    """Return the processor time of a process, of its children, and of those that have ended."""
    total = 0.0
    for pid in tree(process):
        try:
            values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, values[11:15])) / TICKS
    return total


def measure(folder: Path, sites: int, rounds: int, records: int) -> None:
    """Run the study, and print what was measured."""
    homes, server = prepare(folder, sites, rounds, records), folder / "server"
    size = (next(iter(homes.values())) / "records.csv").stat().st_size
    print(
        f"{sites} sites, {rounds} rounds, {records} records each ({size / 1e6:.1f} MB)", flush=True
    )
    began, running, most = time.monotonic(), {}, dict.fromkeys(homes, 0.0)
    seconds: dict[str, float] = {}
    try:
        for name, home in homes.items():
            log = (folder / f"{name}.out").open("wb")
            running[name] = subprocess.Popen([*DPFL, "site", "run", str(home)], stderr=log)
        time.sleep(20)
        waiting = [pss(process.pid) for process in running.values()]
        log = (folder / "server.out").open("wb")
        command = [*DPFL, "server", "run", str(server), "--quiet"]
        ruler = subprocess.Popen(command, stdout=log, stderr=log)
        while ruler.poll() is None:
            time.sleep(2)
            for name, process in running.items():
                most[name] = max(most[name], pss(process.pid))
                seconds[name] = max(seconds.get(name, 0.0), processor_seconds(process.pid))
        assert ruler.returncode == 0, (folder / "server.out").read_text()[-2000:]
        time.sleep(3)
        idle = [pss(process.pid) for process in running.values()]
        workers = sum(len(tree(process.pid)) - 1 for process in running.values())
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait(timeout=60)
    report(server, time.monotonic() - began, rounds)
    for what, values in (
        ("waiting for the server", waiting),
        ("most during the study", list(most.values())),
        ("after the study", idle),
    ):
        print(
            f"MiB of a site, {what}: median {statistics.median(values):.0f}, most {max(values):.0f}"
        )
    print(f"workers after the study: {workers}")
    messages = rounds + 4  # who are you, terms, binding terms, the model
    spent = sum(seconds.values()) / sites
    print(f"processor seconds of a site: {spent:.1f}, {spent / messages:.2f} for each message")


def report(server: Path, seconds: float, rounds: int) -> None:
    """Print what the server wrote down."""
    summary = json.loads((server / "summary.json").read_text())
    print(f"rounds done: {summary['rounds']['done']} of {rounds}; seconds in all: {seconds:.0f}")
    print(f"missed: {sum(summary['missed'].values())}, undelivered: {len(summary['undelivered'])}")
    for text in (server / "timings.jsonl").read_text().splitlines():
        line = json.loads(text)
        took = list(line["seconds"].values())
        print(f"round {line['round'] + 1}: {len(took)} answers, slowest {max(took):.1f} s")


def main() -> None:
    """Read the options, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("sites", 20), ("rounds", 3), ("records", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), given.sites, given.rounds, given.records)


if __name__ == "__main__":
    main()
