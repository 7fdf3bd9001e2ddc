"""Stored records become what a model takes, and stay as they were."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from dpfl.core.random import PublicSeed
from dpfl.data.inputs import NUMBERS, Inputs, Numbers, Pixels, Tokens

COLOUR = Pixels(mean=(0.49, 0.3, 0.6), deviation=(0.25, 0.1, 0.5))
GREY = Pixels(mean=(0.13,), deviation=(0.31,))
EVERY: list[tuple[Inputs, tuple[int, ...]]] = [
    (NUMBERS, (4,)), (NUMBERS, ()), (GREY, (1, 5, 4)), (COLOUR, (3, 5, 4)), (Tokens(9), (6,)), (Tokens(2), (2, 3)),
]  # fmt: skip
EACH = pytest.mark.parametrize(
    ("inputs", "shape"),
    EVERY,
    ids=lambda x: type(x).__name__ if not isinstance(x, tuple) else str(x),
)


def made(inputs: Inputs, shape: tuple[int, ...], count: int = 7, seed: int = 0) -> Tensor:
    return inputs.made_up(count, shape, PublicSeed(seed).generator())


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 2)), min_size=1, max_size=4),
    st.integers(0, 10**6),
    st.integers(0, 4),
)
def test_pixels_are_scaled_channel_by_channel(
    channels: list[tuple[float, float]], seed: int, count: int
) -> None:
    means, deviations = zip(*channels, strict=True)
    inputs = Pixels(mean=means, deviation=deviations)
    raw = made(inputs, (len(channels), 3, 2), count, seed)
    ready = inputs(raw)
    assert ready.dtype == torch.float32 and ready.shape == raw.shape
    for c, (mean, deviation) in enumerate(channels):
        wanted = (raw[:, c].double() / 255 - mean) / deviation
        assert torch.allclose(ready[:, c].double(), wanted, rtol=1e-5, atol=1e-6 / deviation)


def test_every_byte_has_its_own_number_in_order() -> None:
    ready = GREY(torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)).flatten()
    assert bool((ready.diff() > 0).all())
    assert ready[0].item() == pytest.approx(-0.13 / 0.31) and ready[-1].item() == pytest.approx(
        0.87 / 0.31
    )


def test_a_batch_of_pixels_is_its_records_one_by_one() -> None:
    raw = made(COLOUR, (3, 5, 4))
    assert torch.equal(COLOUR(raw), torch.stack([COLOUR(record) for record in raw]))
    lying = raw.to(memory_format=torch.channels_last)
    assert torch.equal(COLOUR(lying), COLOUR(raw))


@pytest.mark.parametrize("mean", [(0.5,), (0.5, 0.5, 0.5)])
def test_means_and_deviations_of_different_numbers_of_channels_are_refused(
    mean: tuple[float, ...],
) -> None:
    with pytest.raises(ValueError, match="zip"):
        Pixels(mean=mean, deviation=(0.5, 0.5))(torch.zeros(1, 2, 2, 2, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_tokens_are_what_an_embedding_takes(dtype: torch.dtype) -> None:
    ready = Tokens(200)(torch.tensor([[0, 3], [199, 127]], dtype=dtype))
    assert ready.dtype == torch.int64
    assert ready.tolist() == [[0, 3], [199, 127]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8])
def test_numbers_are_taken_as_they_are(dtype: torch.dtype) -> None:
    raw = torch.arange(6).reshape(2, 3).to(dtype)
    ready = Numbers()(raw)
    assert ready.dtype == dtype and torch.equal(ready, raw)


@EACH
def test_making_records_ready_leaves_them_as_they_are_stored(
    inputs: Inputs, shape: tuple[int, ...]
) -> None:
    raw = made(inputs, shape)
    before = raw.clone()
    inputs(raw)
    assert torch.equal(raw, before) and raw.dtype == before.dtype


@EACH
@pytest.mark.parametrize("count", [0, 1, 7])
def test_made_up_records_have_the_shape_asked_for(
    inputs: Inputs, shape: tuple[int, ...], count: int
) -> None:
    raw = made(inputs, shape, count)
    assert raw.shape == (count, *shape)
    assert inputs(raw).shape == raw.shape


@EACH
def test_made_up_records_depend_on_the_generator_alone(
    inputs: Inputs, shape: tuple[int, ...]
) -> None:
    before = torch.get_rng_state()
    assert torch.equal(made(inputs, shape, 20), made(inputs, shape, 20))
    assert not torch.equal(made(inputs, shape, 20), made(inputs, shape, 20, seed=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_made_up_pixels_are_all_bytes() -> None:
    raw = made(COLOUR, (3, 20, 20), 20)
    assert raw.dtype == torch.uint8
    assert len(raw.unique()) == 256


@pytest.mark.parametrize("vocabulary", [1, 2, 90])
def test_made_up_tokens_are_all_below_the_vocabulary(vocabulary: int) -> None:
    raw = made(Tokens(vocabulary), (50,), 100)
    assert raw.unique().tolist() == list(range(vocabulary))


def test_made_up_numbers_lie_between_zero_and_one() -> None:
    raw = made(NUMBERS, (100,), 50)
    assert raw.dtype == torch.float32
    assert 0 <= raw.min() < 0.01 and 0.99 < raw.max() < 1


@pytest.mark.parametrize("inputs", [NUMBERS, COLOUR, Tokens(9)], ids=lambda x: type(x).__name__)
def test_inputs_are_values(inputs: Inputs) -> None:
    """They are kept beside stored data, and compared."""
    assert hash(inputs) == hash(type(inputs)(**vars(inputs))) and inputs == type(inputs)(
        **vars(inputs)
    )
    assert Tokens(9) != Tokens(8) and COLOUR != GREY
