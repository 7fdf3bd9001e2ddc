"""A unit that leaves: a blank in studies that have begun, gone from the next, and from the folder."""

from __future__ import annotations

import io
import multiprocessing
import os
import shutil
import signal
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from dpfl.cli.main import run_command
from dpfl.core.errors import ConfigurationError, DataError, FolderError, LedgerError
from dpfl.core.types import Observer
from dpfl.deploy.messages import Message, Reply
from dpfl.deploy.outcome import keep_model
from dpfl.deploy.records import UNITS_KEY, Records
from dpfl.deploy.requests import END
from dpfl.deploy.site import STOPPED, Site
from dpfl.deploy.withdrawal import plan_withdrawal, remove_traces, withdraw
from dpfl.privacy.site_ledger import SiteLedger
from dpfl.runs.deployment import StudyFile
from dpfl.runs.site_file import SiteFile
from tests.deploy.federation import (
    CLIENT,
    RECORD,
    Desk,
    Federation,
    charged,
    make_site,
    study_values,
    upload_of,
)

SEEDED = {"seed": 5, "noise": "seeded"}
REHEARSAL = {"allow_seeded": True}
ROUNDS = 4
CLIP, LR, BATCH = 1.0, 0.1, 8


def line(site: Site, number: int) -> None:
    """Withdraw the record in a line of the site's file."""
    fresh = Site(site.folder)
    withdraw(fresh, plan_withdrawal(fresh, None, number))


def twins(tmp_path: Path, names: str, budget: Mapping[str, Any] = RECORD) -> dict[str, Site]:
    """Copies of one site: equal records, key and budget."""
    make_site(tmp_path / "first", "a", budget, REHEARSAL)
    for name in names:
        shutil.copytree(tmp_path / "first", tmp_path / name)
    return {name: Site(tmp_path / name) for name in names}


def desk(method: str = "weiavg", **more: Any) -> Desk:
    settings = {"local_steps": 1, **more}
    return Desk(study_values(method, rounds=ROUNDS, run=SEEDED, **settings))


def lines_of(site: Site, *, trained: bool, count: int) -> list[int]:
    """Lines of the file whose records are trained on, or tested on."""
    units = site.units()
    assert units is not None
    order = site.units_key.order(units.marks)
    cut = len(order) // 5
    chosen = order[cut:] if trained else order[:cut]
    return [place + 2 for place in chosen[:count]]  # below the header


def test_a_line_is_one_of_the_file_as_it_stands(tmp_path: Path) -> None:
    """Blank lines, line breaks in quotes and form feeds count as an editor counts them."""
    site = make_site(tmp_path / "a", "a", RECORD, REHEARSAL)
    records = site.folder / "records.csv"
    header, *rows = records.read_text().splitlines()
    broken = [f'"{first}\n","\f{second}",{rest}' for first, second, rest in map(split, rows)]
    records.write_bytes("\n\n".join([header, *broken]).replace("\n", "\r\n").encode())
    site = Site(site.folder)
    units = site.units()
    assert units is not None and len(units.marks) == len(rows)
    for number in (0, 1, len(rows) - 1):
        planned = plan_withdrawal(site, None, 3 + 3 * number)
        assert planned.mark == units.marks[number]
        first, second, _ = split(rows[number])
        line_there = f"records.csv, line {3 + 3 * number} (x0 = {first}, x1 = {second}, "
        assert planned.what.startswith(line_there)
        for between in (1, 2):  # the second line of the record, and a blank one
            with pytest.raises(DataError, match=f"line {3 + 3 * number + between}: holds no rec"):
                plan_withdrawal(site, None, 3 + 3 * number + between)


def split(row: str) -> list[str]:
    return row.split(",", 2)


def last_bytes(site: Site, server: Desk, round_: int) -> Message:
    answer = Site(site.folder).answer(server.train(round_))
    assert answer.accepted, answer.reason
    return answer


def with_private_part(tmp_path: Path) -> tuple[Site, Desk]:
    """A site that has answered a round, and keeps a part of the model to itself."""
    values = study_values("ppsgd", rounds=ROUNDS, run=SEEDED, local_steps=1)
    server = Desk({**values, "model": {"name": "mlp", "hidden": 4}})
    site = make_site(tmp_path / "a", "a", CLIENT, REHEARSAL)
    assert site.answer(server.terms()).accepted
    last_bytes(site, server, 0)
    return site, server


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("method", ["weiavg", "udp_fedavg"])
def test_after_a_withdrawal_all_messages_are_those_of_a_blank_from_the_start(
    tmp_path: Path, method: str, trained: bool
) -> None:
    server, sites = (
        desk(method),
        twins(tmp_path, "xyz", CLIENT if method == "udp_fedavg" else RECORD),
    )
    for site in sites.values():
        assert site.answer(server.terms()).accepted
    (number,) = lines_of(sites["x"], trained=trained, count=1)
    line(sites["x"], number)
    early = {name: last_bytes(site, server, 0) for name, site in sites.items()}
    assert early["y"].payload == early["z"].payload
    line(sites["y"], number)
    for round_ in (1, 2):
        answers = {name: last_bytes(site, server, round_) for name, site in sites.items()}
        x, y = ({**answers[name].header, "head": ""} for name in "xy")
        assert x == y and answers["x"].payload == answers["y"].payload
    observer = Observer.WORLD if method == "udp_fedavg" else Observer.SERVER
    assert all(charged(site, observer) == {0, 1, 2} for site in sites.values())


def test_before_a_withdrawal_sums_differ_by_what_is_charged(tmp_path: Path) -> None:
    """Equal noise cancels: what is left is one clipped gradient over the expected batch."""
    server = desk()
    sites = twins(tmp_path, "xy")
    for site in sites.values():
        assert site.answer(server.terms()).accepted
    for number in lines_of(sites["x"], trained=True, count=1):
        line(sites["x"], number)
    moved = 0.0
    for round_ in range(ROUNDS):
        one, other = (upload_of(last_bytes(site, server, round_)) for site in sites.values())
        moved = max(moved, float(torch.linalg.vector_norm(one - other)))
    assert moved <= LR * CLIP / BATCH * 1.01


def test_sizes_stay_and_the_row_may_be_deleted_afterwards(tmp_path: Path) -> None:
    sites, server = twins(tmp_path, "xy"), desk()
    for site in sites.values():
        assert site.answer(server.terms()).accepted
    numbers = lines_of(sites["x"], trained=True, count=2)
    numbers += lines_of(sites["x"], trained=False, count=1)
    for site in sites.values():
        for number in numbers:
            line(site, number)
    records = sites["y"].folder / "records.csv"
    rows = records.read_text().splitlines()
    records.write_text("\n".join(r for i, r in enumerate(rows, 1) if i not in numbers) + "\n")
    for round_ in range(2):
        one, other = (last_bytes(site, server, round_) for site in sites.values())
        assert one.payload == other.payload
    claims = Site(sites["y"].folder).answer(server.hello()).header["claims"]
    assert claims["examples"] == 32
    another = Desk(server.values, run="run-2")
    later = [Site(site.folder).answer(another.hello()).header["claims"] for site in sites.values()]
    assert later[0] == later[1] and later[0]["examples"] == 37 - round(37 / 5)


def test_a_site_with_all_units_withdrawn_still_answers(tmp_path: Path) -> None:
    site, server = make_site(tmp_path / "a", "a", policy=REHEARSAL), desk()
    assert site.answer(server.terms()).accepted
    for number in range(2, 42):
        line(site, number)
    assert last_bytes(site, server, 0).payload
    records = site.folder / "records.csv"
    records.write_text(records.read_text().splitlines()[0] + "\n")
    assert last_bytes(site, server, 1).payload


def test_of_equal_rows_the_last_is_withdrawn_and_twice_is_refused(tmp_path: Path) -> None:
    site = make_site(tmp_path / "a", "a")
    records = site.folder / "records.csv"
    rows = records.read_text().splitlines()
    records.write_text("\n".join([*rows, rows[3], rows[3]]) + "\n")
    units = Site(site.folder).units()
    assert units is not None
    wanted = [units.marks[-1], units.marks[-2], units.marks[2]]
    for mark in wanted:
        planned = plan_withdrawal(Site(site.folder), None, 4)
        assert planned.mark == mark
        withdraw(Site(site.folder), planned)
    with pytest.raises(DataError, match="was withdrawn before"):
        plan_withdrawal(Site(site.folder), None, 43)


# -- while other things happen ---------------------------------------------------------------------


def test_an_answer_under_way_is_computed_anew_and_charged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites, server = twins(tmp_path, "xy"), desk()
    for site in sites.values():
        assert site.answer(server.terms()).accepted
    (number,) = lines_of(sites["x"], trained=True, count=1)
    work, times = Site.work, []

    def interrupted(self: Site, *rest: Any) -> Any:
        made = work(self, *rest)
        times.append(1)
        if len(times) == 1:
            line(self, number)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(Site, "work", interrupted)
        answer = sites["x"].answer(server.train(0))
    assert answer.accepted and len(times) == 2
    line(sites["y"], number)
    assert answer.payload == last_bytes(sites["y"], server, 0).payload
    assert charged(sites["x"]) == {0}


def test_a_stored_answer_is_sent_again_as_it_was(tmp_path: Path) -> None:
    site, server = make_site(tmp_path / "a", "a", policy=REHEARSAL), desk()
    assert site.answer(server.terms()).accepted
    before = last_bytes(site, server, 0)
    line(site, lines_of(site, trained=True, count=1)[0])
    again = last_bytes(site, server, 0)
    assert again.payload == before.payload and Reply.of(again).more


@pytest.mark.parametrize("at", ["withdraw", "traces_removed"])
def test_a_command_that_is_killed_leaves_all_or_nothing(tmp_path: Path, at: str) -> None:
    site, server = make_site(tmp_path / "a", "a", policy=REHEARSAL), desk()
    assert site.answer(server.terms()).accepted
    last_bytes(site, server, 0)
    number = lines_of(site, trained=True, count=1)[0]
    finish = site.folder / "models" / "old" / "finish.json"

    def killed() -> None:
        real = SiteLedger.withdraw

        def dies(self: SiteLedger, *rest: Any) -> bool:
            if at == "withdraw":  # inside the transaction
                self._transaction = None  # type: ignore[method-assign, assignment]
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, *rest)

        SiteLedger.withdraw = dies  # type: ignore[method-assign]
        SiteLedger.traces_removed = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        line(site, number)

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with closing(Site(site.folder).ledger()) as ledger:
        withdrawn, untraced = len(ledger.withdrawals()), len(ledger.untraced())
    assert (withdrawn, untraced) == ((0, 0) if at == "withdraw" else (1, 1))
    assert last_bytes(site, server, 1).payload
    remove_traces(Site(site.folder))
    with closing(Site(site.folder).ledger()) as ledger:
        assert not ledger.untraced()
    assert not finish.exists()
    if at == "withdraw":
        line(site, number)


# -- files that change otherwise -------------------------------------------------------------------


@pytest.mark.parametrize("change", ["drop a row", "a cell", "equal count", "another key"])
def test_other_records_end_the_study_with_the_one_sentence(tmp_path: Path, change: str) -> None:
    site, server = make_site(tmp_path / "a", "a", policy=REHEARSAL), desk()
    assert site.answer(server.terms()).accepted
    records = site.folder / "records.csv"
    rows = records.read_text().splitlines()
    if change == "another key":
        (site.folder / UNITS_KEY).write_text("11" * 32)
    elif change == "drop a row":
        records.write_text("\n".join(rows[:-1]) + "\n")
    elif change == "a cell":
        records.write_text("\n".join([rows[0], f"9{rows[1].lstrip('-')}", *rows[2:]]) + "\n")
    else:
        records.write_text("\n".join([*rows[:-1], rows[1]]) + "\n")
    for message in (server.train(0), server.terms()):
        answer = Site(site.folder).answer(message)
        assert Reply.of(answer).more is answer.accepted is (message.header["kind"] == "terms")
    assert Site(site.folder).answer(server.train(1)).reason == STOPPED
    assert charged(site) == set()
    claims = Site(site.folder).answer(server.hello()).header["claims"]
    assert claims["examples"] == 32  # what it said when it agreed, whatever the file holds now
    records.write_text("\n".join([rows[0], *reversed(rows[1:])]) + "\n")
    same = Site(site.folder).answer(server.train(1))  # the order of rows is nothing
    assert same.accepted is (change != "another key")


def test_a_spent_budget_ends_with_the_same_sentence(tmp_path: Path) -> None:
    site = make_site(tmp_path / "a", "a", {**RECORD, "filter": "renyi"}, REHEARSAL)
    server = Desk(study_values("weiavg", rounds=200, run=SEEDED), epsilon=400.0)
    if not site.answer(server.terms()).accepted:
        pytest.skip("not planned")
    reasons = {
        site.answer(server.train(round_)).header.get("reason") for round_ in range(0, 200, 9)
    }
    assert reasons <= {None, STOPPED}


def test_a_study_from_before_is_refused_and_the_log_says_why(tmp_path: Path) -> None:
    site, server = make_site(tmp_path / "a", "a", policy=REHEARSAL), desk()
    assert site.answer(server.terms()).accepted
    with closing(site.ledger()) as ledger:
        ledger._connection.execute("DELETE FROM units")
    assert site.answer(server.train(0)).reason == STOPPED
    assert "earlier rule" in (site.folder / "site.log").read_text()


def test_a_lost_key_is_not_replaced_where_it_was_used(tmp_path: Path) -> None:
    site = make_site(tmp_path / "a", "a")
    assert site.answer(Desk(study_values()).terms()).accepted
    (site.folder / UNITS_KEY).unlink()
    with pytest.raises(FolderError, match="is not known; restore it"):
        Site(site.folder).federation()


@pytest.mark.parametrize("key", ["", "ab", "cd" * 32, "ab" * 100, "zz"])
def test_another_key_does_not_undo_a_withdrawal(tmp_path: Path, key: str) -> None:
    site = hospital(tmp_path / "a")
    withdraw(site, plan_withdrawal(Site(site.folder), "p7", None))
    kept = (site.folder / UNITS_KEY).read_text()
    (site.folder / UNITS_KEY).write_text(key)
    with pytest.raises(FolderError, match="restore it"):
        Site(site.folder).member()
    (site.folder / UNITS_KEY).write_text(kept)
    shard = Site(site.folder).member().shard
    assert shard.examples + len(shard.test_labels) == 29


def test_a_person_who_is_withdrawn_twice_at_once_is_withdrawn_once(tmp_path: Path) -> None:
    site = hospital(tmp_path / "a")
    one, other = (plan_withdrawal(Site(site.folder), "p7", None) for _ in range(2))
    withdraw(Site(site.folder), one)
    with pytest.raises(LedgerError, match="changed by another process meanwhile"):
        withdraw(Site(site.folder), other)
    with closing(site.ledger()) as ledger:
        assert len(ledger.withdrawals()) == 1


def test_a_file_that_changes_while_a_person_thinks_withdraws_nobody(tmp_path: Path) -> None:
    """The study could not go on with a blank, although the command has said so."""
    site, server = make_site(tmp_path / "a", "a", policy=REHEARSAL), desk()
    assert site.answer(server.terms()).accepted
    number = lines_of(site, trained=True, count=1)[0]
    planned = plan_withdrawal(Site(site.folder), None, number)
    records = site.folder / "records.csv"
    before = records.read_text()
    rows = before.splitlines()
    records.write_text("\n".join(rows[: number - 1] + rows[number:]) + "\n")
    with pytest.raises(DataError, match="put the file back"):
        withdraw(Site(site.folder), planned)
    records.write_text(before)
    withdraw(Site(site.folder), planned)
    assert last_bytes(site, server, 0).payload


@pytest.mark.parametrize("put_back", [False, True])
def test_work_that_was_under_way_on_a_study_that_stopped_is_not_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put_back: bool
) -> None:
    site, server = make_site(tmp_path / "a", "a", policy=REHEARSAL), desk()
    assert site.answer(server.terms()).accepted
    number = lines_of(site, trained=True, count=1)[0]
    records, work = site.folder / "records.csv", Site.work
    before = records.read_text()

    def leaves_meanwhile(self: Site, *rest: Any) -> Any:
        found = work(self, *rest)
        records.write_text(before + before.splitlines()[-1] + "\n")
        line(site, number)
        if put_back:
            records.write_text(before)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Site, "work", leaves_meanwhile)
        assert site.answer(server.train(0)).reason == STOPPED
    with closing(site.ledger()) as ledger:
        assert ledger.answered("run-1") is None


def test_a_stored_answer_does_not_follow_from_the_policy_of_today(tmp_path: Path) -> None:
    site, server = make_site(tmp_path / "a", "a", policy=REHEARSAL), desk()
    assert site.answer(server.terms()).accepted
    first = last_bytes(site, server, 0)
    values = SiteFile.in_folder(site.folder).model_dump(exclude_none=True)
    values["policy"]["methods"] = ["fedavg_dp"]
    (site.folder / "site.toml").write_text(SiteFile.from_dict(values).to_toml())
    again = last_bytes(site, server, 0)
    assert again.payload == first.payload
    assert not again.header["more"]
    assert not Site(site.folder).answer(server.train(1)).accepted


def test_a_file_that_cannot_be_removed_keeps_nobody_from_leaving(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    site = hospital(tmp_path / "a")
    (site.folder / "models" / "old" / "finish.html_files").mkdir(parents=True)
    (site.folder / "models" / "young").mkdir()
    heads = [site.folder / "models" / name / "head.safetensors" for name in ("old", "young")]
    for head in heads:
        head.write_bytes(b"a head")
    for person in ("p7", "p8"):
        arguments = ["site", "withdraw", str(site.folder), "--person", person, "--yes"]
        assert run_command(arguments) in (5, 6)
        assert "finish.html_files" in capfd.readouterr().err
        assert not any(head.exists() for head in heads)
    with closing(site.ledger()) as ledger:
        assert len(ledger.withdrawals()) == len(ledger.untraced()) == 2


def test_private_parts_leave_the_ledger_s_file_or_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, _ = with_private_part(tmp_path)
    with closing(site.ledger()) as ledger:
        answered = ledger.answered("run-1")
    assert answered is not None
    held, ledger_file = answered.private[-64:], site.folder / "ledger.sqlite"
    number = lines_of(site, trained=True, count=1)[0]
    connect = sqlite3.connect
    monkeypatch.setattr("sqlite3.connect", lambda *a, **k: connect(*a, **{**k, "timeout": 0.1}))
    with closing(connect(ledger_file)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM outbox").fetchall()
        with pytest.raises(LedgerError, match="is read by another process"):
            line(site, number)
    remove_traces(Site(site.folder))
    files = [path for path in site.folder.rglob("*") if path.is_file()]
    assert not any(held in path.read_bytes() for path in files)


# -- people ----------------------------------------------------------------------------------------

SCHEMA = """
target = "ill"
person = "who"
person_word = "patient"
[columns.dose]
type = "number"
range = [0, 1]
missing = "drop"
[columns.ill]
type = "boolean"
"""


def hospital(folder: Path) -> Site:
    folder.mkdir(parents=True)
    rows = [f"p{i % 30},{i / 60:.3f},{i % 2}" for i in range(60)]
    (folder / "records.csv").write_text("\n".join(["who,dose,ill", *rows]) + "\n")
    (folder / "schema.toml").write_text(SCHEMA)
    values = {
        "site": {"id": "a"},
        "data": {"file": "records.csv", "schema": "schema.toml"},
        "budget": {"epsilon": 4.0, "delta": 1e-3, "unit": "patient"},
    }
    (folder / "site.toml").write_text(SiteFile.from_dict(values).to_toml())
    site = Site(folder)
    site.prepare()
    return site


def test_a_person_is_withdrawn_by_id_from_the_command_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = hospital(tmp_path / "a")
    before = site.member().shard
    assert before.examples + len(before.test_labels) == 30
    monkeypatch.setattr("typer.confirm", lambda text: False)
    assert run_command(["site", "withdraw", str(site.folder), "--person", "p7"]) == 0
    assert "Nothing was withdrawn" in capfd.readouterr().err
    assert run_command(["site", "withdraw", str(site.folder), "--person", " p7", "--yes"]) == 0
    assert "patient 'p7'" in capfd.readouterr().out
    after = Site(site.folder).member().shard
    assert after.examples + len(after.test_labels) == 29
    page = tmp_path / "board.html"
    assert run_command(["site", "spend", str(site.folder), "--page", str(page)]) == 0
    assert "1 patient(s) withdrew" in page.read_text()
    for arguments, words, code in (
        (["--person", "p7"], "was withdrawn before", 3),
        (["--person", "nobody"], "is not in the file", 3),
        (["--line", "3"], "its units are not rows", 2),
        ([], "needs one unit", 2),
        (["--person", "p\udcff"], "cannot be written as UTF-8", 3),
        (["--person", "p1", "--line", "3"], "needs one unit", 2),
    ):
        assert run_command(["site", "withdraw", str(site.folder), *arguments, "--yes"]) == code
        assert words in capfd.readouterr().err


def test_where_nobody_can_be_asked_nobody_is_withdrawn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = hospital(tmp_path / "a")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert run_command(["site", "withdraw", str(site.folder), "--person", "p7"]) == 130
    told = capfd.readouterr()
    assert "--yes skips this question" in told.out + told.err
    with closing(site.ledger()) as ledger:
        assert not ledger.withdrawals()


def test_rows_without_an_id_are_explained_to_the_board(tmp_path: Path) -> None:
    site, page = make_site(tmp_path / "a", "a"), tmp_path / "board.html"
    assert run_command(["site", "spend", str(site.folder), "--page", str(page)]) == 0
    assert "A column that names persons avoids this" in page.read_text()
    with pytest.raises(ConfigurationError, match="has no person column"):
        plan_withdrawal(site, "p1", None)


def test_a_withdrawal_in_a_real_study_of_three_sites(tmp_path: Path) -> None:
    """The study goes on, and what was made of the delivered model is made again."""
    played = Federation.of(tmp_path, study_values(rounds=2))
    played.play()
    site = played.sites["a"]
    assert StudyFile.from_file(tmp_path / "server" / "study.toml").study.sites
    line(site, 5)
    assert run_command(["site", "evaluate", str(site.folder)]) == 0


# -- between two moments ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["train", "terms"])
def test_a_withdrawal_while_a_message_is_looked_at_does_not_stop_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    site, server = make_site(tmp_path / "a", "a", policy=REHEARSAL), desk()
    assert site.answer(server.terms()).accepted
    number = lines_of(site, trained=True, count=1)[0]
    enter, times = Site.enter, []

    def interrupted(self: Site, ledger: SiteLedger, run: str | None) -> Any:
        planned = enter(self, ledger, run)
        if run is not None and not times:
            times.append(1)
            line(self, number)
        return planned

    with monkeypatch.context() as patch:
        patch.setattr(Site, "enter", interrupted)
        answer = Site(site.folder).answer(server.train(0) if kind == "train" else server.terms())
    assert answer.accepted and Reply.of(answer).more
    assert last_bytes(site, server, 0).payload


def test_a_study_that_begins_while_a_person_thinks_goes_on_with_a_blank(tmp_path: Path) -> None:
    site, server = make_site(tmp_path / "a", "a", policy=REHEARSAL), desk()
    planned = plan_withdrawal(site, None, lines_of(site, trained=True, count=1)[0])
    assert site.answer(server.terms()).accepted
    withdraw(site, planned)
    assert last_bytes(site, server, 0).payload


def test_a_file_that_changes_during_the_work_is_not_answered_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, server = make_site(tmp_path / "a", "a", policy=REHEARSAL), desk()
    assert site.answer(server.terms()).accepted
    records, work = site.folder / "records.csv", Site.work

    def swapped(self: Site, *rest: Any) -> Any:
        rows = records.read_text().splitlines()
        records.write_text("\n".join([rows[0], *(f"9{r.lstrip('-')}" for r in rows[1:])]) + "\n")
        return work(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Site, "work", swapped)
        assert site.answer(server.train(0)).reason == STOPPED
    assert charged(site) == set()


def test_a_private_part_is_not_kept_of_a_unit_that_leaves_while_the_model_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, server = with_private_part(tmp_path)
    number = lines_of(site, trained=True, count=1)[0]

    def kept(*rest: Any) -> Path:
        line(site, number)
        return keep_model(*rest)

    monkeypatch.setattr("dpfl.deploy.site.keep_model", kept)
    header = {k: v for k, v in server.train(0).header.items() if k != "round"} | {"kind": END}
    payload = save(server.study().build_model().state_dict())
    assert site.answer(Message(header=header, payload=payload)).accepted
    assert list(site.folder.glob("models/*/model.safetensors"))
    assert not list(site.folder.glob("models/*/private.safetensors"))


@pytest.mark.parametrize("change", ["same size and time", "key", "rule"])
def test_a_worker_that_has_read_the_records_notices_what_changes(
    tmp_path: Path, change: str
) -> None:
    site, server, records = make_site(tmp_path / "a", "a", policy=REHEARSAL), desk(), Records()
    assert Site(site.folder, records).answer(server.terms()).accepted
    file, settings = site.folder / "records.csv", site.folder / "site.toml"
    if change == "key":
        (site.folder / UNITS_KEY).write_text("11" * 32)
    elif change == "rule":
        settings.write_text(settings.read_text().replace("classes = 2", "classes = 3"))
    else:
        before = file.stat()
        file.write_text(file.read_text().replace("\n-1.0,", "\n-2.0,", 1))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert file.stat().st_size == before.st_size
    assert not Site(site.folder, records).answer(server.train(0)).accepted


@pytest.mark.parametrize("cell", ["", "word"])
def test_records_that_cannot_be_read_any_more_stop_the_site_like_any_reason(
    tmp_path: Path, cell: str
) -> None:
    site, server = make_site(tmp_path / "a", "a", policy=REHEARSAL), desk()
    assert site.answer(server.terms()).accepted
    before = last_bytes(site, server, 0)
    records = site.folder / "records.csv"
    rows = records.read_text().splitlines()
    rows[5] = cell + rows[5][rows[5].index(",") :]
    records.write_text("\n".join(rows) + "\n")
    again = last_bytes(site, server, 0)
    assert again.payload == before.payload and not Reply.of(again).more
    assert Site(site.folder).answer(server.train(1)).reason == STOPPED
    assert Site(site.folder).answer(server.hello()).header["claims"]["examples"] == 32


def test_a_line_is_the_one_of_an_editor(tmp_path: Path) -> None:
    site = hospital(tmp_path / "a")
    schema = site.folder / "schema.toml"
    schema.write_text('ignore = ["note"]\n' + SCHEMA.replace('person = "who"', ""))
    schema.write_text(schema.read_text().replace('person_word = "patient"', ""))
    text = 'note,dose,ill\nplain,0.1,0\n"two\nlines",0.2,1\nplain,0.3,0\n'
    (site.folder / "records.csv").write_text(text)
    settings = site.folder / "site.toml"
    settings.write_text(settings.read_text().replace('unit = "patient"', 'unit = "record"'))
    shutil.rmtree(site.folder / "models", ignore_errors=True)
    for path in site.folder.glob("ledger.sqlite*"):
        path.unlink()
    site = Site(site.folder)
    site.prepare()
    assert "dose = 0.3" in plan_withdrawal(site, None, 5).what
    with pytest.raises(DataError, match="holds no record"):
        plan_withdrawal(site, None, 4)
