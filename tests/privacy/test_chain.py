"""A ledger that was edited, cut, reordered, rolled back or forked is noticed when it is opened."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from tests.privacy.ledgers import SERVER, WORLD, charge, cost, plan, set_budgets

from dpfl.core.errors import LedgerError
from dpfl.privacy.chain import TABLES, Entry, Head, digest_of, head_path, read_head
from dpfl.privacy.ledger import Ledger, backup

ACCOUNTS = ("a", "b")


def make(path: Path, rounds: int = 4) -> Path:
    with closing(Ledger.create(path, "test", filter="gaussian")) as ledger:
        set_budgets(ledger, 50, *ACCOUNTS)
        ledger.register("run", seeded=False, title="a test")
        crowd = ledger.population(["c", "d"])
        ledger.commit("run", [plan("a"), plan("b", cost(20.0)), plan(crowd, observer=WORLD)])
        for round_ in range(rounds):
            ledger.charge(
                "run", round_, [charge("a"), charge("b", cost(20.0)), charge(crowd, observer=WORLD)]
            )
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make(tmp_path / "ledger.sqlite")


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA foreign_keys=OFF")
        for one in statements:
            assert connection.execute(one).rowcount, one


def charge_more(path: Path, rounds: range, noise: float = 10.0) -> None:
    with closing(Ledger.open(path, "test")) as ledger:
        for round_ in rounds:
            ledger.charge("run", round_, [charge("a", cost(noise))])


def refusal(path: Path) -> str:
    """What opening says; reading only and writing say the same, and the exit code is that of a
    ledger.
    """
    with pytest.raises(LedgerError) as first:
        Ledger.open(path, read_only=True)
    with pytest.raises(LedgerError) as second:
        Ledger.open(path, "test")
    assert str(first.value) == str(second.value)
    assert second.value.exit_code == 5
    assert "\n" not in str(second.value)
    return str(second.value)


@pytest.mark.parametrize(
    "edit",
    [
        "UPDATE grants SET epsilon = epsilon + 1 WHERE account = 'a'",
        "UPDATE grants SET delta = 1e-4",
        "UPDATE grants SET observer = 'world' WHERE account = 'b'",
        "UPDATE plans SET releases = 1000 WHERE account = 'a'",
        "UPDATE plans SET delta = 1e-9 WHERE account = 'a'",
        "UPDATE plans SET bill = (SELECT bill FROM plans WHERE account = 'b') WHERE account = 'a'",
        "UPDATE charges SET draw = 'x' WHERE account = 'a' AND round = 2",
        "UPDATE charges SET account = 'z' WHERE account = 'a' AND round = 2",
        "UPDATE charges SET plan = 'z' WHERE account = 'a' AND round = 2",
        "UPDATE runs SET seeded = 1",
        "UPDATE members SET account = 'z' WHERE account = 'c'",
        "UPDATE journal SET round = 7 WHERE round = 3",
        "UPDATE runs SET title = x'00ff'",
        "UPDATE plans SET releases = 'many' WHERE account = 'a'",
        "UPDATE chain SET digest = replace(digest, substr(digest, 1, 1), 'x') WHERE number = 3",
    ],
)
def test_an_edit_is_noticed(path: Path, edit: str) -> None:
    change(path, edit)
    assert "was changed, deleted or moved" in refusal(path)


@pytest.mark.parametrize("table", sorted(set(TABLES) - {"withdrawn"}))  # only a site has that
def test_a_deletion_is_noticed(path: Path, table: str) -> None:
    change(path, f"DELETE FROM {table} WHERE entry = (SELECT MAX(entry) FROM {table})")
    assert "was changed, deleted or moved" in refusal(path)


def test_a_row_that_no_transaction_wrote_is_noticed(path: Path) -> None:
    change(path, "INSERT INTO members VALUES ('e', 'population:x', 99)")
    assert "belong to no entry" in refusal(path)


def test_a_row_slipped_into_an_entry_is_noticed(path: Path) -> None:
    change(path, "INSERT INTO members VALUES ('e', 'population:x', 2)")
    assert "entry 2" in refusal(path)


def test_what_no_writer_leaves_is_refused_as_well(path: Path) -> None:
    change(path, "UPDATE meta SET value = x'00ff' WHERE key = 'identity'")
    with pytest.raises(LedgerError, match="first entry"):
        Ledger.open(path)


def test_two_entries_that_changed_places_are_noticed(path: Path) -> None:
    newest = read_head(str(path))
    assert newest is not None
    last, before = newest.number, newest.number - 1
    for table in ("charges", "journal"):
        change(
            path,
            f"UPDATE {table} SET entry = -1 WHERE entry = {last}",
            f"UPDATE {table} SET entry = {last} WHERE entry = {before}",
            f"UPDATE {table} SET entry = {before} WHERE entry = -1",
        )
    assert f"entry {before}" in refusal(path)


def test_a_gap_in_the_chain_is_noticed(path: Path) -> None:
    change(path, "DELETE FROM chain WHERE number = 3")
    assert "entry 3" in refusal(path)


def test_a_chain_without_its_newest_entries_is_noticed(path: Path) -> None:
    newest = read_head(str(path))
    assert newest is not None
    for table in ("charges", "journal"):
        change(path, f"DELETE FROM {table} WHERE entry = {newest.number}")
    change(path, f"DELETE FROM chain WHERE number = {newest.number}")
    assert "is an old copy" in refusal(path)


def test_an_old_copy_put_back_is_noticed(path: Path, tmp_path: Path) -> None:
    shutil.copy(path, tmp_path / "old")
    charge_more(path, range(4, 6))
    shutil.copy(tmp_path / "old", path)
    assert "is an old copy" in refusal(path)


@pytest.mark.parametrize("longer", [False, True])
def test_a_copy_that_went_its_own_way_is_noticed(path: Path, tmp_path: Path, longer: bool) -> None:
    copy = tmp_path / "copy.sqlite"
    backup(path, copy)
    charge_more(path, range(4, 6))
    charge_more(copy, range(7, 12 if longer else 9))
    shutil.copy(copy, path)
    assert "is another copy" in refusal(path)


def test_a_replaced_file_is_noticed_by_a_process_that_had_it_open(
    path: Path, tmp_path: Path
) -> None:
    shutil.copy(path, tmp_path / "old")
    ledger = Ledger.open(path, "test")
    ledger.charge("run", 4, [charge("a")])
    with closing(sqlite3.connect(tmp_path / "old")) as old, closing(sqlite3.connect(path)) as live:
        old.backup(live)
    with pytest.raises(LedgerError, match="was replaced"):
        ledger.charge("run", 5, [charge("a")])
    ledger.close()


def test_a_missing_head_file_is_refused_until_a_person_accepts_the_ledger(path: Path) -> None:
    head = read_head(str(path))
    head_path(str(path)).unlink()
    said = refusal(path)
    assert "head file ledger.sqlite.head is missing" in said
    assert f"dpfl ledger verify {path} --accept-head" in said
    Ledger.open(path, read_only=True, accept_head=True).close()
    assert read_head(str(path)) == head
    Ledger.open(path, "test").close()


def test_a_head_that_disagrees_is_never_replaced(path: Path, tmp_path: Path) -> None:
    shutil.copy(path, tmp_path / "old")
    charge_more(path, range(4, 6))
    noted = read_head(str(path))
    shutil.copy(tmp_path / "old", path)
    with pytest.raises(LedgerError, match="old copy"):
        Ledger.open(path, accept_head=True)
    assert read_head(str(path)) == noted


@pytest.mark.parametrize(
    "content", ["", "{}", "x", '{"format": "dpfl-ledger-head-9", "number": 1, "hash": "a"}']
)
def test_a_head_file_that_cannot_be_read_is_refused(path: Path, content: str) -> None:
    head_path(str(path)).write_text(content)
    assert "ledger.sqlite.head: cannot be read" in refusal(path)


def test_a_new_ledger_without_entries_opens_without_its_head_file(tmp_path: Path) -> None:
    """A process killed between making the ledger and noting its head has charged nothing."""
    where = tmp_path / "ledger.sqlite"
    Ledger.create(where, "test").close()
    head_path(str(where)).unlink()
    with closing(Ledger.open(where, "test")) as ledger:
        ledger.register("run", seeded=False, title="t")
        assert read_head(str(where)) == ledger.head()


def test_where_a_ledger_was_kept_no_new_one_is_made(path: Path) -> None:
    path.unlink()
    with pytest.raises(LedgerError, match="a ledger was kept here"):
        Ledger.create(path, "test")


def test_the_head_file_follows_every_transaction(path: Path) -> None:
    with closing(Ledger.open(path, "test")) as ledger:
        for round_ in range(4, 8):
            ledger.charge("run", round_, [charge("a")])
            assert read_head(str(path)) == ledger.head()
        before = ledger.head()
        ledger.register("run", seeded=False, title="again")  # nothing new: no entry
        ledger.commit("run", [plan("a")])
        assert ledger.head() == before
        assert ledger.contains(before.digest)
        assert not ledger.contains("0" * 64)


def test_what_was_refused_is_not_in_the_chain(path: Path) -> None:
    with closing(Ledger.open(path, "test")) as ledger:
        ledger.register("dear", seeded=False, title="t")
        before = ledger.head().number
        assert ledger.commit("dear", [plan("a", cost(0.1)), plan("b", cost(0.1), SERVER)]) == {
            "a",
            "b",
        }
        assert ledger.head().number == before
    Ledger.open(path, "test").close()


def test_a_backup_carries_the_head_of_what_it_holds(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.sqlite"
    backup(path, copy)
    assert read_head(str(copy)) == read_head(str(path))
    charge_more(path, range(4, 6))
    Ledger.open(copy, "test").close()
    change(path, "UPDATE grants SET epsilon = 99")
    with pytest.raises(LedgerError):
        backup(path, tmp_path / "third.sqlite")


ROWS = st.lists(st.tuples(st.text(max_size=3), st.integers(0, 3), st.floats(0, 1)), max_size=4)


@given(ROWS, ROWS)
def test_digests_agree_exactly_where_the_rows_do(
    first: list[tuple[str, int, float]], second: list[tuple[str, int, float]]
) -> None:
    same = sorted(first) == sorted(second)
    one = digest_of(1, "x", {"journal": list(first)})
    assert (one == digest_of(1, "x", {"journal": list(second)})) == same
    assert one != digest_of(2, "x", {"journal": list(first)})
    assert one != digest_of(1, "y", {"journal": list(first)})
    assert one != digest_of(1, "x", {"members": list(first)})


def test_rows_are_hashed_as_they_will_be_read(tmp_path: Path) -> None:
    """An epsilon of 1 is written as 1 and read as 1.0: its digest must not change."""
    with (
        closing(Ledger.create(tmp_path / "ledger.sqlite", "test")) as ledger,
        ledger._transaction() as entry,
    ):
        assert isinstance(entry, Entry)
        entry.insert("grants", [("a", "server", "client", 1, 1e-5)])
        entry.insert("runs", [("run", True, "title")])
    Ledger.open(tmp_path / "ledger.sqlite").close()


def test_a_head_is_written_as_number_and_digest() -> None:
    assert str(Head(number=3, digest="ab")) == "3:ab"


def test_a_head_that_is_noted_a_moment_later_is_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between making a ledger and noting its head, another process may already write into it."""
    content = head_path(str(path)).read_bytes()
    head_path(str(path)).unlink()
    monkeypatch.setattr("time.sleep", lambda seconds: head_path(str(path)).write_bytes(content))
    Ledger.open(path, "test").close()


def test_a_trigger_that_would_swallow_charges_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, "site").close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "CREATE TRIGGER forget BEFORE INSERT ON charges BEGIN SELECT RAISE(IGNORE); END"
        )
    with pytest.raises(LedgerError, match="'forget' is not as dpfl makes it"):
        Ledger.open(path)


def test_a_table_made_anew_to_swallow_charges_is_noticed(tmp_path: Path) -> None:
    """Ten rounds were released, and one was stored: every later charge met a key that ignores what
    it knows.
    """
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, "site").close()
    with closing(sqlite3.connect(path)) as connection, connection:
        (made,) = connection.execute(
            "SELECT sql FROM sqlite_master WHERE name = 'charges'"
        ).fetchone()
        index = connection.execute(
            "SELECT sql FROM sqlite_master WHERE name = 'charges_by_plan'"
        ).fetchone()[0]
        swallows = made.replace("PRIMARY KEY", "UNIQUE (account) ON CONFLICT IGNORE, PRIMARY KEY")
        connection.executescript(f"DROP TABLE charges; {swallows}; {index};")
    with pytest.raises(LedgerError, match="'charges' is not as dpfl makes it"):
        Ledger.open(path)


def test_an_entry_notices_rows_that_were_not_taken() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(
            "CREATE TABLE journal (run, round, at, entry, UNIQUE (run) ON CONFLICT IGNORE)"
        )
        connection.execute("CREATE TABLE chain (number, digest)")
        connection.execute("INSERT INTO chain VALUES (?, ?)", Head(0, ""))
        entry = Entry(connection)
        entry.insert("journal", [("a", 1, 0.0)])
        with pytest.raises(LedgerError, match="took 0 of 1 rows"):
            entry.insert("journal", [("a", 2, 0.0)])
