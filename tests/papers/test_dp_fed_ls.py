"""What the DP-Fed-LS paper says of smoothing, of noise by a trusted server, and of what both cost."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tests.by_hand import play_clients
from torch import Tensor, nn

import dpfl
from dpfl import testing
from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.layout import Layout
from dpfl.core.types import Aggregate, Claims, Observer
from dpfl.data.partition import Partition
from dpfl.datasets.named import load_dataset
from dpfl.engine.base import Engine
from dpfl.engine.one_by_one import OneByOne
from dpfl.engine.stacked import Stacked
from dpfl.methods.dp_fed_ls import LaplacianSmoothing
from dpfl.models import make_model
from dpfl.numerics.closed_form import closed_form_noise
from dpfl.numerics.recursive_filter import laplacian_smoothing, noise_gain
from dpfl.plugs.selection import Selection
from dpfl.privacy import calibrate, epsilon
from dpfl.privacy.classic_rdp import POISSON_REMARK, UNIFORM_REMARK
from dpfl.privacy.ledger import Ledger
from dpfl.rounds import Run, close_round, enrol, first_state, open_round
from dpfl.rounds.codec import decode_upload
from dpfl.rounds.members import honest_members
from dpfl.rounds.record import RoundRecord
from dpfl.runs.experiment import Experiment

LAYOUT = Layout.of({"weight": torch.zeros(4, 5), "bias": torch.zeros(4), "two": torch.zeros(2)})
HABITS = {"lr": 0.1, "clip": 1.0, "batch_size": 16, "local_steps": 2}
POISSON, FIXED = dpfl.PoissonCohort(sampling_rate=0.3), dpfl.FixedCohort(size=3)

lengths = st.integers(3, 60)
smoothings = st.floats(-2, 4).map(lambda exponent: 10**exponent)
seeds = st.integers(0, 999)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=dpfl.PublicSeed(seed).generator(), dtype=torch.float64)


def circulant(length: int, smoothing: float) -> Tensor:
    """I + smoothing x Lap, written down entry by entry."""
    matrix = (1 + 2 * smoothing) * torch.eye(length, dtype=torch.float64)
    for i in range(length):
        matrix[i, (i + 1) % length] -= smoothing
        matrix[i, (i - 1) % length] -= smoothing
    return matrix


def by_fourier(vector: Tensor, smoothing: float) -> Tensor:
    """The same in Fourier space: v_k = u_k / (1 + 2 s (1 - cos w_k))."""
    entries = vector.double().flatten().numpy()
    symbol = 1 + 2 * smoothing * (1 - np.cos(2 * np.pi * np.arange(len(entries)) / len(entries)))
    return torch.from_numpy(np.fft.ifft(np.fft.fft(entries) / symbol).real)


# ---- Eq. 2: the smoother ---------------------------------------------------------------------------------------------


@given(lengths, smoothings, seeds)
def test_smoothing_solves_the_circulant_system(length: int, smoothing: float, seed: int) -> None:
    vector = normal(length, seed=seed)
    solved = torch.linalg.solve(circulant(length, smoothing), vector)
    assert torch.allclose(laplacian_smoothing(vector, smoothing), solved, rtol=0, atol=1e-10)


@pytest.mark.parametrize("length", [3, 4, 17, 60])
def test_the_ends_meet_however_far_smoothing_reaches(length: int) -> None:
    """Without the wrap the last entry would hardly feel the first; with 1e4 all of them come close
    to the mean.
    """
    vector = torch.zeros(length, dtype=torch.float64)
    vector[0] = 1.0
    smoothed = laplacian_smoothing(vector, 1e4)
    assert torch.allclose(smoothed[1:], smoothed[1:].flip(0), rtol=0, atol=1e-10)
    assert torch.allclose(smoothed, torch.full_like(smoothed, 1 / length), rtol=0.01 * length)
    assert torch.allclose(
        smoothed, torch.linalg.solve(circulant(length, 1e4), vector), rtol=0, atol=1e-10
    )


@given(lengths, smoothings, seeds)
def test_the_sum_stays_and_the_smoother_is_symmetric_linear_and_contracts(
    length: int, smoothing: float, seed: int
) -> None:
    x, y = normal(length, seed=seed), normal(length, seed=seed + 1000)
    smooth_x, smooth_y = laplacian_smoothing(x, smoothing), laplacian_smoothing(y, smoothing)
    assert float(smooth_x.sum()) == pytest.approx(float(x.sum()), abs=1e-9)
    assert float(smooth_x @ y) == pytest.approx(float(x @ smooth_y), abs=1e-9)
    assert torch.allclose(
        laplacian_smoothing(2 * x - 3 * y, smoothing), 2 * smooth_x - 3 * smooth_y, atol=1e-9
    )
    assert float(smooth_x.norm()) <= float(x.norm())
    assert float((smooth_x - smooth_y).norm()) <= float((x - y).norm())


@given(lengths, smoothings, seeds, st.integers(0, 59))
def test_turning_the_circle_turns_the_result(
    length: int, smoothing: float, seed: int, turn: int
) -> None:
    vector = normal(length, seed=seed)
    turned = laplacian_smoothing(torch.roll(vector, turn), smoothing)
    assert torch.allclose(
        turned, torch.roll(laplacian_smoothing(vector, smoothing), turn), rtol=0, atol=1e-10
    )


@given(st.integers(0, 60), seeds)
def test_no_smoothing_changes_nothing(length: int, seed: int) -> None:
    vector = normal(length, seed=seed).float()
    same = laplacian_smoothing(vector, 0.0)
    assert torch.equal(same, vector)
    assert length == 0 or same.data_ptr() != vector.data_ptr()


@pytest.mark.parametrize(
    "vector", [torch.zeros(0), torch.tensor(2.0), torch.tensor([3.0]), torch.tensor([[1.0, -4.0]])]
)
def test_fewer_than_three_entries_are_left_alone(vector: Tensor) -> None:
    assert torch.equal(laplacian_smoothing(vector, 7.0), vector)
    assert noise_gain(vector.numel(), 7.0) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(3,), (4, 5), (2, 3, 4), (1, 9, 1)])
def test_shape_and_dtype_stay_and_tensors_are_read_row_by_row(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = normal(*shape).to(dtype)
    before = tensor.clone()
    smoothed = laplacian_smoothing(tensor, 1.5)
    assert (smoothed.shape, smoothed.dtype) == (tensor.shape, dtype)
    expected = by_fourier(tensor.reshape(-1), 1.5).reshape(shape).to(dtype)
    assert torch.allclose(
        smoothed, expected, rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps
    )
    assert torch.equal(tensor, before)


def test_a_transposed_tensor_is_read_in_its_own_order() -> None:
    tensor = normal(4, 6).T
    assert torch.equal(
        laplacian_smoothing(tensor, 2.0), laplacian_smoothing(tensor.contiguous(), 2.0)
    )


@pytest.mark.parametrize("smoothing", [0.01, 0.5, 3.0, 100.0, 1e4])
def test_a_long_vector_is_what_a_transform_in_double_precision_gives(smoothing: float) -> None:
    vector = normal(50_021)
    expected = by_fourier(vector, smoothing)
    assert torch.allclose(laplacian_smoothing(vector, smoothing), expected, rtol=0, atol=1e-12)
    rounded = laplacian_smoothing(vector.float(), smoothing)
    assert torch.allclose(
        rounded, by_fourier(vector.float(), smoothing).float(), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("smoothing", [-1.0, -1e-9, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "use",
    [
        lambda s: laplacian_smoothing(torch.ones(5), s),
        lambda s: noise_gain(5, s),
        lambda s: LaplacianSmoothing(smoothing=s),
        lambda s: dpfl.dp_fed_ls(**HABITS, smoothing=s),
    ],
)
def test_a_smoothing_that_makes_no_sense_is_refused_in_one_sentence(
    use: Callable[[float], object], smoothing: float
) -> None:
    with pytest.raises(ConfigurationError, match=f"smoothing = {smoothing}") as caught:
        use(smoothing)
    assert "\n" not in str(caught.value)
    assert "give" in str(caught.value)


# ---- what is left of noise -------------------------------------------------------------------------------------------


@given(lengths, smoothings)
def test_the_gain_is_the_mean_of_the_squared_eigenvalues(length: int, smoothing: float) -> None:
    eigenvalues = torch.linalg.eigvalsh(circulant(length, smoothing))
    assert noise_gain(length, smoothing) == pytest.approx(float((eigenvalues**-2).mean()), rel=1e-9)


@given(st.integers(3, 40), smoothings)
def test_the_gain_is_what_smoothing_does_to_independent_entries(
    length: int, smoothing: float
) -> None:
    columns = torch.stack(
        [laplacian_smoothing(row, smoothing) for row in torch.eye(length, dtype=torch.float64)]
    )
    assert noise_gain(length, smoothing) == pytest.approx(
        float(columns.square().sum()) / length, rel=1e-9
    )


@given(st.integers(3, 5000), smoothings)
def test_the_gain_of_any_length_is_that_of_the_symbol(length: int, smoothing: float) -> None:
    angles = 2 * np.pi * np.arange(length) / length
    exact = np.mean((1 + 2 * smoothing * (1 - np.cos(angles))) ** -2.0)
    assert noise_gain(length, smoothing) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(
    ("smoothing", "gain"), [(0.5, 0.385), (1.0, 0.268), (1.5, 0.216), (2.0, 0.185), (3.0, 0.149)]
)
def test_long_vectors_keep_the_published_share_of_the_variance(
    smoothing: float, gain: float
) -> None:
    assert (1 + 2 * smoothing) / (1 + 4 * smoothing) ** 1.5 == pytest.approx(gain, abs=5e-4)
    for length in (1000, 10**7):
        assert noise_gain(length, smoothing) == pytest.approx(gain, abs=5e-4)


@pytest.mark.parametrize("smoothing", [0.5, 1.0, 3.0])
def test_white_noise_shrinks_as_the_gain_says_and_the_test_would_see_two_percent(
    smoothing: float,
) -> None:
    noise = normal(200_000, seed=3)
    symbol = 1 + 2 * smoothing * (1 - np.cos(2 * np.pi * np.arange(len(noise)) / len(noise)))
    error = (
        math.sqrt(2 * np.sum(symbol**-4)) / np.sum(symbol**-2) / 2
    )  # of the measured std, relative
    assert 4 * error < 0.02
    std = math.sqrt(noise_gain(len(noise), smoothing))
    assert float(laplacian_smoothing(noise, smoothing).square().mean().sqrt()) == pytest.approx(
        std, rel=4 * error
    )


def test_a_short_circle_keeps_more_noise_than_a_long_one_and_so_does_its_measured_variance() -> (
    None
):
    draws = torch.stack([laplacian_smoothing(row, 50.0) for row in normal(4000, 5)])
    assert float(draws.square().mean()) == pytest.approx(noise_gain(5, 50.0), rel=0.06)
    assert noise_gain(5, 50.0) > 1.5 * noise_gain(10**6, 50.0)


@given(lengths, smoothings, seeds)
def test_bias_by_the_eigenvalues_as_in_proposition_1(
    length: int, smoothing: float, seed: int
) -> None:
    vector = normal(length, seed=seed)
    eigenvalues, basis = torch.linalg.eigh(circulant(length, smoothing))
    coefficients = basis.T @ vector
    smoothed = laplacian_smoothing(vector, smoothing)
    bias = float((((1 - 1 / eigenvalues) * coefficients) ** 2).sum())
    assert float((smoothed - vector).square().sum()) == pytest.approx(bias, rel=1e-8, abs=1e-10)
    assert float(smoothed.square().sum()) == pytest.approx(
        float(((coefficients / eigenvalues) ** 2).sum()), abs=1e-8
    )


def test_error_is_bias_plus_variance_as_in_proposition_1() -> None:
    """E|A^-1 (x + n) - x|^2 and E|A^-1 (x + n)|^2 over 4,000 draws, each within 2 %."""
    length, smoothing, std = 40, 1.5, 0.7
    vector = torch.sin(
        2 * math.pi * torch.arange(length, dtype=torch.float64) / length
    ) + 0.3 * normal(length)
    eigenvalues, basis = torch.linalg.eigh(circulant(length, smoothing))
    coefficients = basis.T @ vector
    variance = std**2 * float((eigenvalues**-2).sum())
    draws = torch.stack(
        [laplacian_smoothing(vector + std * row, smoothing) for row in normal(4000, length, seed=1)]
    )
    bias = float((((1 - 1 / eigenvalues) * coefficients) ** 2).sum())
    assert float((draws - vector).square().sum(dim=1).mean()) == pytest.approx(
        bias + variance, rel=0.02
    )
    signal = float(((coefficients / eigenvalues) ** 2).sum())
    assert float(draws.square().sum(dim=1).mean()) == pytest.approx(signal + variance, rel=0.02)
    assert bias + variance < length * std**2 < signal + length * std**2  # smoothing pays here


def aggregate(vector: Tensor) -> Aggregate:
    return Aggregate(vector=vector, model=torch.zeros(LAYOUT.size), layout=LAYOUT, round=0)


def test_by_default_every_tensor_is_smoothed_by_itself() -> None:
    vector = normal(LAYOUT.size).float()
    smoothed, _, told = LaplacianSmoothing(smoothing=2.0)({}, aggregate(vector))
    for block in LAYOUT:
        assert torch.equal(smoothed[block.slice], laplacian_smoothing(vector[block.slice], 2.0))
    assert torch.equal(smoothed[-2:], vector[-2:])
    gain = (20 * noise_gain(20, 2.0) + 4 * noise_gain(4, 2.0) + 2) / 26
    assert LaplacianSmoothing(smoothing=2.0).gain(LAYOUT) == pytest.approx(gain)
    assert told["noise_norm_factor"] == pytest.approx(math.sqrt(gain))


def test_or_the_whole_model_is_one_vector() -> None:
    vector = normal(LAYOUT.size).float()
    whole = LaplacianSmoothing(smoothing=2.0, scope="model")
    smoothed, _, told = whole({}, aggregate(vector))
    assert torch.equal(smoothed, laplacian_smoothing(vector, 2.0))
    assert whole.gain(LAYOUT) == pytest.approx(noise_gain(26, 2.0))
    assert told["noise_norm_factor"] == pytest.approx(math.sqrt(noise_gain(26, 2.0)))


@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_the_gain_of_a_model_is_what_its_noise_keeps(scope: str) -> None:
    smoother = LaplacianSmoothing(smoothing=5.0, scope=scope)  # type: ignore[arg-type]
    columns = torch.stack(
        [smoother({}, aggregate(row))[0] for row in torch.eye(LAYOUT.size, dtype=torch.float64)]
    )
    assert smoother.gain(LAYOUT) == pytest.approx(float(columns.square().sum()) / LAYOUT.size)
    testing.check_denoiser(smoother)
    assert smoother.linear


# ---- Theorems 1 and 2 ------------------------------------------------------------------------------------------------

MNIST = {"delta": 1000**-1.1, "clip": 0.3, "sampling_rate": 0.05, "rounds": 30}


@pytest.mark.parametrize(
    ("sampling", "target", "noise"),
    [
        ("uniform", 6.0, 0.8080),
        ("uniform", 8.0, 0.5821),
        ("poisson", 6.0, 0.7771),
        ("poisson", 8.0, 0.5662),
    ],
)
def test_the_theorems_give_the_noise_of_the_paper_s_mnist_setting(
    sampling: str, target: float, noise: float
) -> None:
    found = closed_form_noise(target, **MNIST, sampling=sampling)  # type: ignore[arg-type]
    assert found == pytest.approx(noise, abs=1e-4)
    wider = closed_form_noise(target, **{**MNIST, "clip": 3.0}, sampling=sampling)  # type: ignore[arg-type]
    assert wider == pytest.approx(10 * found)


@pytest.mark.parametrize(
    ("sampling", "constant", "least"), [("uniform", 14, 0.67), ("poisson", 8, 0.53)]
)
@pytest.mark.parametrize("target", [5.6, 7.0, 9.0, 60.0])
def test_the_noise_is_the_smallest_over_lambda_that_meets_both_conditions(
    sampling: str, constant: float, least: float, target: float
) -> None:
    """On another grid of lambda. In the last case it is nu^2 that binds, in the others alpha."""
    delta, clip, rate, rounds = MNIST.values()
    share = np.linspace(1e-4, 1 - 1e-4, 200_001)
    alpha = math.log(1 / delta) / (1 - share) / target + 1
    square = (
        (rate / target) ** 2
        * constant
        * rounds
        / share
        * (math.log(1 / delta) / (1 - share) + target)
    )
    room = square / 6 * np.log(1 / (rate * alpha * (1 + square / 4)))
    smallest = clip * math.sqrt(square[(square / 4 >= least) & (alpha - 1 <= room)].min())
    assert closed_form_noise(target, **MNIST, sampling=sampling) == pytest.approx(
        smallest, rel=1e-3
    )  # type: ignore[arg-type]
    assert (smallest == pytest.approx(2 * clip * math.sqrt(least), rel=1e-3)) is (target == 60)


@pytest.mark.parametrize(("sampling", "target"), [("uniform", 0.5), ("poisson", 5.0)])
def test_no_lambda_covers_a_small_epsilon_and_the_error_says_which_is_covered(
    sampling: str, target: float
) -> None:
    with pytest.raises(ConfigurationError, match=f"epsilon = {target:g};") as caught:
        closed_form_noise(target, **MNIST, sampling=sampling)  # type: ignore[arg-type]
    said = str(caught.value)
    assert "dpfl.privacy.calibrate" in said
    assert "\n" not in said
    found = re.search(r"covers epsilon >= ([\d.]+);", said)
    assert found is not None
    smallest = float(found[1])
    assert closed_form_noise(smallest + 0.01, **MNIST, sampling=sampling) > 0  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError):
        closed_form_noise(0.97 * smallest, **MNIST, sampling=sampling)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"epsilon": 0.0},
        {"epsilon": -1.0},
        {"epsilon": math.nan},
        {"epsilon": math.inf},
        {"delta": 0.0},
        {"delta": 1.0},
        {"delta": math.nan},
        {"clip": 0.0},
        {"clip": math.inf},
        {"sampling_rate": 0.0},
        {"sampling_rate": 1.01},
        {"rounds": 0},
        {"sampling": "everyone"},
    ],
)
def test_a_theorem_asked_with_numbers_out_of_range_refuses_and_names_them(
    wrong: dict[str, object],
) -> None:
    (name,) = wrong
    with pytest.raises(ConfigurationError, match=f"closed form: {name} = ") as caught:
        closed_form_noise(**{"epsilon": 8.0, **MNIST, **wrong})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("target", "plan"),
    [
        (6.0, MNIST),
        (8.0, MNIST),
        (4.0, {"delta": 1e-5, "clip": 2.0, "sampling_rate": 0.01, "rounds": 500}),
    ],
)
def test_the_numerical_accountant_never_needs_the_theorem_s_noise(
    target: float, plan: dict[str, float]
) -> None:
    needed = (
        calibrate(target, plan["delta"], plan["sampling_rate"], int(plan["rounds"])) * plan["clip"]
    )
    assert closed_form_noise(target, **plan) > 2 * needed  # type: ignore[arg-type]


# ---- one round -------------------------------------------------------------------------------------------------------


def small_federation(clients: int, features: int = 6) -> dpfl.Federation:
    generator, records = np.random.default_rng(1), 20 if features < 100 else 2
    arrays = {
        f"c{i}": (generator.normal(size=(records, features)), generator.integers(0, 3, records))
        for i in range(clients)
    }
    return dpfl.Federation.from_arrays(arrays, classes=3)


def one_round(
    strategy: dpfl.Strategy,
    *,
    clients: int = 6,
    features: int = 6,
    seed: int = 0,
    round_: int = 0,
    engine: Engine | None = None,
) -> tuple[Tensor, dict[str, Tensor], RoundRecord]:
    """Play one round from a zero model; return by what it moved, what was uploaded, and what was
    written down.
    """
    members = honest_members(small_federation(clients, features))
    model = nn.Sequential(nn.Linear(features, 3))
    layout = Layout.of_module(model)
    agreement = enrol(
        strategy, {client: member.claims for client, member in members.items()}, 4, layout
    )
    ledger = Ledger.create(":memory:", "test")
    ledger.register("run", seeded=True, title="test")
    run = Run(name="run", ledger=ledger, seed=dpfl.PublicSeed(seed), public=dpfl.PublicSeed(5))
    state = replace(first_state(agreement, torch.zeros(layout.size)), round=round_)
    plan = open_round(agreement, state, run, lambda client: True)
    drawn = {client: members[client] for client in plan.cohort.ids}
    uplinks = play_clients(agreement, run, plan, drawn, engine or Stacked(), model)
    after, record = close_round(agreement, state, plan, uplinks, run)
    ledger.close()
    uploads = {
        u.client: decode_upload(u.payload or b"", layout.size, "run", round_, u.client)
        for u in uplinks
    }
    return after.model, uploads, record


def test_the_sum_is_divided_by_the_expected_cohort_whatever_was_drawn() -> None:
    strategy = dpfl.dp_fed(
        **HABITS, noise_multiplier=1e-7, selection=dpfl.PoissonCohort(sampling_rate=0.4)
    )
    sizes = set()
    for seed in range(6):
        moved, uploads, _ = one_round(strategy, clients=5, seed=seed)
        sizes.add(len(uploads))
        total = sum(uploads.values(), torch.zeros_like(moved))
        assert torch.allclose(moved, total / (0.4 * 5), atol=1e-6)
    assert len(sizes - {2}) >= 2


def test_a_fixed_cohort_is_divided_by_its_size_and_everyone_by_the_population() -> None:
    for selection, divisor in ((FIXED, 3), (dpfl.Everyone(), 6)):
        moved, uploads, _ = one_round(
            dpfl.dp_fed(**HABITS, noise_multiplier=1e-7, selection=selection)
        )
        assert len(uploads) == divisor
        assert torch.allclose(
            moved, torch.stack(list(uploads.values())).sum(dim=0) / divisor, atol=1e-6
        )


def by_hand(
    client: str, *, lr: float, steps: int, clip: float, weight_decay: float, every_step: bool
) -> Tensor:
    """Full-batch SGD from zero in double precision, brought back into the ball after every step or
    at the end.
    """
    shard = small_federation(6).shards[client]
    features, labels = shard.features.double().numpy(), shard.labels.numpy()
    wanted, inputs = np.eye(3)[labels], np.hstack([features, np.ones((len(labels), 1))])
    matrix = np.zeros((3, 7))  # the bias is the last column
    for _ in range(steps):
        odds = np.exp(inputs @ matrix.T)
        gradient = (odds / odds.sum(axis=1, keepdims=True) - wanted).T @ inputs / len(labels)
        matrix = matrix - lr * (gradient + weight_decay * matrix)
        if every_step:
            matrix = matrix * min(1.0, clip / float(np.linalg.norm(matrix)))
    matrix = matrix * min(1.0, clip / float(np.linalg.norm(matrix)))
    return torch.from_numpy(np.concatenate([matrix[:, :6].ravel(), matrix[:, 6]]))


@pytest.mark.parametrize("engine", [Stacked(), OneByOne()])
@pytest.mark.parametrize("project", ["every_step", "once"])
def test_clients_are_brought_back_into_the_ball_after_every_step_or_once(
    project: str, engine: Engine
) -> None:
    """Eight full-batch steps that leave the ball in the second; decays as in the paper, in its
    third round.
    """
    habits = {"lr": 2.0, "clip": 0.5, "weight_decay": 0.05}
    strategy = dpfl.dp_fed(
        **habits,
        batch_size=1000,
        local_steps=8,
        lr_decay=0.9,
        noise_multiplier=1.0,
        project=project,  # type: ignore[arg-type]
    )
    _, uploads, _ = one_round(strategy, round_=2, engine=engine)
    for client, upload in uploads.items():
        expected, other = (
            by_hand(client, **{**habits, "lr": 2.0 * 0.81}, steps=8, every_step=which)
            for which in (project == "every_step", project != "every_step")
        )
        assert float((upload - expected).norm()) < 1e-4 * 0.5
        assert float((upload - other).norm()) > 0.01
        assert float(upload.double().norm()) <= 0.5


@pytest.mark.parametrize("project", ["every_step", "once"])
@pytest.mark.parametrize("lr", [0.01, 1.0, 1e4])
def test_no_upload_exceeds_the_clip(project: str, lr: float) -> None:
    strategy = dpfl.dp_fed(
        lr=lr,
        clip=0.3,
        batch_size=4,
        local_epochs=2,
        noise_multiplier=1.0,
        project=project,  # type: ignore[arg-type]
    )
    norms = [float(upload.double().norm()) for upload in one_round(strategy)[1].values()]
    assert max(norms) <= 0.3
    assert lr < 1 or min(norms) > 0.29


def test_every_step_of_a_client_stays_in_the_ball() -> None:
    """Work of k steps is the first k steps of longer work: the model after each of them is looked
    at.
    """
    for steps in range(1, 9):
        strategy = dpfl.dp_fed(
            lr=5.0, clip=0.4, batch_size=1000, local_steps=steps, noise_multiplier=1.0
        )
        _, uploads, _ = one_round(strategy)
        assert max(float(upload.double().norm()) for upload in uploads.values()) <= 0.4


def test_smoothing_acts_on_what_would_have_been_published() -> None:
    habits = {**HABITS, "noise_multiplier": 1.0, "selection": POISSON}
    plain, _, _ = one_round(dpfl.dp_fed(**habits), seed=1)
    smoothed, _, _ = one_round(dpfl.dp_fed_ls(**habits, smoothing=3.0), seed=1)
    expected = torch.cat(
        [laplacian_smoothing(plain[:18], 3.0), laplacian_smoothing(plain[18:], 3.0)]
    )
    assert torch.allclose(smoothed, expected, atol=1e-6)
    whole, _, _ = one_round(dpfl.dp_fed_ls(**habits, smoothing=3.0, scope="model"), seed=1)
    assert torch.allclose(whole, laplacian_smoothing(plain, 3.0), atol=1e-6)
    assert not torch.allclose(whole, smoothed, atol=1e-3)


@pytest.mark.parametrize(
    ("selection", "expected_cohort"),
    [(POISSON, 3.0), (dpfl.FixedCohort(size=4), 4.0), (dpfl.Everyone(), 10.0)],
)
def test_the_published_model_carries_the_promised_noise_and_the_test_would_see_two_percent(
    selection: Selection, expected_cohort: float
) -> None:
    habits = {"lr": 1e-12, "clip": 0.7, "batch_size": 20, "local_steps": 1}
    strategy = dpfl.dp_fed(**habits, noise_multiplier=1.3, selection=selection)
    noise = one_round(strategy, clients=10, features=10_000)[0].double()
    assert 4 / math.sqrt(2 * len(noise)) < 0.02
    std = 1.3 * 0.7 / expected_cohort
    assert float(noise.square().mean().sqrt()) == pytest.approx(std, rel=0.02)
    assert abs(float(noise.mean())) < 4 * std / math.sqrt(len(noise))


def test_each_round_tells_its_noise_before_and_after_smoothing_whatever_was_drawn() -> None:
    habits = {**HABITS, "lr": 1e-12, "noise_multiplier": 1.5, "selection": POISSON}
    formula = 1.5 * 1.0 / 3.0 * math.sqrt(9003)
    left = (9000 * noise_gain(9000, 2.0) + 3 * noise_gain(3, 2.0)) / 9003
    sizes = set()
    for seed in range(4):
        moved, uploads, record = one_round(
            dpfl.dp_fed_ls(**habits, smoothing=2.0), clients=10, features=3000, seed=seed
        )
        sizes.add(len(uploads))
        told: Any = record.metrics["noise"]
        assert told["expected_norm"] == pytest.approx(formula)
        assert told["norm"] == pytest.approx(formula, rel=0.03)
        assert told["norm_after"] == pytest.approx(formula * math.sqrt(left), rel=0.04)
        assert float(moved.norm()) == pytest.approx(told["norm_after"], rel=1e-3)
        factor: Any = record.metrics["denoise0"]
        assert factor["noise_norm_factor"] == pytest.approx(math.sqrt(left))
    assert len(sizes) > 1
    plain, _, record = one_round(dpfl.dp_fed(**habits), clients=10, features=3000)
    told = record.metrics["noise"]
    assert float(plain.norm()) == pytest.approx(told["norm"], rel=1e-3)
    assert "norm_after" not in told


# ---- in training -----------------------------------------------------------------------------------------------------


def federation(clients: int = 10, epsilons: float | list[float] = 1000.0) -> dpfl.Federation:
    digits = dpfl.Federation.from_dataset(
        load_dataset("digits"), Partition(), clients, dpfl.PublicSeed(0)
    )
    return digits.with_budgets(dpfl.make_budgets(epsilons, 1e-3, digits.ids, dpfl.PublicSeed(1)))


def start() -> nn.Module:
    return make_model("logistic", (64,), 10, dpfl.PublicSeed(0))


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(("selection", "scope"), [(POISSON, "tensor"), (FIXED, "model")])
def test_smoothing_zero_is_dp_fed_bit_for_bit_and_no_smoothing_changes_a_bill(
    selection: Selection, scope: str
) -> None:
    habits = {
        **HABITS,
        "noise_multiplier": 1.2,
        "weight_decay": 4e-5,
        "lr_decay": 0.99,
        "selection": selection,
    }
    zero, some = (dpfl.dp_fed_ls(**habits, smoothing=s, scope=scope) for s in (0.0, 0.5))  # type: ignore[arg-type]
    plain, zero, some = (
        dpfl.train(start(), federation(), strategy, rounds=5, seed=7)
        for strategy in (dpfl.dp_fed(**habits), zero, some)
    )
    assert torch.equal(parameters(plain.model), parameters(zero.model))
    assert not torch.equal(parameters(plain.model), parameters(some.model))
    for other in (zero, some):
        assert {c: s.epsilon for c, s in plain.spent.items()} == {
            c: s.epsilon for c, s in other.spent.items()
        }


def test_an_empty_cohort_is_a_round_of_noise_that_everyone_pays() -> None:
    strategy = dpfl.dp_fed(
        **HABITS, noise_multiplier=1.0, selection=dpfl.PoissonCohort(sampling_rate=0.05)
    )
    result = dpfl.train(start(), federation(5), strategy, rounds=6)
    empty = [line for line in result.history if not line.cohort]
    assert empty
    for line in empty:
        assert line.published
        assert line.weights == {}
        assert line.update_norm == pytest.approx(line.metrics["noise"]["norm"], rel=1e-6)
        assert line.metrics["noise"]["norm"] == pytest.approx(math.sqrt(650) / (0.05 * 5), rel=0.1)
    assert {line.rounds for line in result.spent.values()} == {6}


# ---- what it costs ---------------------------------------------------------------------------------------------------


def charged(noise_multiplier: float, numbers: int = 650) -> float:
    """The noise over one client's contribution, which rounding onto the grid of that noise widens."""
    return noise_multiplier / (1 + noise_multiplier * math.sqrt(numbers) / 2**20)


def test_poisson_cohorts_cost_the_world_what_the_accountant_says_under_zero_out() -> None:
    strategy = dpfl.dp_fed(**HABITS, noise_multiplier=1.2, selection=POISSON)
    result = dpfl.train(start(), federation(), strategy, rounds=5)
    ideal, price = (epsilon(z, 0.3, 5, 1e-3, adjacency="zero_out") for z in (1.2, charged(1.2)))
    assert len(result.spent) == 10
    for line in result.spent.values():
        assert (line.unit, line.observer, line.adjacency) == ("client", "world", "zero_out")
        assert (
            ideal < price < line.epsilon == pytest.approx(price, abs=2e-7)
        )  # the sampler's own 1e-7 on top
    assert result.summary.epsilon_against[Observer.SERVER].spent.smallest == math.inf


def test_fixed_cohorts_cost_the_world_what_the_accountant_says_under_replace_one() -> None:
    strategy = dpfl.dp_fed_ls(**HABITS, noise_multiplier=1.2, selection=FIXED)
    result = dpfl.train(start(), federation(), strategy, rounds=5)
    ideal = epsilon(1.2, 0.3, 5, 1e-3, sampling="uniform", adjacency="replace_one")
    price = epsilon(charged(1.2), 0.3, 5, 1e-3, sampling="uniform", adjacency="replace_one")
    for line in result.spent.values():
        assert (line.unit, line.observer, line.adjacency) == ("client", "world", "replace_one")
        assert ideal < price < line.epsilon == pytest.approx(price, abs=2e-7)
    assert result.summary.epsilon_against[Observer.SERVER].spent.smallest == math.inf


@pytest.mark.parametrize("selection", [POISSON, FIXED, dpfl.Everyone()])
def test_noise_left_out_is_calibrated_to_the_smallest_claim(selection: Selection) -> None:
    granted = [5.0, 9.0, *[20.0] * 8]
    result = dpfl.train(
        start(), federation(epsilons=granted), dpfl.dp_fed(**HABITS, selection=selection), rounds=4
    )
    assert not result.summary.clients_left
    for line in result.spent.values():
        assert 0.95 * 5 <= line.epsilon <= 5


def test_without_budgets_and_without_a_multiplier_nothing_is_planned() -> None:
    with pytest.raises(PrivacyRefusal, match="has no budget"):
        dpfl.train(
            start(),
            federation().with_budgets({}),
            dpfl.dp_fed(**HABITS, selection=POISSON),
            rounds=2,
        )
    useless = {
        "a": Claims(epsilon=math.inf, delta=0.0, examples=10),
        "b": Claims(epsilon=-1, delta=1e-3, examples=10),
    }
    for method in (dpfl.dp_fed, dpfl.dp_fed_ls):
        with pytest.raises(
            PrivacyRefusal, match="neither a noise_multiplier nor a usable budget"
        ) as caught:
            enrol(method(**HABITS, selection=POISSON), useless, 3, LAYOUT)
        assert "\n" not in str(caught.value)
        enrol(method(**HABITS, noise_multiplier=1.0, selection=POISSON), useless, 3, LAYOUT)


def test_the_server_is_billed_as_one_who_sees_everything() -> None:
    for selection in (POISSON, FIXED, dpfl.Everyone()):
        strategy = dpfl.dp_fed(**HABITS, noise_multiplier=1.0, selection=selection)
        claims = {f"c{i}": Claims(epsilon=1.0, delta=1e-3, examples=10) for i in range(10)}
        agreement = enrol(strategy, claims, 4, LAYOUT)
        cost = agreement.strategy.cost(Observer.SERVER, (), 10, agreement.terms)
        assert [event.noise_multiplier for event in cost.events] == [0]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"clip": 0.0}, "clip"),
        ({"clip": -1.0}, "clip"),
        ({"clip": math.nan}, "clip"),
        ({"noise_multiplier": 0.0}, "noise_multiplier = 0.0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier = -1.0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier = nan"),
        ({"project": "sometimes"}, "project = 'sometimes'"),
        ({"scope": "layer"}, "scope = 'layer'"),
        ({"lr": 0.0}, "lr = 0.0"),
        ({"lr_decay": -0.5}, "lr_decay = -0.5"),
        ({"weight_decay": -1.0}, "weight_decay = -1.0"),
        ({"local_epochs": 2}, "both given"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why) as caught:
        dpfl.dp_fed_ls(**{**HABITS, **wrong})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


# ---- Table 2 ---------------------------------------------------------------------------------------------------------

TABLE_2 = [(1.0, 5.07, 8.66), (1.1, 4.24, 7.84), (1.3, 3.19, 6.34), (1.5, 2.56, 5.23)]
PLAN = {"sampling_rate": 0.05, "steps": 200, "delta": 2000**-1.1}


@pytest.mark.parametrize(("noise", "poisson", "uniform"), TABLE_2)
def test_the_published_columns_are_classic_rdp(
    noise: float, poisson: float, uniform: float
) -> None:
    assert epsilon(noise, **PLAN, accountant="classic-rdp") == pytest.approx(poisson, abs=0.006)
    found = epsilon(noise, **PLAN, sampling="uniform", accountant="classic-rdp")
    assert found == pytest.approx(uniform, abs=0.006)


@pytest.mark.parametrize(("noise", "poisson", "uniform"), TABLE_2)
def test_ours_is_below_the_valid_column_and_above_the_one_that_is_none(
    noise: float, poisson: float, uniform: float
) -> None:
    assert epsilon(noise, **PLAN) < 0.75 * poisson
    assert epsilon(noise, **PLAN, sampling="uniform", adjacency="replace_one") > 1.5 * uniform


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "delta"),
    [(1.2, 0.3, 5, 1e-3), (3.0, 0.5, 50, 1e-6), (1.0, 1.0, 3, 1e-5), (5.0, 0.01, 1, 1e-5)],
)
def test_classic_rdp_of_poisson_samples_is_never_below_the_tight_bound(
    noise: float, rate: float, steps: int, delta: float
) -> None:
    assert epsilon(noise, rate, steps, delta, accountant="classic-rdp") >= epsilon(
        noise, rate, steps, delta
    )


# ---- described without running ---------------------------------------------------------------------------------------


def planned(method: dict[str, Any], budgets: Any, **run: Any) -> Any:
    """The description of ten clients' digits."""
    from dpfl.experiments.describe import describe

    return describe(
        Experiment.from_dict(
            {
                "data": {"name": "digits"},
                "partition": {"clients": 10},
                "budgets": {"epsilon": budgets, "delta": 1e-3},
                "method": {**HABITS, **method},
                "run": run,
            }
        )
    )


@pytest.mark.parametrize(
    ("method", "sampling", "adjacency", "remark"),
    [
        ("dp_fed_ls", "poisson", "zero_out", POISSON_REMARK),
        ("dp_fed", "uniform", "replace_one", UNIFORM_REMARK),
    ],
)
def test_a_description_states_both_adversaries_and_the_published_figure(
    method: str, sampling: str, adjacency: str, remark: str
) -> None:
    described = planned(
        {"name": method, "noise_multiplier": 1.2}, 1000.0, rounds=5, cohort=0.3, sampling=sampling
    )
    price = epsilon(1.2, 0.3, 5, 1e-3, sampling=sampling, adjacency=adjacency)  # type: ignore[arg-type]
    classic = epsilon(1.2, 0.3, 5, 1e-3, sampling=sampling, accountant="classic-rdp")  # type: ignore[arg-type]
    server, world = (described.epsilon[o].spread for o in (Observer.SERVER, Observer.WORLD))
    assert server.smallest == server.median == server.largest == math.inf
    assert price <= world.smallest == world.median == world.largest < price + 0.002
    assert described.published.epsilon == pytest.approx(classic)
    assert described.published.remark == remark
    promise = described.promise
    assert (promise.unit, promise.observer, promise.adjacency) == ("client", "world", adjacency)


def test_describe_knows_the_noise_that_enrolment_will_settle() -> None:
    budgets = [5.0, 9.0, *[20.0] * 8]
    described = planned({"name": "dp_fed_ls"}, budgets, rounds=4, cohort=0.3)
    noise = described.noise_multiplier.smallest
    assert noise == described.noise_multiplier.largest
    wanted = calibrate(5.0, 1e-3, 0.3, 4, adjacency="zero_out", numbers=650)
    assert wanted <= charged(noise) < wanted * (1 + 1e-5)
    assert described.epsilon[Observer.SERVER].spread.smallest == math.inf
    world = described.epsilon[Observer.WORLD]
    assert 0.95 * 5 <= world.spread.smallest <= world.spread.largest <= 5
    assert world.running_out == described.running_out == 0
    classic = epsilon(noise, 0.3, 4, 1e-3, accountant="classic-rdp")
    assert described.published.epsilon == pytest.approx(classic)
    assert described.published.remark == POISSON_REMARK


def test_where_nobody_is_sampled_there_is_no_published_figure() -> None:
    described = planned({"name": "dp_fed", "noise_multiplier": 3.0}, 1000.0, rounds=4)
    assert described.published is None
    ideal, price = (epsilon(z, 1.0, 4, 1e-3, sampling="none") for z in (3.0, charged(3.0)))
    stated = described.epsilon[Observer.WORLD].spread.largest
    assert ideal < price < stated == pytest.approx(price, abs=2e-7)
