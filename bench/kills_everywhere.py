"""Kill simulated runs and federations at named points and at random, and check every ledger after
every kill.

A run or a study is started, killed, started again, and so on, until it ends; then the next one
begins. Each process is a fork of this one, so that it starts at once, and ends by ``kill -9``: at a
named point (:mod:`bench.kill_points`) or after a random time. Federations are a server and three
sites on the grid within one process; the last part kills processes of real federations
(:mod:`bench.kills`).

What must hold after every kill: ledgers are whole; what was recorded or sent is charged; no charge
is gone, and no epsilon has fallen; no budget is exceeded. At the end nothing was charged twice, and
where noise is seeded the model, the records and the charges are those of a run that nobody killed.

    python -m bench.kills_everywhere --kills 500
"""

import argparse
import datetime
import io
import json
import math
import os
import platform
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench import kills
from bench.kill_points import FEDERATION, SIMULATOR, count_visits, kill_at
from bench.run import LATEST, keep, rounded
from dpfl.cli.main import run_command
from dpfl.core.files import write_safely
from dpfl.deploy.coordinator import Coordinator
from dpfl.deploy.example import write_example
from dpfl.deploy.in_process_grid import InProcessGrid
from dpfl.deploy.receipts import RECEIPTS, read_receipts
from dpfl.deploy.site_folder import LEDGER, SENT
from dpfl.deploy.transport import Transport
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.site_ledger import Answered, SiteLedger
from dpfl.privacy.statement import statements
from dpfl.runs.deployment import STUDY_FILE, StudyFile
from dpfl.runs.experiment import Experiment, for_method
from dpfl.runs.folder import RunFolder
from dpfl.runs.site_file import SITE_FILE, SiteFile
from dpfl.sim.train import run_experiment

METHODS = ("weiavg", "udp_fedavg", "dp_fed", "preconditioned")
MOST_KILLS = 8  # of one run or study; then it is let to its end
SHARES = {"simulator, named": 0.46, "simulator, random": 0.24, "federation, named": 0.24}
"""What part of the kills each is; the rest is of real federations."""

Row = tuple[Any, ...]


# -- what is killed --------------------------------------------------------------------------------


@dataclass
class Story(ABC):
    """A run or a study in a folder, killed again and again, and what its ledgers held so far."""

    folder: Path
    seeded: bool
    charges: dict[Path, set[Row]] = field(default_factory=dict)
    epsilons: dict[tuple[Path, str, str], float] = field(default_factory=dict)

    @abstractmethod
    def play(self) -> None:
        """Start it, or go on with it."""

    @abstractmethod
    def check(self) -> None:
        """Check what must hold after every kill."""

    @abstractmethod
    def traces(self) -> dict[str, Any]:
        """What must be the same, bit for bit, whether it was killed or not."""

    def check_ledger(self, path: Path) -> set[tuple[str, int, str]]:
        """Check a ledger against what it held before; return what it has charged.

        A charge is named by its run, its round and its account.
        """
        before = self.charges.get(path, set())
        if not path.exists():
            assert not before, f"{path}: a ledger with charges is gone"
            return set()
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
            code = run_command(["ledger", "verify", str(path)])
        assert code == 0, said.getvalue()
        with closing(sqlite3.connect(path)) as book:
            rows = book.execute("SELECT run, round, account, observer, bill, draw FROM charges")
            found = set(rows)
        assert before <= found, f"{path}: a charge is gone"
        keys = [row[:4] for row in found]
        assert len(set(keys)) == len(keys), f"{path}: a round is charged twice"
        self.charges[path] = found
        with closing(Ledger.open(path, read_only=True)) as ledger:
            for line in statements(ledger):
                key = (path, line.account, line.observer)
                assert line.budget is None or line.epsilon <= line.budget, f"{key}: budget exceeded"
                assert line.epsilon >= self.epsilons.get(key, 0.0), f"{key}: spend has fallen"
                self.epsilons[key] = line.epsilon
        return {row[:3] for row in found}


@dataclass
class Simulated(Story):
    """A simulated run."""

    experiment: Experiment | None = None

    def play(self) -> None:
        """Start it, or go on with it."""
        assert self.experiment is not None
        run_experiment(self.experiment, self.folder, resume=RunFolder(self.folder).holds_run)

    def check(self) -> None:
        """Check the ledger, and that it holds whatever was recorded."""
        folder = RunFolder(self.folder)
        charged = {(round_, account) for _, round_, account in self.check_ledger(folder.ledger)}
        rounds = [line for line in folder.read_rounds() if not line.lost]
        assert len({line.round for line in rounds}) == len(rounds), "a round is recorded twice"
        for line in rounds:
            alone = {(line.round, client) for client in line.arrived}
            everyone = any(round_ == line.round for round_, _ in charged)
            populations = not {account for _, account in charged} & {*line.arrived}
            assert alone <= charged or (populations and everyone), f"{line.round} is not charged"

    def traces(self) -> dict[str, Any]:
        """Model, records and charges; the summary but for the seconds."""
        folder = RunFolder(self.folder)
        summary = json.loads(folder.summary.read_text())
        del summary["seconds"]
        found = {"summary": summary, "charges": self.charges[folder.ledger]}
        return found | {path.name: path.read_bytes() for path in (folder.model, folder.rounds)}


@dataclass
class Federated(Story):
    """A server and three sites in one process, ``summed`` over a secure sum or not."""

    summed: bool = False
    answers: dict[tuple[Path, str, int], bytes] = field(default_factory=dict)

    @property
    def homes(self) -> list[Path]:
        """The folders of the sites."""
        return sorted(path.parent for path in self.folder.glob(f"sites/*/{SITE_FILE}"))

    @property
    def server(self) -> RunFolder:
        """The folder of the server."""
        return RunFolder(self.folder / "server")

    def play(self) -> None:
        """Start the study, or go on with it, unless it has ended."""
        if self.server.summary.exists():
            return
        grid = InProcessGrid(dict(enumerate(self.homes, 1)))
        Coordinator(self.server.path, Transport(grid)).begin()

    def check(self) -> None:
        """Check all ledgers, and that they hold whatever was sent, signed or has arrived."""
        self.check_ledger(self.server.ledger)
        arrived = {
            home.name: {
                line.round for line in self.server.read_rounds() if home.name in line.arrived
            }
            for home in self.homes
        }
        for home in self.homes:
            charged = self.check_ledger(home / LEDGER)
            rounds = {round_ for _, round_, _ in charged}
            assert arrived[home.name] <= rounds, f"{home.name}: a round arrived, not charged"
            sent: dict[tuple[str, int], set[str]] = {}
            for line in RunFolder(home).read_lines(home / SENT):
                if line["kind"] == "train" and line["accepted"]:
                    sent.setdefault((line["run"], line["round"]), set()).add(line["sha256"])
            assert {round_ for _, round_ in sent} <= rounds, f"{home.name}: sent, not charged"
            # in a secure sum, the header of an answer names what was signed since
            others = [one for one, digests in sent.items() if len(digests) > 1]
            assert self.summed or not others, f"{home.name}: {others} had another answer"
            with closing(SiteLedger.open(home / LEDGER, read_only=True)) as ledger:
                for run in ledger.titles():
                    self.check_answer(home, run, ledger.answered(run))
                for receipt in read_receipts(home / RECEIPTS):
                    assert receipt.head in ledger.heads(receipt.run), f"{home.name}: {receipt}"

    def check_answer(self, home: Path, run: str, answer: Answered | None) -> None:
        """Check that the answer to a round, once it is stored, stays the same."""
        if answer is not None:
            known = self.answers.setdefault((home, run, answer.round), answer.payload)
            assert known == answer.payload, f"{home.name}: another answer to round {answer.round}"

    def traces(self) -> dict[str, Any]:
        """The model, where noise is seeded, and which rounds were charged to whom."""
        charged = {
            home.name: sorted(row[1:4] for row in self.charges[home / LEDGER])
            for home in self.homes
        }
        model = self.server.model.read_bytes() if self.seeded else b""
        return {"charged": charged, "model": model}


def simulated(folder: Path, number: int) -> Simulated:
    """A small run of one of the methods, its noise from a seed or from the system."""
    method, seeded = METHODS[number % len(METHODS)], number // len(METHODS) % 2 == 0
    values: dict[str, Any] = {
        "data": {"name": "digits"},
        "partition": {"kind": "iid", "clients": 6, "records": 60},
        "budgets": {"epsilon": [2.0, 4.0, 4.0, 8.0, 8.0, 16.0], "delta": 1e-3},
        "run": {"rounds": 5, "seed": 3, "noise": "seeded" if seeded else "system"},
    }
    settings = {"lr": 0.3, "clip": 1.0, "batch_size": 8, "local_steps": 2}
    if method == "dp_fed":
        values["run"] |= {"cohort": 0.7}
        settings |= {"noise_multiplier": 1.0}
    if method == "weiavg":
        values["run"] |= {"cohort": 4}
    experiment = Experiment.from_dict(for_method({**values, "method": settings}, method))
    return Simulated(folder=folder, seeded=seeded, experiment=experiment)


FEDERATIONS = ("weiavg", "weiavg, seeded", "udp_fedavg", "udp_fedavg, secure sum")


def federated(folder: Path, number: int) -> Federated:
    """A small study of one of the methods."""
    kind = number % len(FEDERATIONS)
    method, _, how = FEDERATIONS[kind].partition(", ")
    template = folder.parent / f"template-{kind}"
    made = Federated(folder=template, seeded=how == "seeded", summed=how == "secure sum")
    if not template.exists():
        write_example(template, port=1, rounds=3, method=method, secure_sum=made.summed)
        _change_settings(made)
    shutil.copytree(template, folder)
    return replace(made, folder=folder)


def _change_settings(made: Federated) -> None:
    """Wait for nobody, and let the noise of a study that is to be repeated come from its seed."""
    run: dict[str, Any] = {"enrol_timeout": 20.0, "round_timeout": 20.0}
    if made.seeded:
        run["noise"] = "seeded"
    for path, kind, section, own in [
        (made.server.path / STUDY_FILE, StudyFile, "run", run),
        *((home / SITE_FILE, SiteFile, "policy", {"allow_seeded": True}) for home in made.homes),
    ]:
        values = kind.from_file(path).to_dict()
        values[section] = {**values[section], **own}
        write_safely(path, kind.from_dict(values).to_toml().encode())


# -- killing ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """What nobody killed: what it leaves, how often it visits each point, and how long it takes."""

    traces: dict[str, Any]
    visits: dict[str, int]
    seconds: float


@dataclass
class Tally:
    """What was killed, by kind and by point, and what came of it."""

    kills: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    same: int = 0
    lost: int = 0
    checks: int = 0


def in_process(log: Path, work: Callable[[], object], seconds: float = math.inf) -> int:
    """Do something in a process of its own, killed after some seconds; return its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        with log.open("a") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
            try:
                work()
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)
    until = time.monotonic() + seconds
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            until = math.inf
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(ended[1])


def reference(story: Story, folder: Path, places: dict[str, str]) -> Reference:
    """Play what nobody kills."""
    log, told = folder / "log", folder / "visits.json"

    def work() -> None:
        found = count_visits(list(places.values()))
        story.play()
        told.write_text(json.dumps(found))

    began = time.monotonic()
    assert in_process(log, work) == 0, log.read_text()
    seconds = time.monotonic() - began
    story.check()
    return Reference(story.traces(), json.loads(told.read_text()), seconds)


def play(
    kind: str, story: Story, known: Reference, tally: Tally, kills: int, seed: random.Random
) -> None:
    """Kill a run or a study as long as there are kills left for it, and let it come to its end."""
    places = SIMULATOR if isinstance(story, Simulated) else FEDERATION
    visited = sorted(name for name, place in places.items() if known.visits.get(place))
    log, code = story.folder.parent / f"{story.folder.name}.log", -signal.SIGKILL
    for _ in range(min(kills, MOST_KILLS)):
        name, before = seed.choice(visited), seed.random() < 0.5
        # what goes on after a kill visits a point less often
        visit = 1 + int(known.visits[places[name]] * seed.random() ** 2)

        def work(place: str = places[name], visit: int = visit, before: bool = before) -> None:
            if kind.endswith("named"):
                kill_at(place, visit, before=before)
            story.play()

        named = kind.endswith("named")
        code = in_process(log, work, math.inf if named else seed.uniform(0, known.seconds))
        if code == 0:  # what is left of it does not visit the point as often
            break
        assert code == -signal.SIGKILL, log.read_text()
        tally.kills[kind] += 1
        if named:
            tally.points[f"{'before' if before else 'after'}: {name}"] += 1
        story.check()
        tally.checks += 1
    if code != 0:
        assert in_process(log, story.play) == 0, log.read_text()
    story.check()
    tally.ended[kind] += 1
    finish(story, known, tally)


def finish(story: Story, known: Reference, tally: Tally) -> None:
    """Check what was killed, and has ended, against what nobody killed."""
    found = story.traces()
    if isinstance(story, Federated):
        summary = json.loads(story.server.summary.read_text())
        tally.lost += len(summary["lost_rounds"])
        for site, own in found["charged"].items():
            assert set(own) <= set(known.traces["charged"][site]), f"{site}: charged too much"
        if not summary["lost_rounds"] and story.seeded:
            assert found == known.traces, f"{story.folder}: another model"
            tally.same += 1
        return
    lines = RunFolder(story.folder).read_rounds()
    tally.lost += sum(bool(line.lost) for line in lines)
    numbers = [json.loads(line)["round"] for line in known.traces["rounds.jsonl"].splitlines()]
    assert [line.round for line in lines] == numbers, f"{story.folder}: other rounds"
    charged = {row[1] for rows in story.charges.values() for row in rows}
    assert set(numbers) <= charged, f"{story.folder}: a round is not charged"
    if story.seeded:
        assert found == known.traces, f"{story.folder}: other bits"
        tally.same += 1


def kill_forks(folder: Path, kills: int, tally: Tally, seed: random.Random) -> None:
    """Kill runs and federations that are forks of this process."""
    for kind, share in SHARES.items():
        make, variants, places = simulated, 2 * len(METHODS), SIMULATOR
        if kind.startswith("federation"):
            make, variants, places = federated, len(FEDERATIONS), FEDERATION
        base, number, wanted = folder / kind, 0, round(share * kills)
        base.mkdir()
        for variant in range(variants):  # what is loaded and computed here is there in every fork
            make(base / f"warm-{variant}", variant).play()
        known: dict[int, Reference] = {}
        while (left := wanted - tally.kills[kind]) > 0:
            variant = number % variants
            if variant not in known:
                place = base / f"reference-{variant}"
                place.mkdir()
                known[variant] = reference(make(place / "run", variant), place, places)
            story = make(base / f"killed-{number}", number)
            play(kind, story, known[variant], tally, left, seed)
            shutil.rmtree(story.folder)
            number += 1
            print(f"{kind}: {tally.kills[kind]} of {wanted} kills", flush=True)


def kill_real(folder: Path, count: int, seed: random.Random) -> kills.Tally:
    """Kill processes of real federations."""
    tally = kills.Tally()
    while sum(tally.kills.values()) < count:
        kills.play(folder / f"real-{tally.studies}", 8, tally, count, seed, (2.0, 8.0))
        print(f"real federations: {sum(tally.kills.values())} of {count} kills", flush=True)
    return tally


def main() -> None:
    """Kill, check, print, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=LATEST)
    given = parser.parse_args()
    began, seed, tally = time.monotonic(), random.Random(given.seed), Tally()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kill_forks(folder, given.kills, tally, seed)
        real = kill_real(folder, given.kills - sum(tally.kills.values()), seed)
    killed = dict(tally.kills) | {f"real, {who}": n for who, n in sorted(real.kills.items())}
    found = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {"cpus": os.cpu_count(), "system": platform.system()},
        "seed": given.seed,
        "kills": killed,
        "points": dict(sorted(tally.points.items())),
        "ended": dict(tally.ended) | {"real federations": real.studies},
        "bit_identical": tally.same,
        "lost_rounds": tally.lost + real.lost,
        "checked_after_kills": tally.checks,
        "seconds": time.monotonic() - began,
    }
    keep(given.out, {"kills": rounded(found)})
    for key, value in found.items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
