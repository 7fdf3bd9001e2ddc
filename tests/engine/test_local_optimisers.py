"""Ways of clipping and of stepping: naive references, bounds that hold for the bits, and how noise
adds up.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from dpfl.core.errors import ConfigurationError
from dpfl.core.layout import Layout
from dpfl.core.phases import CLIPPINGS, Phase
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.engine import ghost_clipping, make_engine
from dpfl.engine.base import Batch, Engine, Job
from dpfl.engine.one_by_one import OneByOne
from dpfl.engine.phase_block import PhaseBlock
from dpfl.engine.row_span import fits_row_span
from dpfl.engine.stacked import Stacked
from dpfl.engine.stacks import Chain
from dpfl.numerics.clipping import NORMALISED
from dpfl.plugs.update_noise import noise_variance, step_responses

CLASSES = 3
PHASE = Phase(steps=6, batch_size=4, sampling="poisson", lr=0.3, clip=1.0, noise_multiplier=1.0)
ENGINES = pytest.mark.parametrize("engine", [OneByOne(), Stacked()], ids=["one_by_one", "stacked"])


def convolutional() -> nn.Module:
    """Layers whose tensors lie apart in the layout: a module with parameters around another's."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, CLASSES)
    )


def recurrent() -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gates, self.top = nn.LSTM(4, 5, 2, batch_first=True), nn.Linear(5, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.top(self.gates(x)[0][:, -1])  # type: ignore[no-any-return]

    torch.manual_seed(2)
    return Last()


def dense() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, CLASSES))


def linear() -> nn.Module:
    """Gradients as large as the records, in two layers."""
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, CLASSES))


MODELS = {
    "linear": (linear, (5,)),
    "convolutional": (convolutional, (1, 4, 4)),
    "recurrent": (recurrent, (3, 4)),
    "dense": (dense, (5,)),
}


def batch_of(shape: tuple[int, ...], count: int, scale: float, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(count, *shape, generator=generator)
    return Batch(x, torch.randint(0, CLASSES, (count,), generator=generator))


def naive(model: nn.Module, batch: Batch, clip: float, clipping: str) -> Tensor:
    """Per-record gradients one at a time, and the rules as they are printed."""
    named, total = dict(model.named_parameters()), 0.0
    modules = {name.rpartition(".")[0] for name in named}
    for x, y in zip(batch.features, batch.labels, strict=True):
        loss = nn.functional.cross_entropy(model(x[None]), y[None])
        grads = dict(zip(named, torch.autograd.grad(loss, [*named.values()]), strict=True))
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
        factors = dict.fromkeys(modules, min(1.0, clip / norm))
        if clipping == "normalised":
            factors = dict.fromkeys(modules, clip / (norm + NORMALISED))
        if clipping == "per_layer":
            for module in modules:
                own = [g for name, g in grads.items() if name.rpartition(".")[0] == module]
                part = math.sqrt(sum(float(g.double().square().sum()) for g in own))
                factors[module] = min(1.0, clip / math.sqrt(len(modules)) / part)
        pieces = [factors[n.rpartition(".")[0]] * g.double().flatten() for n, g in grads.items()]
        total = total + torch.cat(pieces)
    assert isinstance(total, Tensor)
    return total


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("name", MODELS)
def test_clipped_sums_are_those_of_a_loop_over_records(name: str, clipping: str) -> None:
    build, shape = MODELS[name]
    model, batch = build(), batch_of(shape, 6, 1.0)
    layout = Layout.of_module(model)
    for clip in (0.05, 1.2):
        wanted = naive(model, batch, clip, clipping)
        for sums in (ghost_clipping.clipped_sum, OneByOne(one_at_a_time=True).clipped_sum):
            found = sums(model, layout, layout.read(model), batch, clip, clipping)  # type: ignore[operator]
            assert float((found - wanted).norm()) < 5e-5 * float(wanted.norm())


def test_the_three_ways_of_clipping_differ() -> None:
    build, shape = MODELS["dense"]
    model, batch = build(), batch_of(shape, 6, 1.0)
    one, two, three = (naive(model, batch, 1.2, clipping) for clipping in CLIPPINGS)
    assert float((one - two).norm()) > 1e-2 * float(one.norm())
    assert float((one - three).norm()) > 1e-2 * float(one.norm())


def job(model: nn.Module, phase: Phase, batch: Batch, seed: int = 0) -> Job:
    start = Layout.of_module(model).read(model)
    rng = SecretRng.simulated(PublicSeed(seed))
    return Job(
        client="a",
        start=start,
        phases=(phase,),
        features=batch.features,
        labels=batch.labels,
        rng=rng,
    )


@pytest.mark.parametrize("clipping", CLIPPINGS)
@given(
    name=st.sampled_from(sorted(MODELS)),
    scale=st.sampled_from([1e-30, 1e-12, 1e-3, 1.0, 1e4, 1e12, 1e14]),
    clip=st.sampled_from([1e-6, 0.3, 1.0, 1e3]),
    seed=st.integers(0, 1000),
)
def test_one_record_is_within_the_clip_for_every_way_of_clipping(
    clipping: str, name: str, scale: float, clip: float, seed: int
) -> None:
    """The bound that is charged holds for the bits of the sum, from tiny records to huge ones."""
    build, shape = MODELS[name]
    model, batch = build(), batch_of(shape, 1, scale, seed)
    layout = Layout.of_module(model)
    for sums in (ghost_clipping.clipped_sum, OneByOne(one_at_a_time=True).clipped_sum):
        found = sums(model, layout, layout.read(model), batch, clip, clipping)  # type: ignore[operator]
        assert bool(torch.isfinite(found).all())
        assert float(found.norm()) <= clip


@pytest.mark.parametrize("clipping", CLIPPINGS)
@given(
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e14]),
    clip=st.sampled_from([0.01, 0.3, 1e3]),
    seed=st.integers(0, 1000),
)
def test_one_record_of_many_clients_at_once_is_within_the_clip(
    clipping: str, scale: float, clip: float, seed: int
) -> None:
    """From small weights the update is the contribution itself, but for rounding."""
    model = linear()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e-3)
    work = replace(PHASE, steps=1, batch_size=1, lr=1.0, noise_multiplier=0.0, clip=clip)
    one = job(model, replace(work, clipping=clipping), batch_of((5,), 1, scale, seed))  # type: ignore[arg-type]
    (after,) = Stacked().run(model, Layout.of_module(model), [one])
    rounding = 2**-24 * float(torch.cat([one.start, after]).double().norm())
    assert bool(torch.isfinite(after).all())
    assert float((after - one.start).double().norm()) <= clip + rounding


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e38])
def test_a_poisoned_record_counts_as_zero(clipping: str, poison: float) -> None:
    build, shape = MODELS["convolutional"]
    model, batch = build(), batch_of(shape, 3, 1.0)
    layout = Layout.of_module(model)
    alone = Batch(batch.features[:2], batch.labels[:2])
    batch.features[2, 0, 0, 0] = poison
    for sums in (ghost_clipping.clipped_sum, OneByOne(one_at_a_time=True).clipped_sum):
        clean, dirty = (
            sums(model, layout, layout.read(model), some, 0.2, clipping)  # type: ignore[operator]
            for some in (alone, batch)
        )
        assert float((clean - dirty).norm()) < 1e-6 * float(clean.norm())


# ---- how noise adds up ---------------------------------------------------------------------------

FILTERS: dict[str, dict[str, float]] = {
    "plain": {},
    "momentum": {"momentum": 0.8},
    "weight decay": {"weight_decay": 0.5},
    "proximal": {"proximal": 1.0},
    "all": {"momentum": 0.9, "weight_decay": 0.3, "proximal": 0.4},
}


@ENGINES
@pytest.mark.parametrize("name", FILTERS)
def test_noise_variance_is_that_of_the_noise_that_is_added(engine: Engine, name: str) -> None:
    """Records of zeros have no gradient without a bias, so an update is noise and decay of the
    start alone; 30,000 coordinates tell a variance to 0.8 %, and the plain formula is far off.
    """
    model = nn.Linear(10_000, CLASSES, bias=False)
    batch = Batch(torch.zeros(8, 10_000), torch.zeros(8, dtype=torch.int64))
    first = replace(PHASE, **FILTERS[name])  # type: ignore[arg-type]
    second = replace(first, steps=4, lr=0.1)
    for phases in ((first,), (first, second)):
        one = replace(job(model, first, batch, seed=5), phases=phases)
        one = replace(one, start=torch.zeros_like(one.start))
        (after,) = engine.run(model, Layout.of_module(model), [one])
        promised = noise_variance(phases, 8, 30_000)
        assert float(after.double().square().sum()) == pytest.approx(promised, rel=0.04)
        plainly = noise_variance(tuple(replace(p, **_PLAIN) for p in phases), 8, 30_000)  # type: ignore[arg-type]
        assert (name == "plain") == (abs(promised / plainly - 1) < 0.1)


_PLAIN = {"momentum": 0.0, "weight_decay": 0.0, "proximal": 0.0}


@given(
    momentum=st.sampled_from([0.0, 0.5, 0.95]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    proximal=st.sampled_from([0.0, 0.3]),
    steps=st.integers(1, 8),
)
def test_responses_are_those_of_the_printed_recursion(
    momentum: float, weight_decay: float, proximal: float, steps: int
) -> None:
    how = {"momentum": momentum, "weight_decay": weight_decay, "proximal": proximal}
    work = replace(PHASE, steps=steps, **how)  # type: ignore[arg-type]

    def end(gradients: list[float], start: float) -> float:
        w, m = start, 0.0
        for gradient in gradients:
            m = momentum * m + gradient + weight_decay * w + proximal * (w - start)
            w -= work.lr * m
        return w

    responses, kept = step_responses(work)
    assert end([0.0] * steps, 1.0) == pytest.approx(kept)
    for step in range(steps):
        unit = [float(t == step) for t in range(steps)]
        assert end(unit, 0.0) == pytest.approx(-work.lr * responses[steps - 1 - step])


# ---- who is computed where -----------------------------------------------------------------------


def test_the_row_span_declines_momentum_and_the_proximal_term() -> None:
    model = nn.Linear(64, CLASSES)
    chain = Chain.of(model, Layout.of_module(model))
    assert chain is not None
    work = Phase(steps=12, batch_size=3, sampling="shuffle", lr=0.1)
    for more, fits in ({}, True), ({"momentum": 0.5}, False), ({"proximal": 0.5}, False):
        one = job(model, replace(work, **more), batch_of((64,), 8, 1.0))  # type: ignore[arg-type]
        assert fits_row_span(PhaseBlock(chain, [one], 0, torch.device("cpu"))) is fits


def test_clients_that_clip_or_step_otherwise_are_computed_apart() -> None:
    changes = ({}, {"clipping": "per_layer"}, {"momentum": 0.5}, {"proximal": 0.1}, {"lr": 0.7})
    plans = [(replace(PHASE, **change),) for change in changes]  # type: ignore[arg-type]
    assert make_engine("stacked").blocks(plans) == [[0, 4], [1], [2], [3]]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"momentum": 1.0}, "momentum = 1.0"),
        ({"momentum": -0.1}, "momentum = -0.1"),
        ({"proximal": -1.0}, "proximal = -1.0"),
        ({"weight_decay": math.nan}, "weight_decay = nan"),
        ({"clipping": "layer"}, "clipping = 'layer'"),
        ({"clipping": "per_layer", "clip": None, "noise_multiplier": 0.0}, "nothing is clipped"),
    ],
)
def test_a_step_that_cannot_be_is_refused(wrong: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        replace(PHASE, **wrong)  # type: ignore[arg-type]
