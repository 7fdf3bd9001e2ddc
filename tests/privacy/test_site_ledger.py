"""A site's answer and its charge are one transaction, inside the plan that the site has committed
to.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.privacy.ledgers import SERVER, charge, cost, plan, set_budgets

from dpfl.core.errors import LedgerError
from dpfl.privacy.site_ledger import Answered, SiteLedger


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
    yield opened
    opened.close()


def test_an_answer_is_kept_exactly_where_it_was_charged(ledger: SiteLedger) -> None:
    assert not ledger.commit("run", [plan("north", releases=2)])
    for round_ in range(2):
        assert ledger.charge_and_store(
            "run", round_, [charge("north")], b"sent %d" % round_, b"private"
        )
        assert ledger.answered("run") == Answered(
            round=round_, payload=b"sent %d" % round_, private=b"private"
        )
    assert not ledger.charge_and_store("run", 2, [charge("north")], b"sent 2", b"")
    assert not ledger.charge_and_store("run", 2, [charge("north", cost(11.0))], b"sent 2", b"")
    assert ledger.answered("run") == Answered(round=1, payload=b"sent 1", private=b"private")
    assert ledger.charged("run") == {(0, "north"), (1, "north")}


def test_an_answer_without_a_plan_is_an_error_and_not_kept(ledger: SiteLedger) -> None:
    with pytest.raises(LedgerError, match="was not planned"):
        ledger.charge_and_store("run", 0, [charge("north")], b"sent", b"")
    assert ledger.answered("run") is None
    assert ledger.commit("run", [plan("north", releases=6)]) == {
        "north"
    }  # more than the budget covers
    assert not ledger.can_release("run", 0, "north", SERVER, cost())


def test_what_was_agreed_is_written_once(ledger: SiteLedger, path: Path) -> None:
    assert ledger.agree("run", "terms")
    assert ledger.agree("run", "terms")
    assert not ledger.agree("run", "other terms")
    assert ledger.agreed("run") == "terms"
    ledger.close()
    SiteLedger.open_for(path, "north").close()


def test_the_ledger_of_another_site_is_refused(path: Path) -> None:
    with pytest.raises(LedgerError, match="to 'north', not to 'south'"):
        SiteLedger.open_for(path, "south")
