"""Comparing two commits: what is unpacked, which clock counts, and when the gate fails."""

import subprocess
import sys
from pathlib import Path

import pytest
from bench.against import compared, too_slow, unpack
from bench.machine import machine
from bench.sides import ROOT, SideFailed, environment, processor_seconds

BUSY = """
import sys, time
print("ready", flush=True)
sys.stdin.readline()
began = time.process_time()
while time.process_time() - began < 0.3: pass
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the clocks of other processes")
def test_processor_time_of_another_process_is_what_it_says_itself() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdout.readline()
        before = processor_seconds(child.pid)
        child.stdin.write("go\n")
        child.stdin.flush()
        child.stdout.readline()
        assert 0.3 <= processor_seconds(child.pid) - before < 0.6
    finally:
        child.communicate("end\n")


def test_ratios_are_of_medians() -> None:
    this = {"seconds": [1.0, 1.0, 50.0], "processor seconds": [0.5, 1.0, 1.5]}
    other = {"seconds": [2.0, 0.1, 4.0], "processor seconds": [0.0, 0.0, 0.0]}
    numbers = compared({"this": this, "other": other})
    assert numbers["seconds: ratio"] == 0.5
    assert numbers["processor seconds: ratio"] is None


@pytest.mark.parametrize(
    ("ratio", "slow"), [(1.0, []), (1.05, []), (1.051, ["W2"]), (None, ["W2"])]
)
def test_the_gate_fails_beyond_its_limit_and_where_nothing_was_measured(
    ratio: float | None, slow: list[str]
) -> None:
    assert too_slow({"W2": {"processor seconds: ratio": ratio}}, 1.05) == slow


def test_a_commit_is_unpacked_whole(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    revision = unpack("HEAD", tmp_path)
    assert len(revision) == 40
    assert (tmp_path / "src" / "dpfl" / "__init__.py").exists()
    assert (tmp_path / "bench" / "ours.py").exists()


def test_a_commit_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    with pytest.raises(SideFailed, match="no-such-commit"):
        unpack("no-such-commit", tmp_path)


def test_no_side_is_held_back_by_openblas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    other = tmp_path / "other"
    variables = environment(tmp_path, (other,))
    assert not any(name.startswith("OPENBLAS_") for name in variables)
    assert variables["PYTHONPATH"].split(":") == [str(other), str(other / "src")]
    described = machine()
    assert described["processor"] and set(described["kernels"]) == {"torch", "numpy"}
