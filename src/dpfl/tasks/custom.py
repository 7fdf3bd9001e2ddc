"""A user's own loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, DataError
from dpfl.core.types import Plain
from dpfl.tasks.base import Task, numbers

Score = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True, kw_only=True)
class CustomTask(Task):
    """A loss of the user's own, one number per record.

    ``loss(outputs, targets)`` returns a tensor of shape (records,). It must be differentiable, and
    is computed record by record, so it must not read values into Python. ``outputs_per_record`` is
    how many numbers the model gives. ``own_metrics`` are functions of (outputs, targets) by name;
    ``metric`` is one of them, or "loss". ``more_is_better`` says which way the metric goes.
    ``whole_targets`` says that targets are whole numbers (int64); else they are float32.
    ``predict`` turns outputs into predictions, which are the outputs themselves if it is left out.

    >>> task = CustomTask(loss=lambda found, wanted: (found[:, 0] - wanted).abs())
    >>> task.losses(torch.ones(2, 1), torch.tensor([1.0, 3.0]))
    tensor([0., 2.])
    """

    name: ClassVar[str] = "custom"
    metrics: ClassVar[tuple[str, ...]] = ("loss",)
    loss: Callable[[Tensor, Tensor], Tensor]
    outputs_per_record: int | None = None
    own_metrics: Mapping[str, Score] = field(default_factory=lambda: MappingProxyType({}))
    more_is_better: bool = False
    whole_targets: bool = False
    predict: Callable[[Tensor], Tensor] | None = None

    @property
    def known_metrics(self) -> tuple[str, ...]:
        """The user's metrics, and the loss."""
        return (*self.metrics, *self.own_metrics)

    @property
    def higher_is_better(self) -> bool:
        """As the user says; less loss is better."""
        return self.more_is_better and self.metric != "loss"

    @property
    def width(self) -> int:
        """How many numbers the model gives for a record."""
        return self.outputs_per_record or 1

    def check_targets(self, where: str, values: np.ndarray) -> Tensor:
        """Convert numbers of any shape."""
        found = numbers(where, values, "targets")
        check(
            not self.whole_targets or bool(np.all(found == np.round(found))),
            where,
            "has targets that are not whole numbers",
            "give whole numbers, or whole_targets=False",
            DataError,
        )
        return torch.from_numpy(found.astype(np.int64 if self.whole_targets else np.float32))

    def made_up(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Made-up zeros and ones, which most losses take."""
        found = torch.randint(0, 2, (count, *shape), generator=generator)
        return found if self.whole_targets else found.to(torch.float32)

    def accepts(self, outputs: Tensor) -> bool:
        """Any outputs will do, unless their number is given."""
        return self.outputs_per_record is None or super().accepts(outputs)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The user's loss, which must be one number per record."""
        found = self.loss(outputs, targets)
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        check(
            shape == (len(targets),),
            "task",
            f"loss gives {shape} for {len(targets)} records",
            "return one number per record, without a mean over records",
        )
        return found

    def predictions(self, outputs: Tensor) -> Tensor:
        """The user's predictions, or the outputs themselves."""
        return outputs if self.predict is None else self.predict(outputs)

    def score(self, outputs: Tensor, targets: Tensor) -> float:
        """The value of the ranking metric: one of the user's own, or the mean loss."""
        return self.scores(outputs, targets)[self.metric]

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """The user's metrics, and the loss."""
        own = {name: float(score(outputs, targets)) for name, score in self.own_metrics.items()}
        return {"loss": float(self.losses(outputs, targets).mean()), **own}

    def to_dict(self) -> Plain:
        """A function cannot be written down: only names are."""
        return {"name": self.name, "metric": self.metric}


def cannot_load() -> ConfigurationError:
    """Say that a task with the user's own functions is not in a file."""
    return ConfigurationError(
        "task",
        "is the user's own, and no file holds its functions",
        "pass the same CustomTask again",
    )
