"""The process that answers for a site: records are read once, a kill costs nothing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpfl.core.errors import DataError, DpflError
from dpfl.deploy import records as module
from dpfl.deploy.messages import WENT_WRONG, Message
from dpfl.deploy.records import Records
from dpfl.deploy.site import Site
from dpfl.deploy.worker import Worker
from dpfl.runs.processes import alive
from tests.deploy.federation import Desk, charged, make_site, study_values, write_csv


def test_records_are_read_once_and_again_only_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, desk, reads = make_site(tmp_path / "a", "a"), Desk(study_values()), []
    real = module.read_file
    monkeypatch.setattr(module, "read_file", lambda *rest: reads.append(rest) or real(*rest))
    kept = Records()
    for _ in range(3):
        assert Site(site.folder, kept).answer(desk.hello()).accepted
    assert len(reads) == 1
    write_csv(site.folder / "records.csv", seed=5, records=60)
    claims = Site(site.folder, kept).answer(desk.hello()).header["claims"]
    assert len(reads) == 2
    assert claims["examples"] == 48  # of the new file
    file = site.folder / "site.toml"
    file.write_text(file.read_text().replace("trust_server = false", "trust_server = true"))
    assert Site(site.folder, kept).answer(desk.hello()).accepted
    assert len(reads) == 2  # the policy is read for every message, the records are not


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    make_site(tmp_path / "a", "a")
    made = Worker(tmp_path / "a")
    yield made
    made.end()


def test_one_process_answers_a_whole_study_and_a_kill_changes_no_byte(
    worker: Worker, tmp_path: Path
) -> None:
    desk, told = Desk(study_values()), list[str]()
    assert worker.pid is None
    assert worker.answer(desk.terms(), told.append).accepted
    first = worker.pid
    answer = worker.answer(desk.train(0), told.append)
    assert (worker.pid, told) == (first, [])
    assert answer.accepted
    assert first is not None
    os.kill(first, signal.SIGKILL)
    again = worker.answer(desk.train(0), told.append)
    assert again.payload == answer.payload
    assert worker.pid != first
    assert len(told) == 1
    assert "exit code -9" in told[0]
    assert charged(Site(tmp_path / "a")) == {0}


def test_a_worker_that_cannot_live_is_given_up_with_a_reason(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    told: list[str] = []
    with pytest.raises(DataError, match=r"4 times.*exit code 1"):
        worker.answer(Desk(study_values()).hello(), told.append)
    assert len(told) == 3


def test_work_that_ends_the_process_is_charged_and_not_done_again(
    worker: Worker, tmp_path: Path
) -> None:
    """A server could otherwise try again and again what makes a worker die, for nothing."""
    desk, told = Desk(study_values()), list[str]()
    assert worker.answer(desk.terms(), told.append).accepted
    real, asked = worker._asked, list[bool]()

    def dying(message: Message, *, able: bool) -> Message:
        asked.append(able)
        if able:
            raise EOFError
        return real(message, able=able)

    worker._asked = dying  # type: ignore[method-assign]
    answer = worker.answer(desk.train(0), told.append)
    assert asked == [True, True, True, False]
    assert not answer.accepted
    assert answer.reason == WENT_WRONG
    assert charged(Site(tmp_path / "a")) == {0}
    assert "worker: ended over this message" in (tmp_path / "a" / "site.log").read_text()
    again = Site(tmp_path / "a").answer(desk.train(0))
    assert not again.accepted
    assert "failed in this round" in again.reason


def test_a_worker_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    make_site(tmp_path / "a", "a")
    program = f"""
import time
from pathlib import Path
from dpfl.deploy.messages import Message
from dpfl.deploy.worker import Worker
worker = Worker(Path({str(tmp_path / "a")!r}))
worker.answer(Message(header={{}}), print)
print(worker.pid, flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
        parent.wait()
        until = time.monotonic() + 10
        while alive(pid) and time.monotonic() < until:
            time.sleep(0.1)
    assert not alive(pid)


def test_a_disk_that_is_full_is_told_as_such(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "a" / "sent.jsonl").mkdir()  # what cannot be appended to
    told: list[str] = []
    with pytest.raises(DpflError, match=r"sent\.jsonl"):
        worker.answer(Desk(study_values()).hello(), told.append)
    assert told == []  # it lives, and was not started again


def test_a_log_that_cannot_be_written_stops_nobody(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "a" / "site.log").mkdir()
    told: list[str] = []
    answer = worker.answer(Desk(study_values(sites=["b", "c"])).hello(), told.append)
    assert "is not named" in answer.reason
    assert told == []
