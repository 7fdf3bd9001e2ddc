"""``dpfl ledger verify``: says what was checked, and refuses what was changed."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dpfl.cli.main import run_command
from dpfl.core.types import Adjacency, Budget, Observer, Unit
from dpfl.privacy.costs import Charge, PrivacyCost, PrivacyPlan
from dpfl.privacy.events import Event
from dpfl.privacy.ledger import Ledger

BILL = PrivacyCost(
    unit=Unit.RECORD, adjacency=Adjacency.ZERO_OUT, events=(Event(noise_multiplier=8.0),)
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    where = tmp_path / "north.sqlite"
    with closing(Ledger.create(where, "north", filter="gaussian")) as ledger:
        ledger.set_budgets(
            {"north": Budget(epsilon=2.0, delta=1e-5)}, unit=Unit.RECORD, observer=Observer.SERVER
        )
        ledger.register("run-1", seeded=False, title="heart: weiavg")
        ledger.commit(
            "run-1", [PrivacyPlan(account="north", observer=Observer.SERVER, cost=BILL, releases=9)]
        )
        charge(ledger, 0)
    return where


def charge(ledger: Ledger, round_: int) -> None:
    assert not ledger.charge(
        "run-1", round_, [Charge(account="north", observer=Observer.SERVER, cost=BILL)]
    )


def ask(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = run_command([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_verify_says_what_was_checked(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(Ledger.open(path)) as ledger:
        head = ledger.head()
    code, out, _ = ask(capsys, "ledger", "verify", path)
    assert code == 0
    assert f"Head: {head.digest}" in out
    assert "gaussian" in out
    code, out, _ = ask(capsys, "ledger", "verify", path, "--head", str(head), "--json")
    told = json.loads(out)
    assert code == 0
    assert (told["head"], told["entries"], told["head_file"]) == (head.digest, 4, 4)
    assert (told["identity"], told["filter"]) == ("north", "gaussian")
    assert told["checked"] == ["file", "hash chain", "head file", "given head"]


def test_a_head_noted_earlier_is_found_in_a_longer_ledger_and_not_in_another(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(path, tmp_path / "old.sqlite")
    shutil.copy(f"{path}.head", tmp_path / "old.sqlite.head")
    with closing(Ledger.open(path)) as ledger:
        charge(ledger, 1)
        noted = ledger.head().digest
        charge(ledger, 2)
    assert ask(capsys, "ledger", "verify", path, "--head", noted)[0] == 0
    # Ledger and head file were put back together: only the noted head tells.
    assert ask(capsys, "ledger", "verify", tmp_path / "old.sqlite")[0] == 0
    code, _, err = ask(capsys, "ledger", "verify", tmp_path / "old.sqlite", "--head", noted)
    assert code == 5
    assert f"does not contain entry {noted}" in err


def test_a_changed_ledger_ends_every_command_that_reads_it(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE grants SET epsilon = 200")
    for words in (("ledger", "verify", path), ("account", "--ledger", path)):
        code, out, err = ask(capsys, *words)
        assert (code, out) == (5, "")
        assert "was changed, deleted or moved" in err


def test_a_ledger_copied_without_its_head_is_accepted_by_hand(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(f"{path}.head").unlink()
    code, _, err = ask(capsys, "ledger", "verify", path)
    assert code == 5
    assert "--accept-head" in err
    code, _, err = ask(capsys, "ledger", "verify", path, "--accept-head")
    assert code == 0
    assert "Wrote" in err
    assert ask(capsys, "ledger", "verify", path)[0] == 0


def test_a_ledger_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ((), ("--accept-head",)):
        code, _, err = ask(capsys, "ledger", "verify", tmp_path / "nowhere.sqlite", *more)
        assert code == 5
        assert "there is no ledger" in err
    assert list(tmp_path.iterdir()) == []


def test_account_prints_filter_and_head(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(Ledger.open(path)) as ledger:
        head = ledger.head()
    page = tmp_path / "board.html"
    code, out, _ = ask(capsys, "account", "--ledger", path, "--page", page)
    assert code == 0
    assert head.digest in out
    assert head.digest in page.read_text()
    _, out, _ = ask(capsys, "account", "--ledger", path, "--json")
    told = json.loads(out)
    assert (told["filter"], told["entries"], told["head"]) == ("gaussian", 4, head.digest)
    assert told["statements"][0]["accountant"] == "Gaussian filter"
