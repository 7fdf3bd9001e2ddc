"""What the server's people see of the sites: at once, with the reason, and with what comes next."""

import datetime
import json
from pathlib import Path

import pytest

from dpfl.core.errors import PeerError
from dpfl.deploy.progress import PROGRESS, News, Progress, SiteState
from dpfl.deploy.summary import StudyStatus
from dpfl.rounds.record import RoundRecord
from dpfl.runs.folder import RunFolder
from tests.deploy.federation import Federation, study_values

NO_ROUNDS: list[RoundRecord] = []


def test_what_is_new_is_told_once(tmp_path: Path) -> None:
    progress, news = Progress(tmp_path), News(tmp_path)
    progress.note("a", SiteState.CONNECTED)
    progress.expect("Waiting for b until 12:00; then the study ends")
    assert news.read(NO_ROUNDS) == ["a connected", progress.next]
    assert news.read(NO_ROUNDS) == []
    progress.note("b", SiteState.REFUSED, "its policy does not allow weiavg")
    progress.note("a", SiteState.ASKED)
    assert news.read(NO_ROUNDS) == ["b refuses: its policy does not allow weiavg"]
    since = datetime.datetime.fromisoformat(Progress.read(tmp_path).sites["b"].since)
    assert abs(since - datetime.datetime.now(datetime.UTC)) < datetime.timedelta(minutes=1)


def test_who_was_missed_is_told_whenever_the_screen_looks(tmp_path: Path) -> None:
    """A refusal may come and go between two looks: the records of the rounds keep it."""
    run, news = RunFolder(tmp_path), News(tmp_path)
    rounds = [
        {"missing": {"b": "did not answer within 5 s"}, "arrived": ("a",)},
        {"missing": {"b": "did not answer within 5 s"}, "arrived": ("a",)},
        {"missing": {}, "arrived": ("a", "b")},
        {"missing": {"b": "did not answer within 5 s"}, "arrived": ("a",)},
    ]
    for number, record in enumerate(rounds):
        run.append_round(RoundRecord(round=number, cohort=("a", "b"), **record))  # type: ignore[arg-type]
    assert news.read(run.read_rounds()) == [
        "b was missed in round 1: did not answer within 5 s",
        "b was missed in round 4: did not answer within 5 s",
    ]
    assert news.read(run.read_rounds()) == []


def test_progress_is_for_the_operator_s_eyes(tmp_path: Path) -> None:
    Progress(tmp_path).note("a", SiteState.CONNECTED)
    assert (tmp_path / PROGRESS).stat().st_mode & 0o077 == 0


def test_a_damaged_file_shows_nothing_and_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / PROGRESS).write_text('{"sites": {"a": {"state": "dancing"}}, "next": ""}')
    assert Progress.read(tmp_path).sites == {}


def test_a_refused_and_a_missing_site_are_in_the_status_while_the_study_waits(
    tmp_path: Path,
) -> None:
    values = study_values("weiavg", sites=("a", "b", "c"), run={"enrol_timeout": 3.0})
    federation = Federation.of(tmp_path, values)
    file = federation.sites["b"].folder / "site.toml"
    file.write_text(file.read_text().replace("[policy]", '[policy]\nmethods = ["pfa"]'))
    del federation.grid.sites[3]  # c is not started
    seen: list[Progress] = []
    coordinator = federation.coordinator()
    coordinator.sites.transport.wait = (  # type: ignore[method-assign]
        lambda seconds: seen.append(Progress.read(federation.server))
    )
    with pytest.raises(PeerError, match="least_sites"):
        coordinator.begin()
    now = seen[-1] if seen else Progress.read(federation.server)
    assert now.sites["a"].state == SiteState.CONNECTED
    assert now.sites["b"].state == SiteState.REFUSED
    assert "policy does not allow weiavg" in now.sites["b"].reason
    assert now.sites["c"].state == SiteState.ABSENT
    assert "Waiting for b, c until" in now.next
    assert "the server stops unless 2 of 3 are there" in now.next
    told = StudyStatus.of(federation.server).to_dict()
    assert told["sites"]["b"]["state"] == "refuses"
    assert json.dumps(told)
    assert "a" not in told["sites"]  # nobody is connected to a server that does not run
    assert told["next"] == ""


def test_a_round_says_who_is_waited_for_and_what_comes_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, said = Federation.of(tmp_path, study_values("weiavg", rounds=1)), list[str]()
    real = Progress.expect
    monkeypatch.setattr(Progress, "expect", lambda self, one: said.append(one) or real(self, one))
    federation.play()
    now = Progress.read(federation.server)
    assert all(site.state == SiteState.ANSWERED for site in now.sites.values())
    assert now.next == ""  # nothing is waited for any more
    for start in (
        "The model is sent to 3 sites",
        "3 sites are asked for a round",
        "3 sites are asked whether",
        "Waiting for a",
    ):
        assert any(sentence.startswith(start) for sentence in said), start
