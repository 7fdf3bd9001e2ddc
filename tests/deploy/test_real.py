"""Real processes: a SuperLink, SuperNodes and TLS on this machine, with kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dpfl.deploy.processes import free_port
from dpfl.deploy.site import Site
from tests.deploy.federation import charged

DPFL = [sys.executable, "-m", "dpfl.cli.main"]
PATIENCE = 360.0  # on a machine that does much else


@contextmanager
def started(*arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command of ours that is ended, with what it started, however the test ends."""
    with log.open("ab") as stream:
        process = subprocess.Popen([*DPFL, *arguments], stdout=stream, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=10)


def until(condition: Callable[[], bool], *processes: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, log.read_text()[-2000:]
        assert all(process.poll() is None for process in processes), log.read_text()[-2000:]
        time.sleep(0.2)


def example(folder: Path, rounds: int) -> Path:
    port = str(free_port())
    command = [*DPFL, "deploy", "example", str(folder), "--port", port, "--rounds", str(rounds)]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
    return folder


def test_an_example_runs_over_tls_from_the_first_command_to_the_page_for_the_board(
    tmp_path: Path,
) -> None:
    folder = example(tmp_path / "example", 1)
    command = [*DPFL, "deploy", "run", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((folder / "server" / "summary.json").read_text())
    assert summary["rounds"] == {"planned": 1, "done": 1, "ended_early": None}
    assert summary["sites"] == ["cleveland", "hungarian", "va"]
    assert summary["missed"] == summary["refusals"] == {}
    assert summary["stamps"] == []
    assert summary["undelivered"] == {}
    assert done.stdout.count("right on ") == 3
    assert load_file(folder / "server" / "model.safetensors")
    for name, granted in (("cleveland", 1.0), ("hungarian", 4.0), ("va", 8.0)):
        (line,) = Site(folder / "sites" / name).spent()
        assert 0.9 * granted < line.epsilon <= granted
        assert line.rounds == 1
        assert name in done.stdout
        assert not (folder / "sites" / name / "supernode.pid").exists()
    assert not (folder / "server" / "superlink.pid").exists()
    tokens = json.loads((folder / "server" / "enrolment.json").read_text())["tokens"]
    log = (
        (folder / "server" / "superlink.log").read_text(errors="replace")
        + done.stdout
        + done.stderr
    )
    assert not any(token in log for token in tokens.values())


def test_a_killed_superlink_is_resumed_and_an_unregistered_site_is_turned_away(
    tmp_path: Path,
) -> None:
    folder = example(tmp_path / "example", 2)
    server, log = folder / "server", tmp_path / "server.log"
    study = (server / "study.toml").read_text()
    assert '    "va",\n' in study
    (server / "study.toml").write_text(
        study.replace('    "va",\n', "")
    )  # va is not asked, and its key not known
    (server / "sites" / "va.pub").unlink()
    homes = {name: folder / "sites" / name for name in ("cleveland", "hungarian")}
    rounds = server / "rounds.jsonl"
    with started("server", "run", str(server), "--quiet", log=log) as first:
        until(lambda: "Listening" in log.read_text(), first, log=log)
        with ExitStack() as stack:
            sites = [
                stack.enter_context(started("site", "run", str(home), log=tmp_path / f"{name}.log"))
                for name, home in homes.items()
            ]
            stranger = subprocess.run(
                [*DPFL, "site", "run", str(folder / "sites" / "va")],
                capture_output=True, text=True, timeout=PATIENCE, check=False,
            )  # fmt: skip
            assert stranger.returncode == 7, stranger.stderr
            until(lambda: (server / "opened.bin").exists(), first, log=log)
            os.kill(int((server / "superlink.pid").read_text()), signal.SIGKILL)
            assert first.wait(timeout=60) == 7
            assert "dpfl server resume" in log.read_text().splitlines()[-1]
            assert not (server / "summary.json").exists()
            done = len(rounds.read_text().splitlines()) if rounds.exists() else 0
            run = json.loads((server / "enrolment.json").read_text())["run"]
            before = {name: charged(Site(home)) for name, home in homes.items()}
            with started("server", "resume", str(server), "--quiet", log=log) as second:
                until(lambda: log.read_text().count("Listening") == 2, second, log=log)
                with ExitStack() as again:
                    running, end = dict(zip(homes, sites, strict=True)), time.monotonic() + PATIENCE
                    while second.poll() is None and time.monotonic() < end:
                        for name, process in running.items():
                            if (
                                process.poll() is not None
                            ):  # its SuperNode gave up: the operator starts it again
                                site = started(
                                    "site", "run", str(homes[name]), log=tmp_path / f"{name}.log"
                                )
                                running[name] = again.enter_context(site)
                        time.sleep(1)
                    assert second.poll() == 0, log.read_text()[-2000:]
    summary = json.loads((server / "summary.json").read_text())
    assert summary["run"] == run
    assert summary["rounds"]["done"] == 2
    assert [json.loads(line)["round"] for line in rounds.read_text().splitlines()] == [0, 1]
    assert summary["lost_rounds"] in ([], [done])
    for name, home in homes.items():
        took = {
            line["round"]
            for line in map(json.loads, rounds.read_text().splitlines())
            if name in line.get("arrived", [])
        }
        assert before[name] | took <= charged(Site(home))
        assert all(line.epsilon <= (line.budget or 0) for line in Site(home).spent())
    assert load_file(server / "model.safetensors")
    assert "does not know this site's key" in stranger.stderr.splitlines()[-1]


pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="SuperLink and SuperNodes are started as on a server"
)
