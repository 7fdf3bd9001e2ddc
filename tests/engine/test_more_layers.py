"""The rules of further convolutions, norms and attention against the naive per-record gradient."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from dpfl.core.errors import PrivacyRefusal
from dpfl.core.layout import Layout
from dpfl.engine import ghost_clipping, slow_layers
from dpfl.engine.base import Batch
from dpfl.engine.one_by_one import OneByOne
from dpfl.engine.trace import NotCovered
from dpfl.models import check_model
from tests.engine.test_layer_rules import CLASSES, CLIPS, SEEDS, Head, agree, at_once, draw, made

BATCHES = st.integers(1, 4)
MODES = ["zeros", "reflect", "circular", "replicate"]


# ---- convolutions of one and three axes ----------------------------------------------------------


@settings(max_examples=50)
@given(
    seed=SEEDS,
    clip=CLIPS,
    batch=BATCHES,
    groups=st.integers(1, 2),
    channels=st.sampled_from([2, 4, 48]),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    padding=st.sampled_from([0, 1, 2, "valid", "same"]),
    mode=st.sampled_from(MODES),
    bias=st.booleans(),
)
def test_convolutions_of_one_axis(
    seed: int, clip: float, batch: int, groups: int, channels: int, kernel: int, stride: int, dilation: int,
    padding: Any, mode: str, bias: bool,
) -> None:  # fmt: skip
    if padding == "same":  # torch warns of even kernels
        stride, kernel = 1, kernel // 2 * 2 + 1
    options = (stride, padding, dilation, groups, bias, mode)
    model = made(lambda: Head(nn.Conv1d(channels, 4, kernel, *options), (channels, 9)), seed)
    agree(model, draw(seed, batch, channels, 9), clip)


@settings(max_examples=40)
@given(
    seed=SEEDS,
    clip=CLIPS,
    batch=BATCHES,
    groups=st.integers(1, 2),
    kernel=st.tuples(*[st.integers(1, 3)] * 3),
    stride=st.tuples(*[st.integers(1, 2)] * 3),
    dilation=st.tuples(*[st.integers(1, 2)] * 3),
    padding=st.sampled_from([0, 1, (1, 0, 2), "valid", "same"]),
    mode=st.sampled_from(MODES),
    bias=st.booleans(),
)
def test_convolutions_of_three_axes(
    seed: int, clip: float, batch: int, groups: int, kernel: tuple[int, ...], stride: Any,
    dilation: Any, padding: Any, mode: str, bias: bool,
) -> None:  # fmt: skip
    if padding == "same":
        stride, kernel = 1, tuple(own // 2 * 2 + 1 for own in kernel)
    options = (stride, padding, dilation, groups, bias, mode)
    model = made(lambda: Head(nn.Conv3d(2, 4, kernel, *options), (2, 5, 6, 5)), seed)  # type: ignore[arg-type]
    agree(model, draw(seed, batch, 2, 5, 6, 5), clip)


# ---- norms ---------------------------------------------------------------------------------------


@given(SEEDS, CLIPS, BATCHES, st.integers(1, 3), st.booleans())
def test_instance_norm(seed: int, clip: float, batch: int, axes: int, tracks: bool) -> None:
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[axes - 1]
    layer = kind(3, affine=True, track_running_stats=tracks)
    shape = (3, *(4, 2, 2)[:axes])
    model = made(lambda: Head(_settled(layer, shape), shape), seed)
    agree(model, draw(seed, batch, *shape), clip)


@given(SEEDS, CLIPS, BATCHES, st.integers(0, 3))
def test_batch_norm_in_evaluation_mode(seed: int, clip: float, batch: int, axes: int) -> None:
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[axes]
    shape = (3, *(4, 2, 2)[:axes])
    model = made(lambda: Head(_settled(kind(3), shape), shape), seed)
    agree(model, draw(seed, batch, *shape), clip)


def _settled(layer: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """A layer with uneven parameters and statistics, in evaluation mode."""
    layer(1 + 2 * torch.randn(8, *shape))
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer.eval()


@given(SEEDS, CLIPS, BATCHES, st.sampled_from([(4,), (3, 4)]), st.sampled_from([None, 0.1]))
def test_rms_norm(
    seed: int, clip: float, batch: int, shape: tuple[int, ...], eps: float | None
) -> None:
    layer = nn.RMSNorm(shape, eps=eps)
    nn.init.normal_(layer.weight)
    agree(made(lambda: Head(layer, (2, 3, 4)), seed), draw(seed, batch, 2, 3, 4), clip)


@given(SEEDS, CLIPS, BATCHES)
def test_group_norm_of_vectors(seed: int, clip: float, batch: int) -> None:
    agree(made(lambda: Head(nn.GroupNorm(2, 4), (4,)), seed), draw(seed, batch, 4), clip)


# ---- attention -----------------------------------------------------------------------------------


class Attends(nn.Module):
    """An attention layer with options, on a sequence that also makes keys, values and masks."""

    def __init__(
        self, *, cross: bool, masked: str, padded: bool, weights: bool, average: bool, causal: bool,
        sizes: tuple[int, int] = (8, 8), **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, kdim=sizes[0], vdim=sizes[1], **options)
        self.cross, self.masked, self.padded, self.causal = cross, masked, padded, causal
        self.weights, self.average, self.sizes = weights, average, sizes

    def forward(self, x: Tensor) -> Tensor:
        records, length = x.shape[:2]
        key, value = x, x
        if self.cross or self.sizes != (8, 8):
            key, value = torch.sin(x)[:, 1:, : self.sizes[0]], x[:, 1:, : self.sizes[1]] * 2
        keys = key.shape[1]
        mask = torch.ones(length, keys).triu(1).bool()
        given: Tensor | None = {"none": None, "bool": mask, "float": -2.0 * mask}.get(self.masked)
        if self.masked == "each":
            given = mask.expand(records * 2, length, keys)
        padding = torch.zeros(records, keys, dtype=torch.bool)
        padding[:, -1] = keys > 1
        inputs = [x, key, value]
        if not self.attention.batch_first:
            inputs = [own.transpose(0, 1) for own in inputs]
        output, weights = self.attention(
            *inputs,
            key_padding_mask=padding.float() if self.masked == "float" else padding,
            attn_mask=given,
            need_weights=self.weights,
            average_attn_weights=self.average,
            is_causal=self.causal and given is not None,
        ) if self.padded else self.attention(
            *inputs,
            attn_mask=given,
            need_weights=self.weights,
            average_attn_weights=self.average,
            is_causal=self.causal and self.masked == "bool" and keys == length,
        )  # fmt: skip
        output = output if self.attention.batch_first else output.transpose(0, 1)
        output = output.flatten(1)
        return output if weights is None else torch.cat([output, weights.flatten(1)], dim=1)


OPTIONS = {
    "cross": st.booleans(),
    "masked": st.sampled_from(["none", "bool", "float", "each"]),
    "padded": st.booleans(),
    "weights": st.booleans(),
    "average": st.booleans(),
    "causal": st.booleans(),
    "sizes": st.sampled_from([(8, 8), (5, 6), (8, 3)]),
    "bias": st.booleans(),
    "batch_first": st.just(True),
}


@settings(max_examples=60)
@given(SEEDS, CLIPS, BATCHES, st.integers(2, 5), st.fixed_dictionaries(OPTIONS))
def test_attention(
    seed: int, clip: float, batch: int, length: int, options: dict[str, Any]
) -> None:
    model = made(lambda: Head(Attends(**options), (length, 8)), seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    features = draw(seed, batch, length, 8)
    agree(model, features, clip)
    with torch.no_grad():  # the layer itself is as it was
        assert model.layer.attention.forward.__func__ is nn.MultiheadAttention.forward


@pytest.mark.parametrize("part", ["in_proj_weight", "in_proj_bias", "out_proj.weight", "none"])
@pytest.mark.parametrize("sizes", [(8, 8), (5, 8)])
def test_attention_that_is_partly_frozen(part: str, sizes: tuple[int, int]) -> None:
    options = {"cross": True, "masked": "bool", "padded": False, "weights": False}
    layer = Attends(**options, average=True, causal=False, sizes=sizes, batch_first=True)  # type: ignore[arg-type]
    model = made(lambda: Head(layer, (4, 8)), 0)
    for name, parameter in layer.attention.named_parameters():
        parameter.requires_grad_(name == part)
    agree(model, draw(0, 3, 4, 8), 0.1)


def test_attention_with_positions_first_takes_the_slow_path_by_name() -> None:
    options = {"cross": False, "masked": "none", "padded": False, "weights": False}
    layer = Attends(**options, average=True, causal=False)  # type: ignore[arg-type]
    model = made(lambda: Head(layer, (4, 8)), 0)
    assert slow_layers(model) == {
        "layer.attention": "MultiheadAttention has positions on its first axis; use batch_first=True"
    }
    added = nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True)
    assert list(slow_layers(added)) == [""]


class Reads(nn.Module):
    """A transformer on vectors, its positions averaged."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.top = body, nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.body(x).mean(dim=1))


def encoder(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, **options)


ENCODERS = {
    "one": lambda: encoder(),
    "norm first": lambda: encoder(norm_first=True, activation="gelu"),
    "no bias": lambda: encoder(bias=False),
    "stacked": lambda: nn.TransformerEncoder(encoder(dropout=0.5), 2, norm=nn.LayerNorm(8)),
}


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoders(name: str, training: bool) -> None:
    """In evaluation mode torch would take a path that passes over the layers inside."""
    with warnings.catch_warnings(action="ignore"):  # of torch, when the layer is made
        model = made(lambda: Reads(ENCODERS[name]()), 0)
    for module in model.modules():  # the two ways draw differently
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    for seed, clip in enumerate((1e-3, 1.0, 100.0)):
        agree(model.train(training), draw(seed, 4, 5, 8), clip)
    assert slow_layers(model) == {}
    assert at_once(model, (5, 8)) > 0
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("padded", [True, False])
def test_a_transformer_with_decoder_and_masks(padded: bool) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(
                encoder(dropout=0.0), 1, enable_nested_tensor=padded
            )
            self.decoder = nn.TransformerDecoderLayer(8, 2, 12, 0.0, batch_first=True)
            self.top = nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            missing = (x[..., 0] > 0.5) if padded else None
            if missing is not None:
                missing[:, 0] = False
            memory = self.encoder(x, src_key_padding_mask=missing)
            causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            found = self.decoder(torch.sin(x), memory, tgt_mask=causal, tgt_is_causal=True)
            return self.top(found.mean(dim=1))

    model = made(Both, 0)
    check_model(model, (5, 8), CLASSES)  # where nothing is differentiated, torch takes other paths
    for training in (True, False):
        agree(model.train(training), draw(0, 4, 5, 8), 0.1)


# ---- what is not covered -------------------------------------------------------------------------


def test_layers_without_a_rule_are_named() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.PReLU(), nn.Bilinear(4, 4, 2), nn.LSTM(4, 4, proj_size=2)
    )
    assert list(slow_layers(model)) == ["1", "2", "3"]
    model[2].requires_grad_(False)
    assert list(slow_layers(model)) == ["1", "3"]
    table = nn.Embedding(4, 3, max_norm=1.0)
    assert "rescales its rows" in slow_layers(table)[""]


def test_named_arguments_and_records_on_another_axis_are_noticed_and_still_right() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.top = nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.top(input=x)

    class Turned(Named):
        def forward(self, x: Tensor) -> Tensor:
            return self.top(x.unflatten(1, (2, 4)).transpose(0, 1)).sum(dim=0)

    for model, shape, said in ((Named(), (4,), "named arguments"), (Turned(), (8,), "first axis")):
        layout = Layout.of_module(model)
        vector, batch = layout.read(model), Batch(draw(0, 5, *shape), torch.arange(5) % CLASSES)
        with pytest.raises(NotCovered, match=said):
            ghost_clipping.clipped_sum(model, layout, vector, batch, 0.1)
        assert at_once(model, shape) == 0
        fast = ghost_clipping.GhostClipping().clipped_sum(model, layout, vector, batch, 0.1)
        exact = OneByOne(one_at_a_time=True).clipped_sum(model, layout, vector, batch, 0.1)
        torch.testing.assert_close(fast, exact)


class Branches(nn.Module):
    """Looks at the values of a record in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.top = nn.PReLU(), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.slope(x)
        return self.top(x if float(x.detach().sum()) > 1e6 else 2 * x)


def test_a_model_that_looks_at_values_in_python_is_refused() -> None:
    model = Branches()
    layout = Layout.of_module(model)
    vector, batch = layout.read(model), Batch(draw(0, 5, 4), torch.arange(5) % CLASSES)
    state = torch.get_rng_state()
    with pytest.raises(PrivacyRefusal, match="reads a value of a record"):
        OneByOne().clipped_sum(model, layout, vector, batch, 0.1)
    assert torch.equal(torch.get_rng_state(), state)
