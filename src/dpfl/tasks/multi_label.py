"""Several labels at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dpfl.core.checks import check
from dpfl.core.errors import DataError
from dpfl.tasks.base import Task, numbers


@dataclass(frozen=True, kw_only=True)
class MultiLabel(Task):
    """Several labels at once, each present or not.

    Targets are rows of 0 and 1. ``labels`` left out is the number of columns. A record's loss is
    the mean over its labels.
    """

    name: ClassVar[str] = "multi_label"
    metrics: ClassVar[tuple[str, ...]] = (
        *("accuracy", "auc", "average_precision", "f1", "calibration_error"),
        "loss",
    )
    metric: str = "auc"
    labels: int | None = None

    @property
    def width(self) -> int:
        """The number of labels."""
        return self.labels or 1

    def check_targets(self, where: str, values: np.ndarray) -> Tensor:
        """Convert rows of zeros and ones."""
        found = numbers(where, values, "labels")
        remedy = "give one row of zeros and ones per record"
        check(found.ndim == 2, where, f"has labels of shape {found.shape}", remedy, DataError)
        odd = found[(found != 0) & (found != 1)]
        check(
            not len(odd),
            where,
            f"has label {next(iter(odd), 0):g} among several labels",
            remedy,
            DataError,
        )
        return torch.from_numpy(found.astype(np.float32))

    def resolve(self, targets: Sequence[Tensor]) -> Self:
        """Take the number of labels from the targets, which must agree on it."""
        columns = {target.shape[1] for target in targets}
        check(
            len(columns) == 1 and (self.labels is None or {self.labels} == columns),
            "federation",
            f"clients have {sorted(columns)} labels, not {self.labels or 'one number of them'}",
            "give every client the same labels",
            DataError,
        )
        return replace(self, labels=columns.pop())

    def made_up(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return made-up rows of labels, each present or not."""
        return torch.randint(0, 2, (count, *shape), generator=generator).to(torch.float32)

    def missing_from_test(self, targets: Tensor) -> str | None:
        """Name the first label that no test record has."""
        empty = (targets.sum(dim=0) == 0).nonzero().flatten().tolist()
        return f"positive (label {empty[0]})" if len(targets) and empty else None

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean logistic loss of a record's labels."""
        wanted = targets.to(outputs.dtype)
        found = F.binary_cross_entropy_with_logits(outputs, wanted, reduction="none")
        return found.mean(dim=1)

    def predictions(self, outputs: Tensor) -> Tensor:
        """One where a logit is above 0."""
        return (outputs > 0).long()

    def probabilities(self, outputs: Tensor) -> Tensor:
        """The probability of each label."""
        return outputs.double().sigmoid()
