"""Receipts: a ledger that was restored or copied is noticed by the site and by its server."""

import hashlib
import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from dpfl.core.errors import FolderError, LedgerError, PeerError
from dpfl.deploy.messages import Message
from dpfl.deploy.participation import take_part
from dpfl.deploy.receipts import RECEIPTS, SIGNING_KEY, Countersigner, Receipt
from dpfl.deploy.site import Site
from tests.deploy.federation import (
    CLIENT,
    RECORD,
    Desk,
    Federation,
    charged,
    make_site,
    study_values,
)


def signed_round(desk: Desk, signer: Countersigner, site: Site, round_: int) -> Message:
    """Ask for a round as a server does that keeps receipts, and sign what comes back."""
    last = signer.last.get(site.id)
    more = {"signer": signer.key, "receipt": asdict(last) if last else None}
    question = desk.train(round_)
    answer = site.answer(Message(header={**question.header, **more}, payload=question.payload))
    if answer.accepted:
        signer.sign(desk.run, site.id, round_, answer.header["head"])
    return answer


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Desk, Countersigner, Site]:
    """A site that has agreed to a study, and its server's receipts."""
    site, desk = make_site(tmp_path / "a", "a"), Desk(study_values())
    (tmp_path / "server").mkdir()
    signer = Countersigner(tmp_path / "server")
    terms = desk.terms()
    assert site.answer(Message(header={**terms.header, "signer": signer.key})).accepted
    return desk, signer, site


def copy_ledger(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for path in source.glob("ledger.sqlite*"):
        shutil.copy(path, target / path.name)


def test_a_restored_ledger_is_refused_and_the_server_learns_why(
    begun: tuple[Desk, Countersigner, Site], tmp_path: Path
) -> None:
    desk, signer, site = begun
    copy_ledger(site.folder, tmp_path / "backup")
    assert signed_round(desk, signer, site, 0).accepted
    for path in site.folder.glob("ledger.sqlite*"):
        path.unlink()
    copy_ledger(tmp_path / "backup", site.folder)
    answer = signed_round(desk, signer, site, 1)
    assert not answer.accepted
    assert "restored from a backup" in answer.reason
    assert "round 1" in answer.reason
    assert charged(site) == set()  # nothing more was charged, and nothing released
    assert "restored from a backup" in (site.folder / "site.log").read_text()


def test_a_copy_of_a_site_s_folder_is_noticed_once_either_has_answered(
    begun: tuple[Desk, Countersigner, Site], tmp_path: Path
) -> None:
    desk, signer, site = begun
    assert signed_round(desk, signer, site, 0).accepted
    shutil.copytree(site.folder, tmp_path / "copy")
    copied = Site(tmp_path / "copy")
    assert signed_round(desk, signer, site, 1).accepted
    answer = signed_round(desk, signer, copied, 2)
    assert not answer.accepted
    assert "copy of the site's folder" in answer.reason
    assert signed_round(desk, signer, site, 2).accepted  # the one that was signed last goes on


def test_both_sides_keep_receipts_and_they_prove_what_was_signed(
    begun: tuple[Desk, Countersigner, Site], tmp_path: Path
) -> None:
    desk, signer, site = begun
    for round_ in range(3):
        assert signed_round(desk, signer, site, round_).accepted
    own = [json.loads(line) for line in (site.folder / RECEIPTS).read_text().splitlines()]
    theirs = [
        json.loads(line) for line in (tmp_path / "server" / RECEIPTS).read_text().splitlines()
    ]
    assert own == theirs[:2]  # the last comes with the next request
    assert len(theirs) == 3
    for line in theirs:
        receipt = Receipt.read(line)
        receipt.check(signer.key)
        for lie in ({"head": "0" * 64}, {"round": 9}, {"site": "b"}, {"run": "other"}):
            with pytest.raises(PeerError, match="not signed"):
                replace(receipt, **lie).check(signer.key)
    again = Countersigner(tmp_path / "server")
    assert (again.key, again.last) == (signer.key, signer.last)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"signature": "00"}, "not signed"),
        ({"signature": "no hex"}, "not signed"),
        ({"site": "b"}, "not signed"),
        ({"head": None}, "not signed"),
    ],
)
def test_a_receipt_that_is_not_the_server_s_is_refused(
    begun: tuple[Desk, Countersigner, Site], change: dict[str, Any], words: str
) -> None:
    desk, signer, site = begun
    assert signed_round(desk, signer, site, 0).accepted
    receipt = {**asdict(signer.last["a"]), **change}
    question = desk.train(1)
    header = {**question.header, "signer": signer.key, "receipt": receipt}
    answer = site.answer(Message(header=header, payload=question.payload))
    assert not answer.accepted
    assert words in answer.reason


def test_another_server_key_is_not_what_was_agreed_on(
    begun: tuple[Desk, Countersigner, Site], tmp_path: Path
) -> None:
    desk, _, site = begun
    (tmp_path / "other").mkdir()
    answer = signed_round(desk, Countersigner(tmp_path / "other"), site, 0)
    assert not answer.accepted
    assert "agreed terms" in answer.reason


def test_a_head_says_nothing_about_how_much_a_ledger_holds_or_about_other_studies(
    tmp_path: Path,
) -> None:
    site, desk = make_site(tmp_path / "a", "a", {**RECORD, "per_study": 1.0}), Desk(study_values())
    (tmp_path / "server").mkdir()
    signer, terms = Countersigner(tmp_path / "server"), desk.terms()
    assert site.answer(Message(header={**terms.header, "signer": signer.key})).accepted
    question = desk.train(0)
    question = Message(header={**question.header, "signer": signer.key}, payload=question.payload)
    head = site.answer(question).header["head"]
    assert isinstance(head, str)
    assert len(head) == 64
    with closing(sqlite3.connect(site.folder / "ledger.sqlite")) as opened:
        # An entry could be guessed: number, time and cost are nearly known. With a secret it cannot
        digests = {digest for (digest,) in opened.execute("SELECT digest FROM chain")}
        ((salt,),) = opened.execute("SELECT value FROM salt").fetchall()
    assert head not in digests
    assert head in {hashlib.sha256(salt + digest.encode()).hexdigest() for digest in digests}
    assert len(salt) == 32
    other = Desk(study_values(), run="run-2")
    assert site.answer(other.terms()).accepted
    theirs = site.answer(other.train(0))
    assert theirs.accepted
    assert theirs.header["head"] != head
    # The same round again: the same head, whatever was charged meanwhile for others
    assert site.answer(question).header["head"] == head
    # A server that signs what another server was told learns nothing by it
    signer.sign(desk.run, site.id, 0, theirs.header["head"])
    answer = signed_round(desk, signer, site, 1)
    assert not answer.accepted
    assert "never sent" in answer.reason
    assert theirs.header["head"] in (site.folder / "site.log").read_text()
    # and a false receipt does not keep the site from other studies
    assert site.answer(other.train(1)).accepted


def test_a_restored_ledger_is_noticed_by_the_site_alone(
    begun: tuple[Desk, Countersigner, Site], tmp_path: Path
) -> None:
    """A server that sends no receipt cannot have a round answered twice with other noise."""
    desk, signer, site = begun
    copy_ledger(site.folder, tmp_path / "backup")
    for round_ in range(2):
        assert signed_round(desk, signer, site, round_).accepted
    for path in site.folder.glob("ledger.sqlite*"):
        path.unlink()
    copy_ledger(tmp_path / "backup", site.folder)
    question = desk.train(0)
    header = {**question.header, "signer": signer.key}
    answer = site.answer(Message(header=header, payload=question.payload))
    assert not answer.accepted
    assert charged(site) == set()
    with pytest.raises(LedgerError, match="restored from a backup"):
        take_part(site.folder, print, insecure=True)


def test_torn_and_damaged_lines_lose_no_other_receipt(
    begun: tuple[Desk, Countersigner, Site], tmp_path: Path
) -> None:
    desk, signer, site = begun
    for folder in (tmp_path / "server", site.folder):
        with (folder / RECEIPTS).open("ab") as stream:
            stream.write(b'\xff\xfe{"run": "cut')
    for round_ in range(3):
        assert signed_round(desk, signer, site, round_).accepted
    again = Countersigner(tmp_path / "server")
    assert again.last["a"].round == 2


def test_a_lost_signing_key_is_not_replaced_in_silence(
    begun: tuple[Desk, Countersigner, Site], tmp_path: Path
) -> None:
    desk, signer, site = begun
    assert signed_round(desk, signer, site, 0).accepted
    (tmp_path / "server" / SIGNING_KEY).unlink()
    with pytest.raises(FolderError, match="is missing"):
        Countersigner(tmp_path / "server")


def test_a_study_leaves_receipts_of_every_round_at_every_site(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values("weiavg", rounds=3))
    federation.play()
    kept = (federation.server / RECEIPTS).read_text().splitlines()
    assert len(kept) == 9
    for site in federation.sites.values():
        # the model came with the receipt of the last round
        assert len((site.folder / RECEIPTS).read_text().splitlines()) == 3
    assert (federation.server / SIGNING_KEY).stat().st_mode & 0o077 == 0


def test_a_damaged_signing_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / SIGNING_KEY).write_bytes(b"short")
    with pytest.raises(FolderError, match=SIGNING_KEY):
        Countersigner(tmp_path)


@pytest.mark.parametrize("method", ["dp_fed", "udp_fedavg"])
def test_an_answer_that_was_paid_for_before_is_in_the_chain_as_well(
    method: str, tmp_path: Path
) -> None:
    """Where all rounds are charged at once, a restored ledger would else pass unnoticed."""
    site = make_site(tmp_path / "a", "a", CLIENT)
    desk = Desk(study_values(method, run={"cohort": 2 if method == "udp_fedavg" else 0.5}))
    assert site.answer(desk.terms()).accepted
    heads = []
    for round_ in range(2):
        answer = site.answer(desk.train(round_, payload=desk.download(round_, drawn=2)))
        heads.append(answer.header["head"])
    assert len({site.ledger().heads(desk.run)[-1], *heads}) == 3
