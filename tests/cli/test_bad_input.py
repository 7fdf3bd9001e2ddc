"""What a sloppy user types: one sentence that names the value, and the right exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpfl.cli.main import COMMANDS, imported, run_command

FEDERATION = ["--dataset", "digits", "--clients", "4", "--rounds", "1", "--local-steps", "1"]
PRIVATE = ["--budgets", "2", "--delta", "1e-3", "--clip", "1", "--method", "weiavg", "--quiet"]
FULL = [*FEDERATION, *PRIVATE]
FOREIGN = ("Traceback", "Input should", "validation error", "pydantic", "NoneType", "internal")
"""Words that a user must not read: they are of other libraries."""


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """Run a command that must be refused, and return its one sentence."""
    found = run_command(list(arguments))
    out, err = capsys.readouterr()
    assert (found, out) == (code, ""), err
    sentence = err.strip().splitlines()[-1]
    assert sentence.startswith("dpfl: ")
    assert not any(word in err for word in FOREIGN), err
    return sentence


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--label", "ill"], 2, r"[data] label: 'ill' is given for the data set 'digits'"),
        (["--seed", "-1"], 2, "[run] seed: -1 was given; give a number of at least 0"),
        (["--lr", "1e9"], 2, "lr = 1000000000.0; give a number above 0 and at most 10000"),
        (["--set", "server.lr=1e9"], 2, "lr = 1000000000.0; give a number above 0 and at most"),
        (["--lr", "nan"], 2, "lr = nan"),
        (["--lr", "-1"], 2, "lr = -1.0"),
        (["--set", "run.rounds=many"], 2, "[run] rounds: 'many' was given; give a whole number"),
        (["--set", "run.seed=1.5"], 2, "[run] seed: 1.5 was given; give a whole number"),
        (["--set", "run.sampling=often"], 2, "give 'uniform' or 'poisson'"),
        (["--set", "nonsense"], 2, "'nonsense' is not KEY=VALUE"),
        (["--set", "=1"], 2, "'=1' is not KEY=VALUE"),
        (["--set", "run.=1"], 2, "'run.=1' is not KEY=VALUE"),
        (["--set", "nothing.x=1"], 2, "there is no key 'nothing'"),
        (["--records", "100000"], 3, "there are 1438; ask for at most 359 records per client"),
        (["--records", "0"], 2, "records = 0"),
        (["--clients", "100000"], 3, "use at most 719 clients"),
        (["--clients", "-3"], 2, "-3 clients"),
        (["--partition", "iidd"], 2, "did you mean 'iid'"),
        (["--model", "logistik"], 2, "did you mean 'logistic'"),
        (["--engine", "stackd"], 2, "stacked"),
        (["--device", "gpu"], 2, "gpu"),
        (["--budgets", "nan"], 2, "epsilon = nan"),
        (["--budgets", "1,2"], 2, "2 values for 4 clients"),
        (["--delta", "2"], 2, "delta = 2.0"),
        (["--clip", "inf"], 2, "clip"),
        (["--cohort", "lots"], 2, "'lots' is not a number"),
        (["--cohort", "nan"], 2, "[run] cohort"),
        (["--misreport", "x"], 2, "ID:FACTOR"),
        (["--dropout", "nan"], 2, "[run] dropout"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_an_option_that_cannot_be_meant_is_refused(
    options: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, "run", *FULL, *options, code=code)
    assert not Path("runs").exists()


def test_another_experiment_s_folder_is_no_folder_to_resume(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["run", *FULL, "--out", "r"]) == 0
    capsys.readouterr()
    before = {path.name: path.stat().st_mtime_ns for path in Path("r").glob("[!.]*")}
    sentence = refused(capsys, "run", *FULL, "--seed", "1", "--out", "r", code=5)
    assert "r: already holds another experiment" in sentence
    assert "--resume" not in sentence
    assert "give another --out" in sentence
    sentence = refused(capsys, "run", *FULL, "--out", "r", code=5)
    assert "already holds a run of this experiment; use dpfl run --resume r" in sentence
    assert {path.name: path.stat().st_mtime_ns for path in Path("r").glob("[!.]*")} == before


def test_a_class_without_a_record_needs_declared_classes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("sites").mkdir()
    for name in "ab":
        lines = [f"{n},{(0, 1, 3)[n % 3]}" for n in range(30)]
        Path("sites", f"{name}.csv").write_text("\n".join(["x,ill", *lines]))
    own = ["--dataset", "./sites", "--rounds", "1", "--local-steps", "1", *PRIVATE]
    sentence = refused(capsys, "run", *own, code=3)
    assert "nobody has a record of class 2" in sentence
    assert "classes = 4" in sentence
    assert run_command(["run", *own, "--set", "task.classes=4"]) == 0


@pytest.mark.parametrize("width", [40, 200])
def test_the_help_of_every_command_is_plain_and_complete(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for name in COMMANDS:
        command = imported(name)
        for words in [[name], *([name, own] for own in getattr(command, "commands", {}))]:
            assert run_command([*words, "--help"]) == 0
            out, err = capsys.readouterr()
            assert "\\" not in out
            assert err == ""
    run_command(["run", "--help"])
    assert "[FILE]" in (text := capsys.readouterr().out)
    assert "Experiment file (TOML)." in " ".join(text.split())
