"""A site's answer and its charge are one transaction, inside the plan that the site has committed
to.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.privacy.ledgers import SERVER, charge, cost, plan, set_budgets

from dpfl.core.errors import LedgerError
from dpfl.privacy.site_ledger import Answered, PlannedUnits, SiteLedger, UnitsWithdrawn
from dpfl.privacy.statement import statements

UNITS = PlannedUnits("u", 8, 2, frozenset())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    where = tmp_path / "ledger.sqlite"
    SiteLedger.create(where, "north").close()
    return where


@pytest.fixture
def ledger(path: Path) -> Iterator[SiteLedger]:
    opened = SiteLedger.open_for(path, "north")
    set_budgets(opened, 5, "north")
    opened.register("run", seeded=False, title="t")
    assert opened.agree("run", "terms", UNITS)
    yield opened
    opened.close()


def test_an_answer_is_kept_exactly_where_it_was_charged(ledger: SiteLedger) -> None:
    assert not ledger.commit("run", [plan("north", releases=2)])
    for round_ in range(2):
        assert ledger.charge_and_store(
            "run", round_, [charge("north")], b"sent %d" % round_, b"private", units="u"
        )
        assert ledger.answered("run") == Answered(
            round=round_, payload=b"sent %d" % round_, private=b"private"
        )
    assert not ledger.charge_and_store("run", 2, [charge("north")], b"sent 2", b"", units="u")
    assert not ledger.charge_and_store(
        "run", 2, [charge("north", cost(11.0))], b"sent 2", b"", units="u"
    )
    assert ledger.answered("run") == Answered(round=1, payload=b"sent 1", private=b"private")
    assert ledger.charged("run") == {(0, "north"), (1, "north")}


def test_an_answer_without_a_plan_is_an_error_and_not_kept(ledger: SiteLedger) -> None:
    with pytest.raises(LedgerError, match="was not planned"):
        ledger.charge_and_store("run", 0, [charge("north")], b"sent", b"", units="u")
    assert ledger.answered("run") is None
    assert ledger.commit("run", [plan("north", releases=6)]) == {
        "north"
    }  # more than the budget covers
    assert not ledger.can_release("run", 0, "north", SERVER, cost())


def test_what_was_agreed_is_written_once(ledger: SiteLedger, path: Path) -> None:
    assert ledger.agree("run", "terms", UNITS)
    assert ledger.agree("run", "terms", UNITS)
    assert not ledger.agree("run", "other terms", UNITS)
    assert ledger.agreed("run") == "terms"
    ledger.close()
    SiteLedger.open_for(path, "north").close()


def test_the_ledger_of_another_site_is_refused(path: Path) -> None:
    with pytest.raises(LedgerError, match="to 'north', not to 'south'"):
        SiteLedger.open_for(path, "south")


def test_an_answer_from_units_that_were_withdrawn_meanwhile_is_not_charged(
    ledger: SiteLedger, path: Path
) -> None:
    assert not ledger.commit("run", [plan("north", releases=2)])
    assert ledger.charge_and_store("run", 0, [charge("north")], b"sent", b"private", units="u")
    mark = b"m" * 32
    assert not ledger.withdraw(mark, "key", {"run": ("another", "v")})
    assert not ledger.withdraw(mark, "key", {})
    assert ledger.withdrawals() == {}
    assert ledger.withdraw(mark, "key", {"run": ("u", "v")})
    with pytest.raises(UnitsWithdrawn):
        ledger.charge_and_store("run", 1, [charge("north")], b"sent 1", b"", units="u")
    assert ledger.charged("run") == {(0, "north")}
    last = ledger.answered("run")
    assert last == Answered(round=0, payload=b"sent", private=b"")  # it is sent again as it was
    assert ledger.charge_and_store("run", 1, [charge("north")], b"sent 1", b"", units="v")
    planned = ledger.units("run")
    assert planned is not None and planned.blanks == {mark}
    ledger.register("next", seeded=False, title="t")
    with pytest.raises(UnitsWithdrawn):  # what it would plan for was read before
        ledger.agree("next", "terms", UNITS)
    assert ledger.agree("next", "terms", UNITS, withdrawn=1)
    later = ledger.units("next")
    assert later is not None and not later.blanks
    ledger.close()
    reopened = SiteLedger.open_for(path, "north")  # its chain holds the withdrawal
    assert list(reopened.withdrawals()) == [mark] and reopened.untraced()
    reopened.traces_removed(reopened.untraced())
    assert not reopened.untraced()
    reopened._connection.execute("DELETE FROM withdrawn")
    reopened.close()
    with pytest.raises(LedgerError, match="changed, deleted or moved"):
        SiteLedger.open_for(path, "north")


def test_a_ledger_from_before_withdrawals_is_read_and_goes_on(
    ledger: SiteLedger, path: Path
) -> None:
    """Its format is today's, without the tables of units."""
    assert not ledger.commit("run", [plan("north", releases=3)])
    assert ledger.charge_and_store("run", 0, [charge("north")], b"sent", b"private", units="u")
    ledger.close()
    tables = ("withdrawn", "untraced", "units")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript("".join(f"DROP TABLE {table};" for table in tables))
    with closing(SiteLedger.open(path, "north", read_only=True)) as earlier:
        assert [line.rounds for line in statements(earlier)] == [1]
        assert earlier.withdrawals() == {}
    reopened = SiteLedger.open_for(path, "north")
    assert reopened.withdrawals() == {} and not reopened.untraced()
    assert reopened.agreed("run") == "terms" and reopened.units("run") is None
    with pytest.raises(UnitsWithdrawn):  # what it was planned for was not written down
        reopened.charge_and_store("run", 1, [charge("north")], b"sent 1", b"", units="u")
    reopened.register("next", seeded=False, title="t")
    assert reopened.agree("next", "terms", UNITS) and reopened.units("next") == UNITS
    assert reopened.charged("run") == {(0, "north")}
    reopened.close()
