"""What a search has tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpfl.core.types import Plain
from dpfl.experiments.study import Values
from dpfl.tasks import MetricWords


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A candidate of a search (``values``), and its mean score on ``validation`` records.

    ``metric`` names the score, ``higher_is_better`` which way it is better. ``rounds`` says how far
    it went, where a search drops candidates early.
    """

    values: Values
    validation: float
    metric: str = "accuracy"
    higher_is_better: bool = True
    rounds: int | None = None

    @property
    def words(self) -> MetricWords:
        """How its score is shown."""
        return MetricWords(self.metric)

    def to_dict(self) -> Plain:
        """Return plain values."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trial:
        """Read back what :meth:`to_dict` wrote, in this version or in 0.1."""
        return cls(**{k.removesuffix("_accuracy"): value for k, value in values.items()})
