"""Charged if and only if the answer is in the outbox, wherever the site's process dies."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from dpfl.core.types import Observer
from dpfl.deploy.messages import Message
from dpfl.deploy.site import Site
from dpfl.privacy.chain import Entry
from dpfl.privacy.costs import Charge, PrivacyPlan
from dpfl.privacy.site_ledger import PlannedUnits, SiteLedger
from tests.deploy.federation import CLIENT, Desk, charged, make_site, study_values

RUN = "run-1"
POINTS = [
    "before work",
    "after work",
    "after checking",
    "in the transaction",
    "before commit",
    "after commit",
]
KILLED = """
import os, signal, sqlite3, sys
from pathlib import Path
from dpfl.deploy import site as module
from dpfl.privacy.chain import Entry
from dpfl.privacy.site_ledger import PlannedUnits, SiteLedger
from dpfl.rounds import Agreement
from tests.deploy.federation import Desk, study_values

def die(*rest, **more):
    os.kill(os.getpid(), signal.SIGKILL)

def arm(point):
    real_work, real_charge = module.Site.work, SiteLedger._charge
    if point == "before work":
        module.Site.work = die
    if point == "after work":
        module.Site.work = lambda *a: (real_work(*a), die())
    if point == "after checking":
        SiteLedger.charge_and_store = die
    if point == "in the transaction":
        SiteLedger._charge = lambda *a: (real_charge(*a), die())
    if point == "before commit":
        Entry.seal = die
    if point == "after commit":
        real_pay = SiteLedger.charge_and_store
        SiteLedger.charge_and_store = lambda *a, **m: (real_pay(*a, **m), die())

desk = Desk(study_values("udp_fedavg"))
for point, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    child = os.fork()
    if child == 0:
        arm(point)
        module.Site(Path(folder)).answer(desk.train(0))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (point, status)
"""


def outbox(site: Site) -> bytes | None:
    ledger = site.ledger()
    try:
        last = ledger.answered(RUN)
    finally:
        ledger.close()
    return None if last is None else last.payload


def test_a_killed_site_has_charged_if_and_only_if_its_answer_is_kept(tmp_path: Path) -> None:
    desk, arguments, sites = Desk(study_values("udp_fedavg")), [], {}
    for number, point in enumerate(POINTS):
        sites[point] = make_site(tmp_path / str(number), "a", CLIENT)
        assert sites[point].answer(desk.terms()).accepted
        arguments += [point, str(sites[point].folder)]
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", KILLED, *arguments], check=True, cwd=root, timeout=120)
    for point, site in sites.items():
        kept = outbox(site)
        paid = {o: charged(site, o) for o in (Observer.SERVER, Observer.WORLD)}
        assert (kept is not None) == (point == "after commit"), point
        assert paid == dict.fromkeys(paid, {0} if kept else set()), point
        answer = Site(site.folder).answer(desk.train(0))
        assert answer.accepted, (point, answer.reason)
        assert charged(site) == {0}
        assert outbox(site) == answer.payload
        if kept is not None:
            assert answer.payload == kept


def test_asking_again_returns_the_same_bytes_and_charges_nothing(tmp_path: Path) -> None:
    site, desk = make_site(tmp_path / "a", "a"), Desk(study_values())
    assert site.answer(desk.terms()).accepted
    first = site.answer(desk.train(0))
    spent = site.spent()
    for _ in range(2):
        again = Site(site.folder).answer(desk.train(0))
        assert again.payload == first.payload
        assert again.header == first.header
    other = Site(site.folder).answer(desk.train(0, payload=desk.download(0, drawn=2)))
    assert other.payload == first.payload  # whatever is asked now, this round was answered
    assert site.spent() == spent
    second = site.answer(desk.train(1))
    assert second.accepted
    assert second.payload != first.payload
    old = site.answer(desk.train(0))
    assert not old.accepted
    assert "round 0 is over" in old.reason
    assert old.payload == b""
    assert charged(site) == {0, 1}


def test_a_skipped_round_is_neither_charged_nor_answered_later(tmp_path: Path) -> None:
    site, desk = make_site(tmp_path / "a", "a"), Desk(study_values())
    assert site.answer(desk.terms()).accepted
    assert site.answer(desk.train(1)).accepted
    assert not site.answer(desk.train(0)).accepted
    assert charged(site) == {1}


def test_a_fault_between_work_and_commit_charges_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, desk = make_site(tmp_path / "a", "a"), Desk(study_values())
    assert site.answer(desk.terms()).accepted

    def full(*rest: object, **more: object) -> bool:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(SiteLedger, "charge_and_store", full)
        answer = site.answer(desk.train(0))
    assert not answer.accepted
    assert answer.payload == b""
    assert charged(site) == set()
    assert outbox(site) is None
    assert site.answer(desk.train(0)).accepted


def test_what_belongs_to_a_charge_is_written_with_it_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, desk = make_site(tmp_path / "a", "a", CLIENT), Desk(study_values("udp_fedavg"))
    cost = desk.agreement().cost(Observer.WORLD, site.member().participant)
    ledger = site.ledger()
    ledger.register(RUN, seeded=False, title="t")
    ledger.agree(RUN, "terms", PlannedUnits("u", 8, 2, frozenset()))
    ledger.commit(RUN, [PrivacyPlan(account="a", observer=Observer.WORLD, cost=cost, releases=1)])
    charge = [Charge(account="a", observer=Observer.WORLD, cost=cost)]

    def fails(entry: Entry) -> None:
        written = entry.connection.execute("SELECT payload FROM outbox").fetchall()
        assert (written, len(entry.rows["charges"])) == ([(b"sent",)], 1)
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(Entry, "seal", fails)
        ledger.charge_and_store(RUN, 0, charge, b"sent", b"", units="u")
    assert ledger.charged(RUN, Observer.WORLD) == set()
    assert ledger.answered(RUN) is None
    assert ledger.charge_and_store(RUN, 0, charge, b"sent", b"", units="u")
    assert (ledger.answered(RUN), ledger.charged(RUN, Observer.WORLD)) == (
        (0, b"sent", b""),
        {(0, "a")},
    )
    ledger.close()


def test_nothing_is_kept_of_an_answer_that_the_budget_does_not_cover(tmp_path: Path) -> None:
    site = make_site(tmp_path / "a", "a", {**CLIENT, "epsilon": 2.0, "filter": "gaussian"})
    cost = (
        Desk(study_values("udp_fedavg")).agreement().cost(Observer.WORLD, site.member().participant)
    )
    ledger = site.ledger()
    ledger.register(RUN, seeded=False, title="t")
    ledger.agree(RUN, "terms", PlannedUnits("u", 8, 2, frozenset()))
    affordable = ledger.affordable_releases("a", cost, {Observer.WORLD}, 100)
    assert 0 < affordable < 100
    ledger.commit(RUN, [PrivacyPlan(account="a", observer=Observer.WORLD, cost=cost, releases=100)])
    charge = [Charge(account="a", observer=Observer.WORLD, cost=cost)]
    for round_ in range(affordable):
        assert ledger.charge_and_store(RUN, round_, charge, b"payload", b"", units="u")
    assert ledger.charge_and_store(RUN, affordable, charge, b"another", b"", units="u") is False
    answered = ledger.answered(RUN)
    assert answered is not None
    assert (answered.round, answered.payload) == (affordable - 1, b"payload")
    assert len(ledger.charged(RUN, Observer.WORLD)) == affordable
    ledger.close()


def test_the_private_part_of_a_model_survives_a_new_process_and_is_never_sent(
    tmp_path: Path,
) -> None:
    site, desk = make_site(tmp_path / "a", "a", CLIENT), Desk(study_values("ppsgd", lr=0.5))
    assert site.answer(desk.terms()).accepted
    assert Site(site.folder).answer(desk.train(0)).accepted
    ledger = site.ledger()
    first = ledger.answered(RUN)
    ledger.close()
    assert first is not None
    assert first.private
    assert Site(site.folder).answer(desk.train(1)).accepted
    ledger = site.ledger()
    second = ledger.answered(RUN)
    ledger.close()
    assert second is not None
    assert (second.round, second.private != first.private) == (1, True)


def test_two_runs_have_outboxes_of_their_own(tmp_path: Path) -> None:
    site = make_site(tmp_path / "a", "a", {"epsilon": 12.0, "delta": 1e-2})
    answers: list[Message] = []
    for run in ("one", "two"):
        desk = Desk(
            study_values(noise_multiplier=None) | {"method": study_values()["method"]}, run=run
        )
        assert site.answer(desk.terms(noise_multiplier=2.0)).accepted
        answers.append(site.answer(desk.train(0, noise_multiplier=2.0)))
    assert answers[0].payload != answers[1].payload
    again = site.answer(Desk(study_values(), run="one").train(0, noise_multiplier=2.0))
    assert again.payload == answers[0].payload
    assert again.header == answers[0].header  # nothing of what was charged in between
