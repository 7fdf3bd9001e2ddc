"""What ``dpfl describe`` says of a method over the air."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable

import pytest
from scipy import optimize, special

from dpfl.cli.main import run_command
from dpfl.core.types import Adjacency
from dpfl.experiments import planned_costs as library
from dpfl.privacy.accountant import Spend
from dpfl.privacy.events import Event
from dpfl.rounds.codec import FRAME_BYTES


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_command(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


DIGITS = [
    "--dataset",
    "digits",
    "--clients",
    "2",
    "--budgets",
    "4",
    "--delta",
    "1e-3",
    "--clip",
    "1",
    "--lr",
    "0.5",
]
DPRP = ["describe", *DIGITS, "--rounds", "3", "--method", "dprp", "--set", "dimension=50"]


ASSUMED = (
    "all clients are honest",
    "half of the others are",
    "own and receiver's noise",
    "own noise only",
)


def test_describe_prints_epsilon_by_whose_noise_is_counted_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = _run(capsys, *DPRP, "--rounds", "1")
    assert code == 0
    assert "protects a client against the server (replace_one adjacency)" in out
    assert "over this run's channel, if" in out
    for name in ASSUMED:
        assert re.search(rf"^{name}\s+\S+\s+\S+\s+\S+", out, re.M)
    assert "100 % of the other clients are counted on" in " ".join(out.split())
    assert f"{4 * 50 + FRAME_BYTES} B up" in out


def exact(history: Iterable[Event], delta: float, *, adjacency: Adjacency) -> Spend:
    """Gaussian mechanisms compose into one, whose epsilon has a closed form (Balle and Wang):
    faster than any curve.
    """
    moved = 2 if adjacency is Adjacency.REPLACE_ONE else 1
    mu = moved * math.sqrt(sum(event.steps / event.noise_multiplier**2 for event in history))

    def excess(epsilon: float) -> float:
        second = math.exp(epsilon + special.log_ndtr(-mu / 2 - epsilon / mu))
        return float(special.ndtr(mu / 2 - epsilon / mu)) - second - delta

    value = optimize.brentq(excess, 0, mu**2 + 20 * mu + 10)
    return Spend(epsilon=value, delta=delta, adjacency=adjacency, accountant="exact")


@pytest.mark.parametrize(
    ("honest", "row"),
    [
        ("1.0", "all clients are honest"),
        ("0.25", "25 % of the others are"),
        ("own_and_receiver", "own and receiver's noise"),
        ("own", "own noise only"),
    ],
)
def test_fewer_honest_clients_hide_less_and_those_counted_on_hide_what_was_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, honest: str, row: str
) -> None:
    monkeypatch.setattr(library, "spend", exact)
    code, out, _ = _run(
        capsys,
        *DPRP,
        "--clients",
        "9",
        "--set",
        f"honest={honest}",
        "--set",
        "receiver_noise=0.01",
        "--json",
    )
    assert code == 0
    found = json.loads(out)
    table = {name: spread["largest"] for name, spread in found["if_honest"].items()}
    assert list(table)[:4] == list(ASSUMED)
    assert len(table) == (5 if honest == "0.25" else 4)
    finite = [math.inf if table[name] == "infinite" else table[name] for name in ASSUMED]
    assert finite == sorted(finite)
    planned = found["epsilon"]["server"]["largest"]
    assert 0.99 * 4 <= planned <= 4
    assert table[row] <= planned * 1.001
    if (
        honest == "1.0"
    ):  # all noise is counted on and some is made on purpose: nothing is given away
        assert table[row] == pytest.approx(planned, rel=0.01)
