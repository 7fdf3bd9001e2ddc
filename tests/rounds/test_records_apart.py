"""Metrics, releases and features whose records meet: refused, or computed so that they cannot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpfl
from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Claims
from dpfl.data.records import Shard
from dpfl.models.feature_map import Table
from dpfl.models.featured import with_features
from dpfl.plugs.measures import Accuracy, Measure
from dpfl.plugs.releases import GramMatrix, Mean, Release
from dpfl.rounds import buffer_shapes, enrol
from dpfl.rounds.measure import measured_answer
from dpfl.rounds.members import Member
from dpfl.rounds.release import release_answer
from dpfl.tasks import Classification, Task

RECORDS = 128
BUDGET = dpfl.Budget(epsilon=4.0, delta=1e-5)


def member(records: Tensor) -> Member:
    """A client that trains and tests on the same records, of two classes."""
    labels = torch.arange(len(records)) % 2
    claims = Claims(epsilon=BUDGET.epsilon, delta=BUDGET.delta, examples=len(records))
    shard = Shard.of(records, labels, records, labels)
    task = Classification(classes=2)
    return Member(id="a", shard=shard, budget=BUDGET, claims=claims, task=task)


def pair(size: float = 100.0) -> tuple[Tensor, Tensor]:
    """Two data sets that differ in one record."""
    torch.manual_seed(1)
    first = torch.rand(RECORDS, 4)
    second = first.clone()
    second[0] = size
    return first, second


# ---- an accounted metric -------------------------------------------------------------------------


class AttentionOverRecords(nn.Module):
    """Attention over the batch, behind a scale that starts at almost nothing and was learned."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.attention, self.top = nn.MultiheadAttention(4, 1), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.full((4,), scale))

    def forward(self, x: Tensor) -> Tensor:
        y = x[:, None]  # records as positions
        return self.top(x + self.scale * self.attention(y, y, y)[0][:, 0])


@dataclass(frozen=True, kw_only=True)
class Mixed(Accuracy):
    """How many records are right, given to each of them."""

    def statistic(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        rows = super().statistic(task, outputs, targets)
        return rows.min() + 0 * rows


def measured(measure: Measure, model: nn.Module, records: Tensor) -> Tensor:
    """The sum of a statistic, with next to no noise."""
    rng = SecretRng.simulated(PublicSeed(0))
    return measured_answer(measure, [model], member(records), 1e-4, rng)


@pytest.mark.parametrize("kind", ["attention", "a measure of its own"])
def test_one_record_moves_an_accounted_metric_by_one_at_most(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "attention":
        model: nn.Module = AttentionOverRecords(scale=30.0)
        measure: Measure = Accuracy()
    else:
        model, measure = nn.Linear(4, 2), Mixed()
        nn.init.constant_(model.weight, 0.0)
    first, second = pair(-5.0)
    sums = [measured(measure, model, records) for records in (first, second)]
    assert float((sums[0] - sums[1]).norm()) <= 1.01


# ---- releases before round one -------------------------------------------------------------------


class Centred(Mean):
    """The mean of the batch, given to each of its records."""

    def statistic(self, inputs: Tensor, labels: Tensor, shape: tuple[int, ...]) -> Tensor:
        return inputs.mean(dim=0, keepdim=True).expand_as(inputs)


class Summed(Mean):
    """Adds up without clipping."""

    def clipped_sum(self, inputs: Tensor, labels: Tensor, shape: tuple[int, ...]) -> Tensor:
        return inputs.double().sum(dim=0)


class Shifted(nn.Module):
    """Something of the user's own in front of the layer that owns the buffer."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("gram", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.mean


def released(release: Release, front: nn.Module, records: Tensor) -> Tensor:
    model = nn.Sequential(front, Holder(), nn.Linear(4, 2))
    base = dpfl.fedavg_dp(lr=0.1, clip=1.0, batch_size=8, local_steps=1)
    strategy = replace(base, releases=(release,))
    claims = {"a": Claims(epsilon=BUDGET.epsilon, delta=BUDGET.delta, examples=RECORDS)}
    shapes = buffer_shapes(model, strategy.releases)
    agreement: Any = enrol(strategy, claims, 2, Layout.of_module(model), shapes)
    rng = SecretRng.simulated(PublicSeed(5))  # the same noise on both
    return release_answer(agreement, -1, member(records), model, rng).double()


@pytest.mark.parametrize("front", [nn.Identity(), Shifted()], ids=["as they are", "centred"])
@pytest.mark.parametrize(
    "release",
    [
        Centred(into="1.mean", share=0.1),
        Summed(into="1.mean", share=0.1),
        Mean(into="1.mean", share=0.1),
        GramMatrix(into="1.gram", share=0.1),
    ],
    ids=lambda release: type(release).__name__,
)
def test_one_record_moves_a_release_by_two_bounds_at_most(
    release: Release, front: nn.Module
) -> None:
    first, second = (released(release, front, records) for records in pair())
    assert float((first - second).norm()) <= 2.01


# ---- features ------------------------------------------------------------------------------------


class CentredTable(Table):
    def features(self, records: Tensor) -> Tensor:
        return super().features(records) - records.flatten(1).mean(0)


class KeepsRecords(Table):
    """Keeps the first record it has seen."""

    def features(self, records: Tensor) -> Tensor:
        self.__dict__.setdefault("first", records[:1].clone())
        return records.flatten(1) - self.__dict__["first"].flatten(1)


def featured(features: nn.Module, records: Tensor) -> Tensor:
    budgets = {"a": BUDGET}
    arrays = {"a": (records.numpy(), (torch.arange(len(records)) % 2).numpy())}
    federation = dpfl.Federation.from_arrays(arrays, budgets=budgets)
    return with_features(federation, features).shards["a"].features


def test_features_of_the_user_s_own_are_of_single_records() -> None:
    first, second = (featured(CentredTable((4,)), records) for records in pair())
    assert int((first != second).any(dim=1).sum()) <= 1


def test_features_that_keep_records_are_refused() -> None:
    with pytest.raises((PrivacyRefusal, ConfigurationError), match="an earlier record"):
        featured(KeepsRecords((4,)), pair()[0])
