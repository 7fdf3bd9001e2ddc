"""Classes: one of several, and one logit for two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dpfl.core.checks import check, positive, whole_number
from dpfl.core.errors import DataError
from dpfl.tasks.base import Task, column, numbers, weights_of

_METRICS = ("accuracy", "balanced_accuracy", "auc", "average_precision", "f1", "calibration_error")
_NUMBERED = "number the classes from 0"


def _class_numbers(where: str, values: np.ndarray, most: float) -> Tensor:
    """Whole numbers from 0, one a record."""
    found = column(numbers(where, values, "labels"))
    check(
        found.ndim == 1,
        where,
        f"has labels of shape {found.shape}",
        "give one class number per record, not one-hot rows",
        DataError,
    )
    check(
        bool(np.all(found == np.round(found))),
        where,
        "has labels that are not whole numbers",
        f"{_NUMBERED}, or choose the task 'regression'",
        DataError,
    )
    odd = found[(found < 0) | (found > most)]
    check(
        not len(odd),
        where,
        f"has label {next(iter(odd), 0):g}",
        "label records 0 or 1" if most == 1 else _NUMBERED,
        DataError,
    )
    return torch.from_numpy(found.astype(np.int64))


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """One of several classes.

    The model gives a row of at least ``classes`` scores. ``classes`` left out is the largest label
    and one more. ``class_weights`` multiply the loss of each class's records: public constants, not
    counts of private records.

    >>> Classification(classes=3).width
    3
    """

    name: ClassVar[str] = "classification"
    metrics: ClassVar[tuple[str, ...]] = (*_METRICS, "loss")
    targets: ClassVar[str] = "classes"
    counted: ClassVar[str] = "classes"
    metric: str = "accuracy"
    classes: int | None = None
    class_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        where = "task class_weights"
        object.__setattr__(self, "class_weights", weights_of(where, self.class_weights))
        if self.classes is not None:
            count = whole_number("task", "classes", self.classes)
            object.__setattr__(self, "classes", count)
        if self.classes is not None and self.class_weights is not None:
            check(
                len(self.class_weights) == self.classes,
                where,
                f"{len(self.class_weights)} weights for {self.classes} classes",
                "give one a class",
            )

    @property
    def width(self) -> int:
        """The number of classes."""
        return self.classes or 1

    @property
    def softmax(self) -> bool:
        """Whether the loss is plain cross-entropy: it is, unless classes have weights."""
        return self.class_weights is None

    def check_targets(self, where: str, values: np.ndarray) -> Tensor:
        """Convert class numbers."""
        return _class_numbers(where, values, 2**31 - 1)

    def resolve(self, targets: Sequence[Tensor]) -> Self:
        """Take the number of classes from the largest label, unless it is given.

        A class that nobody has a record of is refused: it may be a mistake of numbering.
        """
        if self.classes is not None:
            return self
        labels = torch.cat(list(targets)) if targets else torch.zeros(0)
        largest = int(labels.max()) if len(labels) else 0
        check(
            largest < max(len(labels), 1),
            "federation",
            f"there is a label {largest}, more than records",
            "check which column is the label, or choose the task 'regression'",
            DataError,
        )
        gaps = torch.nonzero(torch.bincount(labels.long(), minlength=1) == 0).flatten().tolist()
        named = ", ".join(map(str, gaps[:5])) + (", ..." if len(gaps) > 5 else "")
        check(
            not (len(labels) and gaps),
            "federation",
            f"labels go up to {largest}, and nobody has a record of class {named}",
            f"number the classes without gaps, or declare classes = {largest + 1}",
            DataError,
        )
        return replace(self, classes=largest + 1)

    def outside(self, targets: Tensor) -> str | None:
        """Say which label is not a class."""
        if not len(targets):
            return None
        low, high = (int(end) for end in torch.aminmax(targets))
        odd = low if low < 0 else high if high >= self.width else None
        return None if odd is None else f"has label {odd}, outside 0..{self.width - 1}"

    def takes(self, other: Task) -> bool:
        """Whether the other task's targets are classes, and no more of them."""
        return other.targets == "classes" and other.width <= self.width

    def constant(self, targets: Tensor) -> Tensor:
        """The logarithm of each class's share."""
        return torch.bincount(targets, minlength=self.width).div(len(targets)).clamp(1e-9).log()

    def made_up(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return made-up classes: 0 and 1 in turn, where there are two."""
        return torch.arange(count) % min(2, self.width)

    def missing_from_test(self, targets: Tensor) -> str | None:
        """Say which of two classes the test records lack; of more classes, none is asked for."""
        return _lacking(targets) if self.classes == 2 and len(targets) else None

    def accepts(self, outputs: Tensor) -> bool:
        """Whether there is a score for each class, at least."""
        return outputs.ndim == 2 and outputs.shape[1] >= self.width

    @property
    def wanted(self) -> str:
        """What the model must return, in words."""
        return f"one row of {self.width} scores per record"

    def __str__(self) -> str:
        return f"{self.width} classes"

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy, times the weight of the record's class."""
        weights = self.class_weights
        own = None if weights is None else torch.tensor(weights, device=outputs.device)
        if own is not None and outputs.shape[1] > len(own):  # scores of classes that nobody has
            own = F.pad(own, (0, outputs.shape[1] - len(own)), value=1.0)
        return F.cross_entropy(outputs, targets, weight=own, reduction="none")

    def predictions(self, outputs: Tensor) -> Tensor:
        """The class with the largest score."""
        return outputs.argmax(1)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Softmax of the scores."""
        return outputs.double().softmax(dim=1)

    def by_class(self, outputs: Tensor, targets: Tensor) -> tuple[tuple[int, ...], ...]:
        """The confusion matrix."""
        return _confusion(self.predictions(outputs), targets, outputs.shape[1])


@dataclass(frozen=True, kw_only=True)
class Binary(Task):
    """Yes or no, by one logit.

    Targets are 0 and 1. ``positive_weight`` multiplies the loss of positive records.
    """

    name: ClassVar[str] = "binary"
    metrics: ClassVar[tuple[str, ...]] = (*_METRICS, "loss")
    targets: ClassVar[str] = "classes"
    metric: str = "auc"
    positive_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("task", positive_weight=self.positive_weight)

    @property
    def width(self) -> int:
        """One number: the logit of the positive answer."""
        return 1

    def check_targets(self, where: str, values: np.ndarray) -> Tensor:
        """Convert zeros and ones."""
        return _class_numbers(where, values, 1).to(torch.float32)

    def takes(self, other: Task) -> bool:
        """Whether the other task's targets are at most two classes."""
        return other.targets == "classes" and other.width <= 2

    def constant(self, targets: Tensor) -> Tensor:
        """The logit of the share of positive records."""
        return targets.mean().logit(eps=1e-9).reshape(1)

    def made_up(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return made-up answers: no and yes in turn."""
        return (torch.arange(count) % 2).to(torch.float32)

    def missing_from_test(self, targets: Tensor) -> str | None:
        """Say which of the two answers the test records lack."""
        return _lacking(targets)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Logistic loss of the logit, times the weight of positive records."""
        weight = torch.tensor(self.positive_weight, device=outputs.device)
        logits = outputs.reshape(len(targets))
        wanted = targets.to(outputs.dtype)
        return F.binary_cross_entropy_with_logits(
            logits, wanted, pos_weight=weight, reduction="none"
        )

    def predictions(self, outputs: Tensor) -> Tensor:
        """One where the logit is above 0."""
        return (outputs.reshape(len(outputs)) > 0).long()

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Probabilities of no and of yes."""
        yes = outputs.double().reshape(len(outputs)).sigmoid()
        return torch.stack([1 - yes, yes], dim=1)

    def by_class(self, outputs: Tensor, targets: Tensor) -> tuple[tuple[int, ...], ...]:
        """The confusion matrix."""
        return _confusion(self.predictions(outputs), targets, 2)


def _lacking(targets: Tensor) -> str | None:
    """Which of the answers 0 and 1 occurs in no target, in a word."""
    words = {0: "negative", 1: "positive"}
    return next((word for answer, word in words.items() if not (targets == answer).any()), None)


def _confusion(predicted: Tensor, targets: Tensor, classes: int) -> tuple[tuple[int, ...], ...]:
    """How many records of each true class (row) are taken for each class (column)."""
    places = targets.long() * classes + predicted.long()
    counts = torch.bincount(places, minlength=classes**2).reshape(classes, classes)
    return tuple(map(tuple, counts.tolist()))
