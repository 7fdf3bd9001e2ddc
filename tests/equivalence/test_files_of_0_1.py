"""What version 0.1 left behind: experiments still open, ledgers and runs are read, and only read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dpfl.cli.main import run_command
from dpfl.core.errors import LedgerError
from dpfl.experiments.study import Sweep
from dpfl.privacy.flags import Flag
from dpfl.privacy.ledger import Ledger
from dpfl.runs.experiment import Experiment

ROOT = Path(__file__).parents[2]
OLD = Path(__file__).with_name("run-0.1")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    shutil.copytree(OLD, tmp_path / "run")
    return tmp_path / "run"


def test_its_experiment_opens() -> None:
    experiment = Experiment.from_file(OLD / "experiment.toml")
    experiment.check()
    assert experiment.run.misreports == {}


@pytest.mark.parametrize(
    "path",
    sorted(ROOT.glob("studies/*/*.toml")),
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_its_studies_open(path: Path) -> None:
    assert Sweep.from_file(path).seeds


def test_its_ledger_is_read_and_flagged_and_takes_no_charge(old: Path) -> None:
    ledger = Ledger.open(old / "ledger.sqlite", read_only=True)
    assert [raised.flag for raised in ledger.flags] == [Flag.FLOAT_NOISE]
    assert len(ledger.accounts()) == 4
    with pytest.raises(LedgerError):
        ledger.register("run", seeded=True, title="more")
    ledger.close()
    with pytest.raises(LedgerError) as refusal:
        Ledger.open(old / "ledger.sqlite")
    assert refusal.value.exit_code == 5


def test_the_command_line_says_so(old: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    assert run_command(["account", "--ledger", str(old / "ledger.sqlite")]) == 0
    assert "FLOAT NOISE" in capfd.readouterr().err
    assert run_command(["report", str(old), "--out", str(old.parent / "page.html")]) == 0
    assert "FLOAT NOISE" in (old.parent / "page.html").read_text()
    assert run_command(["run", "--resume", str(old)]) == 5
    assert run_command(["ledger", "verify", str(old / "ledger.sqlite")]) == 5
    assert all(path.read_bytes() == data for path, data in before.items())
