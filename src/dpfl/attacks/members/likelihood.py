"""From statistics of many runs to ROC curves: the likelihood-ratio attack, and intervals.

Every run is the target once and a shadow run for all others (Carlini, Chien, Nasr, Song, Terzis,
Tramer: *Membership Inference Attacks From First Principles*, IEEE S&P 2022; there LiRA, offline).
Arrays have a row a run and a column a target; ``present`` says which targets were trained on.

*Dependence.* Targets of one run share its noise, so trials are not independent. Limits of AUCs use
the variance between runs (Obuchowski, *Biometrics* 1997); limits of rates are Clopper and Pearson's
at the effective number of trials (Korn and Graubard, *Survey Methodology* 1998), which is never
larger than the number of trials.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit, ndtri
from scipy.stats import beta, rankdata, t

Floats = NDArray[np.float64]
Marks = NDArray[np.bool_]

FEW = 32
"""Shadow runs of a target below which all targets have one variance in common."""


def likelihood_scores(statistics: Floats, present: Marks) -> Floats:
    """Score every target in every run by how far it is above what it would be if it were absent.

    A normal law is fitted to the statistic of a target over the other runs in which it was absent;
    the score is the standardised statistic, which orders trials as that law's distribution function
    does. With fewer than :data:`FEW` such runs a target the variance is that of all targets.

    The presence of a target in a run never enters its own score, so coins must be independent: in a
    balanced design the number of shadow runs would tell the coin.

    >>> statistics = np.array([[5.0], [1.0], [2.0], [3.0]])
    >>> likelihood_scores(statistics, np.array([[True], [False], [False], [False]]))[0]
    array([3.])
    """
    absent = (~present).astype(np.float64)
    shift = statistics.mean(axis=0)
    moved = statistics - shift  # sums of squares stay small
    counts, sums, squares = (
        (absent * power).sum(axis=0) - absent * power for power in (1.0, moved, moved**2)
    )
    every = np.maximum(absent.sum() - absent.sum(axis=1), 1)[:, None]
    rest = (absent * statistics).sum() - (absent * statistics).sum(axis=1)[:, None]
    means = np.where(counts > 0, sums / np.maximum(counts, 1), rest / every - shift)
    around = np.maximum(squares - counts * means**2, 0.0)
    free = np.maximum(counts - 1, 0)
    if np.median(counts) < FEW:
        around, free = (one.sum(axis=1, keepdims=True) for one in (around, free))
    variances = np.maximum(around / np.maximum(free, 1), np.finfo(np.float64).tiny)
    return np.asarray((moved - means) / np.sqrt(variances))


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value, and confidence limits on both sides of it."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Trials:
    """Scores of all targets in all runs, and who was ``present``: a row a run.

    An attack with threshold s says "present" where a score is above s.
    """

    scores: Floats
    present: Marks

    @property
    def absences(self) -> int:
        """In how many trials the target was absent."""
        return int((~self.present).sum())

    # -- the curve ---------------------------------------------------------------------------------

    def curve(self, most: int = 200) -> tuple[tuple[float, float], ...]:
        """The ROC curve as pairs (false positive rate, true positive rate), rising.

        Of a long curve about ``most`` points are kept, as many in every decade.
        """
        from sklearn.metrics import roc_curve

        alarms, hits, _ = roc_curve(self.present.ravel(), self.scores.ravel())
        if len(alarms) > most:
            places = np.geomspace(1 / self.absences, 1, most)
            kept = np.unique(np.searchsorted(alarms, places, side="right") - 1)
            alarms = alarms[[0, *kept]]
            hits = hits[[0, *kept]]
        return tuple(zip(alarms.tolist(), hits.tolist(), strict=True))

    def auc(self, confidence: float) -> Interval:
        """The area under the curve, with a t interval of its log odds from the variance between
        runs.
        """
        there = self.scores[self.present]
        gone = self.scores[~self.present]
        ranks = rankdata(np.concatenate([there, gone]))
        above = (ranks[: len(there)] - rankdata(there)) / len(gone)
        below = 1 - (ranks[len(there) :] - rankdata(gone)) / len(there)
        area = float(above.mean())
        runs = len(self.scores)
        moved = np.zeros(self.scores.shape)
        moved[self.present] = (above - area) / len(there)
        moved[~self.present] = (below - area) / len(gone)
        error = np.sqrt(runs / (runs - 1) * np.square(moved.sum(axis=1)).sum())
        if error == 0 or not 0 < area < 1:  # all runs alike: as if every run were one trial
            low, high = _exact(area, runs, confidence)
            return Interval(value=area, low=low, high=high)
        # On the scale of log odds, where an area near 1 does not stand at the end of its range.
        reach = float(t.ppf((1 + confidence) / 2, runs - 1) * error / (area * (1 - area)))
        low, high = (float(expit(logit(area) + way * reach)) for way in (-1, 1))
        return Interval(value=area, low=low, high=high)

    def hits(self, rate: float, confidence: float) -> tuple[Interval, float]:
        """The true positive rate at a false positive ``rate``, and the upper confidence limit of
        the rate itself.

        The threshold is an order statistic of the absent targets' scores: at most that share of
        them is above it.
        """
        gone = np.sort(self.scores[~self.present])[::-1]
        above = self.scores > gone[int(rate * len(gone))]
        hits = self._share(above, self.present, confidence)
        alarms = self._share(above, ~self.present, confidence)
        return hits, alarms.high

    # -- confidence limits -------------------------------------------------------------------------

    def _share(self, above: Marks, chosen: Marks, confidence: float) -> Interval:
        """The share of ``chosen`` trials that are ``above``, at the effective number of trials."""
        count = int(chosen.sum())
        runs = len(self.scores)
        share = float(above[chosen].mean())
        ranks = np.zeros(self.scores.shape)
        ranks[chosen] = rankdata(self.scores[chosen]) - (count + 1) / 2
        misses = np.where(chosen, above - share, 0.0)
        spread = max(1.0, _design_effect(misses), _design_effect(ranks))
        tail = (1 + confidence) / 2
        effective = count / spread * (ndtri(tail) / t.ppf(tail, runs - 1)) ** 2
        low, high = _exact(share, effective, confidence)
        return Interval(value=share, low=low, high=high)


def _design_effect(values: Floats) -> float:
    """How much larger the variance of a mean is than if trials of a run were independent."""
    apart = np.square(values).sum()
    runs = len(values)
    between = runs / (runs - 1) * np.square(values.sum(axis=1)).sum()
    return float(between / apart) if apart > 0 else 1.0


def _exact(share: float, count: float, confidence: float) -> tuple[float, float]:
    """Clopper and Pearson's limits of a share of ``count`` trials.

    >>> [round(limit, 4) for limit in _exact(1.0, 10, 0.95)]
    [0.6915, 1.0]
    """
    tail = (1 - confidence) / 2
    hits = share * count
    low = float(beta.ppf(tail, hits, count - hits + 1)) if share > 0 else 0.0
    high = float(beta.ppf(1 - tail, hits + 1, count - hits)) if share < 1 else 1.0
    return low, high
