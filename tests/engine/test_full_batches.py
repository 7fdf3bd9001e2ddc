"""Full batches: the fast path against per-record gradients written out, and what is kept."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Phase
from dpfl.engine import full_batches
from dpfl.engine.base import Batch, Job
from dpfl.engine.full_batches import FullBatches, public_maps
from dpfl.engine.one_by_one import OneByOne
from dpfl.engine.stacked import Stacked
from dpfl.models.outputs import outputs_of
from dpfl.models.preconditioning import Centre, Whiten
from dpfl.tasks import Classification

PHASE = Phase(steps=1, batch_size=1 << 40, sampling="full", lr=2.0, clip=0.3)


def job_of(features: Tensor, labels: Tensor, start: Tensor, phase: Phase = PHASE) -> Job:
    rng = SecretRng.simulated(PublicSeed(3))
    return Job(client="a", start=start, phases=(phase,), features=features, labels=labels, rng=rng)


def head(size: int, classes: int, bias: bool) -> nn.Sequential:
    model = nn.Sequential(Centre(size), Whiten(size), nn.Linear(size, classes, bias=bias))
    generator = PublicSeed(5).generator()
    with torch.no_grad():
        model[0].mean.copy_(0.1 * torch.rand(size, generator=generator))
        model[1].matrix.copy_(torch.rand(size, size, generator=generator))
    return model


@pytest.mark.parametrize("whole", [False, True])
@settings(deadline=None, max_examples=25)
@given(
    records=st.integers(1, 40),
    size=st.integers(1, 6),
    bias=st.booleans(),
    seed=st.integers(0, 99),
    clip=st.sampled_from([1e-3, 0.3, 5.0]),
)
def test_the_fast_path_agrees_with_the_oracle(
    whole: bool, records: int, size: int, bias: bool, seed: int, clip: float
) -> None:
    generator, model = PublicSeed(seed).generator(), head(size, 3, bias)
    layout = Layout.of_module(model)
    x = torch.randn(records, size, generator=generator)
    y = torch.randint(3, (records,), generator=generator)
    start = torch.randn(layout.size, generator=generator)
    job = job_of(x, y, start, replace(PHASE, clip=clip, whole=whole))
    (fast,) = Stacked().run(model, layout, [job])
    (slow,) = OneByOne(one_at_a_time=True).run(model, layout, [job])
    assert float((fast - slow).norm()) <= 5e-5 * float((slow - start).norm()) + 1e-6


def test_a_record_moves_the_sum_by_at_most_the_clip() -> None:
    """Also records that are huge, tiny or not finite; no other record's part changes."""
    engine, model = FullBatches(), nn.Sequential(nn.Linear(4, 3, bias=False))
    layout = Layout.of_module(model)
    x = torch.randn(9, 4, generator=PublicSeed(0).generator())
    y, vector = torch.arange(9) % 3, layout.read(model)
    without = engine.clipped_sum(model[0], layout, vector, Batch(x[1:], y[1:]), 0.5)
    for value in (0.0, 1e-40, 1.0, 1e20, 1e38, math.inf, math.nan):
        x[0] = value
        found = engine.clipped_sum(model[0], layout, vector, Batch(x, y), 0.5)
        assert float((found - without).norm()) <= 0.5


def test_inputs_are_kept_until_the_maps_or_the_records_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, model = FullBatches(), head(4, 3, bias=False)
    layout, start = Layout.of_module(model), torch.zeros(12)
    x, y = torch.randn(20, 4, generator=PublicSeed(1).generator()), torch.arange(20) % 3
    calls: list[int] = []

    def counted(maps: nn.Module, parameters: dict[str, Tensor], records: Tensor) -> Tensor:
        calls.append(1)
        return outputs_of(maps, parameters, records)

    monkeypatch.setattr(full_batches, "outputs_of", counted)

    def run(features: Tensor) -> Tensor:
        return engine.run(model, layout, [job_of(features, y, start)])[0]

    first = run(x)
    assert torch.equal(run(x), first)
    assert len(calls) == 1
    with torch.no_grad():
        model[0].mean.add_(0.5)
    assert not torch.equal(run(x), first)
    assert len(calls) == 2
    assert not torch.equal(run(x.flip(0) * 2 + 1), first)
    assert len(calls) == 3


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(4, 3),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(4, 3), nn.Softmax(dim=1)),
    ],
)
def test_other_models_are_differentiated_record_by_record(model: nn.Module) -> None:
    layout = Layout.of_module(model)
    assert public_maps(model, layout) is None
    x, y = torch.randn(7, 4, generator=PublicSeed(1).generator()), torch.arange(7) % 3
    job = job_of(x, y, layout.read(model))
    (fast,), (slow,) = (e.run(model, layout, [job]) for e in (Stacked(), OneByOne()))
    assert torch.allclose(fast, slow, atol=1e-6)


@pytest.mark.parametrize("wrong", [1.0, 0.97, 1.03])
def test_noise_has_the_std_that_is_charged(wrong: float) -> None:
    """On an update of zero; the same test rejects 3 % more and less."""
    size, multiplier = 20_000, 3.0
    model = nn.Sequential(nn.Linear(size, 2, bias=False))
    layout = Layout.of_module(model)
    phase = replace(PHASE, noise_multiplier=multiplier * wrong, lr=1 / 0.3)
    job = job_of(torch.zeros(5, size), torch.zeros(5).long(), torch.zeros(2 * size), phase)
    (after,) = Stacked().run(model, layout, [job])
    found = float(after.double().std()) * 5 / multiplier  # the mean of five, in units of the clip
    assert (0.985 < found < 1.015) is (wrong == 1.0)


def test_sums_that_leave_a_client_are_integers() -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    layout = Layout.of_module(model)
    x, y = torch.randn(7, 4, generator=PublicSeed(1).generator()), torch.arange(7) % 3
    more: dict[str, Any] = {"noise_multiplier": 2.0, "sum_only": True}
    job = job_of(x, y, torch.zeros(12), replace(PHASE, **more))
    (found,) = Stacked().run(model, layout, [job])
    assert found.dtype == torch.float64
    assert torch.equal(found, found.round())


class OwnLoss(Classification):
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 0].square()


def test_a_loss_of_the_user_s_own_is_the_one_that_is_differentiated() -> None:
    model = nn.Linear(4, 2)
    layout, task = Layout.of_module(model), OwnLoss(classes=2)
    features = torch.randn(20, 4, generator=PublicSeed(1).generator())
    batch = Batch(features, torch.zeros(20, dtype=torch.long), task)
    sums = [
        engine.clipped_sum(model, layout, layout.read(model), batch, 1.0)
        for engine in (FullBatches(), OneByOne())
    ]
    assert torch.allclose(*sums, atol=1e-5)
