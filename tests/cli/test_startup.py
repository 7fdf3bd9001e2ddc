"""The command line answers at once, imports only what a command needs, and completes names."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest

from dpfl.cli.main import COMMANDS, LazyGroup, app, run_command
from dpfl.cli.options import method_names
from dpfl.methods import METHODS, families

ROOT = Path(__file__).parents[2]
MOST_SECONDS = 0.4
HEAVY = ("torch", "numpy", "pydantic", "plotly", "scipy", "sklearn", "pandas")


def seconds(*arguments: str) -> float:
    """CPU seconds of the fastest of three tries."""
    found = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "dpfl.cli.main", *arguments], capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


def imported(*arguments: str) -> list[str]:
    """Heavy modules that a command has imported when it ends."""
    code = (
        "import json, sys; from dpfl.cli.main import run_command; "
        f"run_command({list(arguments)!r}); "
        f"sys.stderr.write('|' + json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stderr.rpartition("|")[2])
    return found


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["rnu"], ["--nothing"], ["run", "--metod", "x"]]
)
def test_help_version_and_misspellings_are_answered_at_once(arguments: list[str]) -> None:
    assert imported(*arguments) == []
    assert seconds(*arguments) <= MOST_SECONDS


def test_accounting_for_numbers_needs_no_torch() -> None:
    assert "torch" not in imported("account", "--noise-multiplier", "1", "--delta", "1e-5")
    assert "torch" not in imported("account", "--epsilon", "2", "--delta", "1e-5", "--json")


def test_a_run_on_classification_needs_no_scikit_learn(tmp_path: Path) -> None:
    options = ["--dataset", "digits", "--clients", "3", "--budgets", "5", "--delta", "1e-3"]
    options += [
        "--clip",
        "1",
        "--method",
        "weiavg",
        "--rounds",
        "1",
        "--out",
        f"{tmp_path / 'run'}",
    ]
    needed = imported("run", *options)
    assert (tmp_path / "run" / "report.html").exists()
    assert "torch" in needed and not {"sklearn", "pandas"} & set(needed)


def test_every_command_can_be_loaded_and_says_what_it_does() -> None:
    group = LazyGroup(name="dpfl")
    for name in COMMANDS:
        used, command, rest = group.resolve_command(click.Context(group), [name, "--help"])
        assert command is not None
        assert used == command.name == name
        assert command.help
        assert rest == ["--help"]
    with pytest.raises(click.UsageError):
        group.resolve_command(click.Context(group), ["nothing"])


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)
    assert max(map(len, out.splitlines())) <= 80
    assert app.info.name == "dpfl"


# -- completion ------------------------------------------------------------------------------------


def completed(*words: str) -> list[str]:
    """What bash would offer for the last word."""
    line = " ".join(["dpfl", *words])
    asked = {"_DPFL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    done = subprocess.run(
        [sys.executable, "-m", "dpfl.cli.main"],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_is_shown_for_the_shell(shell: str) -> None:
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "dpfl.cli.main", "--show-completion", shell],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "_DPFL_COMPLETE" in done.stdout


def test_commands_options_and_names_complete() -> None:
    assert completed("co") == ["compare"]
    assert "--methods" in completed("compare", "--met")
    assert completed("run", "--method", "wei") == ["weiavg"]
    assert completed("compare", "--methods", "fedavg,wei") == ["fedavg,weiavg"]
    assert completed("run", "--dataset", "digi") == ["digits"]
    assert completed("run", "--budgets", "mixgauss1") == ["mixgauss1"]
    assert completed("run", "--model", "logi") == ["logistic"]


def test_the_names_that_complete_are_those_of_the_methods() -> None:
    assert sorted(method_names()) == sorted(METHODS)


# -- the list of methods ---------------------------------------------------------------------------


def test_the_page_of_methods_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["methods", "--markdown"]) == 0
    assert (ROOT / "docs/methods.md").read_text() == capsys.readouterr().out


def test_methods_are_listed_with_family_and_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["methods", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {name: one["family"] for name, one in told.items()} == {
        name: one.family for name, one in METHODS.items()
    }
    assert run_command(["methods", "--family", "wireless", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(families()["wireless"])
    assert run_command(["methods"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert run_command(["methods", "--family", "wirelss"]) == 2
    assert "did you mean 'wireless'" in capsys.readouterr().err
