"""Metrics by name: what each is computed from, which way is better, how it is shown.

They have the values of scikit-learn's, which takes longer to import than they take to compute. A
metric that the records do not define (an AUC without a positive record) is NaN.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dpfl.core.errors import unknown_name

_BINS = 15  # of the calibration error


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What metrics are computed from, as arrays with one row per record.

    ``probabilities`` has a column for each class (or label), and is None where a task has none.
    """

    targets: np.ndarray
    predictions: np.ndarray
    losses: np.ndarray
    probabilities: np.ndarray | None = None

    @property
    def one_hot(self) -> np.ndarray:
        """The targets as columns, one for each class or label."""
        if self.targets.ndim == 2 or self.probabilities is None:
            return self.targets
        wanted: np.ndarray = self.targets[:, None] == np.arange(self.probabilities.shape[1])
        return wanted


def accuracy(found: Evaluated) -> float:
    """Share of right predictions; of several labels, the share over all labels."""
    return float((found.predictions == found.targets).astype(np.float32).mean())


def balanced_accuracy(found: Evaluated) -> float:
    """Mean over the classes that occur of the share of their records that is recognised."""
    recognised = found.predictions == found.targets
    classes = np.unique(found.targets)
    return float(np.mean([recognised[found.targets == number].mean() for number in classes]))


def f1(found: Evaluated) -> float:
    """F1 score of class 1 where there are two classes, else the mean over classes or labels.

    F1 = 2 TP / (records of the class + records that are taken for it); 0 where there are neither.
    """
    pairs = np.stack([found.targets, found.predictions])
    if pairs.ndim == 2:
        classes = np.ones(1) if found.one_hot.shape[1] == 2 else np.unique(pairs)
        pairs = pairs[..., None] == classes
    right = pairs.all(axis=0).sum(axis=0)
    return float(np.mean(2 * right / np.maximum(1, pairs.sum(axis=(0, 1)))))


def auc(found: Evaluated) -> float:
    """Area under the ROC curve, of class 1 or as the mean over classes or labels.

    It is the share of pairs of a positive and a negative record of which the positive one has the
    larger probability; equal ones count half.
    """
    columns = _by_probability(found)
    return _mean([n @ (np.cumsum(p) - p / 2) / (p.sum() * n.sum()) for p, n in columns])


def average_precision(found: Evaluated) -> float:
    """Area under the precision-recall curve, of class 1 or as the mean over classes or labels.

    It is the mean over the positive records of the precision at the probability of each.
    """
    columns = _by_probability(found)
    return _mean([p @ (np.cumsum(p) / np.cumsum(p + n)) / p.sum() for p, n in columns])


def _by_probability(found: Evaluated) -> list[tuple[np.ndarray, np.ndarray]]:
    """How many positive and how many negative records have each probability, the largest first, for
    each column that has both kinds of records; of two classes, the second counts.
    """
    assert found.probabilities is not None
    wanted = found.one_hot
    chances = found.probabilities
    if found.targets.ndim == 1 and wanted.shape[1] == 2:
        wanted = wanted[:, 1:]
        chances = chances[:, 1:]
    columns = []
    for column, chance in zip(wanted.T, chances.T, strict=True):
        if 0 < column.sum() < len(column):
            _, inverse, counts = np.unique(-chance, return_inverse=True, return_counts=True)
            positives = np.bincount(inverse, weights=column)
            columns.append((positives, counts - positives))
    return columns


def _mean(scores: list[float]) -> float:
    return float(np.mean(scores)) if scores else math.nan


def calibration_error(found: Evaluated) -> float:
    """Expected calibration error: confidence and accuracy compared in 15 bins of equal width."""
    assert found.probabilities is not None
    chances = found.probabilities
    if found.targets.ndim == 2:  # each label is a decision of its own
        sure = np.maximum(chances, 1 - chances)
        right = found.predictions == found.targets
    else:
        sure = chances.max(axis=1)
        right = found.predictions == found.targets
    sure = sure.ravel()
    right = right.ravel()
    bins = np.minimum((sure * _BINS).astype(int), _BINS - 1)
    differences = np.bincount(bins, weights=sure - right, minlength=_BINS)
    return float(np.abs(differences).sum() / max(1, len(sure)))


def rmse(found: Evaluated) -> float:
    """Root mean squared error."""
    return float(np.sqrt(np.mean((found.predictions - found.targets) ** 2)))


def mae(found: Evaluated) -> float:
    """Mean absolute error."""
    return float(np.mean(np.abs(found.predictions - found.targets)))


def r2(found: Evaluated) -> float:
    """Coefficient of determination, the mean over outputs; NaN for fewer than two records.

    Of targets that are all the same it is 1 for predictions without error, 0 for others.
    """
    targets = found.targets
    if len(targets) < 2:
        return math.nan
    missed = np.sum((targets - found.predictions) ** 2, axis=0, dtype=np.float64)
    spread = np.sum((targets - targets.mean(axis=0)) ** 2, axis=0, dtype=np.float64)
    explained = 1 - missed / np.where(spread > 0, spread, 1)
    return float(np.mean(np.where(spread > 0, explained, missed == 0)))


def loss(found: Evaluated) -> float:
    """Mean over all test records of the loss that training minimises."""
    return float(found.losses.mean())


def perplexity(found: Evaluated) -> float:
    """Exponential of the mean loss per token."""
    return math.exp(min(float(found.losses.mean()), 50.0))


@dataclass(frozen=True)
class Metric:
    """A metric: how it is computed, whether more is better, and whether it is shown in percent
    (``share``).
    """

    compute: Callable[[Evaluated], float]
    higher_is_better: bool = True
    share: bool = True


METRICS = {
    "accuracy": Metric(accuracy),
    "balanced_accuracy": Metric(balanced_accuracy),
    "auc": Metric(auc, share=False),
    "average_precision": Metric(average_precision, share=False),
    "f1": Metric(f1, share=False),
    "calibration_error": Metric(calibration_error, higher_is_better=False, share=False),
    "rmse": Metric(rmse, higher_is_better=False, share=False),
    "mae": Metric(mae, higher_is_better=False, share=False),
    "r2": Metric(r2, share=False),
    "perplexity": Metric(perplexity, higher_is_better=False, share=False),
    "loss": Metric(loss, higher_is_better=False, share=False),
}
"""The metrics that dpfl knows, by name."""


def find_metric(name: str) -> Metric:
    """Return a metric by name; an unknown one is refused with the nearest known name.

    >>> find_metric("rmse").higher_is_better
    False
    """
    if name not in METRICS:
        raise unknown_name("metric", "metric", name, METRICS)
    return METRICS[name]


@dataclass(frozen=True)
class MetricWords:
    """How values of a metric (``name``) are shown: in percent for shares, else with four digits."""

    name: str

    @property
    def share(self) -> bool:
        """Whether values are shown in percent."""
        return self.name in METRICS and METRICS[self.name].share

    @property
    def title(self) -> str:
        """The heading of a column.

        >>> MetricWords("accuracy").title, MetricWords("rmse").title
        ('accuracy %', 'RMSE')
        """
        return f"{self.words} %" if self.share else self.words

    @property
    def words(self) -> str:
        """The name as people write it.

        >>> MetricWords("balanced_accuracy").words
        'balanced accuracy'
        """
        short = self.name in ("auc", "f1", "mae", "r2", "rmse")
        return self.name.upper() if short else self.name.replace("_", " ")

    @property
    def scale(self) -> float:
        """What a value is multiplied by before it is shown."""
        return 100.0 if self.share else 1.0

    def number(self, value: float) -> str:
        """Write one value below the metric's title.

        >>> MetricWords("accuracy").number(0.5), MetricWords("rmse").number(12.3456)
        ('50.0', '12.35')
        """
        return f"{100 * value:.1f}" if self.share else f"{value:.4g}"

    def show(self, value: float) -> str:
        """Write one value on its own.

        >>> MetricWords("accuracy").show(0.5), MetricWords("rmse").show(12.3456)
        ('50.0 %', '12.35')
        """
        return f"{self.number(value)} %" if self.share else self.number(value)

    def spread(self, values: Sequence[float]) -> str:
        """Write a mean and, for more than one value, the standard deviation.

        >>> MetricWords("accuracy").spread([0.5, 0.7])
        '60.0 ± 14.1'
        """
        mean = self.number(statistics.mean(values))
        if len(values) == 1:
            return mean
        spread = statistics.stdev(values)
        return f"{mean} ± {self.number(spread) if self.share else f'{spread:.2g}'}"
