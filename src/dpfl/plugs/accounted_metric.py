"""A metric on private test records that is part of a training run's plan."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from dpfl.core.checks import check, share, whole_number
from dpfl.plugs.measures import Estimate, Measure, make_measure
from dpfl.plugs.release_costs import Shares
from dpfl.tasks import Task

SMALLEST_SHARE = 1e-6
"""With less of a budget, the noise of a measurement hides whatever is measured."""


@dataclass(frozen=True, kw_only=True)
class AccountedMetric:
    """A metric that a training run measures on private test records every few rounds.

    ``every`` so many rounds the metric is measured, with ``share`` of each client's budget for all
    measurements together; the rounds get what they leave. The whole schedule is part of the plan,
    so that stopping early may depend on it. ``metric`` is "accuracy", "loss" (with ``bound``),
    "auc" (with ``bins``), or a measure. The common model is measured, also where clients keep
    parts of their own.
    """

    metric: str | Measure = "accuracy"
    every: int = 1
    share: float
    bound: float | None = None
    bins: int = 16

    unaccounted: ClassVar[bool] = False

    def __post_init__(self) -> None:
        where = "accounted metric"
        share(where, share=self.share)
        check(self.share < 1, where, "it takes the whole budget", "give a share below 1")
        check(
            self.share >= SMALLEST_SHARE,
            where,
            f"share = {self.share}",
            f"give a share of at least {SMALLEST_SHARE:g}",
        )
        whole_number(where, "every", self.every)

    def measure(self, task: Task) -> Measure:
        """Return the measure for a task."""
        return make_measure(self.metric, task, self.bound, self.bins)

    def is_due(self, done: int) -> bool:
        """Whether the metric is measured after so many rounds."""
        return done > 0 and done % self.every == 0

    def shares(self, task: Task, rounds: int) -> Shares:
        """Return each planned measurement's share of a budget, and how many numbers it has."""
        count = rounds // self.every
        check(
            count > 0,
            "accounted metric",
            f"is measured every {self.every} of {rounds} rounds, so never",
            "measure more often",
        )
        return ((self.share / count, self.measure(task).numbers),) * count

    @cached_property
    def higher_is_better(self) -> bool:
        """Whether more of the metric is better."""
        known = self.metric
        return known != "loss" if isinstance(known, str) else known.higher_is_better

    def of_round(self, end: Any) -> float | None:
        """Look up what was measured after a round, for early stopping; None if nothing was.

        ``end.record`` is the record of the round.
        """
        found: Estimate | None = end.record.measured
        return None if found is None else found.value
