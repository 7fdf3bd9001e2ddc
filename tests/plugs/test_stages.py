from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from dpfl.core.errors import ConfigurationError
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Claims, Unit, Who
from dpfl.plugs.stages import Clip, GaussianNoise, Stage
from dpfl.privacy.events import Event
from dpfl.privacy.exposure import Exposure

WHO = Who(id="a", claims=Claims(epsilon=1.0, delta=1e-5, examples=10), drawn=4)
DRAWS = 100_000


def rng(seed: int = 0) -> SecretRng:
    return SecretRng.simulated(PublicSeed(seed))


def through(stage: Stage, x: Tensor) -> Tensor:
    return stage.client(x, {}, WHO, rng())


def norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.to(torch.float64)))


# ---- clip ------------------------------------------------------------------------------------------------------------

numbers = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 3.4e38, -3.4e38, math.nan, math.inf, -math.inf]),
    st.floats(-10, 10, width=32),
)
vectors = st.lists(numbers, min_size=0, max_size=40)
clips = st.floats(1e-6, 1e6)


@given(values=vectors, clip=clips, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_what_is_sent_is_finite_and_within_the_clip_whatever_came_in(
    values: list[float], clip: float, dtype: torch.dtype
) -> None:
    sent = through(Clip(clip=clip), torch.tensor(values, dtype=dtype))
    assert sent.dtype == dtype
    assert sent.shape == (len(values),)
    assert bool(torch.isfinite(sent).all())
    assert norm(sent) <= clip


@given(values=vectors, clip=clips)
def test_an_update_that_is_not_finite_contributes_zero(values: list[float], clip: float) -> None:
    for poison in (math.nan, math.inf, -math.inf):
        sent = through(Clip(clip=clip), torch.tensor([*values, poison]))
        assert bool((sent == 0).all())


@given(values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40), clip=clips)
def test_a_small_update_is_sent_as_it_is_and_a_large_one_keeps_its_direction(
    values: list[float], clip: float
) -> None:
    x = torch.tensor(values)
    sent = through(Clip(clip=clip), x)
    if norm(x) <= clip * (1 - 2e-5):
        assert torch.equal(sent, x)
    elif norm(x) > 1e-30:
        expected = x.to(torch.float64) * min(1.0, clip / norm(x))
        assert norm(sent.to(torch.float64) - expected) <= 3e-5 * clip


@pytest.mark.parametrize("size", [1, 7, 1000, 1_000_000])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20, 3e37])
def test_rounding_never_leaves_a_clipped_update_above_the_bill(size: int, scale: float) -> None:
    x = scale * torch.randn(size, generator=torch.Generator().manual_seed(size)).clamp(-10, 10)
    for clip in (1e-3, 1.0, 7.7):
        assert norm(through(Clip(clip=clip), x)) <= clip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@given(
    values=st.lists(st.floats(-100, 100, width=16), min_size=1, max_size=12),
    clip=st.floats(0.01, 10),
)
def test_half_precision_is_clipped_within_the_bill_too(
    dtype: torch.dtype, values: list[float], clip: float
) -> None:
    assert norm(through(Clip(clip=clip), torch.tensor(values, dtype=dtype))) <= clip


@given(
    weight=st.lists(numbers, min_size=6, max_size=6),
    count=st.integers(0, 10_000),
    scalar=numbers,
    clip=clips,
)
def test_tensors_of_every_kind_are_clipped_jointly(
    weight: list[float], count: int, scalar: float, clip: float
) -> None:
    """Buffers, integers, scalars and empty tensors are part of what is sent."""
    tensors = {
        "weight": torch.tensor(weight).reshape(2, 3),
        "running_mean": torch.tensor(weight[:2]),
        "batches": torch.tensor(count),
        "scale": torch.tensor(scalar),
        "nothing": torch.zeros(0, 4),
    }
    layout = Layout.of(tensors)
    assert norm(through(Clip(clip=clip), layout.flatten(tensors))) <= clip


def test_clipping_does_not_touch_what_it_was_given() -> None:
    x = torch.tensor([3.0, 4.0])
    through(Clip(clip=1.0), x)
    assert x.tolist() == [3.0, 4.0]


@given(values=vectors, clip=clips)
def test_the_exposure_of_a_clip_promises_no_less_than_the_clip_enforces(
    values: list[float], clip: float
) -> None:
    exposure = Clip(clip=clip).exposure(Exposure(unit=Unit.CLIENT), 4)
    assert norm(through(Clip(clip=clip), torch.tensor(values))) <= exposure.bound == clip


def test_a_second_clip_can_only_shrink_the_bound() -> None:
    exposure = Clip(clip=1.0).exposure(Exposure(unit=Unit.CLIENT), 4)
    assert Clip(clip=3.0).exposure(exposure, 4).bound == 1.0
    assert Clip(clip=0.2).exposure(exposure, 4).bound == 0.2


def test_clipping_after_noise_leaves_the_event_as_it_is() -> None:
    exposure = Exposure(unit=Unit.CLIENT).clipped(1.0).noised(2.0)
    after = GaussianNoise(noise_multiplier=5.0, clip=1.0).exposure(
        Clip(clip=0.1).exposure(exposure, 4), 4
    )
    assert after.events() == exposure.events()


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan])
def test_a_clip_that_is_not_positive_is_refused(clip: float) -> None:
    with pytest.raises(ConfigurationError, match=f"clip = {clip}"):
        Clip(clip=clip)


# ---- noise -----------------------------------------------------------------------------------------------------------


def accepted(sample: Tensor, std: float) -> bool:
    """The law of SAFETY.md: 10^5 draws, ratio of standard deviations within [0.9926, 1.0074]."""
    return 0.9926 <= float(sample.to(torch.float64).square().mean().sqrt()) / std <= 1.0074


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("noise_multiplier", "clip"), [(1.0, 1.0), (0.5, 3.0), (20.0, 0.01)])
def test_noise_has_the_std_that_is_billed_and_the_test_would_see_three_percent(
    noise_multiplier: float, clip: float, seed: int
) -> None:
    stage = GaussianNoise(noise_multiplier=noise_multiplier, clip=clip)
    sample = stage.client(torch.zeros(DRAWS), {}, WHO, rng(seed))
    assert accepted(sample, noise_multiplier * clip)
    assert not accepted(0.97 * sample, noise_multiplier * clip)
    assert not accepted(1.03 * sample, noise_multiplier * clip)


def test_noise_is_gaussian_and_centred() -> None:
    sample = (
        through(GaussianNoise(noise_multiplier=2.0, clip=1.0), torch.zeros(DRAWS)).to(torch.float64)
        / 2
    )
    assert abs(float(sample.mean())) < 4 / math.sqrt(DRAWS)
    assert abs(float(sample.pow(3).mean())) < 4 * math.sqrt(15 / DRAWS)
    assert abs(float(sample.pow(4).mean()) - 3) < 4 * math.sqrt(96 / DRAWS)
    for bound in (0.5, 1.0, 2.0, 3.0):
        probability = math.erfc(bound / math.sqrt(2))
        share = float((sample.abs() > bound).double().mean())
        assert abs(share - probability) < 4 * math.sqrt(probability / DRAWS)


def test_noise_is_added_to_the_update_and_drawn_afresh() -> None:
    stage, x = GaussianNoise(noise_multiplier=1.0, clip=1.0), torch.full((DRAWS,), 5.0)
    generator = rng()
    first, second = (stage.client(x, {}, WHO, generator) - x for _ in range(2))
    assert accepted(first, 1.0)
    correlation = float((first * second).mean())
    neighbours = float((first[1:] * first[:-1]).mean())
    assert abs(correlation) < 4 / math.sqrt(DRAWS)
    assert abs(neighbours) < 4 / math.sqrt(DRAWS)


def test_noise_comes_from_the_generator_given_and_from_nowhere_else() -> None:
    stage, x = GaussianNoise(noise_multiplier=1.0, clip=1.0), torch.zeros(100)
    torch.manual_seed(0)
    first = stage.client(x, {}, WHO, rng(1))
    before = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(stage.client(x, {}, WHO, rng(1)), first)
    assert not torch.equal(stage.client(x, {}, WHO, rng(2)), first)
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), before)
    unseeded = [stage.client(x, {}, WHO, SecretRng.from_system()) for _ in range(2)]
    assert not torch.equal(unseeded[0], unseeded[1])


@given(noise_multiplier=st.floats(0.01, 100), clip=st.floats(0.01, 100))
def test_clip_then_noise_is_billed_with_the_multiplier_that_was_set(
    noise_multiplier: float, clip: float
) -> None:
    exposure = Clip(clip=clip).exposure(Exposure(unit=Unit.CLIENT), 4)
    exposure = GaussianNoise(noise_multiplier=noise_multiplier, clip=clip).exposure(exposure, 4)
    (event,) = exposure.events()
    assert math.isclose(event.noise_multiplier, noise_multiplier, rel_tol=1e-12)
    assert (event.steps, event.sampling, event.failure) == (1, "none", 0.0)


def test_the_exposure_states_the_std_that_is_drawn_even_where_clips_differ() -> None:
    """Noise planned for another clip than the one before it: the bill follows the two as they are."""
    clip, noise = Clip(clip=2.0), GaussianNoise(noise_multiplier=1.0, clip=0.5)
    exposure = noise.exposure(clip.exposure(Exposure(unit=Unit.CLIENT), 4), 4)
    (event,) = exposure.events()
    assert event.noise_multiplier == pytest.approx(0.25, rel=1e-12)
    assert accepted(through(noise, torch.zeros(DRAWS)), exposure.noise)


def test_noise_without_a_clip_protects_nobody() -> None:
    exposure = GaussianNoise(noise_multiplier=1.0, clip=1.0).exposure(Exposure(unit=Unit.CLIENT), 4)
    assert not exposure.finite
    assert exposure.events() == (Event(noise_multiplier=0.0),)


@pytest.mark.parametrize(
    ("noise_multiplier", "clip"),
    [(-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (1.0, 0.0), (1.0, math.nan), (1.0, math.inf)],
)
def test_noise_that_cannot_be_drawn_is_refused(noise_multiplier: float, clip: float) -> None:
    with pytest.raises(ConfigurationError, match="noise"):
        GaussianNoise(noise_multiplier=noise_multiplier, clip=clip)
