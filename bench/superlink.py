"""Sums between real sites: a SuperLink and its sites on this machine, each in processes of its own."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from bench.phases import Task
from dpfl.deploy import processes, superlink
from dpfl.runs.deployment import NetworkSection

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


def secagg_plus(task: Task, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Add up over a SuperLink and SuperNodes; return each round's seconds by phase."""
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
