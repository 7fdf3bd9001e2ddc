"""The file of a ledger: found as it was left, made once, refused when anything about
it is wrong.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.privacy.ledgers import (
    SERVER,
    charge,
    charged_rounds,
    cost,
    history,
    pay,
    plan,
    set_budgets,
)

from dpfl.core.errors import LedgerError
from dpfl.privacy.events import Event
from dpfl.privacy.ledger import Ledger, backup


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed ledger file with three charges."""
    where = tmp_path / "ledger.sqlite"
    made = Ledger.create(where, "test")
    made.register("run", seeded=False, title="a test")
    for round_ in range(3):
        pay(made, "run", round_, [charge("a"), charge("b", cost(20.0))])
    made.close()
    return where


# ---- the file ------------------------------------------------------------------------------------


def test_a_ledger_is_found_as_it_was_left(path: Path) -> None:
    reopened = Ledger.open(path, "test")
    assert history(reopened, "a") == (Event(noise_multiplier=10.0, steps=3),)
    assert reopened.last_charged("run") == 2
    assert reopened.identity() == "test"
    pay(reopened, "run", 3, [charge("a")])
    reopened.close()
    assert len(charged_rounds(path)) == 7


def test_an_existing_ledger_is_never_overwritten(path: Path) -> None:
    with pytest.raises(LedgerError, match="already exists"):
        Ledger.create(path, "test")
    assert len(charged_rounds(path)) == 6


def test_a_missing_ledger_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="there is no ledger"):
        Ledger.open(tmp_path / "ledger.sqlite")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"SQLite format 3\x00", b"\x00" * 8192], ids=len
)
def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path, content: bytes) -> None:
    where = tmp_path / "ledger.sqlite"
    where.write_bytes(content)
    with pytest.raises(LedgerError):
        Ledger.open(where)


@pytest.mark.parametrize("kept", [0.05, 0.3, 0.6, 0.95])
def test_a_truncated_ledger_is_refused(path: Path, kept: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(LedgerError):
        Ledger.open(path)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_page_of_noise_in_the_middle_is_refused(path: Path, read_only: bool) -> None:
    content = bytearray(path.read_bytes())
    pages = len(content) // 4096
    for page in range(1, pages):
        content[page * 4096 : page * 4096 + 512] = bytes(range(256)) * 2
    path.write_bytes(bytes(content))
    with pytest.raises(LedgerError):
        Ledger.open(path, read_only=read_only)


def test_another_runs_ledger_is_refused(path: Path) -> None:
    with pytest.raises(LedgerError, match="belongs to another run"):
        Ledger.open(path, "another identity")
    Ledger.open(path).close()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("found", ["dpfl-ledger-1", "dpfl-ledger-3"])
def test_a_ledger_of_another_format_is_refused_in_one_sentence(
    path: Path, found: str, read_only: bool
) -> None:
    """Also one of version 0.1, which had no filter, no chain and other tables."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE meta SET value = ? WHERE key = 'format'", (found,))
        connection.executescript("DELETE FROM meta WHERE key = 'filter'; DROP TABLE chain;")
    before = path.read_bytes()
    with pytest.raises(LedgerError) as caught:
        Ledger.open(path, "test", read_only=read_only)
    problem = f"has format {found}, and this dpfl reads dpfl-ledger-2"
    assert str(caught.value) == f"{path}: {problem}; use the version of dpfl that wrote it"
    assert caught.value.exit_code == 5
    assert path.read_bytes() == before


def test_the_filter_is_fixed_when_the_ledger_is_made(tmp_path: Path) -> None:
    Ledger.create(tmp_path / "ledger.sqlite", "test", filter="renyi").close()
    with closing(Ledger.open(tmp_path / "ledger.sqlite")) as ledger:
        assert ledger.filter == "renyi"
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as connection, connection:
        connection.execute("UPDATE meta SET value = 'gaussian' WHERE key = 'filter'")
    with pytest.raises(LedgerError, match="first entry"):
        Ledger.open(tmp_path / "ledger.sqlite")


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE bills SET body = replace(body, '10.0', '99.0')",
        "UPDATE bills SET body = '{}'",
        "DELETE FROM bills",
    ],
)
def test_a_privacy_cost_that_was_tampered_with_is_refused(path: Path, change: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(change)
    with pytest.raises(LedgerError, match="missing or was changed"):
        Ledger.open(path, "test")


def test_a_read_only_ledger_shows_everything_and_charges_nothing(path: Path) -> None:
    viewed = Ledger.open(path, read_only=True)
    assert history(viewed, "a") == (Event(noise_multiplier=10.0, steps=3),)
    with pytest.raises(LedgerError):
        viewed.charge("run", 3, [charge("a")])
    with pytest.raises(LedgerError):
        viewed.commit("run", [plan("c")])
    viewed.close()
    assert len(charged_rounds(path)) == 6


def test_a_ledger_made_where_an_old_one_left_its_write_ahead_log_is_empty_and_whole(
    tmp_path: Path,
) -> None:
    """A killed run leaves its -wal file behind; whoever starts anew must not inherit it."""
    where, aside = tmp_path / "ledger.sqlite", tmp_path / "aside"
    old = Ledger.create(where, "old")
    old.register("run", seeded=False, title="old")
    pay(old, "run", 0, [charge("a")])
    aside.write_bytes((tmp_path / "ledger.sqlite-wal").read_bytes())
    old.close()
    where.unlink()
    (tmp_path / "ledger.sqlite.head").unlink()
    aside.rename(tmp_path / "ledger.sqlite-wal")
    try:
        fresh = Ledger.create(where, "new")
    except LedgerError:
        return
    assert fresh.identity() == "new"
    assert fresh.accounts() == []
    fresh.close()


# ---- backups -------------------------------------------------------------------------------------


def test_a_backup_of_a_ledger_in_use_holds_everything_charged_so_far(tmp_path: Path) -> None:
    source, target = tmp_path / "ledger.sqlite", tmp_path / "copy.sqlite"
    live = Ledger.create(source, "test")
    live.register("run", seeded=False, title="a test")
    set_budgets(live, 9, "a")
    live.commit("run", [plan(releases=9)])
    for round_ in range(4):
        live.charge("run", round_, [charge("a")])
    backup(source, target)
    backup(source, target)  # over an earlier one
    live.charge("run", 4, [charge("a")])
    copy = Ledger.open(target, "test")
    assert history(copy, "a") == (Event(noise_multiplier=10.0, steps=4),)
    assert copy.budget_of("a") == live.budget_of("a") is not None
    assert history(live, "a") == (Event(noise_multiplier=10.0, steps=5),)
    copy.close()
    live.close()


def test_a_backup_of_nothing_or_to_nowhere_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(LedgerError):
        backup(tmp_path / "absent.sqlite", tmp_path / "copy.sqlite")
    with pytest.raises(LedgerError):
        backup(path, tmp_path / "no folder" / "copy.sqlite")
    assert len(charged_rounds(path)) == 6


def test_a_ledger_made_meanwhile_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes start together: by the time the second is ready, the first has charged."""
    path = tmp_path / "ledger.sqlite"
    original = Ledger._set_up

    def overtaken(self: Ledger, identity: str, rule: str) -> Ledger:
        made = original(self, identity, rule)
        if identity == "second":
            first = Ledger.create(path, "first")
            first.register("run", seeded=False, title="t")
            pay(first, "run", 0, [charge()])
            first.close()
        return made

    monkeypatch.setattr(Ledger, "_set_up", overtaken)
    with pytest.raises(LedgerError, match="already exists"):
        Ledger.create(path, "second")
    assert Ledger.open(path, "first").participations("a", SERVER) == 1
    assert not list(tmp_path.glob("*.new"))
