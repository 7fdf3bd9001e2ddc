"""What the server's people see of the sites: at once, with the reason, and with what comes next."""

import json
from pathlib import Path

import pytest

from dpfl.deploy.progress import PROGRESS, Progress, SiteState
from dpfl.deploy.summary import StudyStatus
from tests.deploy.federation import Federation, study_values


def test_what_is_new_is_told_once(tmp_path: Path) -> None:
    progress = Progress(tmp_path)
    progress.note("a", SiteState.CONNECTED)
    progress.expect("Waiting for b until 12:00; then the study ends")
    first = Progress.read(tmp_path)
    assert first.since(Progress(tmp_path)) == ["a connected", progress.next]
    assert Progress.read(tmp_path).since(first) == []
    progress.note("b", SiteState.REFUSED, "its policy does not allow weiavg")
    progress.note("a", SiteState.ASKED)
    second = Progress.read(tmp_path)
    assert second.since(first) == ["b refuses: its policy does not allow weiavg"]
    assert second.sites["b"].since >= first.sites["a"].since
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
    try:
        coordinator.begin()
    except Exception as error:
        assert "least_sites" in str(error)
    now = seen[-1] if seen else Progress.read(federation.server)
    assert now.sites["a"].state == SiteState.CONNECTED
    assert now.sites["b"].state == SiteState.REFUSED
    assert "policy does not allow weiavg" in now.sites["b"].reason
    assert now.sites["c"].state == SiteState.ABSENT
    assert "Waiting for b, c until" in now.next
    assert "the study ends unless 2 sites are there" in now.next
    told = StudyStatus.of(federation.server).to_dict()
    assert told["sites"]["b"]["state"] == "refuses"
    assert json.dumps(told)


def test_a_round_says_who_is_waited_for_and_what_comes_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, said = Federation.of(tmp_path, study_values("weiavg", rounds=1)), list[str]()
    real = Progress.expect
    monkeypatch.setattr(Progress, "expect", lambda self, one: said.append(one) or real(self, one))
    federation.play()
    now = Progress.read(federation.server)
    assert all(site.state == SiteState.ANSWERED for site in now.sites.values())
    assert "The model is sent to 3 sites" in now.next
    for start in ("3 sites are asked for a round", "3 sites are asked whether", "Waiting for a"):
        assert any(sentence.startswith(start) for sentence in said), start
