"""Frozen parameters cost nothing and never move; a shared one is clipped once, over all its uses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpfl.core.layout import Layout
from dpfl.core.phases import Clipping
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Phase
from dpfl.engine import ghost_clipping, layer_rules as rules, make_engine, slow_layers
from dpfl.engine.base import Batch, Job
from dpfl.engine.one_by_one import OneByOne
from dpfl.engine.stacks import Chain
from dpfl.engine.trace import Trace, TracedLayers
from tests.engine.test_layer_rules import CLASSES, CLIPS, SEEDS, Head, agree, at_once, draw, made

BATCHES = st.integers(1, 5)


# ---- frozen parameters ---------------------------------------------------------------------------


def network() -> nn.Module:
    """One of many kinds of layers."""
    norm = nn.BatchNorm1d(6)
    norm(torch.randn(8, 6, 5))
    return nn.Sequential(
        nn.Conv1d(2, 6, 3, padding=1), norm.eval(), nn.ReLU(inplace=True), nn.Flatten(), nn.LayerNorm(30),
        nn.Linear(30, 8), nn.Tanh(), nn.Linear(8, CLASSES),
    )  # fmt: skip


NAMES = [name for name, _ in network().named_parameters()]


@given(SEEDS, CLIPS, BATCHES, st.sets(st.sampled_from(NAMES), min_size=1))
def test_any_part_of_a_network_may_be_frozen(
    seed: int, clip: float, batch: int, free: set[str]
) -> None:
    """Among them a head, a scale or a bias alone."""
    model = made(network, seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in free)
    total = agree(model, draw(seed, batch, 2, 5), clip)
    assert len(total) == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("part", ["weight_ih", "weight_hh", "bias_ih", "bias"])
def test_a_recurrent_layer_may_be_partly_frozen(kind: type[nn.RNNBase], part: str) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.top = kind(3, 4, batch_first=True), nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.top(self.inner(x)[0][:, -1])

    model = made(Reads, 0)
    for name, parameter in model.inner.named_parameters():
        parameter.requires_grad_(name.startswith(part))
    agree(model, draw(0, 4, 5, 3), 0.1)


@pytest.mark.parametrize("kernel", [(3, 3), (1, 1)])
def test_a_convolution_may_learn_its_bias_alone(kernel: tuple[int, int]) -> None:
    model = made(lambda: Head(nn.Conv2d(2, 4, kernel, padding=1), (2, 5, 5)), 0)
    model.layer.weight.requires_grad_(False)
    agree(model, draw(0, 4, 2, 5, 5), 0.1)
    model.layer.weight.requires_grad_(True)
    model.layer.bias.requires_grad_(False)
    agree(model, draw(0, 4, 2, 5, 5), 0.1)


def test_nothing_is_recorded_before_the_first_layer_that_learns() -> None:
    model = made(network, 0)
    for parameter in model[:5].parameters():
        parameter.requires_grad_(False)
    seen: dict[int, bool] = {}  # what the hooks of a trace, which come later, have not touched
    for number, layer in enumerate(model):
        layer.register_forward_hook(
            lambda _, given, output, number=number: seen.update({number: output.requires_grad})
        )
    layout = Layout.of_module(model)
    trace, free = Trace(TracedLayers(model), 3), layout.unflatten(layout.read(model))
    with trace.record():
        torch.func.functional_call(model, free, (draw(0, 3, 2, 5),))
    assert [number for number, recorded in seen.items() if recorded] == [6, 7]
    assert [tensor.shape[1] for tensor in trace.wanted()] == [8, CLASSES]


def test_a_chain_with_a_frozen_layer_is_not_stacked_and_agrees_with_the_slow_engine() -> None:
    model = made(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, CLASSES)), 0)
    model[0].requires_grad_(False)
    layout = Layout.of_module(model)
    assert Chain.of(model, layout) is None
    assert layout.head == slice(0, layout.size)
    phase = Phase(steps=4, batch_size=8, sampling="poisson", lr=0.5, clip=0.3, noise_multiplier=0.0)
    plain = Phase(steps=4, batch_size=8, sampling="shuffle", lr=0.5)
    jobs = [
        Job(
            client=str(i), start=layout.read(model), phases=(phase, plain), features=draw(i, 30, 4),
            labels=torch.arange(30) % CLASSES, rng=SecretRng.simulated(PublicSeed(i)),
        )
        for i in range(3)
    ]  # fmt: skip
    fast = make_engine("stacked").run(model, layout, jobs)
    slow = make_engine("one_by_one").run(model, layout, jobs)
    for one, other, job in zip(fast, slow, jobs, strict=True):
        assert float((one - other).norm()) <= 5e-5 * float((other - job.start).norm())


# ---- shared parameters ---------------------------------------------------------------------------


class Tied(nn.Module):
    """One table for the tokens that are read and for the ones that are predicted."""

    def __init__(self, vocabulary: int, width: int, padding: int | None, bias: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width, padding_idx=padding)
        self.inner = nn.Linear(width, width)
        self.output = nn.Linear(width, vocabulary, bias=bias)
        self.output.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = (tokens.abs() * 1000).long() % self.table.num_embeddings
        scores = self.output(torch.tanh(self.inner(self.table(tokens))))
        return torch.sin(scores).mean(dim=1)


@given(SEEDS, CLIPS, BATCHES, st.integers(1, 6), st.sampled_from([None, 1]), st.booleans())
def test_a_table_that_reads_and_predicts(
    seed: int, clip: float, batch: int, length: int, padding: int | None, bias: bool
) -> None:
    model = made(lambda: Tied(5, 3, padding, bias), seed)
    assert slow_layers(model) == {}
    total = agree(model, draw(seed, batch, length), clip)
    assert len(total) == 5 * 3 + 3 * 3 + 3 + 5 * bias


def test_nothing_of_the_size_of_records_by_vocabulary_by_width_is_written() -> None:
    model = made(lambda: Tied(400, 64, None, True), 0)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            if isinstance(found, Tensor):
                largest = max(largest, found.numel())
            return found

    layout = Layout.of_module(model)
    batch = Batch(draw(0, 16, 4), torch.arange(16) % CLASSES)
    with Watch():
        ghost_clipping.clipped_sum(model, layout, layout.read(model), batch, 0.1)
    assert largest < 16 * 400 * 64 / 8


class Again(nn.Module):
    """Layers that are called several times, and two that share a weight or a bias."""

    def __init__(self, share: str) -> None:
        super().__init__()
        self.first, self.second, self.top = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)
        if share != "calls":
            setattr(self.second, share, getattr(self.first, share))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(torch.tanh(self.first(x))))
        return self.top(torch.tanh(self.second(x)).mean(dim=1))


@given(SEEDS, CLIPS, BATCHES, st.integers(1, 4), st.sampled_from(["calls", "weight", "bias"]))
def test_dense_layers_called_again_or_with_a_shared_parameter(
    seed: int, clip: float, batch: int, positions: int, share: str
) -> None:
    model = made(lambda: Again(share), seed)
    agree(model, draw(seed, batch, positions, 4), clip)
    model.first.bias.requires_grad_(False)
    agree(model, draw(seed, batch, positions, 4), clip)


def test_shared_weights_are_added_up_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(lambda: Tied(5, 3, None, True), 0)
    whole = agree(model, draw(0, 5, 4), 0.1)
    monkeypatch.setattr(rules, "MOST_NUMBERS", 1)
    torch.testing.assert_close(agree(model, draw(0, 5, 4), 0.1), whole)


def test_every_record_of_a_shared_parameter_is_within_the_clip() -> None:
    """Each use alone is within it as well, so that two clips would pass unnoticed without this."""
    model = made(lambda: Tied(5, 3, None, True), 0)
    layout = Layout.of_module(model)
    for seed in range(5):
        batch = Batch(draw(seed, 1, 4), torch.tensor([1]))
        clipped = ghost_clipping.clipped_sum
        total = clipped(model, layout, layout.read(model), batch, 1e-3)
        assert 0.9e-3 <= float(total.norm()) <= 1e-3


def test_other_layers_that_share_take_the_slow_path_by_name() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4), nn.Linear(4, CLASSES))
    model[1].weight = model[0].weight
    said = "LayerNorm shares a parameter with another layer"
    assert slow_layers(model) == {"0": said, "1": said}


class Positions(nn.Module):
    """A table of positions that all records share."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(7, 4), nn.Embedding(6, 4)
        self.top = nn.Linear(4, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = (tokens.abs() * 1000).long() % 7
        places = self.places(torch.arange(tokens.shape[1], device=tokens.device)[None])
        return self.top(torch.tanh(self.table(tokens) + places).mean(dim=1))


@given(SEEDS, CLIPS, BATCHES, st.integers(1, 6))
def test_positions_that_all_records_share(seed: int, clip: float, batch: int, length: int) -> None:
    model = made(Positions, seed)
    agree(model, draw(seed, batch, length), clip)


def test_memory_is_set_aside_for_what_is_learned_only() -> None:
    """A frozen body passes through; its patches and outputs are not kept."""
    body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))
    whole = ghost_clipping.numbers_per_record(model, draw(0, 1, 3, 12, 12))
    body.requires_grad_(False)
    head = ghost_clipping.numbers_per_record(model, draw(0, 1, 3, 12, 12))
    assert whole > 144 * 9 * 19
    assert head < 3 * 144 * 16


class Beside(nn.Module):
    """Uses a layer's weight once more, where no rule can see it; at first that changes nothing."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.top = scale, nn.Linear(4, CLASSES)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        more = self.up(torch.tanh(self.down(x)))
        return self.top(x + self.scale * more * self.down.weight.square().sum())


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-3])
def test_a_use_that_no_rule_sees_is_found_however_small_its_share(scale: float) -> None:
    """Its share of the whole gradient is far below what rounding may cost."""
    model = made(lambda: Beside(scale), 0)
    assert slow_layers(model) == {}
    assert at_once(model, (4,)) == 0


def test_records_that_cancel_are_no_disagreement() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).requires_grad_(False)
    nn.init.zeros_(model[0].weight)
    model[1].bias.requires_grad_(True)
    assert at_once(model, (4,)) > 0


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "normalised"])
@pytest.mark.parametrize("build", [lambda: Tied(5, 3, None, True), lambda: Again("bias"), network])
def test_every_way_of_clipping(clipping: Clipping, build: Callable[[], nn.Module]) -> None:
    """A shared parameter belongs to the layer whose name it has, and is clipped with it."""
    model = made(build, 0)
    model[4].requires_grad_(False) if isinstance(model, nn.Sequential) else None
    shape = {Tied: (4,), Again: (3, 4)}.get(type(model), (2, 5))
    layout, batch = Layout.of_module(model), Batch(draw(0, 5, *shape), torch.arange(5) % CLASSES)
    exact = OneByOne().clipped_sum(model, layout, layout.read(model), batch, 0.1, clipping)
    fast = ghost_clipping.clipped_sum(model, layout, layout.read(model), batch, 0.1, clipping)
    assert float((fast - exact).norm()) <= 5e-5 * float(exact.norm())
