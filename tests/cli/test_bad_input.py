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
        (["--records", "9999", "--clients", "9999"], 3, "use fewer clients with fewer records"),
        (["--set", "partition.smallest=9999"], 3, "use fewer clients with fewer records"),
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
            assert "Positional arguments" not in out
            assert err == ""
    run_command(["run", "--help"])
    assert "[FILE]" in (text := capsys.readouterr().out)
    assert "Experiment file (TOML)." in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--clients", "x"], "--clients: 'x' was given; give a whole number"),
        (["run", "--lr", "fast"], "--lr: 'fast' was given; give a number"),
        (
            ["watch", "x", "--port", "99999"],
            "--port: '99999' was given; give a whole number from 0 to",
        ),
        (
            ["compare", "--workers", "0"],
            "--workers: '0' was given; give a whole number of at least",
        ),
        (["tune", "--seeds", "99999999999"], "give a whole number from 1 to 10000"),
        (["run", "--clip"], "--clip: has no value; give one after it"),
        (["run", "--round", "3"], "there is no option '--round'; did you mean '--rounds'?"),
        (["run", "--zzz"], "there is no option '--zzz'; see dpfl run --help"),
        (["run", "a.toml", "b.toml"], "'b.toml': there is no such argument"),
        (["rnu"], "there is no command 'rnu'; did you mean 'run'?"),
        (["report"], "RUNS: is missing; give it, or see dpfl report --help"),
        (["site", "init", "s"], "--id: is missing"),
        (["compare", *FULL[:-3], "--methods", "weiavg", "--seeds", "-1"], "--seeds: '-1'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_typed_wrongly_is_said_in_our_words(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, *arguments)


EXPERIMENT = """
[data]
name = "digits"
[partition]
clients = 4
[budgets]
epsilon = 2.0
delta = 1e-3
[method]
name = "weiavg"
lr = 0.1
clip = 1.0
batch_size = 8
local_steps = 1
[run]
rounds = 1
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[run]\nrounds = 1", "", "is missing"),
        ("[data]", "server = 5\n[data]", "[server]: 5 was given; write a table"),
        ("[budgets]\nepsilon = 2.0\ndelta = 1e-3", "", "no budgets were given"),
        ("[run]", "[[run]]", "[run]: [{'rounds': 1}] was given; write a table"),
        ("epsilon = 2.0", "epsilon = true", "[budgets] epsilon: True was given"),
        ("rounds = 1", "rounds = '1'", "[run] rounds: '1' was given; give a whole number"),
        ("rounds = 1", f"rounds = {'9' * 5000}", "holds a number of thousands of digits"),
        ("lr = 0.1", "lr = 1979-05-27", "lr: a date or time was given (1979-05-27)"),
        ("rounds = 1", 'rounds = 1\n"a\\nb" = 2', r"there is no key 'a\nb'"),
    ],
)
def test_a_file_that_is_wrong_is_one_sentence(
    old: str, new: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in EXPERIMENT
    Path("e.toml").write_text(EXPERIMENT.replace(old, new))
    for command in (["run"], ["describe"], ["compare", "--methods", "weiavg", "--seeds", "1"]):
        assert said in refused(capsys, *command, "e.toml")


def test_bytes_are_no_file_and_a_byte_order_mark_is_no_mistake(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("e.toml").write_bytes(bytes(range(256)))
    assert "is not text in UTF-8" in refused(capsys, "run", "e.toml")
    Path("e.toml").write_bytes(b"\xef\xbb\xbf" + EXPERIMENT.encode())
    assert run_command(["run", "e.toml", "--quiet"]) == 0


@pytest.mark.parametrize(
    "option", [["--clients", "2"], ["--partition", "iid"], ["--records", "3"]], ids=" ".join
)
def test_files_of_a_folder_are_shared_out_already(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("sites").mkdir()
    text = "\n".join(["x,ill", *(f"{n},{n % 2}" for n in range(20))])
    Path("sites/a.csv").write_text(text)
    own = ["--dataset", "./sites", "--rounds", "1", "--local-steps", "1", *PRIVATE, *option]
    assert "shared out already; leave it out" in refused(capsys, "run", *own)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("b.json", '{"client-0": 1, "client-0": 9}', "names client 'client-0' twice"),
        ("b.json", '{"client-0": null}', "'client-0' has None instead of a number"),
        ("b.json", "{", "it is not JSON"),
        ("b.csv", "id,epsilon\nclient-0,much", "'client-0' has 'much' instead of a number"),
    ],
)
def test_a_file_of_budgets_that_is_wrong_is_one_sentence(
    name: str, content: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).write_text(content)
    assert said in refused(capsys, "run", *FULL, "--budgets", name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x,ill\n1,0\nNA,1\n", "line 3, column 'x': has no value"),
        ("x\till\n1\t0\n", "it is separated by tabs"),
        ("ill\n0\n1\n", "has no column beside 'ill'"),
        ("x,ill\n1,0\n2,99999999999999999999\n", "label"),
    ],
)
def test_a_table_that_is_wrong_is_one_sentence(
    text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("sites").mkdir()
    Path("sites/a.csv").write_text(text)
    assert said in refused(capsys, "run", "--dataset", "./sites", *PRIVATE, code=3)
