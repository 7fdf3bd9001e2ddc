"""Kill processes of a real federation at random, and count what is lost.

A server and three sites run the example study over TLS on this machine. At random moments one of
their processes is killed (``kill -9``): the server's own command, its SuperLink, its proxy, its
server app, a site's command, or a site's worker. Commands that were killed are started again, as a
service manager would. Reported are the rounds that were lost, the rounds that sites missed, and the
seconds from a kill to the next round that was finished.

    python -m bench.kills --kills 50 --rounds 10                # every six seconds: what is lost
    python -m bench.kills --kills 12 --rounds 40 --pause 25 45  # one by one: how long it takes
    python -m bench.kills --kills 30 --secure-sum               # in all phases of a secure sum
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dpfl.core.types import Observer
from dpfl.deploy.processes import free_port
from dpfl.deploy.site import Site

DPFL = [sys.executable, "-m", "dpfl.cli.main"]
LONGEST_SECONDS = 1800.0


@dataclass
class Federation:
    """The processes of one study, and the files that tell how far it is."""

    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def server(self) -> Path:
        """The folder of the server."""
        return self.folder / "server"

    @property
    def homes(self) -> dict[str, Path]:
        """The folders of the sites, by name."""
        return {path.name: path for path in sorted((self.folder / "sites").iterdir())}

    @property
    def ended(self) -> bool:
        """Whether the study has ended."""
        return (self.server / "summary.json").exists()

    def rounds(self) -> int:
        """How many rounds were finished, or lost."""
        path = self.server / "rounds.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def keep_running(self) -> None:
        """Start every command that is not running, as a service manager would."""
        begun = (self.server / "enrolment.json").exists()
        commands = {"server": ["server", "resume" if begun else "run", str(self.server), "--quiet"]}
        commands |= {name: ["site", "run", str(home)] for name, home in self.homes.items()}
        for name, command in commands.items():
            process = self.running.get(name)
            if process is None or process.poll() is not None:
                if name == "server" and self.ended:
                    continue
                with (self.folder / f"{name}.out").open("ab") as log:
                    self.running[name] = subprocess.Popen([*DPFL, *command], stdout=log, stderr=log)

    def victims(self) -> dict[str, int]:
        """Every process that can be killed now, by what it is."""
        found = {
            f"{'server' if name == 'server' else 'site'} command": process.pid
            for name, process in random.sample(list(self.running.items()), len(self.running))
            if process.poll() is None
        }
        for name in ("superlink", "proxy", "server-app"):
            with suppress(OSError, ValueError, IndexError):
                found[name] = int((self.server / f"{name}.pid").read_text().split()[0])
        for name in random.sample(list(self.homes), len(self.homes)):
            process = self.running.get(name)
            if process is not None and process.poll() is None:
                with suppress(OSError):
                    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
                    for child in path.read_text().split():
                        found["site worker"] = int(child)
        return found

    def end(self) -> None:
        """End every command."""
        for process in self.running.values():
            if process.poll() is None:
                process.terminate()
        for process in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)


@dataclass
class Tally:
    """What was counted over all studies."""

    kills: Counter[str] = field(default_factory=Counter)
    recovery: list[float] = field(default_factory=list)
    studies: int = 0
    rounds: int = 0
    lost: int = 0
    missed: int = 0
    undelivered: int = 0
    seconds: float = 0.0


def play(
    folder: Path,
    rounds: int,
    tally: Tally,
    kills: int,
    seed: random.Random,
    pause: tuple[float, float],
    more: tuple[str, ...] = (),
) -> None:
    """Run one study to its end, killing as long as there are kills left.

    ``more`` are further options of the example that is run.
    """
    command = [
        "deploy",
        "example",
        str(folder),
        "--rounds",
        str(rounds),
        "--port",
        str(free_port()),
        *more,
    ]
    subprocess.run([*DPFL, *command], check=True, capture_output=True)
    federation, began = Federation(folder), time.monotonic()
    killed: list[float] = []
    done, strike = 0, time.monotonic() + seed.uniform(8, 16)
    try:
        while not federation.ended:
            federation.keep_running()
            time.sleep(0.2)
            now = time.monotonic()
            if federation.rounds() > done:
                done = federation.rounds()
                tally.recovery += [now - when for when in killed]
                killed.clear()
            if now > strike and sum(tally.kills.values()) < kills:
                victims = federation.victims()
                name = seed.choice(sorted(victims))
                with suppress(ProcessLookupError):
                    os.kill(victims[name], signal.SIGKILL)
                    tally.kills[name] += 1
                    killed.append(now)
                strike = now + seed.uniform(*pause)
            assert now - began < LONGEST_SECONDS, f"the study does not end: see {folder}"
        federation.running["server"].wait(timeout=60)
    finally:
        federation.end()
    count(federation, tally, time.monotonic() - began)


def count(federation: Federation, tally: Tally, seconds: float) -> None:
    """Add up what a study has lost, and check that no budget was exceeded or under-counted."""
    summary = json.loads((federation.server / "summary.json").read_text())
    lines = [
        json.loads(line) for line in (federation.server / "rounds.jsonl").read_text().splitlines()
    ]
    tally.studies += 1
    tally.seconds += seconds
    tally.rounds += len(lines)
    tally.lost += len(summary["lost_rounds"])
    tally.missed += sum(len(line.get("missing", {})) for line in lines)
    tally.undelivered += len(summary["undelivered"])
    for name, home in federation.homes.items():
        site = Site(home)
        ledger = site.ledger()
        charged = {round_ for round_, _ in ledger.charged(summary["run"], Observer.SERVER)}
        ledger.close()
        arrived = {line["round"] for line in lines if name in line.get("arrived", ())}
        assert arrived <= charged, f"{name}: a round arrived that was not charged"
        assert all(line.epsilon <= (line.budget or 0) for line in site.spent()), name


def main() -> None:
    """Kill, count, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, nargs=2, default=(2.0, 10.0))
    parser.add_argument("--secure-sum", action="store_const", const=("--secure-sum",), default=())
    given = parser.parse_args()
    seed, tally = random.Random(given.seed), Tally()
    with tempfile.TemporaryDirectory() as folder:
        while sum(tally.kills.values()) < given.kills:
            study = Path(folder) / str(tally.studies)
            pause = (given.pause[0], given.pause[1])
            play(study, given.rounds, tally, given.kills, seed, pause, given.secure_sum)
            print(f"{sum(tally.kills.values())} kills, {tally.studies} studies", flush=True)
    print(f"kills: {dict(sorted(tally.kills.items()))}")
    print(f"rounds: {tally.rounds} in {tally.studies} studies, lost {tally.lost}")
    print(f"answers missed: {tally.missed} of {3 * tally.rounds}; undelivered {tally.undelivered}")
    slow = sorted(tally.recovery)
    nine = slow[int(0.9 * (len(slow) - 1))]
    middle = statistics.median(slow)
    print(
        f"seconds to the next round: median {middle:.1f}, nine of ten {nine:.1f}, most {slow[-1]:.1f}"
    )
    print(f"seconds in all: {tally.seconds:.0f}")


if __name__ == "__main__":
    main()
