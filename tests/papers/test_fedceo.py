"""What the FedCEO paper proves of its tensor step, and what follows for models and bills."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from scipy.optimize import brentq
from scipy.stats import norm
from tests.by_hand import play_clients
from torch import Tensor

import dpfl
import dpfl.sim.loop
from dpfl import testing
from dpfl.core.errors import ConfigurationError
from dpfl.core.layout import Layout
from dpfl.core.threads import one_thread
from dpfl.core.types import Aggregate, Claims, Cohort, Observer, Rows, State, Terms
from dpfl.data.partition import Partition
from dpfl.datasets.named import load_dataset
from dpfl.engine.stacked import Stacked
from dpfl.methods.fedceo import LowRankMean, LowRankStack
from dpfl.models import make_model
from dpfl.numerics.tensor_svt import smoothness, tensor_svt
from dpfl.plugs.base import Participant
from dpfl.privacy.ledger import Ledger
from dpfl.rounds import (
    Plan,
    Run,
    Uplink,
    close_round,
    enrol,
    first_state,
    open_round,
)
from dpfl.rounds.codec import decode_download, decode_upload
from dpfl.rounds.members import honest_members
from dpfl.rounds.record import RoundRecord
from dpfl.runs.experiment import Experiment
from dpfl.sim.train import run_experiment

LAYOUT = Layout.of(
    {"0.weight": torch.zeros(6, 9), "0.bias": torch.zeros(6), "1.weight": torch.zeros(4, 6)}
)

HABITS = {"lr": 0.3, "clip": 0.02, "batch_size": 16, "local_steps": 3, "noise_multiplier": 20.0}
FIVE = dpfl.FixedCohort(size=5)


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    """Small matrices: threads would only wait for each other."""
    with one_thread():
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=dpfl.PublicSeed(seed).generator(), dtype=torch.float64)


def plain_values(stack: Tensor) -> Tensor:
    """Singular values of all slices of the whole spectrum, (clients, min(rest, out)), largest
    first.
    """
    return torch.linalg.svdvals(torch.fft.fft(stack.double(), dim=2).permute(2, 0, 1))


def matrix_svt(matrix: Tensor, threshold: float) -> Tensor:
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    return (u * (s - threshold).clamp_min(0)) @ v


def plain_svt(stack: Tensor, threshold: float) -> Tensor:
    """Theorem 3.1, written down: DFT, a full SVD of every slice, soft threshold, inverse DFT, real
    part.
    """
    spectrum = torch.fft.fft(stack.to(torch.complex128), dim=2)
    for k in range(stack.shape[2]):
        spectrum[:, :, k] = matrix_svt(spectrum[:, :, k], threshold)
    back = torch.fft.ifft(spectrum, dim=2)
    assert float(back.imag.abs().max()) < 1e-9 * (1 + float(back.abs().max()))
    return back.real


# ---- Theorem 3.1 -----------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 8), st.floats(0, 1.2), st.integers(0, 99)
)
def test_thresholding_is_the_plain_recipe_for_any_shape(
    rest: int, out: int, clients: int, fraction: float, seed: int
) -> None:
    stack = normal(rest, out, clients, seed=seed)
    threshold = fraction * float(plain_values(stack).max())
    assert torch.allclose(tensor_svt(stack, threshold), plain_svt(stack, threshold), atol=1e-8)


@pytest.mark.parametrize(
    "shape", [(70, 6, 5), (6, 70, 4), (30, 30, 7), (40, 3, 1), (3, 40, 2), (1, 1, 6)]
)
def test_thresholding_models_in_single_precision_loses_nothing(shape: tuple[int, int, int]) -> None:
    stack = normal(*shape).float()
    threshold = 0.4 * float(plain_values(stack).max())
    found = tensor_svt(stack, threshold)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), plain_svt(stack, threshold), atol=1e-5)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 8), st.integers(0, 99))
def test_a_threshold_of_zero_changes_nothing(rest: int, out: int, clients: int, seed: int) -> None:
    stack = normal(rest, out, clients, seed=seed)
    assert torch.allclose(tensor_svt(stack, 0.0), stack, atol=1e-12)


@given(
    st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.floats(0, 60), st.integers(0, 99)
)
def test_the_mean_of_the_smoothed_models_is_the_thresholded_mean(
    rest: int, out: int, clients: int, threshold: float, seed: int
) -> None:
    """At threshold / clients, for any threshold: what the bill without personal starts rests on."""
    stack = normal(rest, out, clients, seed=seed) + 2 * normal(rest, out, 1, seed=seed + 1)
    mean = tensor_svt(stack, threshold).mean(dim=2)
    assert torch.allclose(mean, matrix_svt(stack.mean(dim=2), threshold / clients), atol=1e-8)


@pytest.mark.parametrize("clients", [2, 5, 8])
def test_above_all_slices_but_the_first_everyone_gets_the_same_model(clients: int) -> None:
    stack = 3 * normal(12, 7, 1, seed=1) + normal(12, 7, clients)
    values = plain_values(stack)
    others, first = float(values[1:].max()), float(values[0].max())
    assert others < first
    above = tensor_svt(stack, 1.0001 * others)
    assert float((above - above[:, :, :1]).abs().max()) < 1e-10
    assert torch.allclose(
        above[:, :, 0], matrix_svt(stack.mean(dim=2), 1.0001 * others / clients), atol=1e-8
    )
    assert float(above.abs().max()) > 0.1
    below = tensor_svt(stack, 0.99 * others)
    assert float((below - below[:, :, :1]).abs().max()) > 1e-4


def objective(candidate: Tensor, stack: Tensor, threshold: float) -> float:
    """The tensor nuclear norm, (1 / clients) x the singular values of all slices, + |candidate -
    stack|^2 / (2 threshold).

    Slices decouple: their distances add up to clients x |candidate - stack|^2 with the unnormalised
    DFT.
    """
    nuclear = float(plain_values(candidate).sum()) / stack.shape[2]
    return nuclear + float((candidate - stack).square().sum()) / (2 * threshold)


@given(
    st.integers(2, 7),
    st.integers(2, 7),
    st.integers(1, 6),
    st.floats(0.05, 0.9),
    st.integers(0, 99),
)
def test_what_comes_out_is_the_least_of_the_proximal_objective(
    rest: int, out: int, clients: int, fraction: float, seed: int
) -> None:
    """The objective grows by at least |p|^2 / (2 threshold), whatever p is added: of a least point,
    and of no other.
    """
    stack = normal(rest, out, clients, seed=seed)
    threshold = fraction * float(plain_values(stack).max())
    least = tensor_svt(stack, threshold)
    value = objective(least, stack, threshold)
    directions = [
        least,
        stack - least,
        *(normal(rest, out, clients, seed=1000 + seed + i) for i in range(3)),
    ]
    for direction in directions:
        for size in (1.0, 1e-2, 1e-4):
            for moved in (size * direction, -size * direction):
                grown = objective(least + moved, stack, threshold) - value
                assert grown >= float(moved.square().sum()) / (2 * threshold) - 1e-9 * (1 + value)


def test_a_threshold_off_by_the_number_of_clients_is_not_the_least() -> None:
    """The check above has teeth."""
    stack = normal(6, 5, 4)
    right = 0.3 * float(plain_values(stack).max())
    value = objective(tensor_svt(stack, right), stack, right)
    for wrong in (right / 4, 2 * right, right / 2):
        assert objective(tensor_svt(stack, wrong), stack, right) > value + 1e-3


@pytest.mark.parametrize("threshold", [-1.0, -1e-12, float("nan"), float("inf")])
def test_a_threshold_that_makes_no_sense_is_refused(threshold: float) -> None:
    with pytest.raises(ConfigurationError, match="threshold"):
        tensor_svt(normal(3, 2, 2), threshold)


# ---- smoothness ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.integers(0, 99))
def test_smoothness_is_the_mean_distance_to_the_others(
    rest: int, out: int, clients: int, seed: int
) -> None:
    stack = normal(rest, out, clients, seed=seed)
    found = smoothness(stack)
    assert found.shape == (out, clients)
    for c in range(out):
        for i in range(clients):
            apart = [
                float((stack[:, c, i] - stack[:, c, j]).square().sum()) for j in range(clients)
            ]
            assert float(found[c, i]) == pytest.approx(sum(apart) / clients, abs=1e-9)


@given(st.integers(1, 6), st.integers(0, 99))
def test_equal_clients_are_perfectly_smooth(clients: int, seed: int) -> None:
    assert float(smoothness(normal(4, 3, 1, seed=seed).expand(4, 3, clients)).abs().max()) < 1e-24


# ---- the schedule ----------------------------------------------------------------------------------------------------


SAME = {"interval": 3, "coefficient": 0.5, "clip": 1.0}


def schedule(**changes: object) -> LowRankStack:
    return LowRankStack(**{**SAME, **changes})  # type: ignore[arg-type]


def automatic(**changes: object) -> LowRankStack:
    return schedule(coefficient="auto", noise="local", expected_cohort=1.0, **changes)


@pytest.mark.parametrize(
    ("interval", "rounds"),
    [(1, [0, 1, 2, 3, 4, 5, 6]), (2, [1, 3, 5]), (3, [2, 5]), (7, [6]), (8, [])],
)
def test_every_so_many_rounds_end_in_smoothing(interval: int, rounds: list[int]) -> None:
    plan = schedule(interval=interval)
    assert [round_ for round_ in range(7) if plan.due(round_)] == rounds


@pytest.mark.parametrize("shape", [(4, 3, 2), (400, 30, 20)])
def test_the_paper_s_threshold_grows_by_its_factor_from_smoothing_to_smoothing(
    shape: tuple[int, int, int],
) -> None:
    plan = schedule(interval=10, coefficient=0.03, growth=1.07)
    for number in (1, 2, 30):
        assert plan.threshold(10 * number - 1, *shape) == pytest.approx(1.07**number / (2 * 0.03))
    assert schedule(coefficient=85.0).threshold(299, *shape) == pytest.approx(1 / 170)


@pytest.mark.parametrize("shape", [(120, 60, 8), (60, 120, 5), (300, 40, 4)])
def test_the_automatic_threshold_is_where_pure_noise_ends(shape: tuple[int, int, int]) -> None:
    plan = automatic(noise_multiplier=0.7)
    threshold = plan.threshold(2, *shape)
    tops = plain_values(0.7 * normal(*shape))[:, 0]
    assert float(tops.min()) > 0.9 * threshold
    assert float(tops.max()) < 1.1 * threshold
    assert not bool(tensor_svt(0.7 * normal(*shape), 1.1 * threshold).any())
    assert bool(tensor_svt(0.7 * normal(*shape), 0.8 * threshold).any())
    assert automatic(noise_multiplier=0.7, growth=1.5).threshold(2, *shape) == pytest.approx(
        1.5 * threshold
    )


def terms(noise_multiplier: float | None, cohort: float) -> Terms:
    return Terms(
        rounds=1,
        population=100,
        expected_cohort=cohort,
        participations=1,
        smallest_epsilon=1,
        largest_epsilon=1,
        parameters=10,
        noise_multiplier=noise_multiplier,
    )


@pytest.mark.parametrize(
    ("noise", "tolerated", "std"),
    [("distributed", 0, 0.25), ("distributed", 7, 2 * 0.5 / 3), ("local", 0, 2 * 0.5)],
)
def test_the_noise_in_a_model_is_settled_at_enrolment(
    noise: Literal["distributed", "local"], tolerated: int, std: float
) -> None:
    for kind in (LowRankStack, LowRankMean):
        plug = kind(clip=0.5, noise=noise, tolerated_dropouts=tolerated)
        assert plug.resolve(terms(2.0, 16)).row_std == pytest.approx(std)


def test_an_automatic_threshold_needs_to_know_the_noise() -> None:
    with pytest.raises(ConfigurationError, match="enrol first"):
        schedule(coefficient="auto").threshold(2, 4, 3, 2)


def test_the_last_few_layers_are_the_last_few_matrices() -> None:
    images = Layout.of_module(make_model("cnn_small", (1, 16, 16), 10, dpfl.PublicSeed(0)))
    matrices = [block.name for block in images if block.name.endswith("weight")]
    assert [block.name for block in schedule().matrices(images)] == matrices
    for count in (1, 2, 3):
        assert [block.name for block in schedule(layers=count).matrices(images)] == matrices[
            -count:
        ]
    assert [block.name for block in schedule(layers=99).matrices(images)] == matrices
    assert [block.name for block in schedule().matrices(LAYOUT)] == ["0.weight", "1.weight"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval": 0},
        {"interval": -2},
        {"interval": 2.5},
        {"growth": 0.9},
        {"growth": float("inf")},
        {"growth": float("nan")},
        {"coefficient": 0.0},
        {"coefficient": -1.0},
        {"coefficient": float("nan")},
        {"layers": 0},
        {"layers": -1},
        {"layers": 1.5},
        {"layers": "some"},
        {"noise": "central"},
        {"clip": 0.0},
    ],
)
@pytest.mark.parametrize("personal", [True, False])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object], personal: bool) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        dpfl.fedceo(**{**HABITS, **wrong}, personal_starts=personal)  # type: ignore[arg-type]


# ---- the two plugs ---------------------------------------------------------------------------------------------------


def rows_of(matrix: Tensor, origin: Tensor | None = None) -> Rows:
    claims = {f"c{i}": Claims(epsilon=1.0, delta=1e-5, examples=10) for i in range(len(matrix))}
    start = torch.zeros(LAYOUT.size) if origin is None else origin
    return Rows(matrix=matrix.float(), origin=start, cohort=Cohort.of(claims), layout=LAYOUT)


def smoothed(models: Tensor, layout: Layout, threshold: float) -> Tensor:
    """What should become of models (a row each), tensor by tensor, in double precision."""
    result = models.double().clone()
    for block in layout:
        part = result[:, block.slice]
        if len(block.shape) < 2:
            result[:, block.slice] = part.mean(dim=0)
            continue
        stack = part.reshape(len(models), block.shape[0], -1).permute(2, 1, 0)
        result[:, block.slice] = (
            plain_svt(stack, threshold).permute(2, 1, 0).reshape(len(models), -1)
        )
    return result


def low_rank_stack(**changes: object) -> LowRankStack:
    return schedule(interval=1, **changes)


def low_rank_mean(clients: int, **changes: object) -> LowRankMean:
    settings = {**SAME, "interval": 1, "expected_cohort": clients, **changes}
    return LowRankMean(**settings)  # type: ignore[arg-type]


@given(st.integers(1, 7), st.floats(0.05, 2.0), st.integers(0, 99))
def test_models_not_updates_are_smoothed_and_the_mean_alone_gives_the_same_global_model(
    clients: int, coefficient: float, seed: int
) -> None:
    matrix, origin = (
        normal(clients, LAYOUT.size, seed=seed),
        normal(LAYOUT.size, seed=seed + 1).float(),
    )
    rows = rows_of(matrix, origin)
    before = rows.matrix.clone()
    found, _, _ = low_rank_stack(coefficient=coefficient)({}, rows, 0)
    assert torch.equal(rows.matrix, before)
    models = (origin + rows.matrix).double()
    expected = smoothed(models, LAYOUT, 1 / (2 * coefficient))
    for block in LAYOUT:  # what the threshold would leave nothing of becomes its mean
        if not bool(expected[:, block.slice].mean(dim=0).abs().max() > 1e-12):
            expected[:, block.slice] = models[:, block.slice].mean(dim=0)
    assert torch.allclose((found + origin).double(), expected, atol=1e-5)
    place = Aggregate(vector=rows.matrix.mean(dim=0), model=origin, layout=LAYOUT, round=0)
    alone, _, _ = low_rank_mean(clients, coefficient=coefficient)({}, place)
    assert torch.allclose(alone, found.mean(dim=0), atol=1e-5)


def test_rounds_in_between_are_left_alone() -> None:
    rows = rows_of(normal(4, LAYOUT.size))
    plug = schedule(interval=3)
    found, _, told = plug({}, rows, 1)
    assert found is rows.matrix
    assert told == {}
    assert [plug.personal_starts(round_) for round_ in range(4)] == [False, False, True, False]
    mean = low_rank_mean(4, interval=3)
    place = Aggregate(vector=rows.matrix[0], model=rows.origin, layout=LAYOUT, round=1)
    assert torch.equal(mean({}, place)[0], rows.matrix[0])


def test_biases_become_their_mean_whatever_the_threshold() -> None:
    rows = rows_of(normal(5, LAYOUT.size), normal(LAYOUT.size, seed=1).float())
    bias = LAYOUT.blocks[1].slice
    for coefficient in (1e-6, 0.2, 1e9):
        found, _, _ = low_rank_stack(coefficient=coefficient)({}, rows, 0)
        assert torch.allclose(
            found[:, bias], rows.matrix[:, bias].mean(dim=0).expand(5, -1), atol=1e-5
        )


@pytest.mark.parametrize("layers", [1, 2])
def test_only_the_layers_asked_for_are_smoothed(layers: int) -> None:
    rows = rows_of(normal(5, LAYOUT.size))
    found, _, told = low_rank_stack(coefficient=0.1, layers=layers)({}, rows, 0)
    first, _, last = LAYOUT.blocks
    assert torch.allclose(found[:, first.slice], rows.matrix[:, first.slice], atol=1e-6) == (
        layers == 1
    )
    assert not torch.allclose(found[:, last.slice], rows.matrix[:, last.slice], atol=1e-2)
    assert ("0.weight/threshold" in told) == (layers == 2)
    assert "1.weight/threshold" in told


def test_a_tensor_of_which_nothing_would_be_left_is_averaged() -> None:
    rows = rows_of(normal(5, LAYOUT.size), normal(LAYOUT.size, seed=1).float())
    found, _, told = low_rank_stack(coefficient=1e-6)({}, rows, 0)
    mean = rows.matrix.mean(dim=0)
    assert torch.allclose(found, mean.expand_as(found), atol=1e-5)
    assert told["0.weight/survived"] == [0.0, 0.0, 0.0]
    place = Aggregate(vector=mean, model=rows.origin, layout=LAYOUT, round=0)
    assert torch.allclose(low_rank_mean(5, coefficient=1e-6)({}, place)[0], mean, atol=1e-6)


def test_the_order_of_clients_matters_and_is_that_of_their_ids() -> None:
    """From five clients on, a shuffled DFT is another transform: hence canonical order, and a plug
    that says so.
    """
    matrix, turn = normal(5, LAYOUT.size), torch.tensor([0, 2, 1, 3, 4])
    plug = low_rank_stack(coefficient=0.3)
    straight, turned = plug({}, rows_of(matrix), 0)[0], plug({}, rows_of(matrix[turn]), 0)[0]
    assert plug.ordered
    assert not torch.allclose(turned, straight[turn], atol=1e-2)


@pytest.mark.parametrize("clients", [1, 2, 5, 6])
def test_the_record_tells_singular_values_survivors_and_smoothness(clients: int) -> None:
    rows = rows_of(normal(clients, LAYOUT.size) + normal(1, LAYOUT.size, seed=3))
    found, _, told = low_rank_stack(coefficient=0.12)({}, rows, 0)
    half = clients // 2 + 1
    for block in (LAYOUT.blocks[0], LAYOUT.blocks[2]):
        stack = rows.matrix[:, block.slice].reshape(clients, block.shape[0], -1).permute(2, 1, 0)
        values = plain_values(stack)[:half]
        assert told[f"{block.name}/threshold"] == pytest.approx(1 / 0.24)
        assert told[f"{block.name}/slices"] == half
        assert told[f"{block.name}/singular_values"] == pytest.approx(
            values[:, :10].flatten().tolist(), abs=1e-4
        )
        assert told[f"{block.name}/survived"] == (values > 1 / 0.24).sum(dim=1).tolist()
    last = LAYOUT.blocks[2]
    for name, models in (("before", rows.matrix), ("after", found)):
        stack = models[:, last.slice].reshape(clients, last.shape[0], -1).permute(2, 1, 0)
        assert told[f"smoothness_{name}"] == pytest.approx(
            float(smoothness(stack).mean()), abs=1e-4
        )
        shown = torch.tensor(told[f"smoothness_map_{name}"], dtype=torch.float64)
        assert torch.allclose(shown, smoothness(stack).flatten(), rtol=1e-4, atol=1e-4)
    assert told["smoothness_before"] >= told["smoothness_after"]  # type: ignore[operator]
    assert (clients == 1) == (told["smoothness_before"] == 0)


def test_the_pieces_obey_the_laws() -> None:
    testing.check_row_denoiser(low_rank_stack())
    testing.check_denoiser(low_rank_mean(4))
    place = Aggregate(vector=normal(LAYOUT.size), model=normal(LAYOUT.size), layout=LAYOUT, round=0)
    with pytest.raises(ConfigurationError, match="enrol first"):
        low_rank_mean(4, coefficient="auto")({}, place)


# ---- rounds ----------------------------------------------------------------------------------------------------------


@functools.cache
def digits() -> dpfl.Federation:
    federation = dpfl.Federation.from_dataset(
        load_dataset("digits"), Partition(records=30), 8, dpfl.PublicSeed(0)
    )
    return federation.with_budgets(
        {client: dpfl.Budget(epsilon=50.0, delta=1e-3) for client in federation.ids}
    )


def opened(strategy: dpfl.Strategy, rounds: int = 4) -> SimpleNamespace:
    """Everything a round needs."""
    members = honest_members(digits())
    model = make_model("mlp", (64,), 10, dpfl.PublicSeed(0), hidden=8)
    layout = Layout.of_module(model)
    agreement = enrol(strategy, {c: m.claims for c, m in members.items()}, rounds, layout)
    ledger = Ledger.create(":memory:", "test")
    ledger.register("run", seeded=True, title="test")
    run = Run(name="run", ledger=ledger, seed=dpfl.PublicSeed(3), public=dpfl.PublicSeed(5))
    state = first_state(agreement, layout.read(model))
    return SimpleNamespace(
        members=members, model=model, layout=layout, agreement=agreement, run=run, state=state
    )


def play(setting: SimpleNamespace) -> tuple[Plan, list[Uplink], RoundRecord]:
    """One round; the setting's state moves on."""
    plan = open_round(setting.agreement, setting.state, setting.run, lambda client: True)
    members = {client: setting.members[client] for client in plan.cohort.ids}
    uplinks = play_clients(setting.agreement, setting.run, plan, members, Stacked(), setting.model)
    setting.state, record = close_round(
        setting.agreement, setting.state, plan, uplinks, setting.run
    )
    return plan, uplinks, record


def models_sent(setting: SimpleNamespace, plan: Plan, uplinks: Sequence[Uplink]) -> Tensor:
    """Each client's noisy model, a row each in canonical order, from the bytes that travelled."""
    size, grid = setting.layout.size, setting.agreement.strategy.upload_grid(len(plan.cohort))
    assert [uplink.client for uplink in uplinks] == list(plan.cohort.ids)
    starts = [decode_download(plan.downloads[uplink.client], size).start for uplink in uplinks]
    updates = [
        decode_upload(u.payload or b"", size, "run", plan.round, u.client, grid) for u in uplinks
    ]
    return torch.stack(starts).double() + torch.stack(updates)


def test_after_smoothing_the_cohort_starts_from_its_own_smoothed_models_and_nobody_else_does() -> (
    None
):
    setting = opened(dpfl.fedceo(**HABITS, interval=2, coefficient=1.0, selection=FIVE))
    size = setting.layout.size
    plan, uplinks, record = play(setting)
    assert setting.state.starts == {}
    assert "clean" not in record.metrics
    plan, uplinks, record = play(setting)
    cohort = plan.cohort.ids
    expected = smoothed(models_sent(setting, plan, uplinks), setting.layout, 0.5)
    after: State = setting.state
    assert tuple(sorted(after.starts)) == cohort
    found = torch.stack([after.starts[client] for client in cohort]).double()
    assert torch.allclose(found, expected, atol=1e-5)
    assert float((found - found[0]).abs().max()) > 0.01  # they are their own
    assert torch.allclose(after.model.double(), expected.mean(dim=0), atol=1e-5)
    assert (
        record.metrics["clean"]["smoothness_before"] > record.metrics["clean"]["smoothness_after"]
    )
    # the next round
    plan, uplinks, _ = play(setting)
    again, new = set(plan.cohort.ids) & set(cohort), set(plan.cohort.ids) - set(cohort)
    assert again
    assert new
    for client in plan.cohort.ids:
        start = decode_download(plan.downloads[client], size).start
        assert torch.equal(start, after.starts[client] if client in again else after.model)
    assert torch.allclose(
        setting.state.model.double(), models_sent(setting, plan, uplinks).mean(dim=0), atol=1e-5
    )  # wherever they started
    # the round after that
    assert setting.state.starts == {}
    common = setting.state.model
    plan, _, _ = play(setting)
    assert all(
        torch.equal(decode_download(sent, size).start, common) for sent in plan.downloads.values()
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"coefficient": 1.0},
        {"coefficient": 5.0, "layers": 1, "growth": 1.3},
        {},
        {"noise": "local"},
    ],
)
def test_the_first_global_model_after_smoothing_does_not_depend_on_personal_starts(
    changes: dict[str, object],
) -> None:
    settings = [
        opened(
            dpfl.fedceo(**HABITS, interval=2, selection=FIVE, personal_starts=personal, **changes)
        )  # type: ignore[arg-type]
        for personal in (True, False)
    ]
    for _ in range(2):
        for setting in settings:
            play(setting)
    stacked, alone = settings
    assert torch.allclose(stacked.state.model, alone.state.model, atol=1e-5)
    assert len(stacked.state.starts) == 5
    assert alone.state.starts == {}
    plain = opened(
        dpfl.udp_fedavg(
            **HABITS, selection=FIVE, **{k: v for k, v in changes.items() if k == "noise"}
        )
    )  # type: ignore[arg-type]
    for _ in range(2):
        play(plain)
    assert not torch.allclose(stacked.state.model, plain.state.model, atol=1e-3)


def test_a_threshold_above_everything_leaves_the_mean_of_the_models() -> None:
    plain = opened(dpfl.udp_fedavg(**HABITS, selection=FIVE))
    play(plain)
    for personal in (True, False):
        setting = opened(
            dpfl.fedceo(
                **HABITS, interval=1, coefficient=1e-9, selection=FIVE, personal_starts=personal
            )
        )
        play(setting)
        assert torch.allclose(setting.state.model, plain.state.model, atol=1e-5)
        assert all(
            torch.allclose(start, plain.state.model, atol=1e-5)
            for start in setting.state.starts.values()
        )


def test_the_order_in_which_uploads_arrive_changes_nothing() -> None:
    setting = opened(dpfl.fedceo(**HABITS, interval=1, coefficient=1.0, selection=FIVE))
    before = setting.state
    plan, uplinks, _ = play(setting)
    shuffled = [uplinks[i] for i in (3, 0, 4, 1, 2)]
    other, _ = close_round(setting.agreement, before, plan, shuffled, setting.run)
    assert torch.equal(other.model, setting.state.model)
    assert all(
        torch.equal(other.starts[client], start) for client, start in setting.state.starts.items()
    )


@pytest.mark.parametrize(
    ("noise", "tolerated"), [("distributed", 0), ("distributed", 1), ("local", 0)]
)
def test_the_threshold_is_made_from_the_noise_that_clients_add(noise: str, tolerated: int) -> None:
    for personal in (True, False):
        strategy = dpfl.fedceo(
            **HABITS,
            selection=FIVE,
            noise=noise,
            tolerated_dropouts=tolerated,
            personal_starts=personal,
        )  # type: ignore[arg-type]
        resolve = opened(strategy).agreement.strategy
        plug = resolve.clean if personal else resolve.denoise[0]
        assert plug.row_std == pytest.approx(resolve.stages[1].std(5))


def parameters(result: dpfl.Result) -> Tensor:
    return torch.cat([p.detach().flatten() for p in result.model.parameters()])


@pytest.mark.parametrize("personal", [True, False])
def test_with_an_interval_beyond_the_rounds_it_is_udp_fedavg(personal: bool) -> None:
    """Bit for bit where both add up a sum; personal starts need rows, averaged in single precision."""
    model = make_model("mlp", (64,), 10, dpfl.PublicSeed(0), hidden=8)

    def trained(strategy: dpfl.Strategy) -> Tensor:
        return parameters(dpfl.train(model, digits(), strategy, rounds=3))

    plain = trained(dpfl.udp_fedavg(**HABITS, selection=FIVE))
    beyond, within = (
        trained(dpfl.fedceo(**HABITS, interval=interval, personal_starts=personal, selection=FIVE))
        for interval in (4, 3)
    )
    assert float((beyond - plain).abs().max()) <= (1e-6 if personal else 0)
    assert float((within - plain).abs().max()) > 1e-3


def test_personal_starts_survive_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the round that began from smoothed models."""
    values = {
        "data": {"name": "digits"},
        "partition": {"clients": 8, "records": 30},
        "budgets": {"epsilon": 50.0, "delta": 1e-3},
        "model": {"name": "mlp", "hidden": 8},
        "method": {"name": "fedceo", "interval": 2, "coefficient": 1.0, **HABITS},
        "run": {"rounds": 5, "cohort": 5, "seed": 3},
    }
    experiment = Experiment.from_dict(values)
    run_experiment(experiment, tmp_path / "whole")
    rounds = 0

    def struck(*arguments: object) -> object:
        nonlocal rounds
        if rounds == 2:
            raise KeyboardInterrupt
        rounds += 1
        return close_round(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(dpfl.sim.loop, "close_round", struck)
        with pytest.raises(KeyboardInterrupt):
            run_experiment(experiment, tmp_path / "killed")
    kept = load_file(tmp_path / "killed" / "checkpoint" / "state.safetensors")
    assert len([name for name in kept if name.startswith("starts/")]) == 5
    run_experiment(experiment, tmp_path / "killed", resume=True)
    for name in ("model.safetensors", "rounds.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


# ---- what it costs ---------------------------------------------------------------------------------------------------


def hundred(strategy: dpfl.Strategy) -> SimpleNamespace:
    """The paper's federation: ten of a hundred clients, 300 rounds; bills of one round."""
    claims = {f"c{i:02}": Claims(epsilon=10.0, delta=1e-5, examples=100) for i in range(100)}
    agreement = enrol(strategy, claims, 300, LAYOUT)
    member = Participant(examples=100, client_settings=dpfl.ClientSettings(), budget=None)
    costs = {
        observer: agreement.cost(observer, member) for observer in (Observer.SERVER, Observer.WORLD)
    }
    return SimpleNamespace(
        agreement=agreement, server=costs[Observer.SERVER], world=costs[Observer.WORLD]
    )


def exact_epsilon(multiplier: float, releases: int, delta: float, sensitivity: float) -> float:
    """Of composed Gaussian releases, by the closed form of one with sqrt(releases) times the
    sensitivity.
    """
    mu = sensitivity * math.sqrt(releases) / multiplier

    def excess(epsilon: float) -> float:
        other = epsilon + norm.logcdf(-mu / 2 - epsilon / mu)
        return float(norm.cdf(mu / 2 - epsilon / mu) - np.exp(other)) - delta

    return float(brentq(excess, 0.0, 2000.0))


def charged(noise_multiplier: float, shares: int) -> float:
    """The noise of ``shares`` clients over one contribution, which rounding onto one share's grid
    widens.
    """
    return noise_multiplier / (
        1 + noise_multiplier / math.sqrt(shares) * math.sqrt(LAYOUT.size) / 2**20
    )


@pytest.mark.parametrize(
    ("multiplier", "zero_out", "replace_one"), [(1.0, 223, 747), (1.5, 115, 364), (2.0, 74, 223)]
)
def test_with_personal_starts_the_world_s_bill_is_the_server_s(
    multiplier: float, zero_out: int, replace_one: int
) -> None:
    habits = {**HABITS, "noise_multiplier": multiplier, "selection": dpfl.FixedCohort(size=10)}
    found = hundred(dpfl.fedceo(**habits))  # type: ignore[arg-type]
    assert found.world == found.server
    (event,) = found.world.events
    assert event.noise_multiplier == pytest.approx(charged(multiplier / math.sqrt(10), 1), rel=1e-9)
    assert (event.sampling, event.sampling_rate, event.steps) == ("none", 1.0, 1)
    assert not found.agreement.amplified
    assert found.world.adjacency == "replace_one"
    assert exact_epsilon(event.noise_multiplier, 30, 1e-5, 1.0) == pytest.approx(zero_out, abs=0.8)
    assert exact_epsilon(event.noise_multiplier, 30, 1e-5, 2.0) == pytest.approx(
        replace_one, abs=0.8
    )


@pytest.mark.parametrize("noise", ["distributed", "local"])
def test_without_personal_starts_the_bills_are_udp_fedavg_s(noise: str) -> None:
    habits = {**HABITS, "noise": noise, "selection": dpfl.FixedCohort(size=10)}
    alone, plain = (
        hundred(dpfl.fedceo(**habits, personal_starts=False)),
        hundred(dpfl.udp_fedavg(**habits)),
    )  # type: ignore[arg-type]
    assert (alone.server, alone.world) == (plain.server, plain.world)
    assert alone.agreement.amplified == plain.agreement.amplified == (noise == "distributed")
    if noise == "distributed":
        (event,) = alone.world.events
        assert event.noise_multiplier == pytest.approx(charged(20.0, 10), rel=1e-9)
        assert event.sampling == "uniform"
        assert 20.0 * (1 - 1e-3) < event.noise_multiplier < 20.0
        assert event.sampling_rate == pytest.approx(0.1)


def test_only_who_was_drawn_pays_for_personal_starts_and_everyone_for_a_secret_draw() -> None:
    for personal in (True, False):
        setting = opened(
            dpfl.fedceo(**HABITS, interval=1, personal_starts=personal, selection=FIVE)
        )
        plan, _, _ = play(setting)
        assert len(plan.cohort) == 5
        for client in setting.members:
            drawn = client in plan.cohort.ids
            tab = setting.run.ledger.history(client, Observer.WORLD)
            assert (tab != ()) == (drawn or not personal)
            assert (setting.run.ledger.history(client, Observer.SERVER) != ()) == drawn
            if personal and drawn:
                assert tab == setting.run.ledger.history(client, Observer.SERVER)


def test_left_to_the_budgets_the_noise_pays_for_the_bill_that_applies() -> None:
    """Thirty participations cost what the smallest claim grants; without personal starts far less
    noise does.
    """
    habits = {**HABITS, "noise_multiplier": None, "selection": dpfl.FixedCohort(size=10)}
    personal, alone = (
        hundred(dpfl.fedceo(**habits, personal_starts=kind)) for kind in (True, False)
    )  # type: ignore[arg-type]
    spent = exact_epsilon(personal.world.events[0].noise_multiplier, 30, 1e-5, 2.0)
    assert 0.99 * 10 < spent <= 10
    assert alone.agreement.terms.noise_multiplier < 0.3 * personal.agreement.terms.noise_multiplier


def test_the_summary_and_the_strategy_say_which_bill_applies() -> None:
    personal, alone = (
        dpfl.fedceo(**HABITS, personal_starts=personal) for personal in (True, False)
    )
    assert any("more than a sum" in line for line in personal.assumptions)
    assert not any("more than a sum" in line for line in alone.assumptions)
    assert "clean rows" in dict(personal.describe())
    assert "denoise" in dict(alone.describe())


def test_shares_of_noise_over_a_cohort_of_random_size_are_refused() -> None:
    for personal in (True, False):
        with pytest.raises(dpfl.DpflError, match="who was drawn"):
            dpfl.fedceo(
                **HABITS, selection=dpfl.PoissonCohort(sampling_rate=0.1), personal_starts=personal
            )
