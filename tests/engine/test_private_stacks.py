"""DP-SGD on stacks: a record's contribution depends on nothing but the record, and stays within the
clip.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, strategies as st
from torch import Tensor, nn

import dpfl
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.grid import SUMMANDS, Grid, effective_multiplier, part_width
from dpfl.core.grid_noise import LARGEST
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Phase
from dpfl.engine import make_engine
from dpfl.engine.base import Batch, Job
from dpfl.engine.ghost_clipping import clipped_sum
from dpfl.engine.phase_block import PhaseBlock
from dpfl.engine.private_stacks import ClippedSums
from dpfl.engine.stacked import KERNELS, assumptions_of
from dpfl.engine.stacks import Chain
from dpfl.plugs.sampling import Draw

MODELS = {
    "logistic": lambda: nn.Linear(30, 4),
    "wide": lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)),
    "two layers": lambda: nn.Sequential(nn.Linear(30, 17), nn.Tanh(), nn.Linear(17, 4)),
    "odd sigmoids": lambda: nn.Sequential(
        nn.Linear(30, 17), nn.Sigmoid(), nn.Linear(17, 33), nn.Softplus(), nn.Linear(33, 4)
    ),
    "smooth": lambda: nn.Sequential(
        nn.GELU(), nn.Linear(30, 7), nn.SiLU(), nn.Linear(7, 33), nn.ELU(), nn.Linear(33, 4)
    ),
    "three layers": lambda: nn.Sequential(
        nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)
    ),
}
RECORDS = 24


def job_of(model: nn.Module, features: Tensor, labels: Tensor, phase: Phase) -> Job:
    start = Layout.of_module(model).read(model)
    rng = SecretRng.simulated(PublicSeed(5))
    return Job(client="a", start=start, phases=(phase,), features=features, labels=labels, rng=rng)


def per_record(
    model: nn.Module, features: Tensor, labels: Tensor, chosen: list[int], width: int, clients: int
) -> dict[int, bytes]:
    """The bytes of what every chosen record of the last of some clients contributes: inputs, slopes
    and norms.
    """
    size = {8: 1, 16: 8, 32: 16}[width]  # batches whose parts are that wide
    phase = Phase(
        steps=1, batch_size=size, sampling="poisson", lr=0.1, clip=0.5, noise_multiplier=1.0
    )
    job = job_of(model, features, labels, phase)
    chain = Chain.of(model, Layout.of_module(model))
    assert chain is not None
    draw = Draw(torch.tensor(chosen), torch.tensor([len(chosen)]))
    block = PhaseBlock(chain, [job] * clients, 0, torch.device("cpu"), [draw] * clients)
    sums = ClippedSums(block, job.start.expand(clients, -1).clone())
    assert sums.width == width
    found: dict[int, bytes] = {}
    for number, part in enumerate(next(sums.parts())):
        both, parts, _ = sums.gradients(part)
        squares = sum(parts)
        inputs, slopes = both.inputs, both.slopes
        for place, record in enumerate(chosen[number * width : (number + 1) * width]):
            pieces = [
                *(a[-1, place] for a in inputs),
                *(d[-1, place] for d in slopes),
                squares[-1, place],
            ]
            found[record] = b"".join(
                piece.detach().contiguous().numpy().tobytes() for piece in pieces
            )
    return found


@pytest.mark.parametrize("name", MODELS)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_a_contribution_is_the_same_bit_for_bit_whoever_else_is_drawn(
    name: str, seed: int, data: st.DataObject
) -> None:
    """Removal, addition and re-ordering of other records change nothing: the shapes are fixed."""
    torch.manual_seed(seed % 1000)
    model = MODELS[name]()
    length = 784 if name == "wide" else 30
    generator = PublicSeed(seed).generator()
    features, labels = torch.randn(RECORDS, length, generator=generator), torch.arange(RECORDS) % 4
    width, clients = data.draw(st.sampled_from([8, 16, 32])), data.draw(st.sampled_from([1, 2, 3]))
    order = st.lists(st.integers(0, RECORDS - 1), min_size=1, max_size=RECORDS, unique=True)
    one = per_record(model, features, labels, data.draw(order), width, clients)
    other = per_record(model, features, labels, data.draw(order), width, clients)
    for record in set(one) & set(other):
        assert one[record] == other[record]


def test_the_shape_of_a_part_divides_what_is_computed_at_once() -> None:
    """Of 24 records the last 8 were rounded differently: 55 of 300 records changed bits with their
    place.
    """
    assert {part_width(batch_size) for batch_size in range(1, 2000)} == {8, 16, 32}


# -- extreme magnitudes ----------------------------------------------------------------------------

_EXTREME = st.sampled_from(
    [0.0, 1e-45, 1e-38, 1e-20, 1e-3, 1.0, 1e10, 1e14, 1e16, 1e30, 1e37, 1e38, 3e38, -3e38, math.inf]
)


def sent(model: nn.Module, features: Tensor, clip: float, engine: str) -> float:
    """The norm of one full-batch step without noise, over the learning rate and the batch size: at
    most clip x records.
    """
    phase = Phase(steps=1, batch_size=len(features), sampling="poisson", lr=1.0, clip=clip)
    job = job_of(model, features, torch.zeros(len(features), dtype=torch.int64), phase)
    start = torch.zeros_like(job.start)
    job = Job(**{**vars(job), "start": start})
    (after,) = make_engine(engine).run(model, Layout.of_module(model), [job])
    assert torch.isfinite(after).all()
    return float(torch.linalg.vector_norm(after.double())) * len(features)


@pytest.mark.parametrize("engine", ["stacked", "one_by_one"])
@given(values=st.lists(_EXTREME, min_size=6, max_size=6), clip=st.sampled_from([1e-3, 1.0, 50.0]))
def test_no_record_exceeds_its_clip_up_to_the_largest_float(
    engine: str, values: list[float], clip: float
) -> None:
    """Features around 1e38 made clip factors so small that their rounding let 1.43 times the clip
    through.
    """
    model = nn.Linear(6, 3)
    assert sent(model, torch.tensor([values]), clip, engine) <= clip * (1 + 1e-6)


@pytest.mark.parametrize("engine", ["stacked", "one_by_one"])
def test_a_record_beyond_all_bounds_leaves_the_others_alone(engine: str) -> None:
    model = nn.Linear(6, 3)
    ordinary = torch.randn(4, 6, generator=PublicSeed(1).generator())
    alone = sent(model, ordinary, 0.1, engine)
    with_monster = sent(model, torch.cat([ordinary, torch.full((1, 6), 2.9e38)]), 0.1, engine)
    assert with_monster == pytest.approx(alone, rel=1e-5)


def test_ghost_clipping_keeps_the_bound_too() -> None:
    model = nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)
    )
    for size in (1e-30, 1.0, 1e12, 1e20, 1e38, 3e38):
        assert sent(model, torch.full((1, 16), size), 0.5, "stacked") <= 0.5 * (1 + 1e-6)


# -- arithmetic ------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["stacked", "one_by_one"])
def test_reduced_precision_is_refused_where_noise_protects(engine: str) -> None:
    model = nn.Linear(6, 3)
    features, labels = torch.randn(4, 6), torch.arange(4) % 3
    private = Phase(
        steps=1, batch_size=4, sampling="poisson", lr=0.1, clip=1.0, noise_multiplier=1.0
    )
    plain = Phase(steps=1, batch_size=4, sampling="shuffle", lr=0.1)
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(PrivacyRefusal, match="reduced precision"):
            make_engine(engine).run(
                model, Layout.of_module(model), [job_of(model, features, labels, private)]
            )
        make_engine(engine).run(
            model, Layout.of_module(model), [job_of(model, features, labels, plain)]
        )
    finally:
        torch.set_float32_matmul_precision("highest")
    with torch.autocast("cpu"), pytest.raises(PrivacyRefusal, match="autocast"):
        make_engine(engine).run(
            model, Layout.of_module(model), [job_of(model, features, labels, private)]
        )


def test_sums_that_leave_the_exact_integers_are_clamped_and_stay_integers() -> None:
    """Many records along one coordinate and little noise: q is brought to 2^24, and what is
    released stays on the grid.
    """
    model = nn.Linear(1, 2, bias=False)
    features, labels = torch.full((200, 1), 30.0), torch.zeros(200, dtype=torch.int64)
    phase = Phase(
        steps=1, batch_size=200, sampling="poisson", lr=1.0, clip=1.0, noise_multiplier=0.2
    )
    job = job_of(model, features, labels, phase)
    job = Job(**{**vars(job), "start": torch.zeros_like(job.start)})
    with pytest.warns(RuntimeWarning, match="cut off at 16 standard deviations"):
        (after,) = make_engine("stacked").run(model, Layout.of_module(model), [job])
    moved = (job.start - after).double() * 200 / Grid.of(0.2).step
    assert (
        float(moved.abs().max()) <= 2**24 + LARGEST + 1000
    )  # the weights are rounded to single precision
    assert float(moved.abs().max()) > 2**23


def test_the_assumption_on_kernels_is_named_where_it_is_made() -> None:
    linear, other = (
        nn.Linear(4, 2),
        nn.Sequential(nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(6, 2)),
    )
    method = dpfl.weiavg(lr=0.1, clip=1.0, batch_size=8, local_steps=1)
    assert assumptions_of(method, linear, Layout.of_module(linear)) == method.assumptions
    found = assumptions_of(method, other, Layout.of_module(other))
    assert found == (*method.assumptions, method.unit.reworded(KERNELS))


# -- sensitivity of whole steps --------------------------------------------------------------------


def integers_of(
    model: nn.Module, features: Tensor, labels: Tensor, noise_multiplier: float
) -> Tensor:
    """A full batch's clipped sum as the engine rounds it, before noise; weights are zero."""
    count = len(labels)
    phase = Phase(
        steps=1, batch_size=count, sampling="poisson", lr=1.0, clip=1.0, noise_multiplier=noise_multiplier
    )  # fmt: skip
    job, device = job_of(model, features, labels, phase), torch.device("cpu")
    layout = Layout.of_module(model)
    chain = Chain.of(model, layout)
    assert chain is not None
    draw = Draw(torch.arange(count), torch.tensor([count]))
    block = PhaseBlock(chain, [job], 0, device, [draw])
    sums = ClippedSums(block, torch.zeros(1, layout.size))
    assert sums.width == SUMMANDS
    return next(iter(sums)).flatten().double()


def saturating(parts: int) -> Tensor:
    """Labels with which every other part of 32 is cut off on its own, and each part between them
    loses a 1 to a 0.
    """
    labels: list[int] = []
    for part in range(parts):
        mixed = [1] * 16 + [0] * 16
        labels += mixed if part % 2 else [0] * 32 if part % 4 == 0 else [0] + [1] * 31
    return torch.tensor(labels)


@given(
    labels=st.one_of(
        st.integers(2, 12).map(saturating),
        st.lists(st.integers(0, 1), min_size=33, max_size=160).map(torch.tensor),
    ),
    left_out=st.integers(0, 32),
    noise_multiplier=st.sampled_from([0.05, 0.5, 1.0, 4.0]),
)
@example(labels=saturating(8), left_out=0, noise_multiplier=1.0)
def test_a_whole_step_moves_by_no_more_than_was_charged(
    labels: Tensor, left_out: int, noise_multiplier: float
) -> None:
    """Parts that were cut off one by one hid what others gained: one record of 512 moved the sum by
    15 clips.
    """
    model = nn.Linear(2, 2)
    features = torch.zeros(len(labels), 2)
    features[:, 0] = 1e3
    others = torch.arange(len(labels)) != left_out
    with_it = integers_of(model, features, labels, noise_multiplier)
    without = integers_of(model, features[others], labels[others], noise_multiplier)
    assert bool((with_it == with_it.round()).all())
    assert float(with_it.abs().max()) <= 2**24
    moved = float((with_it - without).norm()) * Grid.of(noise_multiplier).step
    charged = noise_multiplier / effective_multiplier(
        noise_multiplier, 6, math.ceil(len(labels) / SUMMANDS)
    )
    assert moved <= charged


@pytest.mark.parametrize("clip", [7.5e-31, 1e-15, 1.0, 1e10])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e8, 1e12, 1e14])
def test_small_clips_hold_by_the_rules_of_layers_too(clip: float, size: float) -> None:
    """Clip factors below the smallest normal number let 1.4 to 2.8 times the clip through."""
    torch.manual_seed(1)
    body = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(body, nn.Linear(144, 20), nn.LayerNorm(20), nn.Linear(20, 3))
    layout = Layout.of_module(model)
    for seed in range(4):
        features = torch.randn(1, 64, generator=PublicSeed(seed).generator()) * size
        batch = Batch(features, torch.tensor([0]))
        found = clipped_sum(model, layout, layout.read(model), batch, clip)
        assert float(found.norm()) <= clip * (1 + 1e-6)
        assert float(found.norm()) > 0.5 * clip or size < 1 or clip > 1
