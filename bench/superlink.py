"""Sums between real sites: a SuperLink and its sites on this machine, each in processes of its own."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from bench.phases import Task
from bench.sites import DPFL, prepare
from dpfl.core.files import write_safely
from dpfl.deploy import processes, superlink
from dpfl.deploy.progress import Progress
from dpfl.deploy.server_sum import WORDS
from dpfl.deploy.site_folder import SiteFolder
from dpfl.deploy.sum_phases import KEYS, SHARES, SURVIVORS, UNMASK
from dpfl.runs.deployment import NetworkSection
from dpfl.runs.site_file import SITE_FILE, SiteFile
from dpfl.secure_sum.keys import public_half

APP = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "secagg-plus"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "bench"

[tool.flwr.app.components]
serverapp = "bench_app:server"
clientapp = "bench_app:site"

[tool.flwr.app.config]
members = 0
parameters = 0
rounds = 0
out = ""
"""
LIMIT = 900.0
HIDDEN, NUMBERS = 6250, 100_002  # of the network that sites train: 13 features, 2 classes
ASKED = {
    WORDS[KEYS]: "keys",
    WORDS[SHARES]: "shares",
    "masked updates": "masked input",
    WORDS[SURVIVORS]: "signatures",
    WORDS[UNMASK]: "unmasking",
}


def ours(sites: int, rounds: int, folder: Path, *, secure: bool = True) -> list[dict[str, Any]]:
    """Run a study of dpfl, with or without a secure sum; return each round's seconds by phase.

    The server writes down what it waits for; that is read while it runs. Of a plain upload it
    writes down how long each site took, and the slowest counts. Training is a part of the masked
    input, or of the plain upload.
    """
    settings = {"lr": 0.1, "clip": 1.0, "batch_size": 32, "local_steps": 10}
    sections: dict[str, dict[str, Any]] = {
        "model": {"name": "mlp", "hidden": HIDDEN},
        "method": {"name": "udp_fedavg", **settings},
    }
    if secure:
        sections["secure_sum"] = {"tolerated_dropouts": 0, "colluders": 1}
    homes, server = prepare(folder, sites, rounds, 200, **sections), folder / "server"
    pin(homes)
    running = []
    try:
        for name, home in homes.items():
            with (folder / f"{name}.out").open("wb") as log:
                running.append(
                    subprocess.Popen([*DPFL, "site", "run", str(home)], stdout=log, stderr=log)
                )
        with (folder / "server.out").open("wb") as log:
            command = [*DPFL, "server", "run", str(server), "--quiet"]
            serving = subprocess.Popen(command, stdout=log, stderr=log)
            running.append(serving)
        seen = watch(serving, server)
        assert serving.returncode == 0, (folder / "server.out").read_text()[-2000:]
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(timeout=60)
    return by_round(seen) if secure else slowest(server)


def slowest(server: Path) -> list[dict[str, Any]]:
    """Seconds of every round until the last upload was there."""
    lines = [json.loads(line) for line in (server / "timings.jsonl").read_text().splitlines()]
    took = [max(line["seconds"].values()) for line in lines]
    return [{"phases": {"upload": seconds}, "seconds": seconds} for seconds in took]


def pin(homes: dict[str, Path]) -> None:
    """Let every site know the identity keys of all others."""
    known = {name: public_half(SiteFolder(home).identity()) for name, home in homes.items()}
    for name, home in homes.items():
        file = SiteFile.in_folder(home)
        others = {other: key for other, key in known.items() if other != name}
        values = file.to_dict() | {"secure_sum": {"members": others}}
        text = SiteFile.from_dict(values, str(home)).to_toml()
        write_safely(home / SITE_FILE, text.encode())


def watch(server: subprocess.Popen[bytes], folder: Path) -> list[tuple[float, str]]:
    """Follow what the server waits for until it ends: since when, and the sentence."""
    seen, until = [(time.perf_counter(), "")], time.monotonic() + LIMIT
    while server.poll() is None:
        sentence = Progress.read(folder).next
        if sentence != seen[-1][1]:
            seen.append((time.perf_counter(), sentence))
        assert time.monotonic() < until, f"the study has not ended after {LIMIT:.0f} s"
        time.sleep(0.02)
    return [*seen, (time.perf_counter(), "")]


def by_round(seen: list[tuple[float, str]]) -> list[dict[str, Any]]:
    """Seconds by phase of every round, from what the server was waiting for."""
    rounds: list[dict[str, float]] = []
    for (began, sentence), (ended, _) in itertools.pairwise(seen):
        _, found, what = sentence.partition("sites are asked for ")
        phase = ASKED.get(what.split(",")[0])
        if found and phase:
            if phase == "keys":  # what follows belongs to the same round
                rounds.append({})
            rounds[-1][phase] = ended - began
    return [{"phases": one, "seconds": sum(one.values())} for one in rounds]


def plain(sites: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """The same study without a secure sum."""
    return ours(sites, rounds, folder, secure=False)


def secagg_plus(sites: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Add up over a SuperLink and SuperNodes; return each round's seconds by phase."""
    task = Task(members=sites, parameters=NUMBERS, dropouts=0)
    # Flower's programs import the app, and the app this folder.
    known = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, known))
    app, out = folder / processes.APP, folder / "seconds.jsonl"
    app.mkdir(parents=True)
    (app / "pyproject.toml").write_text(APP)
    (app / "bench_app.py").write_text(
        "from bench.peers import secagg_plus_app as apps\n\nserver = apps.server\nsite = apps.site\n"
    )
    network = NetworkSection(port=processes.free_port())
    link = superlink.SuperLink.start(folder, network, insecure=True)
    running = [link.process]
    try:
        superlink.write_connection(folder, link.port, insecure=True)
        for number in range(task.members):
            command = [*processes.program("flower-supernode"), "--insecure"]
            command += ["--superlink", f"127.0.0.1:{link.port}"]
            command += ["--port", str(processes.free_port())]
            command += ["--node-config", f"partition-id={number}"]
            home = folder / f"node-{number}"
            home.mkdir()
            running.append(processes.start(command, home, "node.log", "node.pid"))
        configuration = (
            f'members={task.members} parameters={task.parameters} rounds={rounds} out="{out}"'
        )
        command = [*processes.program("flwr"), "run", str(app), "study"]
        command += ["--run-config", configuration, "--format", "json"]
        own = processes.environment(folder / processes.HOME)
        done = subprocess.run(command, capture_output=True, text=True, env=own, timeout=LIMIT)
        assert done.returncode == 0 and json.loads(done.stdout)["success"], (
            done.stdout + done.stderr
        )
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            lines = out.read_text().splitlines() if out.exists() else []
            if len(lines) == rounds:
                return [json.loads(line) for line in lines]
            time.sleep(0.5)
        raise TimeoutError(f"SecAgg+ is not done after {LIMIT:.0f} s; see {folder}")
    finally:
        for one in reversed(running):
            one.end()
