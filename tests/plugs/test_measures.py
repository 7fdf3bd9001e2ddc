"""Measures: bounded per record, exact sums, and honest standard errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.metrics import roc_auc_score
from torch import Tensor

from dpfl.core.errors import ConfigurationError
from dpfl.plugs.accounted_metric import AccountedMetric
from dpfl.plugs.measures import (
    Accuracy,
    BinnedAuc,
    MeanLoss,
    Measure,
    exact_sum,
    make_measure,
    measured_exposure,
)
from dpfl.tasks import Binary, Classification, PerPerson, Regression, Task, TokenPrediction
from dpfl.tasks.custom import CustomTask

TWO = Classification(classes=2)
CASES: list[tuple[Measure, Task]] = [
    (Accuracy(), TWO),
    (Accuracy(), Binary()),
    (MeanLoss(bound=2.0), TWO),
    (MeanLoss(bound=0.5), Regression()),
    (BinnedAuc(bins=8), TWO),
    (BinnedAuc(bins=8), Binary()),
]
anything = st.floats(allow_nan=True, allow_infinity=True, width=32)


def outputs_for(task: Task, values: list[float]) -> Tensor:
    width = 2 if task.width == 2 else 1
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(width).reshape(-1, width)


def summed(measure: Measure, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    return exact_sum(measure.statistic(task, outputs, targets), len(targets), measure.numbers)


@pytest.mark.parametrize(("measure", "task"), CASES)
@given(values=st.lists(anything, min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_a_record_that_becomes_a_blank_moves_the_sum_by_at_most_one(
    measure: Measure, task: Task, values: list[float]
) -> None:
    outputs = outputs_for(task, values)
    rows = measure.statistic(task, outputs, targets_for(task, len(outputs))).double()
    apart = torch.linalg.vector_norm(rows - measure.blank(task), dim=1)
    assert float(apart.max()) <= 1 + 1e-12


def test_a_loss_that_may_be_negative_counts_a_blank_in_the_middle() -> None:
    task = CustomTask(loss=lambda found, wanted: found[:, 0] - wanted)
    measure = MeanLoss(bound=2.0)
    rows = measure.statistic(task, torch.tensor([[-9.0], [9.0]]), torch.zeros(2))
    assert rows.flatten().tolist() == [-1.0, 1.0] and measure.blank(task) == 0.0


def targets_for(task: Task, count: int) -> Tensor:
    targets = torch.arange(count) % 2
    return targets if task.name == "classification" else targets.to(torch.float32)


@pytest.mark.parametrize(("measure", "task"), CASES)
@given(values=st.lists(anything, min_size=1, max_size=6), more=anything)
@settings(max_examples=40, deadline=None)
def test_a_record_moves_the_sum_by_at_most_one(
    measure: Measure, task: Task, values: list[float], more: float
) -> None:
    """Whatever the model gives, also what is not finite; and no record changes another's part."""
    outputs = outputs_for(task, [*values, more])
    outputs[:, -1] += 1  # not a tie of all classes
    targets = targets_for(task, len(outputs))
    with_it = summed(measure, task, outputs, targets)
    without = summed(measure, task, outputs[:-1], targets[:-1])
    alone = summed(measure, task, outputs[-1:], targets[-1:])
    assert torch.isfinite(with_it).all()
    assert float(torch.linalg.vector_norm(with_it - without)) <= 1
    assert torch.equal(with_it, without + alone)  # exact: sums lose nothing


def test_a_statistic_outside_the_ball_counts_as_zero() -> None:
    class Careless(Accuracy):
        def statistic(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
            return outputs[:, :1]

    rows = torch.tensor([[0.5], [1.5], [math.nan], [-1.0]])
    assert summed(Careless(), TWO, rows, torch.zeros(4)).tolist() == [-0.5]
    with pytest.raises(ConfigurationError, match="match statistic and numbers"):
        summed(Broken(), TWO, rows, torch.zeros(4))


class Broken(BinnedAuc):
    def statistic(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs


def test_a_loss_that_is_not_a_number_counts_as_the_bound() -> None:
    outputs = torch.tensor([[math.nan, 0.0], [1e30, 0.0], [0.0, 0.0], [math.inf, 0.0]])
    measure = MeanLoss(bound=2.0)
    total = summed(measure, TWO, outputs, torch.tensor([0, 1, 0, 1]))
    found = measure.estimate(total, 0.0, 4)
    assert found.value == pytest.approx((2 + 2 + math.log(2) + 2) / 4, abs=1e-6)


def test_a_record_without_finite_outputs_is_wrong() -> None:
    outputs = torch.tensor([[math.nan, math.nan], [2.0, 1.0], [1.0, 2.0]])
    assert summed(Accuracy(), TWO, outputs, torch.tensor([0, 0, 0])).tolist() == [1.0]


# ---- AUC -----------------------------------------------------------------------------------------


def scored(count: int, shift: float, seed: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    targets = rng.random(count) < 0.3
    logits = rng.normal(size=count) + shift * targets
    return torch.from_numpy(logits).reshape(-1, 1), torch.from_numpy(targets).to(torch.float32)


@pytest.mark.parametrize("shift", [0.0, 1.0, -2.0])
def test_without_noise_it_is_the_auc_of_binned_scores(shift: float) -> None:
    logits, targets = scored(500, shift, 0)
    measure = BinnedAuc(bins=32)
    total = summed(measure, Binary(), logits, targets)
    places = (torch.sigmoid(logits) * 32).floor()
    exact = roc_auc_score(targets.numpy(), places.numpy().ravel())
    found = measure.estimate(total, 0.0, 500)
    assert found.value == pytest.approx(exact, abs=1e-12)
    assert found.standard_error == 0
    assert abs(found.value - roc_auc_score(targets.numpy(), logits.numpy().ravel())) < 0.01


@pytest.mark.parametrize(("records", "std"), [(3000, 5.0), (500, 10.0)])
def test_the_standard_error_of_an_auc_is_that_of_its_noise(records: int, std: float) -> None:
    logits, targets = scored(records, 1.0, 1)
    measure, rng = BinnedAuc(bins=16), np.random.default_rng(2)
    total = summed(measure, Binary(), logits, targets)
    exact = measure.estimate(total, 0.0, records).value
    found = [
        measure.estimate(total + std * torch.from_numpy(rng.normal(size=32)), std**2, records)
        for _ in range(1500)
    ]
    values = np.array([one.value for one in found])
    errors = np.array([one.standard_error for one in found])
    spread = float(np.sqrt(np.mean((values - exact) ** 2)))
    assert abs(values.mean() - exact) < 0.15 * spread + 4 * spread / math.sqrt(1500)
    assert 0.85 < float(np.sqrt(np.mean(errors**2))) / spread < 1.25
    within = np.mean(np.abs(values - exact) <= 2 * errors)
    assert within > 0.92


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_auc_of_one_class_says_that_nothing_is_known(sign: float) -> None:
    total = torch.zeros(16, dtype=torch.float64)
    total[:8], total[8:] = sign * 5.0, -sign * 3.0
    found = BinnedAuc(bins=8).estimate(total, 4.0, 40)
    assert (found.value, found.standard_error) == (0.5, 0.5)


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=16, max_size=16), noise=st.floats(0.0, 1e6))
@settings(max_examples=60, deadline=None)
def test_estimates_are_finite_and_in_range(values: list[float], noise: float) -> None:
    total = torch.tensor(values, dtype=torch.float64)
    for measure in (Accuracy(), MeanLoss(bound=3.0), BinnedAuc(bins=8)):
        found = measure.estimate(total, noise**2, 7)
        assert math.isfinite(found.value)
        assert math.isfinite(found.standard_error)
        low = -3.0 if measure.name == "loss" else 0.0
        assert low <= found.value <= (3.0 if measure.name == "loss" else 1.0)


# ---- what is charged, what is refused ------------------------------------------------------------


def test_several_models_cost_what_their_joint_sensitivity_says() -> None:
    """k statistics of one record have the norm sqrt(k): the noise must grow with it."""
    (one,) = measured_exposure(10.0, 64).events()
    (four,) = measured_exposure(20.0, 256, copies=4).events()
    assert one.noise_multiplier == pytest.approx(10.0, rel=1e-3)
    assert four.noise_multiplier == pytest.approx(one.noise_multiplier, rel=1e-3)
    assert four.noise_multiplier < 10.0  # rounding onto the grid is charged


@pytest.mark.parametrize(
    ("metric", "task", "more", "said"),
    [
        (
            "auc",
            Classification(classes=3),
            {},
            "than two classes; use another metric: accuracy or loss",
        ),
        ("accuracy", PerPerson(task=TWO), {}, "a unit is a person .* metric: loss$"),
        ("accuracy", Regression(), {}, "no classes"),
        ("accuracy", TokenPrediction(vocabulary=5), {}, "no classes"),
        ("loss", TWO, {}, "no bound of its own"),
        ("loss", TWO, {"bound": -1.0}, "bound = -1"),
        ("auc", TWO, {"bins": 1}, "bins = 1"),
        ("acuracy", TWO, {}, "accuracy"),
    ],
)
def test_what_does_not_fit_is_refused(
    metric: str, task: Task, more: dict[str, Any], said: str
) -> None:
    options = {"bound": None, "bins": 32, **more}
    with pytest.raises(ConfigurationError, match=said):
        make_measure(metric, task, **options)


def test_a_schedule_is_part_of_the_plan() -> None:
    metric = AccountedMetric(metric="auc", every=4, share=0.2, bins=10)
    shares = metric.shares(TWO, 11)
    assert [part for part, _ in shares] == pytest.approx([0.1, 0.1])
    assert [numbers for _, numbers in shares] == [20, 20]
    assert [done for done in range(12) if metric.is_due(done)] == [4, 8]
    assert metric.higher_is_better
    assert not AccountedMetric(metric=MeanLoss(bound=1.0), share=0.1).higher_is_better
    for wrong in ({"share": 0.0}, {"share": 1.0}, {"share": 0.1, "every": 0}):
        with pytest.raises(ConfigurationError):
            AccountedMetric(**wrong)
    with pytest.raises(ConfigurationError, match="so never"):
        metric.shares(TWO, 3)
