"""Membership inference on real runs: the game itself, its bound, a positive control, the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from dpfl.attacks import membership
from dpfl.attacks.members import guess
from dpfl.attacks.members.result import MembershipResult, View
from dpfl.attacks.members.targets import ClientTargets, RecordTargets, Targets
from dpfl.attacks.observation import Observation
from dpfl.cli.main import run_command
from dpfl.core import grid_noise
from dpfl.core.errors import DpflError
from dpfl.core.random import PublicSeed
from dpfl.core.types import Budget, Observer, Rows
from dpfl.data.federation import Federation
from dpfl.methods import make_strategy
from dpfl.models.preconditioning import linear_head
from dpfl.report.membership_page import membership_page
from dpfl.report.rendering import render
from dpfl.sim.opening import Setup, in_memory

WORK: dict[str, Any] = {"lr": 0.5, "batch_size": 16, "local_steps": 1}
PRIVATE = {**WORK, "clip": 1.0}
CLIENT_LEVEL = ("dp_fed", "udp_fedavg", "dp_fed_ls", "ppsgd", "fedceo")


def setup_for(
    method: str,
    *,
    epsilon: float = 1.0,
    clients: int = 3,
    records: int = 30,
    rounds: int | None = 6,
    model: nn.Module | None = None,
    **settings: Any,
) -> Setup:
    """Clients with records of ten random numbers and random labels: whoever fits them memorises."""
    rng, arrays = np.random.default_rng(1), {}
    for client in range(clients):
        x = rng.normal(size=(records + 4, 10)).astype(np.float32)
        y = rng.integers(0, 2, records + 4)
        arrays[f"c{client}"] = (x[:-4], y[:-4], x[-4:], y[-4:])
    budgets = {client: Budget(epsilon=epsilon, delta=1e-3) for client in arrays}
    torch.manual_seed(0)
    return Setup(
        model=model or nn.Sequential(nn.Flatten(), nn.Linear(10, 2)),
        federation=Federation.from_arrays(arrays, budgets=budgets, classes=2),
        strategy=make_strategy(method, settings),
        rounds=rounds,
        seed=PublicSeed(3),
        seeded=True,
        digest="test",
        description="",
    )


def without_noise() -> AbstractContextManager[Any]:
    """All noise is zero, and every claim stays as it is."""

    def fill(sources: Any, out: np.ndarray) -> np.ndarray:
        out[:] = 0.0
        return out

    return patch.object(grid_noise, "fill_rows", fill)


def targets_of(setup: Setup, count: int | None = None) -> Targets:
    with in_memory(setup) as prepared:
        return guess._targets(prepared, None, count)


def played(setup: Setup, targets: Targets, *coins: bool) -> Observation:
    return guess._played(setup, targets, np.array(coins))


def row(seen: Observation, client: str, round_: int = 0) -> torch.Tensor:
    view = seen.server_view(seen.training[round_])
    assert isinstance(view, Rows)
    return view.matrix[view.cohort.ids.index(client)].double()


# ---- the game ------------------------------------------------------------------------------------


def test_two_runs_with_one_seed_differ_by_the_contribution_of_the_record() -> None:
    """Every record is in the one step, so the difference is its clipped gradient over the batch."""
    setup = setup_for("fedavg_dp", rounds=1, **{**PRIVATE, "batch_size": 30})
    targets = targets_of(setup, 2)
    assert isinstance(targets, RecordTargets)
    there, gone = (played(setup, targets, coin, True) for coin in (True, False))
    apart = row(there, "c0") - row(gone, "c0")
    x, y = targets.member.shard.features[:1], targets.member.shard.labels[:1]
    model = there.simulation.work.model
    loss = nn.functional.cross_entropy(model(x), y)
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])])
    clipped = gradient.double() / max(1.0, float(gradient.norm()))
    assert float(clipped.norm()) > 0.1
    assert torch.allclose(apart, -0.5 / 30 * clipped, atol=1e-5)
    for other in ("c1", "c2"):
        assert torch.equal(row(there, other), row(gone, other))


@pytest.mark.parametrize("method", CLIENT_LEVEL)
def test_an_absent_client_contributes_exactly_nothing(method: str) -> None:
    setup = setup_for(method, rounds=2, **PRIVATE)
    targets = targets_of(setup)
    assert isinstance(targets, ClientTargets)
    with without_noise():
        seen = played(setup, targets, False, True, True)
    for round_ in range(2):
        start = seen.training[round_].plan.starts.get("c0", seen.training[round_].state.model)
        moved = row(seen, "c0", round_) + seen.training[round_].state.model - start
        assert float(moved.abs().max()) == 0.0
        assert float(row(seen, "c1", round_).norm()) > 0.01


@pytest.mark.parametrize("method", ["fedavg_dp", "udp_fedavg"])
def test_the_plan_does_not_depend_on_the_coins(method: str) -> None:
    setup = setup_for(method, rounds=2, **PRIVATE)
    targets = targets_of(setup, 3)
    runs = [played(setup, targets, *coins) for coins in ([True] * 3, [False] * 3)]
    for observer in (Observer.SERVER, Observer.WORLD):
        histories = {run.history("c0", observer) for run in runs}
        assert len(histories) == 1
    assert len({run.simulation.agreement.terms for run in runs}) == 1


def test_the_same_question_has_the_same_answer_and_survives_a_file() -> None:
    setup = setup_for("fedavg_dp", rounds=1, **PRIVATE)
    found = [membership(setup, runs=8, targets=6) for _ in range(2)]
    first, second = (replace(one, seconds=0.0) for one in found)
    assert first == second
    assert MembershipResult.from_dict(json.loads(json.dumps(first.to_dict()))) == first
    other = membership(replace(setup, seed=PublicSeed(4)), runs=8, targets=6)
    assert other.curves != first.curves


# ---- what attacks find, and what they cannot ---------------------------------------------------------


@pytest.fixture(scope="module")
def memorised() -> MembershipResult:
    """A model without privacy that fits few records with random labels."""
    settings = {"lr": 1.0, "batch_size": 4, "local_epochs": 5}
    setup = setup_for("fedavg", records=12, clients=2, rounds=4, **settings)
    return membership(setup, runs=16, targets=8)


def test_without_privacy_members_are_found(memorised: MembershipResult) -> None:
    assert memorised.bounds == {}
    assert memorised.left_out
    for view in ("model", "transcript"):
        found = memorised.curve(view, "likelihood").auc
        assert found.low > 0.6
        assert found.bound is None
    assert not memorised.exceeding
    text = render(membership_page(memorised))
    assert "protects nobody" in text
    assert "is left out" in text


def test_a_private_run_stays_below_its_bound() -> None:
    setup = setup_for("fedavg_dp", epsilon=1.0, rounds=3, **PRIVATE)
    result = membership(setup, runs=24, targets=30)
    assert result.absences > 300
    assert not result.exceeding
    bound = result.bounds["transcript"]
    assert 0.9 < bound.epsilon <= 1.0
    assert 0.5 < bound.auc < 0.62
    for curve in result.curves:
        for figure in curve.figures:
            assert figure.bound is not None
            assert figure.low <= figure.bound
    attack = result.curve("transcript", "likelihood").auc
    assert attack.low > 0.5  # it is an attack: it comes close to what is possible
    assert result.curves[0].missing == (0.001,)


def test_noise_that_is_switched_off_is_found_out() -> None:
    setup = setup_for("fedavg_dp", epsilon=0.5, rounds=3, **{**PRIVATE, "batch_size": 30})
    with without_noise():
        result = membership(setup, runs=12, targets=10)
    assert result.bounds["transcript"].epsilon <= 0.5
    found = result.curve("transcript", "likelihood")
    assert found.exceeds
    text = render(membership_page(result))
    assert "BOUND EXCEEDED" in text
    assert "The claim does not hold." in text


def test_a_trusted_server_sees_all_and_the_world_does_not() -> None:
    setup = setup_for("dp_fed", clients=8, rounds=3, **PRIVATE)
    result = membership(setup, runs=12)
    assert result.unit == "client"
    assert result.client is None
    assert set(result.bounds) == {"model"}
    assert result.curve("transcript", "threshold").auc.value == 1.0
    assert not result.exceeding
    assert "trusts the server" in render(membership_page(result))


def test_clients_noise_of_their_own_hides_them_from_the_server() -> None:
    setup = setup_for("udp_fedavg", clients=8, rounds=3, **PRIVATE)
    result = membership(setup, runs=16)
    bound = result.bounds["transcript"]
    assert bound.adversary == "server"
    assert bound.epsilon > result.bounds["model"].epsilon
    assert not result.exceeding
    assert result.curve("transcript", "likelihood").auc.low > 0.5


def test_a_model_on_public_features_with_releases_before_round_one() -> None:
    head = linear_head(nn.Flatten(), 2, size=10, kind="tables")
    before = {name: value.clone() for name, value in head.state_dict().items()}
    setup = setup_for("preconditioned", model=head, epsilon=8.0, rounds=None, force=True)
    result = membership(setup, runs=8, targets=10)
    assert result.curve("transcript", "likelihood").auc.value > 0.5
    assert not result.exceeding
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


def test_a_curator_has_the_records_so_only_the_model_is_attacked() -> None:
    result = membership(setup_for("pooled_dp", rounds=2, **PRIVATE), runs=8, targets=5)
    assert result.views == ["model"]
    assert result.bounds["model"].adversary == "world"


@pytest.mark.parametrize("view", ["model", "transcript"])
def test_statistics_rise_with_presence(view: View) -> None:
    """A wrong sign would turn every attack into its opposite."""
    setup = setup_for("fedavg_dp", rounds=4, **{**PRIVATE, "batch_size": 30, "lr": 5.0})
    targets = targets_of(setup, 4)
    with without_noise():
        seen = [played(setup, targets, *[coin] * 4) for coin in (True, False)]
    there, gone = (guess._statistics(targets, own, view) for own in seen)
    assert (there > gone).all()


# ---- what cannot be asked ------------------------------------------------------------------------

Refusal = Callable[[], Any]
RECORDS, CLIENTS = setup_for("fedavg_dp", **PRIVATE), setup_for("udp_fedavg", **PRIVATE)


@pytest.mark.parametrize(
    ("code", "words", "ask"),
    [
        (2, "give a whole number of at least 8", lambda: membership(RECORDS, runs=3)),
        (2, "too few for a confidence", lambda: membership(RECORDS, runs=8, confidence=0.9999)),
        (2, "is not a level", lambda: membership(RECORDS, confidence=1.5)),
        (2, "needs 10000 trials", lambda: membership(RECORDS, rates=[0.0001])),
        (2, "is not a rate", lambda: membership(RECORDS, rates=[0.0])),
        (3, "there is no 'c9'; choose one of c0, c1, c2", lambda: membership(RECORDS, client="c9")),
        (3, "give at most 30", lambda: membership(RECORDS, targets=31)),
        (2, "protects whole clients", lambda: membership(CLIENTS, client="c0")),
        (2, "sends nothing", lambda: membership(setup_for("local_only", **PRIVATE))),
    ],
)
def test_what_cannot_be_asked_is_said_before_the_work_starts(
    code: int, words: str, ask: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guess, "observe", lambda setup: pytest.fail("work has started"))
    with pytest.raises(DpflError, match=words) as caught:
        ask()
    assert caught.value.exit_code == code


def test_records_that_are_tokens_are_refused() -> None:
    text = np.random.default_rng(0).integers(0, 5, (10, 6)), np.arange(10) % 2
    budgets = {client: Budget(epsilon=1.0, delta=1e-3) for client in "ab"}
    federation = Federation.from_arrays({"a": text, "b": text}, tokens=5, budgets=budgets)
    model = nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(12, 2))
    with pytest.raises(DpflError, match="tokens, not numbers") as caught:
        membership(replace(RECORDS, federation=federation, model=model))
    assert caught.value.exit_code == 3


# ---- the command ---------------------------------------------------------------------------------

COMMAND = ["attack", "membership", "--dataset", "breast_cancer", "--clients", "4", "--rounds", "2"]
OPTIONS = ["--budgets", "1", "--delta", "1e-3", "--clip", "1", "--runs", "8", "--targets", "12"]


def test_the_command_writes_a_table_results_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = [*COMMAND, *OPTIONS, "--method", "weiavg"]
    assert run_command([*full, "--out", str(tmp_path / "one")]) == 0
    said = capsys.readouterr()
    assert "transcript  LiRA" in said.out
    assert "against the server" in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    assert "One run takes" in said.err
    result = MembershipResult.from_dict(json.loads((tmp_path / "one/results.json").read_text()))
    assert result.runs == 8
    assert result.targets == 12
    page = (tmp_path / "one/report.html").read_text()
    assert "roc_transcript_log" in page
    assert "zero-out adjacency" in page
    assert run_command([*full, "--json", "--out", str(tmp_path / "two")]) == 0
    document = json.loads(capsys.readouterr().out)
    own = {name: value for name, value in document.items() if name not in ("folder", "seconds")}
    assert own.items() <= {**json.loads(json.dumps(result.to_dict()))}.items()


def test_the_command_ends_loudly_where_a_bound_is_exceeded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    big = ["--batch-size", "200", "--local-steps", "1", "--method", "weiavg", "--runs", "12"]
    with without_noise():
        assert run_command([*COMMAND, *OPTIONS, *big, "--out", str(tmp_path)]) == 4
    said = capsys.readouterr()
    assert " !" in said.out
    assert "BOUND EXCEEDED" in said.err
    assert "exceed what the stated epsilon allows" in said.err.splitlines()[-1]
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("code", "words", "more"),
    [
        (2, "'x' is not a number", ["--method", "weiavg", "--fpr", "0.1,x"]),
        (2, "use more targets, about", ["--method", "weiavg", "--fpr", "0.001"]),
        (3, "there is no 'nobody'", ["--method", "weiavg", "--client", "nobody"]),
        (2, "at least 8", ["--method", "weiavg", "--runs", "2"]),
        (2, "sends nothing", ["--method", "local_only"]),
    ],
)
def test_bad_input_ends_with_one_sentence(
    code: int, words: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([*COMMAND, *OPTIONS, *more, "--out", str(tmp_path / "none")]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err
    assert said.err.count("\n") == 1
    assert not (tmp_path / "none").exists()
