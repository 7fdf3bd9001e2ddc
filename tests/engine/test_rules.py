"""Every layer's rule against the naive per-record gradient, over shapes, strides, groups and odd values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.engine.bookkeeping import Booked, NotBookable, bookable, clipped_sum
from dpfl.engine.one_by_one import OneByOne

CLASSES = 3


class Head(nn.Module):
    """Any layer, then something uneven on top, so that every output entry has its own gradient."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...], tokens: int | None = None) -> None:
        super().__init__()
        self.layer, self.tokens = layer, tokens
        with torch.no_grad():
            size = layer(self._input(torch.zeros(1, *shape))).numel()
        self.top = nn.Linear(size, CLASSES)

    def _input(self, x: Tensor) -> Tensor:
        return x if self.tokens is None else (x.abs() * 1000).long() % self.tokens

    def forward(self, x: Tensor) -> Tensor:
        return self.top(torch.tanh(self.layer(self._input(x))).flatten(1))


def agree(model: nn.Module, features: Tensor, clip: float, *, tolerance: float = 5e-5) -> Tensor:
    """Both ways give one sum, in relative error; returns it."""
    layout = Layout.of_module(model)
    vector = layout.read(model)
    labels = torch.arange(len(features)) % CLASSES
    assert bookable(model)
    fast = clipped_sum(model, layout, vector, features, labels, clip)
    naive = OneByOne().clipped_sum(model, layout, vector, features, labels, clip)
    assert float((fast - naive).norm()) <= tolerance * float(naive.norm())
    return fast


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=PublicSeed(seed).generator())


SEEDS = st.integers(0, 10**6)
CLIPS = st.sampled_from([1e-3, 0.1, 1.0, 100.0])


def made(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


@given(SEEDS, CLIPS, st.integers(1, 6), st.lists(st.integers(1, 4), max_size=2), st.booleans())
def test_linear_on_any_number_of_positions(seed: int, clip: float, batch: int, between: list[int], bias: bool) -> None:
    model = made(lambda: Head(nn.Linear(5, 4, bias=bias), (*between, 5)), seed)
    agree(model, draw(seed, batch, *between, 5), clip)


@settings(max_examples=60)
@given(
    seed=SEEDS,
    clip=CLIPS,
    batch=st.integers(1, 4),
    groups=st.sampled_from([1, 2]),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    dilation=st.integers(1, 2),
    padding=st.sampled_from([0, 1, (2, 1), "valid", "same"]),
    mode=st.sampled_from(["zeros", "reflect", "circular"]),
    bias=st.booleans(),
    channels_last=st.booleans(),
)
def test_convolutions(
    seed: int, clip: float, batch: int, groups: int, kernel: tuple[int, int], stride: tuple[int, int], dilation: int,
    padding: object, mode: str, bias: bool, channels_last: bool,
) -> None:  # fmt: skip
    if padding == "same":  # torch warns of even kernels
        stride, kernel = (1, 1), (kernel[0] // 2 * 2 + 1, kernel[1] // 2 * 2 + 1)
    model = made(
        lambda: Head(
            nn.Conv2d(2, 4, kernel, stride, padding, dilation, groups, bias, padding_mode=mode),  # type: ignore[arg-type]
            (2, 7, 8),
        ),
        seed,
    )
    features = draw(seed, batch, 2, 7, 8)
    agree(model, features.to(memory_format=torch.channels_last) if channels_last else features, clip)


@given(SEEDS, CLIPS, st.integers(1, 5), st.integers(1, 6), st.sampled_from([None, 0, 3]))
def test_embeddings_add_up_repeated_tokens_before_the_norm(
    seed: int, clip: float, batch: int, length: int, padding: int | None
) -> None:
    model = made(lambda: Head(nn.Embedding(5, 3, padding_idx=padding), (length,), tokens=5), seed)
    agree(model, draw(seed, batch, length), clip)


@given(SEEDS, CLIPS, st.integers(1, 5), st.sampled_from([1, 2, 4]))
def test_group_norm(seed: int, clip: float, batch: int, groups: int) -> None:
    layer = nn.GroupNorm(groups, 4)
    nn.init.normal_(layer.weight)
    agree(made(lambda: Head(layer, (4, 3, 2)), seed), draw(seed, batch, 4, 3, 2), clip)


@given(SEEDS, CLIPS, st.integers(1, 5), st.sampled_from([(4,), (3, 4)]), st.booleans())
def test_layer_norm(seed: int, clip: float, batch: int, shape: tuple[int, ...], bias: bool) -> None:
    model = made(lambda: Head(nn.LayerNorm(shape, bias=bias), (2, 3, 4)), seed)
    agree(model, draw(seed, batch, 2, 3, 4), clip)


def test_both_ways_of_taking_norms_are_exercised() -> None:
    """Few positions and a large weight go through Gram matrices, many positions through per-record gradients."""
    few = made(lambda: Head(nn.Linear(40, 40), (2, 40)), 0)
    many = made(lambda: Head(nn.Linear(2, 3), (30, 2)), 0)
    agree(few, draw(1, 4, 2, 40), 0.5)
    agree(many, draw(2, 4, 30, 2), 0.5)


def deep() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, stride=2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(24, 8), nn.ReLU(inplace=True),
        nn.LayerNorm(8), nn.Linear(8, CLASSES),
    )  # fmt: skip


def test_a_whole_network_with_in_place_activations() -> None:
    agree(made(deep, 0), draw(0, 5, 1, 12, 12)[..., :12], 0.3)


def test_every_record_is_within_the_clip() -> None:
    model = made(deep, 1)
    layout = Layout.of_module(model)
    for seed in range(5):
        record = 100 * draw(seed, 1, 1, 12, 12)
        total = clipped_sum(model, layout, layout.read(model), record, torch.tensor([1]), 0.25)
        assert float(total.double().norm()) <= 0.25


def test_an_empty_batch_gives_zero() -> None:
    model = made(deep, 1)
    layout = Layout.of_module(model)
    total = clipped_sum(model, layout, layout.read(model), torch.zeros(0, 1, 12, 12), torch.zeros(0).long(), 1.0)
    assert bool((total == 0).all())


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e38])
def test_a_poisoned_record_changes_no_other(poison: float) -> None:
    model = made(deep, 2)
    layout = Layout.of_module(model)
    vector, labels = layout.read(model), torch.tensor([0, 1, 2])
    features = draw(3, 3, 1, 12, 12)
    clean = clipped_sum(model, layout, vector, features[:2], labels[:2], 0.2)
    features[2] = poison
    dirty = clipped_sum(model, layout, vector, features, labels, 0.2)
    assert bool(torch.isfinite(dirty).all())
    allowed = 0.2 if poison == 1e38 else 1e-6  # what is not finite counts as zero, what is huge is clipped
    assert float((dirty - clean).double().norm()) <= allowed


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.top = nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.top = nn.Parameter(torch.ones(4)), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(x * self.scale)


def test_a_layer_called_twice_is_noticed_and_still_right() -> None:
    model = made(Twice, 0)
    layout = Layout.of_module(model)
    vector, features, labels = layout.read(model), draw(0, 6, 4), torch.arange(6) % CLASSES
    with pytest.raises(NotBookable, match="'inner' is called twice"):
        clipped_sum(model, layout, vector, features, labels, 0.5)
    assert torch.equal(
        Booked().clipped_sum(model, layout, vector, features, labels, 0.5),
        OneByOne().clipped_sum(model, layout, vector, features, labels, 0.5),
    )


def test_parameters_outside_known_layers_are_not_booked() -> None:
    assert not bookable(Bare())
    assert not bookable(nn.LSTM(3, 4, proj_size=2))
    assert not bookable(nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Flatten(), nn.Linear(6, 3)))
    assert bookable(deep())
