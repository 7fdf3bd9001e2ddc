"""What an accounted evaluation measures on private test records: accuracy, loss, a binned AUC.

A measure is a bounded statistic per test record. Every client adds up the statistics of its own
test records, adds noise on the grid and sends the result; value and standard error are computed
from the noisy sums. The model is taken as public: whatever made it was accounted for before.

A record's statistic lies in the unit ball and is a whole number of steps of 2^-24. Sums are
therefore exact in double precision, and one record moves them by at most 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dpfl.core.checks import check, one_of, positive, whole_number
from dpfl.core.errors import ConfigurationError
from dpfl.core.types import Unit
from dpfl.privacy.exposure import Exposure
from dpfl.tasks import Task

_STEPS = float(1 << 24)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A noisy value and the standard error that the noise gives it.

    How well the test records stand for others is not part of the standard error.
    """

    value: float
    standard_error: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ± {self.standard_error:.2g}"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A bounded statistic per test record, and what its noisy sum says.

    Laws: row i of ``statistic`` depends on record i alone and lies in the unit ball, whatever the
    outputs are; ``estimate`` is finite for any finite sum.
    """

    name: ClassVar[str]
    higher_is_better: ClassVar[bool] = True

    @property
    def numbers(self) -> int:
        """How many numbers the statistic has."""
        return 1

    def blank(self, task: Task) -> float:
        """Each number of the statistic of a blank: the worst there is, or zero where records are
        counted. No record's statistic is further from it than 1.
        """
        return 0.0

    def misfit(self, task: Task) -> str | None:
        """Say why the measure does not fit a task, None if it does."""
        return None

    def statistic(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one row of numbers per record."""
        raise NotImplementedError

    def estimate(self, total: Tensor, variance: float, records: int) -> Estimate:
        """Return the value from a noisy sum over ``records`` test records.

        ``variance`` is that of the noise on each number.
        """
        raise NotImplementedError


def exact_sum(rows: Tensor, records: int, numbers: int) -> Tensor:
    """Add up a statistic's rows exactly; one outside the unit ball counts as zero."""
    check(
        rows.shape == (records, numbers),
        "measure",
        f"gives {tuple(rows.shape)} for {records} records of {numbers}",
        "match statistic and numbers",
    )
    rows = rows.to(torch.float64)
    inside = torch.linalg.vector_norm(rows, dim=1, keepdim=True) <= 1  # False for NaN
    steps = torch.where(inside, rows, torch.zeros_like(rows)).mul_(_STEPS).trunc_()
    return steps.sum(dim=0) / _STEPS


_CLASSES = ("classification", "binary", "multi_label")


def _without(task: Task, lack: str) -> str:
    if task.name == "per_person":
        return "counts single records, and here a unit is a person with several"
    return f"{task.name} has {lack}"


@dataclass(frozen=True, kw_only=True)
class Accuracy(Measure):
    """The share of right predictions; a record whose outputs are not finite counts as wrong."""

    name: ClassVar[str] = "accuracy"

    def misfit(self, task: Task) -> str | None:
        """Say that a task without classes has no accuracy."""
        return None if task.name in _CLASSES else _without(task, "no classes to count")

    def statistic(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return 1 where the prediction is right; of several labels, the share of right ones."""
        right = (task.predictions(outputs) == targets).double().reshape(len(targets), -1)
        finite = torch.isfinite(outputs).reshape(len(targets), -1).all(dim=1, keepdim=True)
        return torch.where(finite, right.mean(dim=1, keepdim=True), 0.0)

    def estimate(self, total: Tensor, variance: float, records: int) -> Estimate:
        """Divide by the number of records, which is public; brought into 0..1."""
        value = min(1.0, max(0.0, float(total[0]) / records))
        return Estimate(value=value, standard_error=math.sqrt(variance) / records)


@dataclass(frozen=True, kw_only=True)
class MeanLoss(Measure):
    """The mean loss, each record's brought into 0 .. ``bound``, a public number.

    A loss that is not a number counts as the bound, and so does a blank. A loss of the user's own
    may be negative: it is brought into -``bound`` .. ``bound``, and a blank counts as 0.
    """

    name: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    bound: float

    def __post_init__(self) -> None:
        positive("loss", bound=self.bound)

    def statistic(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss over its bound."""
        losses = task.losses(outputs, targets).double().reshape(-1, 1) / self.bound
        return losses.nan_to_num(nan=1.0).clamp(self.blank(task) - 1.0, 1.0)

    def blank(self, task: Task) -> float:
        """Return 1 where losses are not negative."""
        return 0.0 if task.single.name == "custom" else 1.0

    def estimate(self, total: Tensor, variance: float, records: int) -> Estimate:
        """Divide by the number of records; brought into the range of a loss."""
        value = min(1.0, max(-1.0, float(total[0]) / records))
        error = math.sqrt(variance) / records
        return Estimate(value=value * self.bound, standard_error=error * self.bound)


@dataclass(frozen=True, kw_only=True)
class BinnedAuc(Measure):
    """The area under the ROC curve of two classes, from a noisy histogram of score and class.

    Scores are probabilities of class 1, in ``bins`` equal bins; two records of one bin count as
    half. The standard error is a second-order expansion in the noise, at the noisy counts.
    """

    name: ClassVar[str] = "auc"
    bins: int = 16

    def __post_init__(self) -> None:
        whole_number("auc", "bins", self.bins, least=2)
        check(self.bins <= 10_000, "auc", f"bins = {self.bins}", "use at most 10000")

    @property
    def numbers(self) -> int:
        """Bins of class 0, then bins of class 1."""
        return 2 * self.bins

    def misfit(self, task: Task) -> str | None:
        """Say that a task without exactly two classes has no ROC curve."""
        two = task.name == "binary" or (task.name == "classification" and task.width == 2)
        return None if two else _without(task, "more or fewer than two classes")

    def statistic(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return a 1 in the bin of the record's score and class."""
        chances = task.probabilities(outputs)
        assert chances is not None  # a task that fits has them
        place = (chances[:, 1].nan_to_num(0.0) * self.bins).long().clamp(0, self.bins - 1)
        return F.one_hot(place + self.bins * (targets > 0.5).long(), self.numbers)

    def estimate(self, total: Tensor, variance: float, records: int) -> Estimate:
        """Count the pairs in which the record of class 1 has the higher score.

        Counts keep their sign: noise of both classes is independent, so sums of products have no
        bias. Where one class has a noisy count of 0 or less, nothing is known: 0.5 ± 0.5.
        """
        no, yes = total.double().numpy().reshape(2, self.bins)
        nos = float(no.sum())
        yeses = float(yes.sum())
        if nos <= 0 or yeses <= 0:
            return Estimate(value=0.5, standard_error=0.5)
        below = np.cumsum(no) - no / 2
        above = np.cumsum(yes[::-1])[::-1] - yes / 2
        value = float(yes @ below) / (nos * yeses)
        slopes = ((below / nos - value) / yeses, (above / yeses - value) / nos)
        first = variance * sum(float(slope @ slope) for slope in slopes)
        places = np.arange(self.bins)
        wins = (np.sign(places[:, None] - places) + 1) / 2 - value
        second = variance**2 * float((wins**2).sum()) / (nos * yeses) ** 2
        error = min(0.5, math.sqrt(first + second))
        return Estimate(value=min(1.0, max(0.0, value)), standard_error=error)


MEASURES: dict[str, Callable[[float | None, int], Measure]] = {
    "accuracy": lambda bound, bins: Accuracy(),
    "loss": lambda bound, bins: MeanLoss(bound=_given(bound)),
    "auc": lambda bound, bins: BinnedAuc(bins=bins),
}


def _given(bound: float | None) -> float:
    problem = "a loss has no bound of its own"
    remedy = "give bound, a public number"
    if bound is None:
        raise ConfigurationError("loss", problem, remedy)
    return bound


def make_measure(metric: str | Measure, task: Task, bound: float | None, bins: int) -> Measure:
    """Return a measure by its name, or the one given; one that does not fit the task is refused.

    ``bound`` is that of a loss, ``bins`` are those of an AUC.
    """
    if isinstance(metric, str):
        one_of("evaluation", MEASURES, metric=metric)
        metric = MEASURES[metric](bound, bins)
    misfit = metric.misfit(task)
    fitting = [name for name, make in MEASURES.items() if make(1.0, bins).misfit(task) is None]
    check(
        misfit is None,
        f"metric {metric.name}",
        misfit or "",
        f"use another metric: {' or '.join(fitting)}",
    )
    return metric


def measured_exposure(
    std: float, numbers: int, copies: int = 1, unit: Unit = Unit.RECORD
) -> Exposure:
    """What noisy sums of ``numbers`` numbers show of one test record, or of one person, for
    ``copies`` models.
    """
    return Exposure(unit=unit, numbers=numbers).clipped(math.sqrt(copies)).noised(std)
