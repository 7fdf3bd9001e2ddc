"""``dpfl plan-power``, and what ``dpfl describe`` says of a method over the air."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from scipy import optimize, special

from dpfl.cli.main import run_command
from dpfl.core.types import Adjacency
from dpfl.experiments import planned_costs as library
from dpfl.experiments.power import plan_power
from dpfl.privacy.accountant import Spend
from dpfl.privacy.events import Event
from dpfl.rounds.codec import FRAME_BYTES

GAINS = {"north": 0.4, "east": 1.0, "south": 2.0, "west": 1.5}
COMMON = ["--parameters", "40", "--rounds", "3", "--delta", "1e-3"]


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [f"{name},{gain}" for name, gain in GAINS.items()]
    Path("gains.csv").write_text("\n".join(["id,gain", *lines]) + "\n")


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_command(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_plan_for_measured_gains_is_the_library_s(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(
        capsys, "plan-power", *COMMON, "--epsilon", "4", "--gains", "gains.csv", "--json"
    )
    assert (code, err) == (0, "")
    plan = json.loads(out)
    expected = plan_power(list(GAINS.values()), 40, 3, 4.0, 1e-3)
    assert plan["dimension"] == expected.dimension
    assert plan["bound"] == expected.bound
    assert 0.99 * 4 <= plan["epsilon"] <= 4
    assert plan["noise_multiplier"] == expected.noise_multiplier
    assert plan["artificial"] == dict(zip(GAINS, expected.artificial, strict=True))
    assert plan["artificial"]["north"] == 0  # the weakest has nothing to spare


def test_a_plan_is_printed_for_people_with_everyone_s_shares(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = _run(capsys, "plan-power", *COMMON, "--epsilon", "4", "--gains", "gains.csv")
    assert (code, err) == (0, "")
    plan = plan_power(list(GAINS.values()), 40, 3, 4.0, 1e-3)
    assert f"{plan.dimension} of 40 numbers" in out
    assert "(target 4)" in out
    assert "per client, replace_one adjacency, against the server" in out
    assert re.search(r"composition\s+tight", out)
    assert f"{plan.bound:.6g}" in out
    assert max(map(len, out.splitlines())) <= 80
    shown = re.search(r"^epsilon\s+([\d.]+)", out, re.M)
    assert shown is not None
    assert float(shown[1]) >= plan.epsilon  # rounded up, never down
    for name, gain, share in zip(GAINS, GAINS.values(), plan.artificial, strict=True):
        signal = 100 * (0.4 / gain) ** 2
        assert re.search(rf"^{name}\s+{gain:g}\s+{signal:.1f}\s+{100 * share:.1f}\s*$", out, re.M)


def test_settings_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--adjacency",
        "zero_out",
        "--projection",
        "gaussian",
        "--power",
        "2",
        "--clip",
        "0.5",
    ]
    arguments = [
        "--epsilon",
        "2",
        "--gains",
        "gains.csv",
        "--strong-convexity",
        "0.1",
        *options,
        "--json",
    ]
    code, out, _ = _run(capsys, "plan-power", *COMMON, *arguments)
    assert code == 0
    expected = plan_power(
        list(GAINS.values()), 40, 3, 2.0, 1e-3, adjacency="zero_out", kind="gaussian", power=2.0, clip=0.5,
        strong_convexity=0.1,
    )  # fmt: skip
    assert json.loads(out)["bound"] == expected.bound
    assert json.loads(out)["dimension"] == expected.dimension


def test_gains_may_be_drawn_and_their_seed_decides(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--parameters",
        "500",
        "--rounds",
        "3",
        "--delta",
        "1e-3",
        "--epsilon",
        "60",
        "--json",
    ]
    paper = ["--accounting", "paper", "--clients", "20"]
    found: list[dict[str, Any]] = []
    for seed in ("0", "0", "1"):
        code, out, _ = _run(capsys, "plan-power", *arguments, *paper, "--seed", seed)
        assert code == 0
        found.append(json.loads(out))
    assert found[0] == found[1] != found[2]
    assert list(found[0]["artificial"])[:2] == ["client-00", "client-01"]
    assert len(found[0]["artificial"]) == 20
    assert found[0]["epsilon"] <= 60
    code, out, _ = _run(capsys, "plan-power", *arguments[:-1], *paper)
    assert code == 0
    assert re.search(r"composition\s+paper", out)
    assert "client-00" not in out  # too many to list


def test_an_infeasible_target_ends_with_4_and_names_the_smallest_that_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    common = ["plan-power", *COMMON, "--gains", "gains.csv"]
    code, out, err = _run(capsys, *common, "--epsilon", "0.1")
    assert (code, out) == (4, "")
    assert len(err.strip().splitlines()) == 1
    named = re.search(r"smallest feasible epsilon for this channel is ([\d.]+)$", err.strip())
    assert named is not None
    assert _run(capsys, *common, "--epsilon", str(1.005 * float(named[1])))[0] == 0
    assert _run(capsys, *common, "--epsilon", str(0.95 * float(named[1])))[0] == 4


CSV = ["--gains", "gains.csv"]
BAD = [
    ([*COMMON, "--epsilon", "4"], "either --gains or --clients"),
    ([*COMMON, "--epsilon", "4", *CSV, "--clients", "3"], "either --gains or --clients"),
    ([*COMMON, *CSV], "--epsilon"),
    ([*COMMON[2:], "--epsilon", "4", *CSV], "--parameters"),
    ([*COMMON[:4], "--epsilon", "4", *CSV], "--delta"),
    ([*COMMON, "--epsilon", "4", *CSV, "--accounting", "loose"], "--accounting"),
    ([*COMMON, "--epsilon", "4", *CSV, "--adjacency", "nearby"], "there is no adjacency"),
    ([*COMMON, "--epsilon", "4", *CSV, "--projection", "walsh"], "kind = 'walsh'"),
    ([*COMMON, "--epsilon", "4", *CSV, "--power", "0"], "power = 0"),
    ([*COMMON, "--epsilon", "0", *CSV], "epsilon = 0"),
    ([*COMMON, "--epsilon", "-2", *CSV], "epsilon = -2"),
    ([*COMMON, "--epsilon", "nan", *CSV], "epsilon = nan"),
    ([*COMMON, "--epsilon", "much", *CSV], "much"),
    ([*COMMON, "--epsilon", "4", "--clients", "0"], "--clients"),
    ([*COMMON, "--epsilon", "4", "--clients", "1"], "1 client"),
    (
        ["--parameters", "0", "--rounds", "3", "--delta", "1e-3", "--epsilon", "4", *CSV],
        "parameters = 0",
    ),
    (
        ["--parameters", "9", "--rounds", "0", "--delta", "1e-3", "--epsilon", "4", *CSV],
        "rounds = 0",
    ),
    (["--parameters", "9", "--rounds", "3", "--delta", "2", "--epsilon", "4", *CSV], "delta = 2"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=[" ".join(a)[-45:] for a, _ in BAD])
def test_bad_usage_gets_one_sentence_and_ends_with_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, out, err = _run(capsys, "plan-power", *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("gain", ["0", "-1", "nan", "inf"])
def test_a_gain_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str], gain: str) -> None:
    Path("gains.csv").write_text(f"id,gain\na,1.0\nb,{gain}\n")
    code, out, err = _run(capsys, "plan-power", *COMMON, "--epsilon", "4", *CSV)
    assert (code, out) == (2, "")
    assert "gain is not a positive number" in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"id,strength\na,1.0\nb,2.0\n", "id,gain"),
        (b"name,gain\na,1.0\nb,2.0\n", "id,gain"),
        (b"id,gain\na,loud\nb,2.0\n", "loud"),
        (b"id,gain\na\nb,2.0\n", "id,gain"),
        (b"\xff\xfe\x00\x81", "id,gain"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file_gets_one_sentence_and_ends_with_3(
    capsys: pytest.CaptureFixture[str], content: bytes | None, words: str
) -> None:
    path = Path("other.csv")
    if content is not None:
        path.write_bytes(content)
    code, out, err = _run(capsys, "plan-power", *COMMON, "--epsilon", "4", "--gains", str(path))
    assert (code, out) == (3, "")
    assert "other.csv" in err
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_a_folder_is_no_file_of_gains(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(capsys, "plan-power", *COMMON, "--epsilon", "4", "--gains", ".")
    assert (code, out) == (3, "")
    assert "cannot be read" in err


# ---- describe --------------------------------------------------------------------------------------------------------

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
