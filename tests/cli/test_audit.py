"""``dpfl audit`` as people use it: results, a page, and refusals in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpfl.attacks.auditing import faults
from dpfl.cli.main import run_command

SMALL = ["--canaries", "64", "--trials", "64", "--rounds", "1", "--adjacency", "zero_out"]


def test_an_audit_leaves_results_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "audit"
    command = ["audit", "weiavg", "fedavg", *SMALL, "--seed", "1", "--out", str(out), "--json"]
    assert run_command(command) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    (line,) = found["lines"]
    assert line["method"] == "weiavg"
    assert line["promise"] == {"unit": "record", "adjacency": "zero_out", "observer": "server"}
    assert line["audited"] < line["claimed"]
    assert "fedavg" in found["left_out"]
    assert "about" in printed.err  # how long it takes, before it starts
    assert json.loads((out / "results.json").read_text())["lines"] == found["lines"]
    page = (out / "report.html").read_text()
    assert "against the adversary and under the adjacency of their line" in page
    assert "Clients are simulated" in page


def test_a_refuted_claim_ends_with_exit_code_4_and_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "audit"
    more = ["--canaries", "400", "--trials", "64", "--rounds", "1", "--adjacency", "zero_out"]
    with faults.scaled_noise(0.0):
        assert run_command(["audit", "weiavg", *more, "--out", str(out)]) == 4
    printed = capsys.readouterr()
    assert "REFUTED" in printed.out
    assert "the claim of weiavg (zero_out) is refuted" in printed.err
    assert "REFUTED" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "no method was named"),
        (["weavg"], "did you mean 'weiavg'"),
        (["weiavg", "--canaries", "3", "--trials", "4"], "3 canaries and 4 trials"),
        (["weiavg", "--adjacency", "add_remove"], "adjacency"),
        (["weiavg", "--epsilon", "-1"], "epsilon"),
        (["weiavg", "--confidence", "2"], "confidence"),
        (["fedavg"], "it protects nobody, and claims nothing"),
        (["maximum", "--sites"], "plans with larger budgets than the sites have"),
    ],
)
def test_bad_input_is_one_sentence(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["audit", *options]) == 2
    (sentence,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dpfl")]
    assert words in sentence
