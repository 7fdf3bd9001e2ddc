"""Numbers: squared and Huber loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dpfl.core.checks import check, one_of, positive, whole_number
from dpfl.core.errors import DataError
from dpfl.tasks.base import Task, column, numbers


@dataclass(frozen=True, kw_only=True)
class Regression(Task):
    """One number a record, or several.

    ``loss`` is "squared" (half the squared error) or "huber" (linear beyond an error of ``delta``).
    ``outputs_per_record`` left out is the number of columns of the targets; a record's loss is the
    mean over them. Scale targets by public constants: gradients grow with the error, and clipping
    then hides all but the sign of large ones.
    """

    name: ClassVar[str] = "regression"
    metrics: ClassVar[tuple[str, ...]] = ("rmse", "mae", "r2", "loss")
    targets: ClassVar[str] = "numbers"
    metric: str = "rmse"
    loss: Literal["squared", "huber"] = "squared"
    delta: float = 1.0
    outputs_per_record: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("task", ("squared", "huber"), loss=self.loss)
        positive("task", delta=self.delta)
        if self.outputs_per_record is not None:
            count = whole_number("task", "outputs_per_record", self.outputs_per_record)
            object.__setattr__(self, "outputs_per_record", count)

    @property
    def width(self) -> int:
        """How many numbers a target has."""
        return self.outputs_per_record or 1

    def check_targets(self, where: str, values: np.ndarray) -> Tensor:
        """Convert one number, or one row of numbers, per record."""
        found = column(numbers(where, values, "targets"))
        check(
            found.ndim in (1, 2),
            where,
            f"has targets of shape {found.shape}",
            "give one number, or one row of numbers, per record",
            DataError,
        )
        check(
            bool((np.abs(found) <= 1e15).all()),
            where,
            "has targets beyond 1e15",
            "scale them by a public constant",
            DataError,
        )
        return torch.from_numpy(found.astype(np.float32))

    def resolve(self, targets: Sequence[Tensor]) -> Self:
        """Take the numbers per record from the targets, which must agree on it."""
        columns = {1 if target.ndim == 1 else target.shape[1] for target in targets}
        check(
            len(columns) == 1 and self.outputs_per_record in (None, *columns),
            "federation",
            f"clients have {sorted(columns)} targets per record",
            "give every client the same targets",
            DataError,
        )
        return replace(self, outputs_per_record=columns.pop())

    def constant(self, targets: Tensor) -> Tensor:
        """The mean of the targets: the constant that has the least squared error."""
        return targets.mean(dim=0).reshape(-1)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Half the squared error, or Huber's loss; the mean over a record's targets."""
        found = outputs.reshape(len(targets), -1)
        wanted = targets.reshape(len(targets), -1)
        if self.loss == "huber":
            each = F.huber_loss(found, wanted, delta=self.delta, reduction="none")
        else:
            each = (found - wanted).square() / 2
        return each.mean(dim=1)

    def predictions(self, outputs: Tensor) -> Tensor:
        """The numbers themselves."""
        return outputs[:, 0] if outputs.ndim == 2 and outputs.shape[1] == 1 else outputs
