"""What a task is: what targets look like, what the model must give, a loss per record, metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, DataError, did_you_mean
from dpfl.core.types import Plain
from dpfl.tasks.metrics import METRICS, Evaluated

LARGEST = 1e18  # what predictions that are not finite count as


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned. Subclasses are the tasks; all of their settings are public constants.

    ``metric`` names the metric that ranks models. ``width`` is how many numbers the model gives for
    one record (or one token of it). ``targets`` is what the target of one record is: one of
    "classes", one of "numbers", or a row of several ("rows"). ``counted`` is the setting, if any,
    that :meth:`resolve` counts in the values of targets. Laws: ``losses`` returns one finite
    number per record for finite outputs, and the loss of a record depends on that record alone.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]
    targets: ClassVar[str] = "rows"
    counted: ClassVar[str] = ""
    metric: str = "loss"

    def __post_init__(self) -> None:
        known = self.known_metrics
        check(
            self.metric in known,
            "task metric",
            f"'{self.metric}' is not a metric of {self.name}",
            did_you_mean(self.metric, known),
        )

    @property
    def known_metrics(self) -> tuple[str, ...]:
        """The names of all metrics that this task computes."""
        return self.metrics

    @property
    def higher_is_better(self) -> bool:
        """Whether more of the ranking metric is better."""
        return METRICS[self.metric].higher_is_better

    @property
    def width(self) -> int:
        """How many numbers the model gives for one record, or one token of it."""
        raise NotImplementedError

    @property
    def softmax(self) -> bool:
        """Whether the loss is plain cross-entropy of one label: its gradient is then known in
        closed form, softmax - one-hot.
        """
        return False

    # -- targets -----------------------------------------------------------------------------------

    def check_targets(self, where: str, values: np.ndarray) -> Tensor:
        """Convert one client's targets, or refuse them; ``where`` names the client."""
        raise NotImplementedError

    def resolve(self, targets: Sequence[Tensor]) -> Self:
        """Fill what the settings leave open, such as the number of classes, from all targets."""
        return self

    @property
    def inferred(self) -> str:
        """The setting that has to be counted in targets; empty where everything is declared.

        The number of targets of a record is no such setting: it is the shape of the data.
        """
        return "" if self.single.counted in self.to_dict() else self.single.counted

    def outside(self, targets: Tensor) -> str | None:
        """Say what is wrong with targets of a task that is resolved, None if nothing is."""
        return None

    def takes(self, other: Task) -> bool:
        """Whether this task can learn the targets that ``other`` describes, one value a record.

        A site of a real federation says what its targets are before it is offered any study.
        """
        return self.targets == other.targets != "rows" and self.width == other.width

    @property
    def single(self) -> Task:
        """The task of single records: this one, unless a unit has several."""
        return self

    def same_units(self, task: Task) -> Task:
        """Return ``task`` for units of as many records as this task has them."""
        return task

    def records(self, targets: Tensor) -> Tensor:
        """The targets of single records."""
        return targets

    def constant(self, targets: Tensor) -> Tensor | None:
        """The outputs for one record of a model that ignores features and knows these targets."""
        return None

    def made_up(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return made-up targets for trying a model; ``shape`` is that of one target."""
        return torch.rand(count, *shape, generator=generator)

    def missing_from_test(self, targets: Tensor) -> str | None:
        """Say which kind of record the test records lack, if metrics depend on it."""
        return None

    # -- the model ---------------------------------------------------------------------------------

    def outputs(self, run: Callable[[Tensor], Any], features: Tensor) -> Any:
        """Apply a model (``run``) to a batch of records."""
        return run(features)

    @property
    def plain(self) -> bool:
        """Whether the model is simply applied to stored records, as the fast paths do."""
        return type(self).outputs is Task.outputs

    @property
    def of_records(self) -> Task:
        """The task of single records."""
        return self

    def record_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of what the model takes, of units that are stored in this shape."""
        return shape

    def accepts(self, outputs: Tensor) -> bool:
        """Whether outputs have the right shape."""
        return tuple(outputs.shape[1:] if outputs.ndim > 1 else (1,)) == (self.width,)

    @property
    def wanted(self) -> str:
        """What the model must return, in words."""
        return f"one row of {self.width} number(s) per record"

    def __str__(self) -> str:
        return self.name.replace("_", " ")

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One loss per record."""
        raise NotImplementedError

    def predictions(self, outputs: Tensor) -> Tensor:
        """What the model says of each record, in the form of the targets."""
        raise NotImplementedError

    def probabilities(self, outputs: Tensor) -> Tensor | None:
        """Probabilities, a column for each class or label; None where the task has none."""
        return None

    # -- metrics -----------------------------------------------------------------------------------

    def evaluated(self, outputs: Tensor, targets: Tensor) -> Evaluated:
        """What metrics are computed from."""
        finite = torch.nan_to_num(outputs, nan=0.0, posinf=LARGEST, neginf=-LARGEST)
        chances = self.probabilities(finite)
        return Evaluated(
            targets=targets.numpy(),
            predictions=self.predictions(finite).numpy(),
            losses=self.losses(outputs, targets).numpy(),
            probabilities=None if chances is None else chances.numpy(),
        )

    def score(self, outputs: Tensor, targets: Tensor) -> float:
        """The ranking metric; NaN where these records do not define it."""
        found = self.evaluated(outputs, targets)
        return METRICS[self.metric].compute(found) if len(found.targets) else math.nan

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """All metrics that these records define."""
        found = self.evaluated(outputs, targets)
        known = self.metrics if len(found.targets) else ()
        scores = {name: METRICS[name].compute(found) for name in known}
        return {name: score for name, score in scores.items() if math.isfinite(score)}

    def by_class(self, outputs: Tensor, targets: Tensor) -> tuple[tuple[int, ...], ...]:
        """The confusion matrix: a row for each true class. Empty where there are no classes."""
        return ()

    # -- files -------------------------------------------------------------------------------------

    def to_dict(self) -> Plain:
        """Return plain values, which travel with a model."""
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in told.items()}
        return {"name": self.name, **{k: v for k, v in plain.items() if v is not None}}

    def with_metric(self, metric: str | None) -> Self:
        """Return the same task ranked by another metric (None: as it is)."""
        return self if metric is None else replace(self, metric=metric)


def numbers(where: str, values: np.ndarray, what: str) -> np.ndarray:
    """Return targets as float64, and refuse what is not a finite number."""
    try:
        found = np.asarray(values, dtype=np.float64)
    except (ValueError, TypeError) as error:
        odd = next((str(one) for one in np.ravel(values) if not _is_number(one)), "")
        raise DataError(
            where,
            f"has {what} that are not numbers, such as {odd!r:.40}",
            "give numbers, and number classes from 0",
        ) from error
    check(
        bool(np.isfinite(found).all()),
        where,
        f"has {what} that are not finite numbers",
        "drop or fill missing targets",
        DataError,
    )
    return found


def _is_number(value: object) -> bool:
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def column(values: np.ndarray) -> np.ndarray:
    """A column of targets as a vector; everything else stays as it is."""
    return values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values


def weights_of(where: str, given: Sequence[float] | None) -> tuple[float, ...] | None:
    """Check weights of classes: positive numbers."""
    if given is None:
        return None
    try:
        found = tuple(float(weight) for weight in given)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            where, f"{given!r} are not weights", "give a list of positive numbers"
        ) from error
    check(
        bool(found) and all(0 < weight < math.inf for weight in found),
        where,
        f"{list(found)} are not weights",
        "give positive numbers, one a class",
    )
    return found
