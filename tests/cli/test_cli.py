"""The command line as a person meets it: what is printed where, and how each mistake ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpfl.cli.main import run_command
from dpfl.runs.processes import alive

QUICK = ["--dataset", "digits", "--clients", "4", "--rounds", "2", "--local-steps", "2", "--quiet"]
PRIVATE = ["--budgets", "2", "--delta", "1e-3", "--clip", "1"]


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_command(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_run_prints_results_on_stdout_and_stamps_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = _run(capsys, "run", *QUICK, *PRIVATE, "--method", "weiavg", "--out", "r")
    assert code == 0
    assert "test accuracy" in out
    assert "per record, zero_out adjacency, against the server, by PLD" in out.replace("\n", " ")
    assert "NOT PRIVATE: SEEDED" in err
    assert "SEEDED" not in out


def test_a_method_in_place_of_the_file_s_leaves_settings_of_others_aside(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _run(capsys, "run", *QUICK, *PRIVATE, "--method", "weiavg", "--out", "first")
    file = "first/experiment.toml"
    code, _, err = _run(capsys, "run", file, "--method", "preconditioned", "--out", "r", "--quiet")
    assert code == 0
    notes = [line for line in err.splitlines() if line.startswith("left aside, ")]
    assert len(notes) == 1 and notes[0].endswith("batch_size, clip, local_steps, lr")
    code, _, err = _run(capsys, "describe", file, "--method", "robust_hdp", "--json")
    assert code == 0 and "left aside" not in err  # it has all of them
    kept = Path("typo.toml")
    kept.write_text(Path(file).read_text().replace("[method]", "[method]\nsmoothnes = 1"))
    code, _, err = _run(capsys, "describe", str(kept), "--method", "robust_hdp")
    assert code == 2 and "has 'smoothnes'; did you mean 'smoothing'?" in err
    code, _, err = _run(capsys, "describe", file, "--method", "preconditioned", "--lr", "1")
    assert code == 2 and "has no setting 'lr'" in err  # it was asked of this method


def test_json_is_one_document_and_epsilon_carries_its_meaning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = _run(capsys, "run", *QUICK, *PRIVATE, "--method", "fedavg_dp", "--json")
    summary = json.loads(out)
    assert code == 0
    assert summary["folder"] == "runs/fedavg_dp-digits-1"
    for line in summary["statements"]:
        assert {
            "unit",
            "adjacency",
            "observer",
            "delta",
            "accountant",
            "epsilon",
            "budget",
        } <= set(line)
        assert line["epsilon"] <= line["budget"]


def test_a_shown_epsilon_is_never_below_the_stored_one(capsys: pytest.CaptureFixture[str]) -> None:
    _run(capsys, "run", *QUICK, *PRIVATE, "--method", "weiavg", "--out", "r")
    _, out, _ = _run(capsys, "account", "--ledger", "r/ledger.sqlite")
    _, text, _ = _run(capsys, "account", "--ledger", "r/ledger.sqlite", "--json")
    stored = {line["account"]: line["epsilon"] for line in json.loads(text)["statements"]}
    shown = dict(re.findall(r"^(client-\d)\s+\d+\s+([\d.]+)", out, re.M))
    assert set(shown) == set(stored)
    assert all(float(shown[client]) >= stored[client] for client in stored)


def test_account_reads_a_ledger_from_the_stored_events_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = _run(
        capsys, "run", *QUICK, *PRIVATE, "--method", "weiavg", "--out", "r", "--json"
    )
    assert code == 0
    lone = tmp_path / "elsewhere" / "ledger.sqlite"
    lone.parent.mkdir()
    lone.write_bytes(Path("r/ledger.sqlite").read_bytes())
    code, text, err = _run(capsys, "account", "--ledger", str(lone), "--json")
    assert (code, text) == (5, "")  # without its head an old copy could not be told from the newest
    assert "ledger.sqlite.head is missing" in " ".join(err.split())
    lone.with_name("ledger.sqlite.head").write_bytes(Path("r/ledger.sqlite.head").read_bytes())
    _, text, _ = _run(capsys, "account", "--ledger", str(lone), "--json")
    assert json.loads(text)["statements"] == json.loads(out)["statements"]


def test_raised_grants_are_called_hypothetical_in_the_ledger_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _run(
        capsys,
        "run",
        *QUICK,
        "--budgets",
        "1,2,3,4",
        "--delta",
        "1e-3",
        "--clip",
        "1",
        "--method",
        "maximum",
        "--out",
        "r",
    )
    _, _, err = _run(capsys, "account", "--ledger", "r/ledger.sqlite")
    assert "HYPOTHETICAL" in err


def test_noise_and_epsilon_are_inverse(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--sampling-rate", "0.05", "--steps", "100", "--delta", "1e-5", "--json"]
    _, out, _ = _run(capsys, "account", "--epsilon", "2", *common)
    noise = json.loads(out)["noise_multiplier"]
    _, out, _ = _run(capsys, "account", "--noise-multiplier", str(noise), *common)
    assert (
        0.985 * 2 <= json.loads(out)["epsilon"] <= 2
    )  # the next multiplier of the ladder is 0.5 % smaller
    _, out, _ = _run(capsys, "account", "--noise-multiplier", str(noise / 1.005), *common)
    assert json.loads(out)["epsilon"] > 2


def test_compare_pairs_methods_and_runs_only_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["compare", *QUICK, *PRIVATE, "--seeds", "2", "--workers", "1", "--json"]
    code, out, _ = _run(capsys, *arguments, "--methods", "fedavg,weiavg")
    first = json.loads(out)
    assert code == 0
    assert [len(cell["runs"]) for cell in first["cells"]] == [2, 2]
    assert [run["seed"] for cell in first["cells"] for run in cell["runs"]] == [0, 1, 0, 1]
    kept = {path: path.stat().st_mtime_ns for path in Path("runs/kept").glob("*/summary.json")}
    assert len(kept) == 4
    code, out, _ = _run(capsys, *arguments, "--methods", "fedavg,weiavg,minimum")
    second = json.loads(out)
    assert code == 0
    assert (first["folder"], second["folder"]) == ("runs/compare-1", "runs/compare-2")
    assert second["cells"][:2] == first["cells"]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert len(list(Path("runs/kept").glob("*/summary.json"))) == 6


def test_compare_tables_fit_a_terminal_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(
        capsys,
        "compare",
        *QUICK,
        *PRIVATE,
        "--seeds",
        "1",
        "--workers",
        "1",
        "--methods",
        "fedavg,fedavg_dp,minimum",
    )
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "fedavg_dp" in out
    assert "…" not in out


def test_compare_in_two_processes_gives_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    results, models = [], []
    for workers in ("1", "2"):
        arguments = [
            "compare",
            *QUICK,
            *PRIVATE,
            "--seeds",
            "1",
            "--methods",
            "fedavg_dp,weiavg",
            "--json",
        ]
        _, out, _ = _run(capsys, *arguments, "--workers", workers, "--kept", f"kept{workers}")
        found = json.loads(out)
        results.append(found["cells"])
        models.append(
            [
                Path(f"kept{workers}", c["runs"][0]["folder"], "model.safetensors").read_bytes()
                for c in found["cells"]
            ]
        )
    assert results[0] == results[1]
    assert models[0] == models[1]


def test_describe_says_whom_it_protects_from_whom_without_running(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = _run(
        capsys, "describe", "--dataset", "digits", "--clients", "4", *PRIVATE, "--method", "weiavg"
    )
    assert code == 0
    assert "protects a record against the server (zero_out adjacency)" in out
    assert "against the world" in out
    assert not Path("runs").exists()
    _, out, _ = _run(
        capsys,
        "describe",
        "--dataset",
        "digits",
        "--clients",
        "4",
        *PRIVATE,
        "--method",
        "weiavg",
        "--json",
    )
    plan = json.loads(out)
    assert 1.99 <= plan["epsilon"]["server"]["largest"] <= 2
    _, out, _ = _run(
        capsys, "run", *QUICK, *PRIVATE, "--method", "weiavg", "--rounds", "1", "--json"
    )
    assert json.loads(out)["bytes_up"] == 4 * plan["bytes_up_per_client"]
    assert json.loads(out)["bytes_down"] == 4 * plan["bytes_down_per_client"]


@pytest.mark.parametrize("command", ["methods", "datasets", "budgets", "models"])
def test_lists(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = _run(capsys, command, "--json")
    assert code == 0
    names = json.loads(out)
    code, out, _ = _run(capsys, command)
    assert all(name in out for name in names)


BAD = [
    (["rnu"], 2, "did you mean 'run'"),
    (["run", "--metod", "x"], 2, "--method"),
    (["run", *QUICK, *PRIVATE, "--method", "weiavgg"], 2, "did you mean 'weiavg'"),
    (["run", "--dataset", "digit", *PRIVATE, "--method", "weiavg"], 2, "did you mean 'digits'"),
    (
        [
            "run",
            *QUICK,
            "--budgets",
            "mixgaus1",
            "--delta",
            "1e-3",
            "--clip",
            "1",
            "--method",
            "weiavg",
        ],
        2,
        "mixgauss1",
    ),
    (
        ["run", *QUICK, *PRIVATE, "--method", "weiavg", "--model", "logstic"],
        2,
        "did you mean 'logistic'",
    ),
    (
        ["run", *QUICK, *PRIVATE, "--method", "weiavg", "--engine", "staked"],
        2,
        "did you mean 'stacked'",
    ),
    (
        ["run", *QUICK, *PRIVATE, "--method", "weiavg", "--partition", "idd"],
        2,
        "did you mean 'iid'",
    ),
    (
        ["run", *QUICK, *PRIVATE, "--method", "weiavg", "--set", "smoothness=3"],
        2,
        "has no setting 'smoothness'",
    ),
    (["run", *QUICK, *PRIVATE], 2, "no method"),
    (["run", *PRIVATE, "--method", "weiavg"], 2, "no data set"),
    (["run", *QUICK, "--budgets", "1", "--delta", "1e-3", "--method", "weiavg"], 2, "clip"),
    (["run", *QUICK, "--clip", "1", "--method", "weiavg"], 2, "budgets"),
    (["run", *QUICK, "--budgets", "1", "--clip", "1", "--method", "weiavg"], 2, "delta"),
    (
        ["run", *QUICK, "--budgets=-1", "--delta", "1e-3", "--clip", "1", "--method", "weiavg"],
        2,
        "epsilon = -1",
    ),
    (
        ["run", *QUICK, "--budgets", "nan", "--delta", "1e-3", "--clip", "1", "--method", "weiavg"],
        2,
        "epsilon = nan",
    ),
    (
        ["run", *QUICK, "--budgets", "1", "--delta", "1", "--clip", "1", "--method", "weiavg"],
        2,
        "delta = 1",
    ),
    (
        ["run", *QUICK, "--budgets", "1,2", "--delta", "1e-3", "--clip", "1", "--method", "weiavg"],
        2,
        "2 values for 4 clients",
    ),
    (
        ["run", *QUICK, "--budgets", "1", "--delta", "1e-3", "--clip", "0", "--method", "weiavg"],
        2,
        "clip = 0",
    ),
    (["run", *QUICK, *PRIVATE, "--method", "weiavg", "--lr", "-1"], 2, "lr = -1"),
    (["run", *QUICK, *PRIVATE, "--method", "weiavg", "--cohort", "9"], 2, "9 of 4 clients"),
    (["run", *QUICK, *PRIVATE, "--method", "weiavg", "--cohort", "many"], 2, "not a number"),
    (["run", *QUICK, *PRIVATE, "--method", "weiavg", "--cohort", "nan"], 2, "nan of 4 clients"),
    (
        ["run", "--dataset", "heart_disease", "--clients", "5", *PRIVATE, "--method", "weiavg"],
        2,
        "natural silos",
    ),
    (["run", *QUICK, *PRIVATE, "--method", "weiavg", "--rounds", "0"], 2, "rounds"),
    (["run", "nowhere.toml"], 2, "cannot be read"),
    (
        ["run", "--dataset", "digits", "--clients", "5000", *PRIVATE, "--method", "weiavg"],
        3,
        "clients",
    ),
    (
        ["run", "--dataset", "mnist", "--data", "nowhere", *PRIVATE, "--method", "weiavg"],
        3,
        "train-images",
    ),
    (["run", "--dataset", "./nowhere", *PRIVATE, "--method", "weiavg"], 3, "not a folder"),
    (
        [
            "run",
            *QUICK,
            "--budgets",
            "1e-9",
            "--delta",
            "1e-12",
            "--clip",
            "1",
            "--method",
            "weiavg",
        ],
        4,
        "no finite noise",
    ),
    (["run", "--resume", "nowhere"], 5, "holds no run"),
    (["account", "--ledger", "nowhere.sqlite"], 5, "there is no ledger"),
    (["account", "--noise-multiplier", "1"], 2, "delta"),
    (["account"], 2, "--ledger"),
    (
        ["account", "--noise-multiplier", "1", "--delta", "1e-5", "--sampling", "uniform"],
        4,
        "replace_one",
    ),
    (["compare", *QUICK, *PRIVATE, "--methods", "weiavg,fedavgg"], 2, "fedavg"),
    (["compare", *QUICK, *PRIVATE, "--methods", "weiavg", "--seeds", "x"], 2, "seeds"),
    (["compare", *QUICK, *PRIVATE], 2, "names no method"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "words"), BAD, ids=[" ".join(a)[-60:] for a, _, _ in BAD]
)
def test_bad_input_gets_one_sentence_and_its_exit_code(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.delenv("DPFL_DATA", raising=False)
    found, out, err = _run(capsys, *arguments)
    assert (found, out) == (code, "")
    assert words in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
    assert not list(Path().rglob("experiment.toml"))  # nothing half-made is left behind


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "[data]\nnam = 'digits'\n[method]\nname='fedavg'\n[run]\nrounds=1\n",
            "did you mean 'name'",
        ),
        ("[data]\nname = 'digits'\n[methd]\nname='fedavg'\n[run]\nrounds=1\n", "no method"),
        (
            "[data]\nname = 'digits'\n[method]\nname='fedavg'\n[runs]\nrounds=1\n",
            "did you mean 'run'",
        ),
        ("[data]\nname = 'digits'\n[method]\nname='fedavg'\n[run]\nround=1\n", "rounds"),
        (
            "[data]\nname = 'digits'\n[method]\nname='fedavg'\nlr=0.1\nbatch_size=4\nlocal_steps=1\n[run]\nrounds='x'\n",
            "rounds",
        ),
        ("[data\n", "not TOML"),
        (
            "[data]\nname='digits'\n[method]\nname='fedavg'\nlr=0.1\nbatch_size=4\nlocal_steps=1\n[run]\nrounds=1\n"
            "[clients.nobody]\nlr=0.1\n",
            "nobody",
        ),
        (
            "[data]\nname='digits'\n[method]\nname='fedavg'\nlr=0.1\nbatch_size=4\nlocal_steps=1\n[run]\nrounds=1\n"
            "[clients.client-01]\nlearning_rate=0.1\n",
            "learning_rate",
        ),
    ],
)
def test_a_bad_experiment_file_is_refused_by_the_key(
    capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    Path("e.toml").write_text(content)
    code, out, err = _run(capsys, "run", "e.toml", "--quiet")
    assert (code, out) == (2, "")
    assert words in err


def test_options_win_over_the_file_and_the_folder_keeps_the_whole_experiment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("e.toml").write_text(
        "[data]\nname='digits'\n[partition]\nclients=4\n[method]\nname='fedavg'\nlr=0.1\nbatch_size=4\nlocal_steps=1\n"
        "[run]\nrounds=3\n"
    )
    assert (
        _run(
            capsys, "run", "e.toml", "--rounds", "2", "--local-epochs", "1", "--out", "a", "--quiet"
        )[0]
        == 0
    )
    assert _run(capsys, "run", "a/experiment.toml", "--out", "b", "--quiet")[0] == 0
    assert Path("a/model.safetensors").read_bytes() == Path("b/model.safetensors").read_bytes()
    assert len(Path("a/rounds.jsonl").read_text().splitlines()) == 2
    assert "local_epochs = 1" in Path("a/experiment.toml").read_text()


def test_one_csv_per_client_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sites").mkdir()
    for site in ("north", "south"):
        rows = [f"{i % 7},{(i * 3) % 5},{int(i % 7 > 3)}" for i in range(40)]
        Path(f"sites/{site}.csv").write_text("a,b,ill\n" + "\n".join(rows) + "\n")
    code, out, _ = _run(
        capsys,
        "run",
        "--dataset",
        "./sites",
        "--label",
        "ill",
        *PRIVATE,
        "--method",
        "weiavg",
        "--rounds",
        "2",
        "--json",
    )
    assert code == 0
    assert {line["account"] for line in json.loads(out)["statements"]} == {"north", "south"}


def test_no_color_is_respected() -> None:
    environment = {**os.environ, "NO_COLOR": "1", "FORCE_COLOR": "", "TERM": "xterm-256color"}
    command = [
        sys.executable,
        "-m",
        "dpfl.cli.main",
        "run",
        *QUICK,
        *PRIVATE,
        "--method",
        "weiavg",
        "--out",
        "r",
    ]
    done = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert b"\x1b[" not in done.stdout + done.stderr


def test_ctrl_c_ends_with_130_and_the_run_can_be_resumed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [
        sys.executable,
        "-m",
        "dpfl.cli.main",
        "run",
        *QUICK,
        *PRIVATE,
        "--method",
        "weiavg",
        "--rounds",
        "150",
        "--out",
        "r",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_hears_ctrl_c
    )
    rounds = Path("r/rounds.jsonl")
    deadline = time.monotonic() + 60
    while not (rounds.exists() and rounds.stat().st_size > 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == b""
    assert b"dpfl run --resume r" in err
    text = Path("r/experiment.toml").read_text()
    assert "rounds = 150" in text
    before = len(rounds.read_text().splitlines())
    code, out_text, _ = _run(capsys, "run", "--resume", "r", "--json", "--quiet")
    assert code == 0
    assert before < 150
    assert json.loads(out_text)["rounds"]["done"] == 150


def test_a_client_that_cannot_afford_one_round_is_still_on_the_page(
    capsys: pytest.CaptureFixture[str],
) -> None:
    budgets = ["--budgets", "0.01,2,3,4", "--delta", "1e-3", "--clip", "1", "--spending", "uniform"]
    code, out, _ = _run(
        capsys, "describe", "--dataset", "digits", "--clients", "4", *budgets, "--method", "weiavg"
    )
    assert code == 0
    assert "1 client(s) will run out" in out
    code, out, _ = _run(capsys, "run", *QUICK, *budgets, "--method", "weiavg", "--out", "r")
    assert "1 of 4 clients (client-0)" in out
    assert re.search(r"client-0\s+0\s+0\.000\s+0\.010", out)
    _, out, _ = _run(capsys, "account", "--ledger", "r/ledger.sqlite")
    assert re.search(r"client-0\s+0\s+0\.000\s+0\.010", out)


def test_a_delta_column_and_a_delta_for_all_do_not_contradict_each_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = "".join(f"client-{i},2,1e-3\n" for i in range(4))
    Path("b.csv").write_text("id,epsilon,delta\n" + rows)
    arguments = ["run", *QUICK, "--method", "weiavg", "--clip", "1", "--budgets", "b.csv"]
    code, _, err = _run(capsys, *arguments, "--delta", "1e-5")
    assert code == 2
    assert "leave one of the two out" in err
    assert _run(capsys, *arguments)[0] == 0


def test_spreadsheets_are_read_as_they_are_saved(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sites").mkdir()
    rows = "".join(f"{i % 7},{(i * 3) % 5},{int(i % 7 > 3)}\n" for i in range(40))
    for site in ("north", "south"):
        Path(f"sites/{site}.csv").write_text(
            "\ufeffa,b,ill\r\n" + rows.replace("\n", "\r\n"), encoding="utf-8"
        )
    assert (
        _run(
            capsys,
            "run",
            "--dataset",
            "./sites",
            *PRIVATE,
            "--method",
            "weiavg",
            "--rounds",
            "1",
            "--quiet",
        )[0]
        == 0
    )
    Path("sites/south.csv").write_text("a;b;ill\n1;2;0\n")
    code, _, err = _run(capsys, "run", "--dataset", "./sites", *PRIVATE, "--method", "weiavg")
    assert code == 3
    assert "semicolons" in err


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m dpfl.cli.main budgets | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_name_of_a_row_survives_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = _run(
        capsys,
        "compare",
        *QUICK,
        *PRIVATE,
        "--seeds",
        "1",
        "--workers",
        "1",
        "--methods",
        "fedavg_dp",
    )
    assert out.count("fedavg_dp") == 2


def _children(pid: int) -> set[int]:
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found |= {int(status.parent.name)} | _children(int(status.parent.name))
    return found


def _hears_ctrl_c() -> None:
    """Also where the tests themselves were started in the background, deaf to it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see processes")
@pytest.mark.parametrize(
    ("command", "end", "training"),
    [
        ("run", signal.SIGINT, True),
        ("run", signal.SIGKILL, True),
        ("compare", signal.SIGINT, False),  # while workers are still reading their libraries
        ("compare", signal.SIGKILL, True),
    ],
)
def test_no_worker_outlives_its_parent(command: str, end: signal.Signals, training: bool) -> None:
    own = (
        ["--method", "weiavg", "--out", "r"]
        if command == "run"
        else ["--methods", "weiavg,fedavg_dp", "--out", "r"]
    )
    arguments = [command, *QUICK, *PRIVATE, "--rounds", "5000", "--workers", "2", *own]
    process = subprocess.Popen(
        [sys.executable, "-m", "dpfl.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_hears_ctrl_c,
    )
    deadline = time.monotonic() + 90
    place = Path("r" if command == "run" else "runs/kept")
    children: set[int] = set()  # the workers, and what Python starts to clean up after them
    ready = False
    while not ready and time.monotonic() < deadline:
        time.sleep(0.05)
        children = _children(process.pid)
        ready = bool(list(place.rglob("rounds.jsonl"))) if training else len(children) >= 3
    if end == signal.SIGINT:
        os.killpg(process.pid, end)  # what a terminal does
    else:
        process.kill()
    _, err = process.communicate(timeout=60)
    assert ready
    assert len(children) >= 2
    assert process.returncode == (130 if end == signal.SIGINT else -9)
    assert b"Traceback" not in err
    deadline = time.monotonic() + 20
    while any(map(alive, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in children if alive(pid)]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import dpfl

    code, out, _ = _run(capsys, "--version")
    assert (code, out.strip()) == (0, dpfl.__version__)


def test_describe_prices_what_the_ledger_will_state(capsys: pytest.CaptureFixture[str]) -> None:
    """A client may be drawn in every round: its plan covers all of them, and so does the price."""
    data = (
        "--dataset",
        "digits",
        "--clients",
        "8",
        *PRIVATE,
        "--method",
        "udp_fedavg",
        "--cohort",
        "3",
        "--rounds",
        "6",
    )
    _, out, _ = _run(capsys, "describe", *data, "--json")
    planned = json.loads(out)["epsilon"]
    code, out, _ = _run(capsys, "run", *data, "--out", "priced", "--json")
    assert code == 0
    stated = json.loads(Path("priced/summary.json").read_text())["epsilon_by_observer"]
    for observer in ("server", "world"):
        assert planned[observer]["largest"] == pytest.approx(
            stated[observer]["spent"]["largest"], rel=1e-6
        )


def test_rounds_of_which_nothing_came_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = _run(
        capsys, "run", *QUICK, *PRIVATE, "--method", "weiavg", "--dropout", "1", "--out", "r"
    )
    assert code == 0
    assert re.search(r"UNPUBLISHED: .*2 of 2 rounds", " ".join(err.split()))
    assert "UNPUBLISHED" in Path("r/report.html").read_text()
    code, _, err = _run(capsys, "run", *QUICK, *PRIVATE, "--method", "weiavg", "--out", "whole")
    assert "UNPUBLISHED" not in err


def test_a_ledger_s_tables_fit_80_columns_whatever_its_epsilons_mean(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _run(capsys, "run", *QUICK, *PRIVATE, "--method", "udp_fedavg", "--out", "r")
    _, out, _ = _run(capsys, "account", "--ledger", "r/ledger.sqlite")
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("client-0") == 2  # against the server, and against the world
    assert "…" not in out


def test_an_infinite_epsilon_is_still_json(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = _run(capsys, "account", "--noise-multiplier", "0", "--delta", "1e-5", "--json")
    assert json.loads(out, parse_constant=lambda text: pytest.fail(text))["epsilon"] == "infinite"
