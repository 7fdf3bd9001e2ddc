"""Persons with several records: one loss, one gradient and one clip for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from dpfl.core.types import Plain
from dpfl.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class PerPerson(Task):
    """Another task, learned from persons who have a bounded number of records each.

    A unit is a person: features (persons, places, ...) and targets (persons, places, ...), where
    the first place always holds a record. A place without one is marked in its target, by NaN or
    the smallest whole number. The model is applied to single records. A person's loss is the mean
    over the person's records, so one person has one gradient, which is clipped once. Metrics are
    those of single records.

    *Formal guarantees.* A person's loss is a function of that person's records alone; places
    without a record have no influence on it.

    >>> from dpfl.tasks.regression import Regression
    >>> task = PerPerson(task=Regression())
    >>> targets = task.check_targets("client 'a'", np.array([[1.0, 3.0], [5.0, np.nan]]))
    >>> task.losses(torch.zeros(2, 2, 1), targets)
    tensor([ 2.5000, 12.5000])
    """

    name: ClassVar[str] = "per_person"
    metrics: ClassVar[tuple[str, ...]] = ()
    task: Task

    def __post_init__(self) -> None:
        object.__setattr__(self, "metric", self.task.metric)

    @property
    def known_metrics(self) -> tuple[str, ...]:
        """The names of the metrics of the task that persons' records are for."""
        return self.task.known_metrics

    @property
    def higher_is_better(self) -> bool:
        """Whether more of the task's ranking metric is better."""
        return self.task.higher_is_better

    @property
    def width(self) -> int:
        """How many numbers the model gives for one record."""
        return self.task.width

    @property
    def plain(self) -> bool:
        """No: records are taken out of their persons first."""
        return False

    @property
    def single(self) -> Task:
        """The task of a person's records."""
        return self.task

    def same_units(self, task: Task) -> Task:
        """Return ``task`` for persons."""
        return PerPerson(task=task)

    def records(self, targets: Tensor) -> Tensor:
        """The targets of all persons' records."""
        return targets.flatten(0, 1)[real_places(targets).flatten()]

    @property
    def of_records(self) -> Task:
        """The task that is learned from persons."""
        return self.task

    def record_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of one of a person's records."""
        return shape[1:]

    # -- targets -----------------------------------------------------------------------------------

    def check_targets(self, where: str, values: np.ndarray) -> Tensor:
        """Convert targets (persons, places, ...).

        NaN marks a place without a record, among whole numbers the smallest one.
        """
        count, places = values.shape[:2]
        flat = np.asarray(values).reshape(count * places, *values.shape[2:])
        first = flat.reshape(len(flat), -1)[:, 0]
        if flat.dtype.kind == "i":  # converted before, by a task that learns classes
            real = first != np.iinfo(flat.dtype).min
        else:
            real = ~np.isnan(first.astype(np.float64))
        flat = flat.astype(np.float64)
        found = self.task.check_targets(where, flat[real])
        targets = torch.full((len(flat), *found.shape[1:]), _absent(found), dtype=found.dtype)
        targets[torch.from_numpy(real)] = found
        return targets.reshape(count, places, *found.shape[1:])

    def resolve(self, targets: Sequence[Tensor]) -> Self:
        """Fill what the task leaves open, from all records."""
        return replace(self, task=self.task.resolve(list(map(self.records, targets))))

    def outside(self, targets: Tensor) -> str | None:
        """Say what is wrong with the targets of records."""
        return self.task.outside(self.records(targets))

    def made_up(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return made-up targets of persons who fill all places."""
        return self.task.made_up(count * shape[0], shape[1:], generator).reshape(count, *shape)

    def missing_from_test(self, targets: Tensor) -> str | None:
        """Say which kind of record the test persons lack."""
        return self.task.missing_from_test(self.records(targets))

    # -- the model ---------------------------------------------------------------------------------

    def outputs(self, run: Callable[[Tensor], Any], features: Tensor) -> Any:
        """Apply a model to all places of a batch of persons."""
        found = self.task.outputs(run, features.flatten(0, 1))
        if not isinstance(found, Tensor):
            return found
        return found.reshape(*features.shape[:2], *found.shape[1:])

    def accepts(self, outputs: Tensor) -> bool:
        """Whether outputs of single records have the right shape."""
        return outputs.ndim >= 2 and self.task.accepts(outputs.flatten(0, 1))

    @property
    def wanted(self) -> str:
        """What the model must return for records, in words."""
        return self.task.wanted

    def __str__(self) -> str:
        return str(self.task)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One loss per person: the mean over the person's records."""
        real = real_places(targets)
        # The first record stands in for those that are not there, so that no loss is undefined.
        whole = real.reshape(*real.shape, *(1,) * (targets.ndim - 2))
        filled = torch.where(whole, targets, targets[:, :1])
        each = self.task.losses(outputs.flatten(0, 1), filled.flatten(0, 1)).reshape(real.shape)
        return torch.where(real, each, 0.0).sum(1) / real.sum(1)

    def predictions(self, outputs: Tensor) -> Tensor:
        """What the model says of every place."""
        found = self.task.predictions(outputs.flatten(0, 1))
        return found.reshape(*outputs.shape[:2], *found.shape[1:])

    # -- metrics, of single records ----------------------------------------------------------------

    def score(self, outputs: Tensor, targets: Tensor) -> float:
        """The ranking metric over all records."""
        return self.task.score(*_records(outputs, targets))

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """All metrics over all records."""
        return self.task.scores(*_records(outputs, targets))

    def by_class(self, outputs: Tensor, targets: Tensor) -> tuple[tuple[int, ...], ...]:
        """The confusion matrix of all records."""
        return self.task.by_class(*_records(outputs, targets))

    def to_dict(self) -> Plain:
        """Return the task of single records: that is what travels with a model."""
        return self.task.to_dict()

    def with_metric(self, metric: str | None) -> Self:
        """Return the same task ranked by another metric."""
        return replace(self, task=self.task.with_metric(metric))


def _absent(targets: Tensor) -> float | int:
    """What marks a place without a record, in targets of this type."""
    return float("nan") if targets.is_floating_point() else torch.iinfo(targets.dtype).min


def real_places(targets: Tensor) -> Tensor:
    """Which places of (persons, places, ...) hold a record."""
    first = targets.flatten(2)[..., 0] if targets.ndim > 2 else targets
    return ~first.isnan() if targets.is_floating_point() else first != _absent(targets)


def _records(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets of single records, without places that hold none."""
    real = real_places(targets).flatten()
    return outputs.flatten(0, 1)[real], targets.flatten(0, 1)[real]
