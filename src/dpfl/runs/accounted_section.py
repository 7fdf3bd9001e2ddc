"""``[accounted]``: a metric on private test records that is part of a run's plan."""

from typing import Literal

from dpfl.plugs.accounted_metric import AccountedMetric
from dpfl.runs.toml_file import Section


class AccountedSection(Section):
    """The settings of :class:`dpfl.plugs.accounted_metric.AccountedMetric`."""

    metric: Literal["accuracy", "loss", "auc"] = "accuracy"
    every: int
    share: float
    bound: float | None = None
    bins: int | None = None

    def build(self) -> AccountedMetric:
        """Make the metric; settings that cannot be are refused."""
        return AccountedMetric(**self.model_dump(exclude_none=True))
