"""Every layer's rule against the naive per-record gradient, over shapes, strides, groups and odd
values.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor, nn

from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.data.inputs import NUMBERS, Inputs
from dpfl.engine import convolutions, ghost_clipping, layer_rules as rules
from dpfl.engine.base import Batch, Job
from dpfl.engine.coverage import can_ghost_clip
from dpfl.engine.ghost_clipping import GhostClipping
from dpfl.engine.one_by_one import OneByOne
from dpfl.engine.trace import NotCovered

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


def clipped_sum(
    model: nn.Module, layout: Layout, vector: Tensor, features: Tensor, labels: Tensor, clip: float
) -> Tensor:
    """The sum by ghost clipping."""
    batch = Batch(features, labels)
    return ghost_clipping.clipped_sum(model, layout, vector, batch, clip)


def agree(model: nn.Module, features: Tensor, clip: float, *, tolerance: float = 5e-5) -> Tensor:
    """Both ways give one sum, in relative error; returns it."""
    layout = Layout.of_module(model)
    vector = layout.read(model)
    labels = torch.arange(len(features)) % CLASSES
    assert can_ghost_clip(model)
    fast = clipped_sum(model, layout, vector, features, labels, clip)
    naive = OneByOne().clipped_sum(model, layout, vector, Batch(features, labels), clip)
    assert float((fast - naive).norm()) <= tolerance * float(naive.norm())
    return fast


def at_once(model: nn.Module, shape: tuple[int, ...], inputs: Inputs = NUMBERS) -> int:
    """How many records ghost clipping would take at once; 0 if its trial fails."""
    layout, rng = Layout.of_module(model), SecretRng.simulated(PublicSeed(0))
    job = Job(
        client="", start=layout.read(model), phases=(), features=torch.zeros(0, *shape),
        labels=torch.zeros(0).long(), rng=rng, inputs=inputs,
    )  # fmt: skip
    return ghost_clipping.records_at_once(model, layout, job, torch.device("cpu"))


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=PublicSeed(seed).generator())


SEEDS = st.integers(0, 10**6)
CLIPS = st.sampled_from([1e-3, 0.1, 1.0, 100.0])


def made(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


@example(0, 1e-3, 1, [2, 1], True)  # torch adds this bias in place
@given(SEEDS, CLIPS, st.integers(1, 6), st.lists(st.integers(1, 4), max_size=2), st.booleans())
def test_linear_on_any_number_of_positions(
    seed: int, clip: float, batch: int, between: list[int], bias: bool
) -> None:
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
    agree(
        model, features.to(memory_format=torch.channels_last) if channels_last else features, clip
    )


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
    """Few positions and a large weight go through Gram matrices, many positions through per-record
    gradients.
    """
    few = made(lambda: Head(nn.Linear(40, 40), (2, 40)), 0)
    many = made(lambda: Head(nn.Linear(2, 3), (30, 2)), 0)
    agree(few, draw(1, 4, 2, 40), 0.5)
    agree(many, draw(2, 4, 30, 2), 0.5)


# ---- every way through a convolution -------------------------------------------------------------


def conv(
    seed: int,
    channels: tuple[int, int],
    size: tuple[int, int],
    kernel: tuple[int, int],
    **options: object,
) -> nn.Module:
    return made(lambda: Head(nn.Conv2d(*channels, kernel, **options), (channels[0], *size)), seed)  # type: ignore[arg-type]


@settings(max_examples=50)
@given(
    seed=SEEDS,
    clip=CLIPS,
    batch=st.integers(1, 4),
    groups=st.integers(1, 3),
    channels=st.tuples(st.integers(1, 24), st.integers(1, 8)),
    size=st.tuples(st.integers(7, 9), st.integers(7, 9)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.sampled_from([0, 1, (2, 1), "valid", "same"]),
    mode=st.sampled_from(["zeros", "reflect", "circular", "replicate"]),
    channels_last=st.booleans(),
)
def test_convolutions_of_many_channels(
    seed: int, clip: float, batch: int, groups: int, channels: tuple[int, int], size: tuple[int, int],
    kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int], padding: object, mode: str,
    channels_last: bool,
) -> None:  # fmt: skip
    """Few or many to a group, so that every way of copying patches is met."""
    if padding == "same":
        stride, kernel = (1, 1), (kernel[0] // 2 * 2 + 1, kernel[1] // 2 * 2 + 1)
    dilation = tuple(1 if k == 5 else d for k, d in zip(kernel, dilation, strict=True))  # type: ignore[assignment]
    inside = max(1, channels[0] // groups) * groups, channels[1] * groups
    model = conv(seed, inside, size, kernel, stride=stride, dilation=dilation, padding=padding, groups=groups,
                 padding_mode=mode)  # fmt: skip
    features = draw(seed, batch, inside[0], *size)
    agree(
        model, features.to(memory_format=torch.channels_last) if channels_last else features, clip
    )


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
@pytest.mark.parametrize("channels", [2, 40])
def test_an_even_kernel_is_padded_on_the_side_where_torch_pads_it(mode: str, channels: int) -> None:
    model = conv(0, (channels, 3), (6, 7), (2, 4), padding="same", padding_mode=mode)
    agree(model, draw(0, 3, channels, 6, 7), 0.3)


def ways(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Fill a set with (how patches are copied, how norms are taken), while convolutions run."""
    taken: set[tuple[str, str]] = set()
    copied = ["linear"]
    planes, patches, products = convolutions._planes, convolutions._patches, rules.products
    of_planes = convolutions._products_of_planes

    def spy_planes(*arguments: object, **options: object) -> Tensor:
        copied[0] = "planes"
        return planes(*arguments, **options)  # type: ignore[arg-type]

    def spy_products_of_planes(*arguments: object) -> object:
        found = of_planes(*arguments)  # type: ignore[arg-type]
        if copied[0] == "planes":  # nobody asked for products of the whole
            taken.add(("planes", "written, transposed"))
            copied[0] = "linear"
        return found

    def spy_patches(*arguments: object) -> Tensor:
        found = patches(*arguments)  # type: ignore[arg-type]
        copied[0] = "strips" if found.shape[1] > 1 else "full"
        return found

    def spy_products(a: Tensor, d: Tensor, *others: Tensor) -> object:
        blocks = a if a.ndim == 4 else a[:, None]
        inputs, (records, positions, outputs) = blocks.shape[1] * blocks.shape[3], d.shape
        if positions == 1:
            norms = "factored"
        elif not rules.written_out(records, positions, inputs, outputs):
            norms = "gram"
        else:
            norms = "written, transposed" if blocks.stride(2) == 1 else "written"
        taken.add((copied[0], norms))
        copied[0] = "linear"
        return products(a, d, *others)

    monkeypatch.setattr(convolutions, "_planes", spy_planes)
    monkeypatch.setattr(convolutions, "_products_of_planes", spy_products_of_planes)
    monkeypatch.setattr(convolutions, "_patches", spy_patches)
    monkeypatch.setattr(rules, "products", spy_products)
    return taken


CONVOLUTIONS: dict[tuple[str, str], list[tuple[tuple[int, int], tuple[int, int], tuple[int, int], dict[str, object]]]] = {
    ("planes", "factored"): [
        ((2, 5), (3, 4), (3, 4), {}),
        ((24, 24), (2, 2), (2, 2), {"groups": 3}),
    ],
    ("planes", "gram"): [
        ((12, 24), (4, 4), (3, 3), {}),
        ((12, 20), (5, 4), (3, 3), {"stride": (2, 1), "bias": False}),
        ((24, 24), (4, 5), (3, 3), {"groups": 2, "dilation": (1, 2)}),
    ],
    ("planes", "written, transposed"): [
        ((1, 4), (9, 8), (3, 3), {"padding": 1}),
        ((3, 5), (9, 9), (5, 3), {"padding": (2, 1), "padding_mode": "circular"}),
        ((6, 4), (9, 8), (2, 3), {"groups": 2, "stride": (2, 1), "dilation": (2, 2)}),
        ((4, 4), (9, 8), (3, 1), {"groups": 4, "padding": "same", "padding_mode": "reflect"}),
        ((8, 16), (11, 12), (3, 5), {"stride": (2, 1), "padding": (0, 1), "bias": False}),
        ((24, 16), (15, 14), (3, 2), {"dilation": (1, 2)}),
    ],
    ("full", "factored"): [
        ((24, 6), (3, 3), (3, 3), {}),
        ((2, 6), (4, 4), (3, 3), {"stride": 2}),
    ],
    ("full", "gram"): [
        ((24, 24), (4, 4), (3, 3), {}),
        ((16, 24), (6, 6), (3, 3), {"stride": (1, 2), "padding": 1, "padding_mode": "reflect"}),
        ((24, 16), (5, 5), (2, 2), {"stride": 2, "groups": 2}),
    ],
    ("full", "written"): [
        ((24, 2), (9, 9), (3, 3), {"dilation": 2, "padding": 2}),
        ((24, 2), (9, 9), (3, 3), {"dilation": (1, 2)}),
        ((24, 2), (12, 9), (3, 3), {"dilation": (2, 1)}),
        ((24, 2), (14, 9), (3, 3), {"stride": (2, 1), "padding": "valid"}),
        ((4, 4), (9, 9), (3, 3), {"stride": (1, 2), "padding": 1, "groups": 2}),
        ((64, 2), (9, 8), (1, 1), {}),
        ((16, 32), (14, 14), (5, 5), {"padding": 2, "stride": 2}),
        ((48, 32), (14, 13), (3, 3), {"groups": 2, "padding": 1, "stride": (2, 1)}),
        ((16, 16), (13, 14), (3, 3), {"stride": 2, "padding": 1}),
    ],
    ("full", "written, transposed"): [((1, 3), (9, 9), (1, 1), {"stride": 2})],
    ("strips", "written"): [
        ((24, 2), (9, 8), (3, 3), {}),
        ((24, 2), (9, 8), (3, 3), {"padding": "same"}),
        ((24, 3), (7, 14), (2, 3), {"stride": (1, 2), "padding": 1}),
        ((48, 4), (8, 9), (4, 3), {"groups": 2, "padding": 1, "padding_mode": "circular", "bias": False}),
        ((16, 2), (9, 8), (5, 4), {}),
        ((16, 32), (14, 14), (5, 5), {"padding": 2}),
        ((48, 32), (14, 13), (3, 3), {"groups": 2, "padding": 1}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("way", CONVOLUTIONS, ids=" ".join)
@pytest.mark.parametrize("channels_last", [True, False])
def test_each_way_through_a_convolution_is_taken_and_right(
    way: tuple[str, str], channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, (channels, size, kernel, options) in enumerate(CONVOLUTIONS[way]):
        model = conv(seed, channels, size, kernel, **options)
        features = draw(seed, 4, channels[0], *size)
        features = features.to(memory_format=torch.channels_last) if channels_last else features
        with monkeypatch.context() as patch:
            taken = ways(patch)
            agree(model, features, 0.3)
            agree(model, features, 100.0)
        assert taken == {way, ("linear", "factored")}
        layout = Layout.of_module(model)
        nothing = clipped_sum(
            model, layout, layout.read(model), features[:0], torch.zeros(0).long(), 1.0
        )
        assert torch.equal(nothing, torch.zeros(layout.size))


@pytest.mark.parametrize("way", CONVOLUTIONS, ids=" ".join)
@pytest.mark.parametrize("most", [1, 4000])
def test_what_does_not_fit_is_done_in_pieces_by_gram_matrices(
    way: tuple[str, str], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strips are asked for their Gram matrices only here."""
    monkeypatch.setattr(rules, "MOST_NUMBERS", most)
    taken = ways(monkeypatch)
    for seed, (channels, size, kernel, options) in enumerate(CONVOLUTIONS[way]):
        agree(conv(seed, channels, size, kernel, **options), draw(seed, 5, channels[0], *size), 0.3)
    if most == 1:
        assert taken - {("linear", "factored")} == {
            (way[0], "factored" if way[1] == "factored" else "gram")
        }


def test_planes_may_be_copied_a_few_records_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = conv(0, (3, 5), (9, 9), (3, 3), padding=1)
    whole = agree(model, draw(0, 7, 3, 9, 9), 0.3)
    monkeypatch.setattr(convolutions, "_IN_CACHE", 3 * 28 * 81)
    torch.testing.assert_close(agree(model, draw(0, 7, 3, 9, 9), 0.3), whole)


@pytest.mark.parametrize("odd", [0.0, 1e30, float("inf"), float("nan")])
def test_records_of_a_convolution_do_not_touch_each_other(odd: float) -> None:
    """Bit for bit, whatever lies beside them, and however many there are."""
    layer = nn.Conv2d(16, 32, 5, padding=2, stride=2)
    a, d = draw(0, 5, 16, 14, 14), draw(1, 5, 32, 7, 7)
    own = torch.tensor([0.0, 1.0, 0.0])

    def record(a: Tensor, d: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            gradient = convolutions.convolution(layer, a, d)
            found = gradient.weighted(factor)
        return gradient.squares[1], found["weight"], found["bias"]

    alone = record(a[:3], d[:3], own)
    assert all(map(torch.equal, alone, record(a, d, torch.cat([own, torch.zeros(2)]))))
    beside, slopes = a[:3].clone(), d[:3].clone()
    beside[0], slopes[2] = odd, odd
    with torch.no_grad():
        assert torch.equal(alone[0], convolutions.convolution(layer, beside, slopes).squares[1])


@pytest.mark.parametrize(
    "layout", ["flipped", "every other row", "a window", "one record many times"]
)
@pytest.mark.parametrize("channels", [1, 3])
def test_images_may_lie_in_memory_as_they_like(layout: str, channels: int) -> None:
    wide = draw(0, 4, channels, 18, 20)
    features = {
        "flipped": wide.transpose(2, 3)[..., :9, :8],
        "every other row": wide[:, :, ::2, ::2],
        "a window": wide[:, :, 5:14, 7:16],
        "one record many times": wide[:1, :, :9, :9].expand(4, channels, 9, 9),
    }[layout]
    assert not features.is_contiguous()
    model = conv(0, (channels, 4), tuple(features.shape[2:]), (3, 3), padding=1)  # type: ignore[arg-type]
    assert torch.equal(agree(model, features, 0.3), agree(model, features.contiguous(), 0.3))


# ---- positions of a dense layer ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "inputs", "outputs", "way"),
    [(1, 5, 4, "factored"), (2, 5, 4, "gram"), (5, 9, 7, "gram"), (16, 40, 30, "gram"), (9, 5, 4, "written"),
     (30, 2, 3, "written"), (40, 30, 40, "written"), (9, 1, 4, "written, transposed"), (9, 4, 1, "written")],
)  # fmt: skip
def test_a_dense_layer_on_either_side_of_the_gram_matrices(
    positions: int, inputs: int, outputs: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = ways(monkeypatch)
    model = made(lambda: Head(nn.Linear(inputs, outputs), (positions, inputs)), 0)
    for clip in (0.1, 100.0):
        agree(model, draw(1, 4, positions, inputs), clip)
    assert taken == {("linear", way), ("linear", "factored")}


@given(
    SEEDS,
    CLIPS,
    st.integers(1, 5),
    st.integers(1, 20),
    st.integers(1, 12),
    st.integers(1, 12),
    st.booleans(),
)
def test_both_ways_of_taking_norms_give_the_same_for_any_shape(
    seed: int, clip: float, batch: int, positions: int, inputs: int, outputs: int, gram: bool
) -> None:
    model = made(lambda: Head(nn.Linear(inputs, outputs), (positions, inputs)), seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "by_gram", lambda *_: gram)
        agree(model, draw(seed, batch, positions, inputs), clip)


class Difference(nn.Module):
    """What its first layer says of one position, less what it says of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.top = nn.Linear(40, 40), nn.Linear(40, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return self.top(x[:, 0] - x[:, 1])


@pytest.mark.parametrize(
    "offset",
    [0.0, 10.0, 1e2, 1e3, 1e4],
)
def test_a_record_whose_positions_nearly_cancel_is_within_the_clip(offset: float) -> None:
    model = made(Difference, 0)
    layout = Layout.of_module(model)
    features = draw(0, 20, 2, 40) + offset
    for record in features:
        total = clipped_sum(model, layout, layout.read(model), record[None], torch.tensor([1]), 0.1)
        assert float(total.double().norm()) <= 0.1


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
    total = clipped_sum(
        model, layout, layout.read(model), torch.zeros(0, 1, 12, 12), torch.zeros(0).long(), 1.0
    )
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
    allowed = (
        0.2 if poison == 1e38 else 1e-6
    )  # what is not finite counts as zero, what is huge is clipped
    assert float((dirty - clean).double().norm()) <= allowed


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.top = nn.LayerNorm(4), nn.Linear(4, CLASSES)

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
    with pytest.raises(NotCovered, match="'inner' is called twice"):
        clipped_sum(model, layout, vector, features, labels, 0.5)
    assert torch.equal(
        GhostClipping().clipped_sum(model, layout, vector, Batch(features, labels), 0.5),
        OneByOne().clipped_sum(model, layout, vector, Batch(features, labels), 0.5),
    )


def test_parameters_outside_known_layers_go_the_slow_way() -> None:
    assert not can_ghost_clip(Bare())
    assert not can_ghost_clip(nn.LSTM(3, 4, proj_size=2))
    assert not can_ghost_clip(
        nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Flatten(), nn.Linear(6, 3))
    )
    assert can_ghost_clip(deep())
