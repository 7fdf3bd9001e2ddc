"""The personal finish at a site: files of its own, made after the answer; nothing of it is sent."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from dpfl.cli.main import run_command
from dpfl.core.layout import Layout
from dpfl.deploy import finish as module
from dpfl.deploy.finish import FINISH_PAGE, HEAD, finish_delivered, finish_of
from dpfl.deploy.messages import Message
from dpfl.deploy.outcome import outcomes
from dpfl.deploy.records import LoadedSite
from dpfl.deploy.requests import END
from dpfl.deploy.site import Site
from dpfl.deploy.site_folder import FINISH, LOG, SENT
from dpfl.deploy.withdrawal import plan_withdrawal, withdraw
from dpfl.deploy.worker import Worker
from dpfl.privacy.site_ledger import SiteLedger
from tests.deploy.federation import (
    SIGNER,
    Desk,
    Federation,
    make_site,
    study_values,
    write_csv,
)
from tests.deploy.releasing import begin_with_a_mean

FILES = {FINISH, FINISH_PAGE, HEAD}


def _ended(desk: Desk, weight: float = 1.0) -> Message:
    """A delivery of a model that knows which feature decides, if its ``weight`` is above 0."""
    blocks = Layout.of_module(desk.study().build_model())
    tensors = {block.name: torch.zeros(block.shape) for block in blocks}
    tensors["1.weight"][1, 0] = weight
    header = desk.header(END, terms=desk.told(), signer=SIGNER)
    return Message(header=header, payload=save(tensors))


def _kept(site: Site) -> dict[str, bytes]:
    (outcome,) = outcomes(site.folder)
    return {path.name: path.read_bytes() for path in outcome.model.parent.iterdir()}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = make_site(tmp_path / "a", "a")
    write_csv(made.folder / "records.csv", seed=3, records=200)
    return made


def _delivered(site: Site, weight: float = 1.0) -> None:
    desk = Desk(study_values())
    assert site.answer(desk.terms()).accepted
    assert site.answer(_ended(desk, weight)).accepted


def test_a_site_keeps_what_it_gets_and_its_own_head_in_its_own_folder(site: Site) -> None:
    _delivered(site)
    assert not FILES & set(_kept(site))  # the answer does not wait for it
    finish_delivered(LoadedSite(site.folder))
    kept = _kept(site)
    assert set(kept) >= FILES
    found = json.loads(kept[FINISH])
    assert found["common"] == 1.0
    assert found["tested"] == 40
    assert found["local"] < 1.0
    assert found["verdict"] == "too few test records to tell"  # a difference of two records
    assert found["sentence"].startswith("40 test records are too few to tell")
    assert found["sentence"] in kept[FINISH_PAGE].decode()
    (outcome,) = outcomes(site.folder)
    head = load_file(outcome.model.with_name(HEAD))
    model = load_file(outcome.model)
    assert {name: x.shape for name, x in head.items()} == {n: x.shape for n, x in model.items()}
    for name in FILES:
        assert outcome.model.with_name(name).stat().st_mode & 0o077 == 0


def test_where_test_records_are_too_few_the_site_is_told_in_a_sentence(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    _delivered(site, weight=-1.0)  # a model that is always wrong
    assert run_command(["site", "evaluate", str(site.folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "40 test records are too few to tell whether federating helps this site" in shown
    assert "0.0 % with the common model" in shown
    assert set(_kept(site)) >= FILES  # it was missing, and is made
    assert run_command(["site", "status", str(site.folder)]) == 0
    assert "too few to tell whether federating" in " ".join(capsys.readouterr().out.split())
    assert run_command(["site", "status", str(site.folder), "--json"]) == 0
    (study,) = json.loads(capsys.readouterr().out)["studies"]
    assert study["finish"].startswith("40 test records are too few to tell")
    assert run_command(["site", "evaluate", str(site.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finish"]["common"] == 0.0


def test_it_is_made_once_and_again_for_another_model_or_other_records(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, real = list[float](), module.personal_finish

    def counted(*rest: Any, **more: Any) -> Any:
        found = real(*rest, **more)
        assert found is not None
        made.append(found.scores.common)
        return found

    monkeypatch.setattr(module, "personal_finish", counted)
    _delivered(site)
    for _ in range(3):
        finish_delivered(LoadedSite(site.folder))
    assert made == [1.0]
    _delivered(site, weight=-1.0)
    finish_delivered(LoadedSite(site.folder))
    assert made == [1.0, 0.0]
    write_csv(site.folder / "records.csv", seed=4, records=300)
    finish_delivered(LoadedSite(site.folder))
    assert len(made) == 3
    (outcome,) = outcomes(site.folder)
    outcome.model.with_name(FINISH).write_text("{")
    finish_delivered(LoadedSite(site.folder))
    assert len(made) == 4
    assert json.loads(_kept(site)[FINISH])["tested"] == 60


def test_nothing_of_it_is_in_any_message_or_at_the_server(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values())
    for number, site in enumerate(federation.sites.values()):
        write_csv(site.folder / "records.csv", seed=number, records=200)
    federation.play()
    sent = {name: (site.folder / SENT).read_bytes() for name, site in federation.sites.items()}
    for name, site in federation.sites.items():
        finish_delivered(LoadedSite(site.folder))
        assert (site.folder / SENT).read_bytes() == sent[name]
    names = dict(enumerate(federation.sites, start=1))
    again = [  # whoever asks again learns nothing new
        federation.sites[names[node]].answer(asked) for node, asked, _ in federation.grid.heard
    ]
    secrets = []
    for site in federation.sites.values():
        kept = _kept(site)
        assert set(kept) >= FILES
        found = json.loads(kept[FINISH])
        values = (json.dumps(found[name]) for name in ("local", "both", "error"))
        secrets += [value.encode() for value in values if len(value) > 8]
        secrets += [found["key"].encode(), found["sentence"].encode()]
        head = load_file(site.folder / "models" / found["run"] / HEAD)
        secrets += [x.numpy().tobytes()[:64] for x in head.values()]
    assert len(secrets) >= 9
    heard = [message for one in federation.grid.heard for message in one[1:]]
    told = [header_and_payload(message) for message in (*heard, *again)]
    files = [path.read_bytes() for path in federation.server.rglob("*") if path.is_file()]
    for secret in secrets:
        assert not any(secret in text for text in (*told, *files))
    ends = [answer for _, asked, answer in federation.grid.heard if asked.header["kind"] == END]
    assert all(set(answer.header) == {"ok", "site"} and not answer.payload for answer in ends)


def header_and_payload(message: Message) -> bytes:
    return json.dumps(dict(message.header)).encode() + message.payload


def test_what_goes_wrong_is_logged_and_the_model_is_there(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*rest: Any, **more: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(module, "personal_finish", broken)
    _delivered(site)
    finish_delivered(LoadedSite(site.folder))
    assert "MemoryError: no room" in (site.folder / LOG).read_text()
    assert "model.safetensors" in _kept(site)
    assert not FILES & set(_kept(site))


def test_a_worker_answers_first_and_finishes_after_it_was_released(site: Site) -> None:
    desk, worker = Desk(study_values()), Worker(site.folder)
    try:
        assert worker.answer(desk.terms(), print).accepted
        answer = worker.answer(_ended(desk), print)
        assert set(answer.header) == {"ok", "site"}
        worker.release()
        assert worker.pid is None
        until = time.monotonic() + 60
        while FINISH not in _kept(site) and time.monotonic() < until:
            time.sleep(0.05)
        assert set(_kept(site)) >= FILES
    finally:
        worker.end()


def test_a_model_that_was_not_delivered_or_another_metric_leaves_no_file(
    site: Site, tmp_path: Path
) -> None:
    _delivered(site)
    (outcome,) = outcomes(site.folder)
    before = set(_kept(site))
    by_loss = finish_of(outcome, site, "loss")
    assert by_loss is not None
    assert by_loss.metric == "loss"
    brought = tmp_path / "models" / "x"
    brought.mkdir(parents=True)
    for name in ("model.safetensors", "model.json", "study.toml"):
        shutil.copy(outcome.folder / name, brought)
    given = ["--model", str(brought)]
    assert run_command(["site", "evaluate", str(site.folder), *given]) == 0
    assert len(list(brought.iterdir())) == 3
    assert set(_kept(site)) == before


def test_the_local_model_does_without_a_released_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_with_a_mean(monkeypatch)
    federation = Federation.of(tmp_path, study_values("weiavg", rounds=2))
    federation.play()
    site = federation.sites["a"]
    (outcome,) = outcomes(site.folder)
    first = finish_of(outcome, site)
    tensors = load_file(outcome.model)
    outcome.model.write_bytes(save({**tensors, "0.mean": tensors["0.mean"] + 10}))
    second = finish_of(outcome, site)
    assert first is not None
    assert second is not None
    assert first.local == second.local


# -- a unit leaves -----------------------------------------------------------------------------------


def _leave(site: Site, line: int) -> None:
    fresh = LoadedSite(site.folder)
    withdraw(fresh, plan_withdrawal(fresh, None, line))


@pytest.mark.parametrize("at", ["personal_finish", "traces_removed"])
def test_whoever_leaves_while_another_leaves_is_in_no_finish(
    site: Site, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    _delivered(site)
    finish_delivered(LoadedSite(site.folder))
    owner: Any = module if at == "personal_finish" else SiteLedger
    real, second = getattr(owner, at), [6]

    def also(*rest: Any, **more: Any) -> Any:
        if second:
            _leave(site, second.pop())
        return real(*rest, **more)

    def then(*rest: Any, **more: Any) -> Any:  # the other one commits after the work on its records
        found = real(*rest, **more)
        if second:
            _leave(site, second.pop())
        return found

    monkeypatch.setattr(owner, at, then if at == "personal_finish" else also)
    _leave(site, 5)
    assert not second
    left = {name: content for name, content in _kept(site).items() if name in FILES}
    assert set(left) == FILES
    for name in FILES:
        (outcome,) = outcomes(site.folder)
        outcome.model.with_name(name).unlink()
    finish_delivered(LoadedSite(site.folder))
    assert {name: _kept(site)[name] for name in (HEAD, FINISH)} == {
        name: left[name] for name in (HEAD, FINISH)
    }


def test_units_leave_although_the_records_fit_no_model_any_more(site: Site) -> None:
    _delivered(site)
    finish_delivered(LoadedSite(site.folder))
    (outcome,) = outcomes(site.folder)
    draft = outcome.model.with_name(f"{HEAD}.new")  # of a process that was killed over it
    draft.write_bytes(b"a head")
    records = site.folder / "records.csv"
    rows = records.read_text().splitlines()
    records.write_text("\n".join(["new," + rows[0], *("0.5," + row for row in rows[1:])]) + "\n")
    for line in ("5", "6"):
        assert run_command(["site", "withdraw", str(site.folder), "--line", line, "--yes"]) == 0
    with closing(site.ledger()) as ledger:
        assert len(ledger.withdrawals()) == 2
        assert not ledger.untraced()
    assert not FILES & set(_kept(site))
    assert not draft.exists()
    assert "personal finish of" in (site.folder / LOG).read_text()


def test_a_file_that_is_touched_all_the_time_has_a_finish(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    _delivered(site)
    real, made = module.personal_finish, []

    def touching(*rest: Any, **more: Any) -> Any:
        made.append((site.folder / "records.csv").touch())
        return real(*rest, **more)

    monkeypatch.setattr(module, "personal_finish", touching)
    finish_delivered(LoadedSite(site.folder))
    assert len(made) == 1
    assert set(_kept(site)) >= FILES
