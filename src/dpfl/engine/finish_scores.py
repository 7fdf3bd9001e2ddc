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

_ROUNDING = 1e-6  # of metrics: four test records more are a difference of just two standard errors


class Verdict(StrEnum):
    """What a client gets from the federation, as far as its own test records show."""

    HELPS = "federating helps"
    NOTHING = "federating buys nothing"
    UNCLEAR = "too few test records to tell"


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
        """Which way the gain goes, if it is larger than two standard errors.

        The standard error is that of no difference: the gain itself adds to the variance, which is
        most of it where few records differ.

        >>> equal = {"error": 0.02, "tested": 50, "strength": 0.1}
        >>> str(FinishScores(local=0.8, common=0.7, both=0.83, **equal).verdict)
        'too few test records to tell'
        >>> str(FinishScores(local=0.8, common=0.7, both=0.85, **equal).verdict)
        'federating helps'
        """
        error = math.hypot(self.error, self.gain / math.sqrt(max(1, self.tested)))
        if abs(self.gain) <= 2 * error + _ROUNDING:
            return Verdict.UNCLEAR
        return Verdict.HELPS if self.gain > 0 else Verdict.NOTHING

    @property
    def sentence(self) -> str:
        """The verdict and its reason, for people."""
        words = MetricWords(self.metric).words
        show = MetricWords(self.metric).show
        alone = f"{words} is {show(self.local)} with its own records alone"
        others = f"{show(self.common)} with the common model, {show(self.both)} with both"
        error = f"the standard error of the difference is {show(self.error)}"
        verdict = {
            Verdict.HELPS: "Federating helps this site",
            Verdict.NOTHING: "Federating buys this site nothing",
            Verdict.UNCLEAR: f"{self.tested} test records are too few to tell whether federating "
            "helps this site, which takes a difference of two standard errors",
        }[self.verdict]
        return f"{verdict}: {alone}, {others}; {error}."

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
