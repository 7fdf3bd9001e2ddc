"""The log of what left a site: everything, with time, study, round, bytes and hash."""

import datetime
import hashlib
import json
from pathlib import Path
from typing import Any

from dpfl.deploy.messages import Message, write_header
from dpfl.deploy.site import answered
from tests.deploy.federation import Desk, Federation, make_site, study_values


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "sent.jsonl").read_text().splitlines()]


def test_everything_that_left_is_in_the_log_with_its_hash(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, study_values("weiavg", rounds=2))
    federation.play()
    for number, site in enumerate(federation.sites.values(), 1):
        said = [answer for node, _, answer in federation.grid.heard if node == number]
        log = lines(site.folder)
        assert [line["kind"] for line in log] == [
            "hello",
            "terms",
            "terms",
            "train",
            "train",
            "end",
        ]
        assert [line["round"] for line in log] == [None, None, None, 0, 1, None]
        for line, answer in zip(log, said, strict=True):
            whole = write_header(answer.header).encode() + answer.payload
            assert line["bytes"] == len(whole)
            assert line["sha256"] == hashlib.sha256(whole).hexdigest()
            assert line["study"] == "demo"
            assert line["run"] == federation.summary()["run"]
            assert line["accepted"] is True
        times = [datetime.datetime.fromisoformat(line["at"]) for line in log]
        assert times == sorted(times)


def test_refusals_and_garbage_are_logged_as_well(tmp_path: Path) -> None:
    site, desk = make_site(tmp_path / "a", "a"), Desk(study_values("weiavg", sites=["b", "c"]))
    assert not site.answer(desk.hello()).accepted
    wild: list[dict[str, Any]] = [
        {},
        {"kind": 5, "study": "x", "run": None, "round": "y"},
        {"study": {"study": 3}},
    ]
    for header in wild:
        assert not site.answer(Message(header=header)).accepted
    log = lines(site.folder)
    assert len(log) == 4
    assert not any(line["accepted"] for line in log)
    assert all(line["round"] is None for line in log)


def test_a_server_s_words_make_one_line_of_the_log_each(tmp_path: Path) -> None:
    site = make_site(tmp_path / "a", "a")
    for kind in ("x\n2026-01-01T00:00:00+00:00 all is well", "\ud800", "\x1b[2J"):
        header = {**Desk(study_values()).hello().header, "kind": kind}
        assert not site.answer(Message(header=header)).accepted
    log = (site.folder / "site.log").read_text().splitlines()
    assert len(log) == 3
    assert not any(line.startswith("2026-01-01T00:00:00+00:00 all") for line in log)
    assert all(line.isprintable() for line in log)
    assert len(lines(site.folder)) == 3


def test_a_folder_that_cannot_be_used_still_logs_its_refusal(tmp_path: Path) -> None:
    site = make_site(tmp_path / "a", "a")
    (site.folder / "site.toml").write_text("[site]\n")
    assert not answered(site.folder, Desk(study_values()).hello()).accepted
    assert len(lines(site.folder)) == 1
    assert "site.toml" in (site.folder / "site.log").read_text()  # what is wrong with it
