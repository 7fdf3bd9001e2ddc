"""Ledgers of version 0.1 open for reading, under a flag, and for nothing else."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.privacy.ledgers import SERVER, charge, plan

from dpfl.core.errors import LedgerError
from dpfl.core.types import Adjacency, Budget, Observer, Unit
from dpfl.privacy.accountant import spend
from dpfl.privacy.events import Event
from dpfl.privacy.flags import Flag
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.site_ledger import SiteLedger
from dpfl.privacy.statement import Statement, statement, statements

RUN = Path(__file__).parents[1] / "equivalence" / "run-0.1"
NAME = "weiavg-0cfaf08eaefbb370"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copy(RUN / "ledger.sqlite", tmp_path / "ledger.sqlite"))


def test_an_old_ledger_is_read_under_a_flag(path: Path) -> None:
    with closing(Ledger.open(path, NAME, read_only=True)) as ledger:
        assert [raised.flag for raised in ledger.flags] == [Flag.FLOAT_NOISE]
        assert ledger.identity() == NAME
        assert ledger.titles() == {NAME: "weiavg"}
        assert ledger.seeded_runs() == [NAME]
        assert ledger.last_charged(NAME) == 1
        assert ledger.accounts() == ["cleveland", "hungarian", "switzerland", "va"]
        assert ledger.budget_of("va") == Budget(
            epsilon=8.0, delta=0.001, unit=Unit.RECORD, observer=SERVER
        )
        assert len(ledger.charged(NAME)) == 8
        assert [found.used for found in ledger.plans("va")] == [2]


def test_its_statements_are_those_of_the_run(path: Path) -> None:
    """The run's own summary was written by version 0.1, from the same charges."""
    summary = json.loads((RUN / "summary.json").read_text())
    told = {line["account"]: Statement.from_dict(line) for line in summary["statements"]}
    with closing(Ledger.open(path, read_only=True)) as ledger:
        found = {line.account: line for line in statements(ledger)}
    assert found.keys() == told.keys() != set()
    for account, line in found.items():
        assert line.epsilon == pytest.approx(told[account].epsilon, rel=1e-3)
        assert (line.delta, line.budget, line.rounds) == (0.001, told[account].budget, 2)
        assert (line.unit, line.adjacency) == ("record", "zero_out")


def test_a_new_ledger_raises_no_flag() -> None:
    assert Ledger.create(":memory:", "new").flags == ()


@pytest.mark.parametrize("kind", [Ledger, SiteLedger])
def test_an_old_ledger_is_not_opened_for_writing(path: Path, kind: type[Ledger]) -> None:
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=r"dpfl 0\.1") as caught:
        kind.open(path, NAME)
    assert caught.value.exit_code == 5
    assert path.read_bytes() == before


def test_nothing_is_written_into_an_old_ledger(path: Path) -> None:
    before = path.read_bytes()
    with closing(Ledger.open(path, read_only=True)) as ledger:
        writes = [
            lambda: ledger.register("new", seeded=False, title="t"),
            lambda: ledger.register(NAME, seeded=True, title="weiavg"),
            lambda: ledger.set_budgets({}, unit=Unit.RECORD, observer=SERVER),
            lambda: ledger.population(["va"]),
            lambda: ledger.commit(NAME, [plan("va")]),
            lambda: ledger.charge(NAME, 2, [charge("va")]),
        ]
        for write in writes:
            with pytest.raises(LedgerError, match="only be read") as caught:
                write()
            assert caught.value.exit_code == 5
    assert path.read_bytes() == before
    assert not path.with_name("ledger.sqlite.head").exists()


def test_another_run_s_ledger_and_a_changed_cost_are_refused(path: Path) -> None:
    with pytest.raises(LedgerError, match="another run"):
        Ledger.open(path, "somebody else", read_only=True)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE bills SET body = replace(body, '2.01', '9.01')")
    with pytest.raises(LedgerError, match="changed"):
        Ledger.open(path, read_only=True)


def add_charge(path: Path, round_: int, account: str, observer: str, noise: float) -> None:
    fields = {"failure": 0.0, "noise_multiplier": noise, "sampling": "none", "sampling_rate": 1.0}
    body = json.dumps(
        {"adjacency": "zero_out", "events": [{**fields, "steps": 1}], "unit": "record"},
        sort_keys=True,
    )
    digest = hashlib.sha256(body.encode()).hexdigest()[:32]
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT OR IGNORE INTO bills VALUES (?, ?)", (digest, body))
        row = (NAME, round_, account, observer, digest, "")
        connection.execute("INSERT INTO charges VALUES (?, ?, ?, ?, ?, ?)", row)
        connection.execute("INSERT INTO journal VALUES (?, ?, 0.0)", (NAME, round_))


def test_rounds_of_different_costs_are_priced_together(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM charges")
    for round_, noise in enumerate((20.0, 20.0, 30.0)):
        add_charge(path, round_, "va", "server", noise)
    events = (Event(noise_multiplier=20.0, steps=2), Event(noise_multiplier=30.0))
    with closing(Ledger.open(path, read_only=True)) as ledger:
        line = statement(ledger, "va", SERVER)
    assert line is not None
    assert line.epsilon == spend(events, 0.001, adjacency=Adjacency.ZERO_OUT).epsilon
    assert line.rounds == 3


def test_what_the_world_saw_is_never_understated(path: Path) -> None:
    """Version 0.1 let the server's charge of a single round cover the world."""
    add_charge(path, 0, "va", "world", 50.0)
    with pytest.raises(LedgerError, match="some rounds"):
        Ledger.open(path, read_only=True)
    add_charge(path, 1, "va", "world", 50.0)
    with closing(Ledger.open(path, read_only=True)) as ledger:
        lines = [statement(ledger, "va", observer) for observer in (Observer.WORLD, SERVER)]
    assert lines[0] is not None
    assert lines[1] is not None
    assert lines[0].epsilon < lines[1].epsilon
