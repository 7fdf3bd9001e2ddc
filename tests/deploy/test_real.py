"""Real processes: a server, sites and TLS on this machine, with kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dpfl.deploy.processes import free_port
from dpfl.deploy.site import Site
from dpfl.runs.processes import alive
from tests.deploy.federation import charged

DPFL = [sys.executable, "-m", "dpfl.cli.main"]
PATIENCE = 360.0  # on a machine that does much else


DYING = """
import os, sys
from dpfl.deploy import fleet, participation
from dpfl.deploy.messages import TRAIN
asked = []
keep = participation.Inbox.keep
participation.Inbox.keep = lambda self, m: (asked.append(m), keep(self, m))[1]
real = fleet.push_objects
def dying(*rest, **more):
    content = asked[-1].content.config_records["dpfl"]["header"] if asked else ""
    if '"kind": "train"' in content:
        os._exit(9)
    return real(*rest, **more)
fleet.push_objects = dying
from dpfl.cli.main import main
sys.exit(main())
"""


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
    assert summary["flags"] == []
    assert summary["undelivered"] == {}
    assert done.stdout.count("the same prediction for every record") == 3
    assert load_file(folder / "server" / "model.safetensors")
    for name, granted in (("cleveland", 1.0), ("hungarian", 4.0), ("va", 8.0)):
        (line,) = Site(folder / "sites" / name).spent()
        assert 0.9 * granted < line.epsilon <= granted
        assert line.rounds == 1
        assert name in done.stdout
        assert not (folder / "sites" / name / "site.pid").exists()
        assert (folder / "sites" / name / "sent.jsonl").read_text().count("\n") == 5
    assert not (folder / "server" / "superlink.pid").exists()
    tokens = json.loads((folder / "server" / "enrolment.json").read_text())["tokens"]
    log = (
        (folder / "server" / "superlink.log").read_text(errors="replace")
        + done.stdout
        + done.stderr
    )
    assert not any(token in log for token in tokens.values())


def pid_in(path: Path) -> int:
    """The process that is noted in a file; 0 while there is none."""
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def memory_of(*processes: int) -> float:
    """The memory of processes in MiB, shared pages counted in part (PSS)."""
    total = 0
    for process in processes:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
        total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total / 1024


def children_of(process: int) -> list[int]:
    return [
        int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()
    ]


def test_every_process_is_killed_once_and_no_round_is_lost(tmp_path: Path) -> None:
    folder = example(tmp_path / "example", 5)
    server, log = folder / "server", tmp_path / "server.log"
    study = (server / "study.toml").read_text()
    assert '    "va",\n' in study
    # va is not asked, and its key not known
    (server / "study.toml").write_text(study.replace('    "va",\n', ""))
    (server / "sites" / "va.pub").unlink()
    homes = {name: folder / "sites" / name for name in ("cleveland", "hungarian")}
    rounds = server / "rounds.jsonl"

    def done() -> int:
        return len(rounds.read_text().splitlines()) if rounds.exists() else 0

    def site(name: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
        return started("site", "run", str(homes[name]), log=tmp_path / f"{name}.log")

    with ExitStack() as stack:
        sites = {name: stack.enter_context(site(name)) for name in homes}  # before the server
        with started("server", "run", str(server), "--quiet", log=log) as first:
            until(lambda: "Listening" in log.read_text(), first, log=log)
            stranger = subprocess.run(
                [*DPFL, "site", "run", str(folder / "sites" / "va")],
                capture_output=True, text=True, timeout=PATIENCE, check=False,
            )  # fmt: skip
            assert stranger.returncode == 7, stranger.stderr
            assert "does not know this site's key" in stranger.stderr.splitlines()[-1]
            until(lambda: done() >= 1, first, log=log)
            # A site with its worker, in the middle of a study
            own = sites["cleveland"].pid
            assert memory_of(own, *children_of(own)) < 450
            os.kill(pid_in(server / "server-app.pid"), signal.SIGKILL)
            killed = time.monotonic()
            until(lambda: "the server app ended" in log.read_text(), first, log=log)
            assert time.monotonic() - killed < 15
            until(lambda: done() >= 2, first, log=log)
            os.kill(pid_in(server / "superlink.pid"), signal.SIGKILL)
            until(lambda: log.read_text().count("starting again") == 2, first, log=log)
            # This one dies when it has announced its answer, and not sent it yet
            sites["hungarian"].kill()
            sites["hungarian"].wait()
            with (tmp_path / "dying.log").open("ab") as own:
                command = [sys.executable, "-c", DYING, "site", "run", str(homes["hungarian"])]
                code = subprocess.run(
                    command, stdout=own, stderr=own, timeout=PATIENCE, check=False
                ).returncode
            assert code == 9, (tmp_path / "dying.log").read_text()[-2000:]
            sites["hungarian"] = stack.enter_context(site("hungarian"))
            until(lambda: done() >= 3, first, log=log)
            left = [pid_in(server / f"{name}.pid") for name in ("superlink", "proxy", "server-app")]
            first.kill()
            first.wait()
        end = time.monotonic() + 30
        while any(alive(pid) for pid in left) and time.monotonic() < end:
            time.sleep(0.2)
        assert not any(alive(pid) for pid in left)  # nobody is left behind
        before = {name: charged(Site(home)) for name, home in homes.items()}
        with started("server", "resume", str(server), "--quiet", log=log) as second:
            assert second.wait(timeout=PATIENCE) == 0, log.read_text()[-2000:]
        assert all(process.poll() is None for process in sites.values())  # they were never ended
    summary = json.loads((server / "summary.json").read_text())
    assert summary["rounds"] == {"planned": 5, "done": 5, "ended_early": None}
    assert summary["lost_rounds"] == []
    assert summary["undelivered"] == {}
    lines = [json.loads(line) for line in rounds.read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(5))
    for name, home in homes.items():
        took = {line["round"] for line in lines if name in line["arrived"]}
        assert before[name] | took <= charged(Site(home))
        assert all(line.epsilon <= (line.budget or 0) for line in Site(home).spent())
    assert load_file(server / "model.safetensors")


pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="processes are started as on a server"
)
