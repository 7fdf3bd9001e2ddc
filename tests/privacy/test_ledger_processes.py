"""Many processes, kills and a full disk: a charge is durable before it returns, and no cap is
passed.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.privacy.ledgers import cap_for

from dpfl.core.errors import DiskError, DpflError, LedgerError
from dpfl.core.types import Adjacency, Budget, Observer, Unit
from dpfl.privacy import chain
from dpfl.privacy.costs import Charge, PrivacyCost, PrivacyPlan
from dpfl.privacy.events import Event
from dpfl.privacy.filters import FilterName
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.statement import statements

DELTA = 1e-5
NOISE = 20.0
BILL = PrivacyCost(
    unit=Unit.CLIENT, adjacency=Adjacency.ADD_REMOVE, events=(Event(noise_multiplier=NOISE),)
)
PLAN = PrivacyPlan(account="a", observer=Observer.SERVER, cost=BILL, releases=100_000)


def new_ledger(path: Path, affordable: int, runs: list[str], rule: FilterName = "gaussian") -> None:
    """A ledger whose account 'a' can afford exactly so many rounds."""
    budget = Budget(epsilon=cap_for(affordable, NOISE), delta=DELTA)
    with closing(Ledger.create(path, "test", filter=rule)) as ledger:
        ledger.set_budgets({"a": budget}, unit=Unit.CLIENT, observer=Observer.SERVER)
        for run in runs:
            ledger.register(run, seeded=False, title="processes")
            if rule == "gaussian":
                assert not ledger.commit(run, [PLAN])


def charged_rounds(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as connection:
        return [
            row[0]
            for row in connection.execute(
                "SELECT round FROM charges WHERE account = 'a' ORDER BY round"
            )
        ]


def steps_on_tab(path: Path) -> int:
    with closing(Ledger.open(path, "test", read_only=True)) as ledger:
        return sum(event.steps for event in ledger.history("a", Observer.SERVER))


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Children that share nothing with the test but the file; libraries are imported
    once for all.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["dpfl.privacy.ledger", "dp_accounting.pld", "dp_accounting.rdp"]
    )
    return context


# ---- the children --------------------------------------------------------------------------------


def spend_all(path: Path, run: str, tries: int, gate: object, results: object) -> None:
    gate.wait()  # type: ignore[attr-defined]
    paid = 0
    with closing(Ledger.open(path, "test")) as ledger:
        for round_ in range(tries):
            charge = Charge(account="a", observer=Observer.SERVER, cost=BILL)
            paid += not ledger.charge(run, round_, [charge])
    results.put(paid)  # type: ignore[attr-defined]


class Killed(NamedTuple):
    """When a process is killed: so many seconds after it has charged so many rounds."""

    rounds: int
    seconds: float


def charge_and_release(path: Path, released: Path, killed: Killed | None = None) -> None:
    """What a run does: charge, then release (a line on disk), from the last charged round until
    refused, or until the system kills it.
    """
    with closing(Ledger.open(path, "test")) as ledger, released.open("a") as stream:
        last = ledger.last_charged("run")
        round_ = 0 if last is None else last + 1
        charge = Charge(account="a", observer=Observer.SERVER, cost=BILL)
        rounds_left = killed.rounds if killed is not None else 0
        while not ledger.charge("run", round_, [charge]):
            rounds_left -= 1
            if killed is not None and rounds_left == 0:
                signal.setitimer(signal.ITIMER_REAL, killed.seconds)  # nobody handles its signal
            stream.write(f"{round_}\n")
            stream.flush()
            os.fsync(stream.fileno())
            round_ += 1


def charge_until_the_disk_is_full(path: Path, largest_file: int, results: object) -> None:
    """No file may grow beyond ``largest_file``: what a full disk looks like to SQLite."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    acknowledged = 0
    with closing(Ledger.open(path, "test")) as ledger:
        names = [f"{i:0200d}" for i in range(50)]
        ledger.commit("run", [replace(PLAN, account=name) for name in names])
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
        try:
            for round_ in range(1, 10_000):
                crowd = [
                    Charge(account=name, observer=Observer.SERVER, cost=BILL) for name in names
                ]
                ledger.charge(
                    "run",
                    round_,
                    [Charge(account="a", observer=Observer.SERVER, cost=BILL), *crowd],
                )
                acknowledged = round_
        except DpflError as error:
            results.put((type(error).__name__, error.exit_code, acknowledged))  # type: ignore[attr-defined]
        except BaseException as error:
            results.put((repr(error), 1, acknowledged))  # type: ignore[attr-defined]


# ---- the tests -----------------------------------------------------------------------------------


def test_eight_processes_on_one_ledger_spend_exactly_the_cap(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    affordable, tries = 41, 12  # 8 x 12 attempts for 41 places
    runs = [f"run {i}" for i in range(8)]
    path = tmp_path / "ledger.sqlite"
    new_ledger(path, affordable, runs)
    gate, results = processes.Barrier(8), processes.Queue()
    children = [
        processes.Process(target=spend_all, args=(path, run, tries, gate, results)) for run in runs
    ]
    for child in children:
        child.start()
    paid = [results.get(timeout=120) for _ in children]
    for child in children:
        child.join(timeout=60)
    assert [child.exitcode for child in children] == [0] * 8
    assert sum(paid) == len(charged_rounds(path)) == steps_on_tab(path) == affordable


def test_no_kill_loses_a_charge_releases_an_uncharged_round_or_passes_the_cap(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    affordable = 400
    path, released = tmp_path / "ledger.sqlite", tmp_path / "released"
    new_ledger(path, affordable, ["run"])
    released.touch()
    moments = random.Random(0)
    seen = 0
    for _ in range(7):
        killed = Killed(rounds=moments.randint(1, 5), seconds=moments.uniform(1e-5, 0.008))
        child = processes.Process(target=charge_and_release, args=(path, released, killed))
        child.start()
        child.join(timeout=60)
        assert child.exitcode == -signal.SIGALRM
        charged = charged_rounds(path)
        assert {int(line) for line in released.read_text().split()} <= set(charged)
        assert len(charged) == steps_on_tab(path) > seen
        seen = len(charged)
    last = processes.Process(target=charge_and_release, args=(path, released))
    last.start()
    last.join(timeout=120)
    assert last.exitcode == 0
    lines = [int(line) for line in released.read_text().split()]
    assert len(lines) == len(set(lines))
    assert set(lines) <= set(charged_rounds(path))
    assert len(charged_rounds(path)) == steps_on_tab(path) == affordable


def test_a_process_killed_in_the_middle_of_a_transaction_leaves_nothing_of_it(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    path = tmp_path / "ledger.sqlite"
    new_ledger(path, 50, ["run"])
    ready = processes.Event()
    child = processes.Process(target=hold_a_transaction, args=(path, ready))
    child.start()
    assert ready.wait(timeout=60)
    child.kill()
    child.join(timeout=30)
    with closing(Ledger.open(path, "test")) as ledger:
        assert ledger.history("a", Observer.SERVER) == ()
        assert (
            ledger.charge("run", 0, [Charge(account="a", observer=Observer.SERVER, cost=BILL)])
            == frozenset()
        )
    assert charged_rounds(path) == [0]


def hold_a_transaction(path: Path, ready: object) -> None:
    with closing(Ledger.open(path, "test")) as ledger, ledger._transaction() as entry:
        entry.connection.execute("INSERT INTO bills VALUES (?, ?)", ("digest", "body"))
        entry.insert("charges", [("run", 0, "a", "server", "a", "digest", "")])
        ready.set()  # type: ignore[attr-defined]
        time.sleep(600)


def test_a_full_disk_is_reported_and_keeps_every_acknowledged_charge(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    path = tmp_path / "ledger.sqlite"
    new_ledger(path, 5000, ["run"])
    with closing(Ledger.open(path, "test")) as ledger:
        ledger.charge("run", 0, [Charge(account="a", observer=Observer.SERVER, cost=BILL)])
    results = processes.Queue()
    child = processes.Process(target=charge_until_the_disk_is_full, args=(path, 300_000, results))
    child.start()
    kind, code, acknowledged = results.get(timeout=120)
    child.join(timeout=60)
    assert kind in {DiskError.__name__, LedgerError.__name__}
    assert code in {5, 6}
    assert acknowledged >= 1
    charged = charged_rounds(path)
    assert charged[: acknowledged + 1] == list(range(acknowledged + 1))
    assert (
        len(charged) <= acknowledged + 2
    )  # a commit whose answer was lost may count, never the other way round
    with closing(Ledger.open(path, "test")) as ledger:
        assert (
            ledger.charge(
                "run", len(charged), [Charge(account="a", observer=Observer.SERVER, cost=BILL)]
            )
            == set()
        )
    assert steps_on_tab(path) == len(charged) + 1


# ---- plans, heads and snapshots ------------------------------------------------------------------


def commit_half(path: Path, run: str, gate: object, results: object) -> None:
    """Ask for a whole allotment, of which the budget holds one."""
    gate.wait()  # type: ignore[attr-defined]
    with closing(Ledger.open(path, "test")) as ledger:
        results.put((run, ledger.commit(run, [replace(PLAN, releases=8)])))  # type: ignore[attr-defined]


def test_of_many_processes_that_race_for_the_last_allotment_one_gets_it(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    path, runs = tmp_path / "ledger.sqlite", [f"run {i}" for i in range(4)]
    new_ledger(path, 10, runs, "allotments")
    gate, results = processes.Barrier(len(runs)), processes.Queue()
    children = [
        processes.Process(target=commit_half, args=(path, run, gate, results)) for run in runs
    ]
    for child in children:
        child.start()
    answers = dict(results.get(timeout=120) for _ in children)
    for child in children:
        child.join(timeout=60)
    winners = [run for run, refused in answers.items() if not refused]
    assert len(winners) == 1
    with closing(Ledger.open(path, "test")) as ledger:
        assert [plan.run for plan in ledger.plans("a")] == winners
        (line,) = statements(ledger)
    assert line.epsilon <= cap_for(10, NOISE)


def die_before_the_head_is_written(path: Path) -> None:
    """Commit a charge, and be killed before the head file follows."""
    chain.write_head = lambda *rest: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    with closing(Ledger.open(path, "test")) as ledger:
        ledger.charge("run", 0, [Charge(account="a", observer=Observer.SERVER, cost=BILL)])


def test_a_kill_between_commit_and_head_file_leaves_a_ledger_that_opens(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    path = tmp_path / "ledger.sqlite"
    new_ledger(path, 50, ["run"])
    noted = chain.read_head(str(path))
    child = processes.Process(target=die_before_the_head_is_written, args=(path,))
    child.start()
    child.join(timeout=60)
    assert child.exitcode == -signal.SIGKILL
    assert chain.read_head(str(path)) == noted
    with closing(Ledger.open(path, "test")) as ledger:
        assert noted is not None
        assert ledger.head().number == noted.number + 1
        assert ledger.participations("a", Observer.SERVER) == 1
        ledger.charge("run", 1, [Charge(account="a", observer=Observer.SERVER, cost=BILL)])
        assert chain.read_head(str(path)) == ledger.head()


def charge_everyone(path: Path, names: list[str], stop: object) -> None:
    with closing(Ledger.open(path, "test")) as ledger:
        for round_ in range(1, 100_000):
            ledger.charge(
                "run",
                round_,
                [Charge(account=n, observer=Observer.SERVER, cost=BILL) for n in names],
            )
            if stop.is_set():  # type: ignore[attr-defined]
                return


def test_every_statement_of_a_page_is_as_of_the_same_round(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    path, names = tmp_path / "ledger.sqlite", [f"c{i:02d}" for i in range(20)]
    new_ledger(path, 50, ["run"])
    with closing(Ledger.open(path, "test")) as ledger:
        ledger.commit("run", [replace(PLAN, account=name) for name in names])
        ledger.charge(
            "run", 0, [Charge(account=n, observer=Observer.SERVER, cost=BILL) for n in names]
        )
        stop = processes.Event()
        child = processes.Process(target=charge_everyone, args=(path, names, stop))
        child.start()
        seen: set[int] = set()
        patience = time.monotonic() + 60
        while len(seen) < 10 and time.monotonic() < patience:
            rounds = {line.rounds for line in statements(ledger, 1e-5) if line.account != "a"}
            assert len(rounds) == 1  # all twenty accounts at the same round
            seen |= rounds
        stop.set()
        child.join(timeout=60)
    assert child.exitcode == 0
    assert len(seen) >= 10
