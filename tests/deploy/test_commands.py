"""The commands of a deployment as people meet them: one sentence, and a documented exit code, on
the side that can act.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from dpfl.cli.main import run_command
from dpfl.core.errors import ConfigurationError, DataError, PeerError
from dpfl.core.files import hold_folder
from dpfl.data.tables import read_file
from dpfl.deploy.credentials import make_certificates
from dpfl.deploy.participation import check_server
from dpfl.deploy.processes import check_port, free_port, note_process
from dpfl.deploy.serving import make_study
from dpfl.deploy.site import Site
from dpfl.deploy.superlink import write_app, write_connection
from dpfl.runs.deployment import StudyFile
from dpfl.runs.folder import RunFolder
from tests.deploy.federation import Desk, Federation, make_server, study_values, write_csv


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_command(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys: pytest.CaptureFixture[str], code: int, words: str, *arguments: str) -> None:
    got, out, err = _run(capsys, *arguments)
    assert got == code, err
    last = err.strip().splitlines()[-1]
    assert last.startswith("dpfl: ")
    assert re.search(words, last), last
    assert "Traceback" not in err
    assert out == ""


INIT = ["--id", "a", "--epsilon", "4", "--delta", "0.01"]


def test_what_is_wrong_with_records_is_said_at_the_site_and_nowhere_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_csv(Path("records.csv"))
    header, *rows = Path("records.csv").read_text().splitlines()
    large = [row.replace("0.", "9000000000000000.", 1) for row in rows]
    Path("records.csv").write_text("\n".join([header, *large]) + "\n")
    code, _, err = _run(
        capsys, "site", "init", "home", "--data", "records.csv", "--label", "ill", *INIT
    )
    assert code == 0 and "TOO LARGE" in err
    answer = Site(Path("home")).answer(Desk(study_values(batch_size=33)).terms())
    log = (Path("home") / "site.log").read_text()
    assert log.count("TOO LARGE") == log.count("WHOLE BATCHES") == 1
    _run(capsys, "site", "spend", "home", "--page", "board.html")
    for text in (str(answer), Path("board.html").read_text()):
        assert "TOO LARGE" not in text and "WHOLE BATCHES" not in text


def test_a_site_is_made_with_one_command_and_shows_what_it_has_spent(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_csv(Path("records.csv"))
    code, out, err = _run(
        capsys, "site", "init", "home", "--data", "records.csv", "--label", "ill", *INIT
    )
    assert code == 0
    assert "Site 'a': 32 training records, 2 classes, epsilon 4 at delta 0.01 per record" in out
    assert "site.key.pub" in err
    home = tmp_path / "home"
    assert {path.name for path in home.iterdir()} >= {
        "site.toml",
        "site.key",
        "site.key.pub",
        "ledger.sqlite",
        "token",
    }
    for secret in ("site.key", "token"):
        assert (home / secret).stat().st_mode & 0o777 == 0o600
    file = (home / "site.toml").read_text()
    assert "trust_server = false" in file
    assert "allow_seeded = false" in file
    _, out, _ = _run(capsys, "site", "spend", "home", "--json")
    (line,) = json.loads(out)
    assert (line["epsilon"], line["budget"], line["observer"], line["rounds"]) == (
        0.0,
        4.0,
        "server",
        0,
    )
    desk = Desk(study_values())
    file = file.replace("least_noise_multiplier = 0.3", "least_noise_multiplier = 0.0")
    (home / "site.toml").write_text(file)
    assert Site(home).answer(desk.terms()).accepted
    assert Site(home).answer(desk.train(0)).accepted
    _, out, _ = _run(capsys, "site", "spend", "home", "--json")
    (line,) = json.loads(out)
    stored = line["epsilon"]
    assert 0 < stored < 4
    _, out, _ = _run(capsys, "site", "spend", "home")
    shown = re.search(r"^a\s+1\s+([\d.]+)\s+4\.000", out, re.M)
    assert shown is not None
    assert float(shown[1]) >= stored
    assert "per record, zero_out adjacency, by RDP filter" in out
    code, out, _ = _run(capsys, "site", "status", "home")
    assert code == 0
    assert "not running" in out
    assert "last charged round 1" in out
    assert "of 4 spent against the server, per record" in out
    _, out, _ = _run(capsys, "site", "status", "home", "--json")
    told = json.loads(out)
    assert told["studies"] == [{"run": "run-1", "title": "demo: weiavg", "last_round": 0}]
    assert (told["running"], told["spent"][0]["epsilon"]) == (False, stored)
    refused(
        capsys, 5, "already holds a site", "site", "init", "home", "--data", "records.csv", *INIT
    )
    assert (home / "site.toml").read_text() == file


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("x,ill\n1,0\nword,1\n", "line 3"),
        ("x,ill\n1,0\n,1\n", "column 'x': has no value"),
        ("x,ill\n1,0.5\n", "not whole numbers"),
        ("x,ill\n", "0 record"),
        ("", "is empty"),
        (None, "cannot be read"),
    ],
)
def test_bad_records_are_refused_and_leave_no_site(
    content: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path("records.csv").write_text(content)
    refused(capsys, 3, words, "site", "init", "home", "--data", "records.csv", *INIT)
    assert not Path("home/site.toml").exists()
    assert not Path("home/ledger.sqlite").exists()
    write_csv(Path("records.csv"))
    assert run_command(["site", "init", "home", "--data", "records.csv", *INIT]) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--epsilon", "-1"], "epsilon"),
        (["--epsilon", "nan"], "epsilon"),
        (["--epsilon", "inf"], "epsilon = inf"),
        (["--delta", "1"], "delta"),
        (["--unit", "person"], "unit"),
        (["--id", ""], "id"),
        (["--epsilon", "much"], "epsilon"),
        (["--label", "none"], "has no column 'none'"),
    ],
)
def test_bad_options_are_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_csv(Path("records.csv"))
    code = 3 if "--label" in options else 2
    refused(capsys, code, words, "site", "init", "home", "--data", "records.csv", *INIT, *options)
    assert not Path("home/site.toml").exists()


def test_one_file_is_read_as_a_folder_of_files_is(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", features=2)
    x, y = read_file(tmp_path / "t.csv", "ill")
    assert (x.shape, x.dtype, y.dtype) == ((40, 2), np.float32, np.float64)
    (tmp_path / "u.CSV").write_text("ill,x\n1,5\n0,6\n")
    x, y = read_file(tmp_path / "u.CSV", "ill")
    assert (x.tolist(), y.tolist()) == ([[5.0], [6.0]], [1, 0])
    (tmp_path / "t.txt").write_text("x,ill\n1,0\n")
    with pytest.raises(DataError, match=r"neither \.csv nor \.parquet"):
        read_file(tmp_path / "t.txt")


def test_a_folder_without_a_site_a_study_or_an_example_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in ("spend", "status", "run"):
        refused(capsys, 5, "holds no site", "site", command, "nowhere")
    for command in ("run", "status"):
        refused(capsys, 5, "holds no study", "server", command, "nowhere")
    refused(capsys, 5, "holds no study", "server", "resume", "nowhere")
    assert not Path("nowhere").exists()
    refused(capsys, 5, "holds no example", "deploy", "run", "nowhere")
    refused(capsys, 2, "", "server", "init", "s", "--study", "none.toml")


def _study_file(**network: Any) -> StudyFile:
    return StudyFile.from_dict({**study_values(), "network": network})


def test_a_study_is_made_with_certificates_and_nothing_is_made_twice(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Path("study.toml").write_text(
        _study_file(names=["study.example.org"], host="0.0.0.0").to_toml()
    )
    code, out, err = _run(capsys, "server", "init", "server", "--study", "study.toml")
    assert code == 0
    assert "Study 'demo': weiavg, 2 classes (accuracy), 3 rounds, 3 sites" in out
    assert "ca.crt" in err
    own = tmp_path / "server" / "certificates"
    assert (own / "ca.key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "server" / "sites").is_dir()
    refused(capsys, 5, "already holds a study", "server", "init", "server", "--study", "study.toml")
    code, out, _ = _run(capsys, "server", "status", "server")
    assert "0 of 3" in out
    _, out, _ = _run(capsys, "server", "status", "server", "--json")
    told = json.loads(out)
    assert (told["rounds"], told["summary"], told["last"]) == (
        {"planned": 3, "done": 0},
        None,
        None,
    )
    assert told["running"] is False
    refused(capsys, 5, "holds no study that has begun", "server", "resume", "server")


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (
            {"method": {"name": "dprp", "lr": 0.1, "clip": 1.0, "batch_size": 8, "dimension": 5}},
            4,
            "simulation",
        ),
        ({"method": {"name": "weiavgg"}}, 2, "weiavg"),
        ({"study": {**study_values()["study"], "sites": ["a", "a"]}}, 2, "names a site twice"),
        ({"run": {"rounds": 0}}, 2, "rounds"),
        ({"run": {"rounds": 1, "cohort": 9}}, 2, "cohort"),
        ({"network": {"port": 70000}}, 2, "port"),
    ],
)
def test_a_study_that_cannot_be_is_refused(
    change: dict[str, Any], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import tomli_w

    Path("study.toml").write_text(tomli_w.dumps({**study_values(), **change}))
    refused(capsys, code, words, "server", "init", "server", "--study", "study.toml")
    assert not Path("server").exists()


def test_status_shows_who_took_part_and_what_went_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    federation = Federation.of(tmp_path, study_values("fedavg_dp"))
    (tmp_path / "b" / "records.csv").unlink()
    federation.play()
    code, out, err = _run(capsys, "server", "status", "server")
    assert code == 0
    assert re.search(r"a\s+took part in 3 round", out)
    assert re.search(r"b\s+took part in 0 round", out)
    assert "b: " in out
    assert "model.safetensors" in err
    _, out, _ = _run(capsys, "server", "status", "server", "--json")
    told = json.loads(out)
    assert told["rounds"] == {"planned": 3, "done": 3}
    assert told["summary"]["sites"] == ["a", "c"]
    refused(capsys, 5, "has ended", "server", "run", "server")
    refused(capsys, 5, "has ended", "server", "resume", "server")


def test_a_study_that_was_begun_is_gone_on_with_unchanged(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    federation = Federation.of(tmp_path, study_values("fedavg_dp"))
    federation.play()
    (federation.server / "summary.json").unlink()  # as if it had been cut off
    refused(capsys, 5, "has begun; continue with: dpfl server resume", "server", "run", "server")
    study = federation.server / "study.toml"
    study.write_text(study.read_text().replace("rounds = 3", "rounds = 5"))
    refused(capsys, 5, "study.toml: is not the study that was begun", "server", "resume", "server")


def test_certificates_are_not_renewed_under_a_running_server(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_server(tmp_path / "server", study_values())
    note_process(tmp_path / "server" / "superlink.pid", os.getpid())
    refused(capsys, 5, "its server is running", "server", "renew", "server")
    (tmp_path / "server" / "superlink.pid").unlink()
    assert _run(capsys, "server", "renew", "server")[0] == 0


@pytest.mark.parametrize(
    "address", ["", "x", "localhost", ":9710", "http://h:1", "localhost:99999", "localhost:abc"]
)
def test_an_address_is_a_name_and_a_port(capsys: pytest.CaptureFixture[str], address: str) -> None:
    write_csv(Path("records.csv"))
    refused(
        capsys,
        2,
        "is not a name and port",
        "site",
        "init",
        "x",
        "--data",
        "records.csv",
        *INIT,
        "--server",
        address,
    )
    assert not Path("x/site.toml").exists()


def test_a_site_runs_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_csv(Path("records.csv"))
    assert _run(capsys, "site", "init", "home", "--data", "records.csv", *INIT)[0] == 0
    monkeypatch.setattr("dpfl.deploy.participation.check_server", lambda *_, **__: None)
    with RunFolder(Path("home")).locked():
        refused(capsys, 5, "is in use by another process", "site", "run", "home")


def test_a_large_delta_is_called_weak_wherever_the_grant_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_csv(Path("records.csv"))
    grant = ["--id", "a", "--epsilon", "4", "--delta", "0.5"]
    _, _, err = _run(capsys, "site", "init", "home", "--data", "records.csv", *grant)
    assert "delta 0.5 is not below 1 / 32 records" in err
    _, _, err = _run(capsys, "site", "spend", "home", "--page", "board.html")
    assert "WEAK" in err
    assert "delta 0.5 is not below" in Path("board.html").read_text()


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("study", {"feature_shape": [-4]}, "feature_shape"),
        ("study", {"sites": ["a", "../b"]}, "sites"),
        ("run", {"least_sites": 7}, "7 of 3 sites are needed"),
        ("run", {"rounds": True}, "rounds"),
        ("run", {"seed": -1}, "seed"),
        ("network", {"host": ""}, "host"),
        ("model", {"name": "logstic"}, "did you mean 'logistic'"),
    ],
)
def test_a_study_that_cannot_be_is_refused_when_it_is_made(
    capsys: pytest.CaptureFixture[str], section: str, values: dict[str, Any], words: str
) -> None:
    study = study_values()
    study[section] = {**study.get(section, {}), **values}
    Path("study.toml").write_bytes(tomli_w.dumps(study).encode())
    refused(capsys, 2, words, "server", "init", "s", "--study", "study.toml")
    assert not Path("s").exists()


def test_a_site_file_that_cannot_be_is_refused(tmp_path: Path) -> None:
    from dpfl.runs.site_file import SiteFile

    base = {
        "site": {"id": "a"},
        "data": {"file": "x.csv", "classes": 2},
        "budget": {"epsilon": 1.0, "delta": 1e-5},
    }
    for change, words in (
        ({"budget": {"epsilon": 1.0, "delta": 1e-13}}, "below 1e-12"),
        ({"site": {"id": "../x"}}, "id"),
        ({"site": {"id": ".hidden"}}, "id"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            SiteFile.from_dict({**base, **change})
    write_csv(tmp_path / "x.csv")
    values = {**base, "policy": {"methods": ["wieavg"]}}
    words = "there is no method 'wieavg'; did you mean 'weiavg'"
    with pytest.raises(ConfigurationError, match=words):
        Site.create(tmp_path / "x", values)
    assert not (tmp_path / "x" / "site.toml").exists()


def test_an_example_is_complete_and_each_site_holds_only_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    port = free_port()
    code, out, _ = _run(
        capsys, "deploy", "example", "example", "--port", str(port), "--rounds", "2"
    )
    assert code == 0
    assert "cleveland, hungarian, va" in out
    example = tmp_path / "example"
    study = StudyFile.from_file(example / "server" / "study.toml")
    assert (study.network.port, study.run.rounds, study.run.noise) == (port, 2, "system")
    secrets = [
        (example / "sites" / n / f).read_bytes()
        for n in ("cleveland", "hungarian", "va")
        for f in ("site.key", "token")
    ]
    for path in (example / "server").rglob("*"):
        if path.is_file():
            assert not any(secret in path.read_bytes() for secret in secrets)
    authority = (example / "server" / "certificates" / "ca.key").read_bytes()
    for name in ("cleveland", "hungarian", "va"):
        home = example / "sites" / name
        assert (home / "site.key").stat().st_mode & 0o777 == 0o600
        assert (home / "ca.crt").read_bytes() == (
            example / "server" / "certificates" / "ca.crt"
        ).read_bytes()
        assert (example / "server" / "sites" / f"{name}.pub").read_bytes() == (
            home / "site.key.pub"
        ).read_bytes()
        assert all(authority not in path.read_bytes() for path in home.rglob("*") if path.is_file())
        site = Site(home)
        values = {**study.offer()}
        assert site.answer(Desk(values).hello()).accepted
    assert str(port) in (example / "sites" / "va" / "site.toml").read_text()
    assert "dpfl deploy run" in (example / "README.md").read_text()
    refused(capsys, 5, "is not empty", "deploy", "example", "example")
    refused(capsys, 4, "simulation", "deploy", "example", "other", "--method", "maximum")


# -- the network -----------------------------------------------------------------------------------


@contextmanager
def tls_server(certificates: Path) -> Iterator[int]:
    """Somebody who speaks TLS on a free port."""

    class Silent(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()

        def log_message(self, *rest: Any) -> None:
            pass

    class Server(http.server.HTTPServer):
        def handle_error(self, *rest: Any) -> None:
            pass

    server = Server(("127.0.0.1", 0), Silent)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


def _home(capsys: pytest.CaptureFixture[str], port: int) -> None:
    write_csv(Path("records.csv"))
    server = ["--server", f"127.0.0.1:{port}"]
    assert _run(capsys, "site", "init", "home", "--data", "records.csv", *INIT, *server)[0] == 0


def test_a_site_with_the_wrong_certificate_says_so_and_does_not_go_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("real", "wrong"):
        make_certificates(tmp_path / name, ["127.0.0.1"])
    with tls_server(tmp_path / "real") as port:
        _home(capsys, port)
        refused(capsys, 2, "ca.crt", "site", "run", "home")  # none was put there
        (tmp_path / "home" / "ca.crt").write_text("no certificate")
        refused(capsys, 2, "is not a certificate", "site", "run", "home")
        (tmp_path / "home" / "ca.crt").write_bytes((tmp_path / "wrong" / "ca.crt").read_bytes())
        refused(capsys, 7, "is not signed by", "site", "run", "home")
        assert not (tmp_path / "home" / "worker.log").exists()  # nothing was started
        problem = check_server(f"127.0.0.1:{port}", tmp_path / "real" / "ca.crt")
        assert problem is None or "status" in problem


def test_a_site_that_is_started_before_its_server_waits_and_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    _home(capsys, port)
    make_certificates(tmp_path / "c", ["127.0.0.1"])
    (tmp_path / "home" / "ca.crt").write_bytes((tmp_path / "c" / "ca.crt").read_bytes())
    looks: list[float] = []

    def look_thrice(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("dpfl.deploy.participation.time.sleep", look_thrice)
    code, _, err = _run(capsys, "site", "run", "home")
    assert code == 130
    assert err.count(f"Waiting for the server: 127.0.0.1:{port} cannot be reached") == 1
    assert not any((tmp_path / "home" / name).exists() for name in ("site.pid", "worker.log"))


def test_somebody_else_at_the_address_is_named(tmp_path: Path) -> None:
    make_certificates(tmp_path / "c", ["127.0.0.1"])
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", 0))
        plain.listen()
        there = plain.getsockname()[1]

        def hang_up() -> None:
            stream, _ = plain.accept()
            stream.sendall(b"SSH-2.0-something\r\n")
            stream.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        problem = check_server(f"127.0.0.1:{there}", tmp_path / "c" / "ca.crt")
        thread.join(timeout=10)
    assert problem is not None
    assert f"127.0.0.1:{there}" in problem


@pytest.mark.parametrize(
    ("off", "words"),
    [(4.5, "4.5 s ahead"), (60.0, "60.0 s ahead"), (-400.0, "400.0 s behind"), (-200.0, "")],
)
def test_a_clock_that_is_off_is_named_with_the_difference(
    off: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpfl.deploy.participation.health", lambda *_: off)
    if not words:
        assert check_server("127.0.0.1:1", None) is None
        return
    with pytest.raises(PeerError, match=words) as caught:
        check_server("127.0.0.1:1", None)
    assert "timedatectl" in caught.value.remedy


def test_a_site_without_its_ledger_does_not_connect(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _home(capsys, free_port())
    (tmp_path / "home" / "ledger.sqlite").unlink()
    refused(capsys, 5, "there is no ledger", "site", "run", "home")


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        make_server(tmp_path / "server", {**study_values(), "network": {"port": port}})
        make_certificates(tmp_path / "server" / "certificates", ["127.0.0.1"])
        refused(capsys, 7, f"127.0.0.1:{port}: cannot be listened on", "server", "run", "server")
        assert not (tmp_path / "server" / "superlink.pid").exists()
    check_port("127.0.0.1", free_port())


def test_a_server_without_certificates_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_server(tmp_path / "server", {**study_values(), "network": {"port": free_port()}})
    refused(capsys, 2, "is missing", "server", "run", "server")


def test_what_flower_is_given_names_the_study_and_verifies_the_server(tmp_path: Path) -> None:
    import tomllib

    write_connection(tmp_path, 1234, insecure=False)
    found = tomllib.loads((tmp_path / "flower" / "config.toml").read_text())["superlink"]["study"]
    assert found == {
        "address": "127.0.0.1:1234",
        "root-certificates": str(tmp_path / "certificates" / "ca.crt"),
    }
    write_connection(tmp_path, 1234, insecure=True)
    assert (
        tomllib.loads((tmp_path / "flower" / "config.toml").read_text())["superlink"]["study"][
            "insecure"
        ]
        is True
    )
    app = write_app(tmp_path)
    components = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"][
        "components"
    ]
    for kind, place in components.items():
        module, _, name = place.partition(":")
        text = (app / f"{module.replace('.', '/')}.py").read_text()
        assert f"dpfl.deploy import {kind.removesuffix('app')}_app" in text
        assert name == "app"


def test_a_study_has_one_server_at_a_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A second one would end the first one's processes, and neither would serve."""
    for verb in ("run", "resume", "deliver"):
        folder = tmp_path / verb
        make_study(folder, StudyFile.from_dict(study_values()))
        with hold_folder(folder, ".serving.lock"):
            refused(capsys, 5, "is in use by another process", "server", verb, str(folder))
