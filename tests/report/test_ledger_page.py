"""The page of a ledger in a real browser: the ledger's numbers, warnings on top, any name is safe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dpfl.cli.main import run_command
from dpfl.core.types import Adjacency, Budget, Observer, Unit
from dpfl.privacy.accountant import shown, spend
from dpfl.privacy.costs import Charge, PrivacyCost, PrivacyPlan
from dpfl.privacy.events import Event
from dpfl.privacy.flags import Flag
from dpfl.privacy.ledger import Ledger
from dpfl.report.ledger_page import write_ledger_page
from tests.report.conftest import Seen
from tests.report.test_browser import FACTS, OVERFLOW, check_silent, table_of

Look = Callable[..., Seen]
EVENT = Event(noise_multiplier=4.0, steps=10, sampling="poisson", sampling_rate=0.1)
BILL = PrivacyCost(unit=Unit.RECORD, adjacency=Adjacency.ZERO_OUT, events=(EVENT,))
DELTA = 1e-5


def _ledger(
    path: Path,
    account: str,
    rounds: int = 3,
    *,
    planned: int | None = None,
    seeded: bool = False,
    title: str = "heart: weiavg",
) -> Ledger:
    releases = rounds if planned is None else planned
    ledger = Ledger.create(path, account)
    budget = Budget(epsilon=2.0, delta=DELTA, unit=Unit.RECORD, observer=Observer.SERVER)
    ledger.set_budgets({account: budget}, unit=Unit.RECORD, observer=Observer.SERVER)
    ledger.register("run-1", seeded=seeded, title=title)
    if releases:
        whom = {"account": account, "observer": Observer.SERVER}
        assert not ledger.commit(
            "run-1", [PrivacyPlan(**whom, cost=BILL, releases=releases, delta=DELTA)]
        )
    for round_ in range(rounds):
        refused = ledger.charge(
            "run-1", round_, [Charge(account=account, observer=Observer.SERVER, cost=BILL)]
        )
        assert not refused
    return ledger


def test_numbers_on_the_page_are_the_ledger_s(tmp_path: Path, look: Look) -> None:
    ledger = _ledger(tmp_path / "l.sqlite", "north")
    page = write_ledger_page(ledger, tmp_path / "page.html", "What 'north' has spent")
    seen = look(page, 390)
    check_silent(seen, page)
    assert seen.page.evaluate(OVERFLOW) <= 0
    epsilon = spend((EVENT,) * 3, DELTA, adjacency=Adjacency.ZERO_OUT).epsilon
    facts = seen.page.evaluate(FACTS)
    assert float(facts["budget"]) == 2.0
    assert float(facts["spent"]) == pytest.approx(epsilon, rel=1e-9)
    (row,) = table_of(seen, "accounts")
    assert [text for _, text in row[4:]] == ["3", "record", "server", "zero_out", "PLD"]
    assert row[0][1] == "north"
    assert float(row[1][0]) == pytest.approx(epsilon, rel=1e-9)
    assert row[1][1] == shown(epsilon)
    (study,) = table_of(seen, "studies")
    assert [text for _, text in study][:2] == ["heart: weiavg", "run-1"]
    assert study[4] == ["3", "3"]
    text = seen.page.inner_text("main")
    assert (
        "'north' has a budget of epsilon 2.000 at delta 1e-05 that protects each record against the server"
        in text
    )
    assert ledger.head().digest in text
    (plan,) = table_of(seen, "plans")
    assert [text for _, text in plan][:5] == ["north", "run-1", "server", "3", "3"]
    assert float(plan[5][0]) == pytest.approx(epsilon, rel=1e-9)
    assert f"It has spent epsilon {shown(epsilon)}, rounded up, in 3 rounds of 1 study." in text
    assert "NOT PRIVATE" not in text


def test_a_grant_is_never_shown_beside_an_epsilon_of_another_delta(tmp_path: Path) -> None:
    ledger = _ledger(tmp_path / "l.sqlite", "north")
    page = write_ledger_page(ledger, tmp_path / "page.html", "north", delta=1e-3).read_text()
    assert "budget of epsilon 2.000" not in page
    assert "of the budget" not in page
    assert "No budget is set at delta 0.001" in page


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_plan_counts_as_a_whole_however_much_of_it_took_place(
    tmp_path: Path, rounds: int
) -> None:
    ledger = _ledger(tmp_path / "l.sqlite", "north", rounds, planned=5)
    page = write_ledger_page(ledger, tmp_path / "page.html", "north").read_text()
    price = spend((EVENT,) * 5, DELTA, adjacency=Adjacency.ZERO_OUT).epsilon
    assert f'data-fact="spent" data-value="{price}"' in page
    said = {
        0: f"It has set aside epsilon {shown(price)}, rounded up, for what is planned, and released nothing",
        3: f"It has spent epsilon {shown(price)}, rounded up, in 3 rounds of 1 study.",
    }
    assert said[rounds] in page


def test_names_are_text_and_a_rehearsal_is_stamped(tmp_path: Path, look: Look) -> None:
    name = "<img src=x onerror=alert(1)>"
    ledger = _ledger(
        tmp_path / "l.sqlite", name, seeded=True, title="</script><script>alert(1)</script>"
    )
    page = write_ledger_page(ledger, tmp_path / "page.html", name)
    seen = look(page)
    check_silent(seen, page)
    assert "NOT PRIVATE: SEEDED" in seen.page.inner_text(".flag")
    assert table_of(seen, "accounts")[0][0][1] == name
    assert seen.page.inner_text("h1") == name


@pytest.mark.parametrize("title", ["maximum (hypothetical)", "HYPOTHETICAL: maximum"])
def test_raised_budgets_are_flagged(tmp_path: Path, title: str) -> None:
    ledger = _ledger(tmp_path / "l.sqlite", "north", title=title)
    page = write_ledger_page(ledger, tmp_path / "page.html", "north").read_text()
    assert f'<div class="flag">{Flag.HYPOTHETICAL.about} (run-1)</div>' in page
    assert "NOT PRIVATE" not in page


def test_what_a_site_warns_of_is_on_top(tmp_path: Path) -> None:
    ledger = _ledger(tmp_path / "l.sqlite", "north")
    warnings = ["KEPT ALONE: <b>no copy</b> of the head"]
    page = write_ledger_page(ledger, tmp_path / "page.html", "north", warnings=warnings).read_text()
    assert '<div class="flag">KEPT ALONE: &lt;b&gt;no copy&lt;/b&gt; of the head</div>' in page


def test_many_accounts_are_a_table_and_the_largest_epsilon_is_explained(tmp_path: Path) -> None:
    ledger = _ledger(tmp_path / "l.sqlite", "north", 1)
    names = [f"site-{number}" for number in range(6)]
    budget = Budget(epsilon=2.0, delta=DELTA, unit=Unit.RECORD, observer=Observer.SERVER)
    others = dict.fromkeys(names, budget)
    ledger.set_budgets(others, unit=Unit.RECORD, observer=Observer.SERVER)
    ledger.register("run-2", seeded=False, title="second")
    plans = [
        PrivacyPlan(account=n, observer=Observer.SERVER, cost=BILL, releases=i + 1, delta=DELTA)
        for i, n in enumerate(names)
    ]
    assert not ledger.commit("run-2", plans)
    page = write_ledger_page(ledger, tmp_path / "page.html", "all").read_text()
    assert "7 accounts, 2 studies." in page
    assert "site-5, per record, zero_out adjacency" in page
    assert page.count("times as likely") == 1


def test_what_was_never_used_and_what_protects_nobody_are_said_in_words(tmp_path: Path) -> None:
    unused = write_ledger_page(
        _ledger(tmp_path / "l.sqlite", "north", 0), tmp_path / "page.html", "north"
    ).read_text()
    assert "has spent nothing yet" in unused
    bare = Ledger.create(tmp_path / "bare.sqlite", "south")
    bare.register("run-1", seeded=False, title="heart: fedavg")
    nothing = PrivacyCost(
        unit=Unit.RECORD,
        adjacency=Adjacency.ZERO_OUT,
        events=(Event(noise_multiplier=0.0, steps=1),),
    )
    bare.commit(
        "run-1", [PrivacyPlan(account="south", observer=Observer.SERVER, cost=nothing, releases=1)]
    )
    bare.charge("run-1", 0, [Charge(account="south", observer=Observer.SERVER, cost=nothing)])
    open_ = write_ledger_page(bare, tmp_path / "bare.html", "south").read_text()
    assert "has no protection left" in open_
    assert "No budget is set" in open_
    empty = Ledger.create(tmp_path / "empty.sqlite", "west")
    assert (
        "No budget was set" in write_ledger_page(empty, tmp_path / "empty.html", "west").read_text()
    )


def test_the_command_writes_the_page_beside_what_it_prints(
    tmp_path: Path, weiavg: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "board.html"
    assert (
        run_command(
            ["account", "--ledger", str(weiavg / "ledger.sqlite"), "--page", str(page), "--json"]
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    text = page.read_text()
    assert "NOT PRIVATE: SEEDED" in text  # simulations are
    assert all(f'data-value="{line["epsilon"]}"' in text for line in told["statements"])
    assert f"{len(told['statements'])} accounts, 1 study." in text
    assert run_command(["account", "--epsilon", "1", "--delta", "1e-5", "--page", str(page)]) == 2
    assert "a page is about a ledger" in capsys.readouterr().err
