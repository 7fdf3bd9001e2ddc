"""What an init refuses and leaves behind: studies that cannot be, a second budget, open folders."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from dpfl.cli.main import run_command
from dpfl.core.errors import ConfigurationError, FolderError, PrivacyRefusal
from dpfl.core.files import content_of
from dpfl.deploy.client_app import answered
from dpfl.deploy.participation import take_part
from dpfl.deploy.records import LoadedSite
from dpfl.deploy.serving import make_study, serve
from dpfl.deploy.site import Site
from dpfl.runs.deployment import StudyFile
from dpfl.runs.site_file import SiteFile
from tests.deploy.federation import (
    RECORD,
    Desk,
    Federation,
    charged,
    make_server,
    make_site,
    study_values,
    write_csv,
)
from tests.deploy.test_schema import make_schema_site, patient_study

INIT = ["--id", "a", "--epsilon", "4", "--delta", "0.01", "--data"]


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = run_command(list(arguments))
    return code, capsys.readouterr().err.strip()


# ---- studies -------------------------------------------------------------------------------------


def preconditioned(model: str) -> dict[str, Any]:
    return {**study_values(), "method": {"name": "preconditioned"}, "model": {"name": model}}


def measured(metric: str, **more: Any) -> dict[str, Any]:
    accounted = {"metric": metric, "every": 1, "share": 0.1, **more}
    return {**patient_study(stated=True), "accounted": accounted}


def released() -> dict[str, Any]:
    return {**patient_study(stated=True), "method": {"name": "preconditioned"}}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (preconditioned("logistic"), "trains a linear head on public features"),
        (study_values("centaur"), "the model has one layer, so there is no body to share"),
        (study_values("krum", byzantine=1), "needs 5 clients in a round, and 3 are expected"),
        (study_values("pfa", public=["elsewhere"]), r"\['elsewhere'\] are not clients"),
        (released(), "take single records, not all of a patient's"),
        (measured("accuracy"), "here a unit is a person with several"),
    ],
    ids=["head", "layers", "cohort", "public", "releases", "metric"],
)
def test_a_study_that_no_sites_can_take_part_in_is_refused_at_init(
    values: Mapping[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("study.toml").write_text(tomli_w.dumps(values))
    code, sentence = run(capsys, "server", "init", "server", "--study", "study.toml")
    assert code == 2
    assert re.search(words, sentence), sentence
    assert not Path("server").exists()


@pytest.mark.parametrize(
    "values",
    [
        preconditioned("linear_head"),
        study_values("pfa"),
        study_values("pfa", public="threshold", public_threshold=2.0),
        study_values("krum"),
        study_values(sites=["a"], run={"least_sites": 1}),
        {**study_values(local_steps=1), "secure_sum": {}},
        measured("loss", bound=2.0),
    ],
    ids=["head", "split", "threshold", "cohort", "alone", "sum", "metric"],
)
def test_a_study_that_depends_on_who_comes_is_made(
    values: Mapping[str, Any], tmp_path: Path
) -> None:
    make_study(tmp_path / "server", StudyFile.from_dict(dict(values)))
    assert (tmp_path / "server" / "study.toml").exists()


def test_init_and_run_refuse_in_the_same_words(tmp_path: Path) -> None:
    values = study_values("krum", byzantine=1)
    federation = Federation.of(tmp_path, values)
    refusals = []
    for begin in (
        federation.coordinator().begin,
        lambda: make_study(tmp_path / "other", StudyFile.from_dict(values)),
    ):
        with pytest.raises(ConfigurationError) as refused:
            begin()
        refusals.append(str(refused.value))
    assert refusals[0] == refusals[1]


def test_a_policy_cannot_allow_a_method_that_the_site_s_own_schema_rules_out(
    tmp_path: Path,
) -> None:
    site = make_schema_site(tmp_path / "a")
    values = site.file.to_dict()
    values["policy"]["methods"] = ["weiavg", "preconditioned"]
    (site.folder / "site.toml").write_text(SiteFile.from_dict(values).to_toml())
    with pytest.raises(ConfigurationError, match=r"preconditioned: .* not all of a patient's"):
        LoadedSite(site.folder)


# ---- the records' budget -------------------------------------------------------------------------


def test_records_get_one_budget_unless_another_one_is_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_csv(Path("data/north.csv"))
    Path("link.csv").symlink_to("data/north.csv")
    assert run(capsys, "site", "init", "one", *INIT, "data/north.csv")[0] == 0
    mark = Path("data/north.csv.dpfl")
    assert mark.read_text() == f"{tmp_path}/one\n"
    assert stat.S_IMODE(mark.stat().st_mode) == 0o600
    for records in ("data/north.csv", "link.csv"):
        code, sentence = run(capsys, "site", "init", "two", *INIT, records)
        assert code == 4
        assert f"data/north.csv: have a budget in the ledger of {tmp_path}/one already" in sentence
        assert "--another-budget" in sentence
        assert not Path("two/site.toml").exists()
        assert not Path("two/ledger.sqlite").exists()
    assert run(capsys, "site", "init", "two", *INIT, "link.csv", "--another-budget")[0] == 0
    assert mark.read_text() == f"{tmp_path}/one\n{tmp_path}/two\n"
    code, sentence = run(capsys, "site", "init", "three", *INIT, "data/north.csv")
    assert (code, f"{tmp_path}/one, {tmp_path}/two" in sentence) == (4, True)


def test_a_site_that_is_made_from_python_marks_its_records(tmp_path: Path) -> None:
    write_csv(tmp_path / "north.csv")
    values = {
        "site": {"id": "a"},
        "data": {"file": str(tmp_path / "north.csv"), "classes": 2},
        "budget": RECORD,
    }
    LoadedSite.create(tmp_path / "one", values)
    with pytest.raises(PrivacyRefusal, match=r"have a budget in the ledger of .*/one already"):
        LoadedSite.create(tmp_path / "two", values)


def test_an_init_that_fails_leaves_no_mark(capsys: pytest.CaptureFixture[str]) -> None:
    Path("north.csv").write_text("x,ill\n1,0\nword,1\n")
    assert run(capsys, "site", "init", "one", *INIT, "north.csv")[0] == 3
    assert not Path("north.csv.dpfl").exists()


def test_records_that_cannot_be_marked_are_said_to_be_unmarked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_csv(Path("data/north.csv"))
    Path("data/north.csv.dpfl.new").mkdir()  # where the mark is drafted: nobody can write it
    Path("data/north.csv.dpfl.new/x").touch()
    code, sentences = run(capsys, "site", "init", "one", *INIT, "data/north.csv")
    assert code == 0
    assert "north.csv.dpfl cannot be written: a second site on these records is not" in sentences


def test_records_in_the_site_s_folder_move_with_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_csv(Path("home/north.csv"))
    assert run(capsys, "site", "init", "home", *INIT, "home/north.csv")[0] == 0
    assert LoadedSite(Path("home")).file.data.file == "north.csv"
    Path("home").rename("moved")
    assert run(capsys, "site", "spend", "moved")[0] == 0
    assert LoadedSite(Path("moved")).member().shard.examples == 32
    write_csv(Path("elsewhere.csv"), seed=1)
    assert run(capsys, "site", "init", "other", *INIT, "elsewhere.csv")[0] == 0
    assert LoadedSite(Path("other")).file.data.file == str(tmp_path / "elsewhere.csv")


# ---- permissions ---------------------------------------------------------------------------------


def modes(folder: Path) -> dict[str, int]:
    paths = [folder, *folder.rglob("*")]
    return {str(path): stat.S_IMODE(path.lstat().st_mode) for path in paths}


@pytest.mark.usefixtures("_usual_umask")
def test_what_an_init_makes_is_its_owner_s_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_csv(Path("north.csv"))
    Path("home").mkdir()
    Path("server").mkdir()
    before = stat.S_IMODE(Path("north.csv").stat().st_mode)
    assert run(capsys, "site", "init", "home", *INIT, "north.csv")[0] == 0
    Path("study.toml").write_text(tomli_w.dumps(study_values()))
    assert run(capsys, "server", "init", "server", "--study", "study.toml")[0] == 0
    assert run(capsys, "deploy", "example", "example")[0] == 0
    for folder in ("home", "server", "example"):
        opened = [path for path, mode in modes(Path(folder)).items() if mode & 0o077]
        assert not [path for path in opened if not path.endswith(".pub")]
    assert stat.S_IMODE(Path("north.csv").stat().st_mode) == before  # it is the hospital's
    Path("made-later").touch()
    assert stat.S_IMODE(Path("made-later").stat().st_mode) == 0o644


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701])
def test_nothing_starts_in_a_folder_that_others_may_enter(mode: int, tmp_path: Path) -> None:
    site = make_site(tmp_path / "a", "a")
    server = make_server(tmp_path / "server", study_values())
    starts: dict[Path, Callable[[], Any]] = {
        site.folder: lambda: take_part(site.folder, print, insecure=True),
        server: lambda: serve(server, "run", print, print, insecure=True),
    }
    for folder, start in starts.items():
        folder.chmod(mode)
        with pytest.raises(FolderError, match=f"chmod 700 {folder}") as refused:
            start()
        assert refused.value.exit_code == 5
    answer = answered(site.folder, Desk(study_values()).hello())
    assert (answer.accepted, "its operator must look at it" in answer.reason) == (False, True)
    site.folder.chmod(0o700)
    assert answered(site.folder, Desk(study_values()).hello()).accepted


@pytest.mark.usefixtures("_usual_umask")
def test_processes_that_a_site_starts_write_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(tmp_path / "a", "a")
    child = "from pathlib import Path; Path('log').touch(); Path('models').mkdir()"

    def started(*arguments: Any) -> None:
        subprocess.run([sys.executable, "-c", child], check=True, cwd=site.folder)

    monkeypatch.setattr("dpfl.deploy.participation.Participation.run", started)
    take_part(site.folder, print, insecure=True)
    found = modes(site.folder)
    assert found[str(site.folder / "log")] == 0o600
    assert found[str(site.folder / "models")] == 0o700


# ---- sentences -----------------------------------------------------------------------------------


def test_nobody_is_named_twice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = study_values()
    federation = Federation.of(tmp_path, values)
    policy = federation.sites["b"].file.to_dict()
    policy["policy"]["methods"] = ["fedavg_dp"]
    (tmp_path / "b" / "site.toml").write_text(SiteFile.from_dict(policy).to_toml())
    federation.play()
    assert federation.summary()["refusals"]["b"].startswith("its policy does not allow weiavg")
    assert "\nb: its policy does not allow" in _status(capsys)
    log = (tmp_path / "b" / "site.log").read_text()
    assert " its policy does not allow weiavg; change one of the two\n" in log
    assert "site 'b'" not in log


def _status(capsys: pytest.CaptureFixture[str]) -> str:
    assert run_command(["server", "status", "server"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("rule", ["renyi", "allotments"])
def test_a_site_reads_in_its_log_what_is_left_and_the_server_does_not(
    rule: str, tmp_path: Path
) -> None:
    site = make_site(tmp_path / "a", "a", {**RECORD, "filter": rule})
    first, second = Desk(study_values()), Desk(study_values(), run="run-2")
    assert site.answer(first.terms()).accepted
    for round_ in range(3):
        assert site.answer(first.train(round_)).accepted
    answer = Site(site.folder).answer(second.terms())
    assert not answer.accepted
    assert answer.reason == (
        "its budget does not cover a round of this study; plan fewer rounds or more noise, or "
        "set per_study at the site to what is left there"
    )
    line = (site.folder / "site.log").read_text().splitlines()[-1]
    numbers = re.search(r"epsilon ([\d.]+) of 4 is left, .* a round takes epsilon ([\d.]+)", line)
    assert numbers is not None, line
    left, takes = map(float, numbers.groups())
    assert 0 <= left < takes < 4
    assert "delta 0.01 is taken" in line


def test_the_log_s_advice_can_be_followed(tmp_path: Path) -> None:
    site = make_site(tmp_path / "a", "a", {**RECORD, "filter": "renyi"})
    first = Desk(study_values())
    assert site.answer(first.terms()).accepted
    for round_ in range(2):
        assert site.answer(first.train(round_)).accepted
    second = Desk(study_values(rounds=1), run="run-2")
    assert not Site(site.folder).answer(second.terms()).accepted
    line = (site.folder / "site.log").read_text().splitlines()[-1]
    (left,) = re.findall(r"epsilon ([\d.]+) of 4 is left", line)
    values = site.file.to_dict()
    values["budget"]["per_study"] = float(left)
    (site.folder / "site.toml").write_text(SiteFile.from_dict(values).to_toml())
    again = Desk(study_values(rounds=1), run="run-3", epsilon=float(left))
    answer = Site(site.folder).answer(again.terms())
    assert answer.accepted, answer.reason
    assert Site(site.folder).answer(again.train(0)).accepted
    assert charged(site) == {0, 1}


# ---- what is not a file --------------------------------------------------------------------------


def test_a_fifo_is_refused_and_the_pipe_of_a_shell_is_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("north.csv", "north.parquet"):
        os.mkfifo(name)
        code, sentence = run(capsys, "site", "init", "home", *INIT, name)
        assert (code, "it is a device or a FIFO" in sentence) == (3, True), sentence
    os.mkfifo("weights")
    with pytest.raises(OSError, match="FIFO"):
        content_of(Path("weights"))
    reading, writing = os.pipe()
    os.write(writing, b"a pipe")
    os.close(writing)
    try:
        assert content_of(Path(f"/dev/fd/{reading}")) == b"a pipe"
    finally:
        os.close(reading)
