"""What a client gets on its own test records: alone, from the common model, and from both.

For a simulation, or for a client's own eyes: no ledger covers these numbers
(:mod:`dpfl.engine.personal_finish`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

import numpy as np

from dpfl.core.types import Plain
from dpfl.tasks import MetricWords
from dpfl.tasks.metrics import find_metric

_ROUNDING = 1e-6  # of metrics: one test record more is a difference of just one standard error


class Verdict(StrEnum):
    """What a client gets from the federation, as far as its own test records show."""

    HELPS = "federating helps"
    NOTHING = "federating buys nothing"


@dataclass(frozen=True, kw_only=True)
class FinishScores:
    """What a client gets on its own test records: without noise, and not accounted.

    ``local`` is the value of ``metric`` for a model of its own records alone, ``common`` for the
    common model, ``both`` for the personal finish. ``error`` is the standard error of the
    difference between ``local`` and the better of the others, on the same ``tested`` records.
    ``strength`` is the lambda that was chosen; infinity keeps the common head, and ``note`` says
    why where folds did not choose it.
    """

    metric: str = "accuracy"
    local: float
    common: float
    both: float
    error: float
    tested: int
    strength: float
    note: str = ""

    @property
    def gain(self) -> float:
        """How much better than ``local`` the better of the others is; negative if it is worse."""
        sign = 1 if find_metric(self.metric).higher_is_better else -1
        return max(sign * (other - self.local) for other in (self.common, self.both))

    @property
    def verdict(self) -> Verdict:
        """Whether the gain is larger than its standard error.

        >>> equal = {"error": 0.02, "tested": 50, "strength": 0.1}
        >>> str(FinishScores(local=0.8, common=0.7, both=0.81, **equal).verdict)
        'federating buys nothing'
        """
        return Verdict.HELPS if self.gain > self.error + _ROUNDING else Verdict.NOTHING

    @property
    def sentence(self) -> str:
        """The verdict and its reason, for people."""
        words, show = MetricWords(self.metric).words, MetricWords(self.metric).show
        alone = f"{words} is {show(self.local)} with its own records alone"
        others = f"{show(self.common)} with the common model, {show(self.both)} with both"
        error = f"the standard error of the difference is {show(self.error)}"
        verdict = "helps this site"
        if self.verdict is Verdict.NOTHING:
            verdict = f"buys this site nothing that {self.tested} test records can show"
        return f"Federating {verdict}: {alone}, {others}; {error}."

    def to_dict(self) -> Plain:
        """Return plain values, as files hold them; infinity is written as a word."""
        strength = "infinite" if math.isinf(self.strength) else self.strength
        return {**vars(self), "strength": strength, "verdict": str(self.verdict)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read back what :meth:`to_dict` wrote."""
        strength = values["strength"]
        return cls(
            **{name: float(values[name]) for name in ("local", "common", "both", "error")},
            metric=str(values["metric"]),
            tested=int(values["tested"]),
            strength=math.inf if strength == "infinite" else float(strength),
            note=str(values.get("note", "")),
        )


def finish_means(finish: Mapping[str, FinishScores]) -> tuple[float, float, float]:
    """Means over clients of what local models, the common model and personal finishes score."""
    rows = [(one.local, one.common, one.both) for one in finish.values()]
    local, common, both = np.mean(rows, axis=0).tolist()
    return local, common, both


def finish_gain(finish: Mapping[str, FinishScores]) -> tuple[float, float]:
    """The mean over clients of what a personal finish adds to own records alone, and its standard
    error over clients; of one client its own standard error.
    """
    gains = np.array([one.both - one.local for one in finish.values()])
    if len(gains) < 2:
        return float(gains.mean()), next(iter(finish.values())).error
    return float(gains.mean()), float(gains.std(ddof=1) / math.sqrt(len(gains)))
