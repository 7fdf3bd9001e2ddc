"""The live view without a browser: who is answered, and what a folder that grows, or is broken,
looks like.
"""

from __future__ import annotations

import html
import http.client
import json
import shutil
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest

from dpfl.cli.main import run_command
from dpfl.core.errors import PeerError
from dpfl.report.live import LiveServer
from tests.report.conftest import copied, summary_of


def ask(
    server: LiveServer, path: str = "/", *, host: str | None = None, method: str = "GET"
) -> tuple[int, str]:
    place = server.address.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(place, timeout=30)
    try:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host if host is not None else place)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def port_of(server: LiveServer) -> int:
    return int(server.address.rstrip("/").rpartition(":")[2])


def test_a_request_under_another_name_is_refused(weiavg: Path) -> None:
    with LiveServer(weiavg) as server:
        port = port_of(server)
        for path in ("/", "/news.json", "/nothing"):
            for host in (
                "evil.example",
                f"evil.example:{port}",
                "127.0.0.1",
                f"127.0.0.1:{port + 1}",
                "",
            ):
                status, body = ask(server, path, host=host)
                assert status == 403, host
                assert "weiavg" not in body
        assert ask(server, "/news.json")[0] == 200
        assert ask(server, "/news.json", host=f"localhost:{port}")[0] == 200


def test_only_this_machine_is_listened_to(weiavg: Path) -> None:
    with LiveServer(weiavg) as server:
        assert server.address == f"http://127.0.0.1:{port_of(server)}/"
        assert server.socket.getsockname()[0] == "127.0.0.1"
        for other in (
            "127.0.0.2",
            "127.1.2.3",
        ):  # an address of this machine on which 0.0.0.0 would listen
            with (
                pytest.raises(OSError),
                socket.create_connection((other, port_of(server)), timeout=2),
            ):
                pass


def test_only_reading_is_answered_and_only_the_page(weiavg: Path) -> None:
    def times() -> dict[str, int]:  # SQLite notes its readers in files of its own
        files = [path for path in weiavg.iterdir() if not path.name.endswith("-shm")]
        files = [path for path in files if path.stat().st_size]  # a reader leaves an empty -wal
        return {path.name: path.stat().st_mtime_ns for path in files}

    before = times()
    with LiveServer(weiavg) as server:
        assert ask(server, "/summary.json")[0] == 404
        assert ask(server, "/../summary.json")[0] == 404
        assert ask(server, "/", method="POST")[0] == 501
        assert ask(server)[0] == 200
    assert times() == before


def test_what_is_served_carries_the_policy_of_its_page(weiavg: Path, tmp_path: Path) -> None:
    for folder in (weiavg, tmp_path):
        with LiveServer(folder) as server:
            with urlopen(server.address) as answer:
                policy = answer.headers["Content-Security-Policy"]
                assert f'content="{html.escape(policy).replace("&#x27;", "&#39;")}"' in str(
                    answer.read()
                )
            assert ("connect-src 'self'" in policy) == (folder == tmp_path)
            with urlopen(f"{server.address}news.json") as answer:
                assert answer.headers["Content-Security-Policy"] == "default-src 'none'"


def test_news_follow_the_folder_from_nothing_to_the_end(weiavg: Path, tmp_path: Path) -> None:
    place = tmp_path / "run"
    lines = (weiavg / "rounds.jsonl").read_text().splitlines(keepends=True)
    with LiveServer(place) as server:

        def news() -> dict[str, Any]:
            status, text = ask(server, "/news.json")
            assert status == 200
            told: dict[str, Any] = json.loads(text)
            return told

        versions = [news()["version"]]
        assert "holds no run yet" in news()["parts"]["summary"]
        place.mkdir()
        (place / "experiment.toml").write_text((weiavg / "experiment.toml").read_text())
        versions.append(news()["version"])
        for done in (1, 2):
            with (place / "rounds.jsonl").open("a") as stream:
                stream.write(lines[done - 1])
            told = news()
            versions.append(told["version"])
            assert f'data-fact="rounds-done" data-value="{done}"' in told["parts"]["summary"]
            assert not told["finished"]
        with (place / "rounds.jsonl").open("a") as stream:
            stream.write(lines[2][:30])
        assert news()["version"] == versions[-1]  # half a line is no news
        for name in ("rounds.jsonl", "timings.jsonl", "summary.json"):
            (place / name).write_text((weiavg / name).read_text())
        told = news()
        assert told["finished"]
        assert (
            f'data-fact="accuracy" data-value="{summary_of(weiavg)["accuracy"]}"'
            in told["parts"]["summary"]
        )
        assert len({*versions, told["version"]}) == len(versions) + 1


def test_clients_of_a_running_run_stand_in_the_order_of_their_budgets(
    weiavg: Path, tmp_path: Path
) -> None:
    place = copied(weiavg, tmp_path / "run")
    # Budgets of the federation rise with the names: turn the names round, so that they do not.
    budgets = {line["account"]: line["budget"] for line in summary_of(weiavg)["statements"]}
    turned = dict(zip(sorted(budgets), sorted(budgets, reverse=True), strict=True))
    shutil.copy(weiavg / "ledger.sqlite", place / "ledger.sqlite")
    with closing(sqlite3.connect(place / "ledger.sqlite")) as ledger:
        for client, other in turned.items():
            values = (budgets[other], client)
            ledger.execute("UPDATE grants SET epsilon = ? WHERE account = ?", values)
        ledger.commit()
    (place / "summary.json").unlink()
    with LiveServer(place) as server:
        figure = json.loads(ask(server, "/news.json")[1])["figures"]["weights-weiavg"]
        page = ask(server)[1]
    wanted = sorted(budgets, key=lambda client: (budgets[turned[client]], client))
    assert wanted != sorted(budgets)
    assert all(list(trace["x"]) == wanted for trace in figure["data"])
    assert "Clients from the smallest to the largest budget." in page


def test_without_known_budgets_clients_stand_by_name_and_the_caption_says_so(
    weiavg: Path, tmp_path: Path
) -> None:
    place = copied(weiavg, tmp_path / "run")
    (place / "summary.json").unlink()
    with LiveServer(place) as server:
        page = ask(server)[1]
    assert "Clients by name." in page
    assert "largest budget" not in page


@pytest.mark.parametrize("path", ["/", "/news.json"])
def test_a_folder_that_cannot_be_read_is_told_in_a_sentence(
    path: str, weiavg: Path, tmp_path: Path
) -> None:
    place = copied(weiavg, tmp_path / "run")
    (place / "summary.json").write_text(json.dumps({"format": "dpfl-summary-0"}))
    with LiveServer(place) as server:
        status, body = ask(server, path)
        assert status == 200
        assert "dpfl-summary-0" in body


def test_a_port_in_use_is_one_sentence_and_code_7(
    weiavg: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LiveServer(weiavg) as server:
        with pytest.raises(PeerError):
            LiveServer(weiavg, port_of(server))
        assert run_command(["watch", str(weiavg), "--port", str(port_of(server))]) == 7
    err = capsys.readouterr().err
    assert err.startswith("dpfl: 127.0.0.1:") and err.count("\n") == 1
    assert "choose another --port" in err


def test_watching_a_folder_without_a_run_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["watch", str(tmp_path)]) == 5
    err = capsys.readouterr().err
    assert err.startswith("dpfl: ") and "holds no run" in err and err.count("\n") == 1


def test_watch_ends_with_the_run_where_asked_to(
    weiavg: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dpfl.cli.report.time", SimpleNamespace(sleep=lambda seconds: None))
    assert run_command(["watch", str(weiavg), "--until-done"]) == 0
    assert "Live view: http://127.0.0.1:" in capsys.readouterr().err
