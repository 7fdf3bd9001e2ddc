"""What a membership attack found, beside what is claimed: typed, and plain values for a file.

The bound that a stated epsilon puts on every membership attack, and figures beside it.

*Formal guarantees.* For whoever decides from what an adversary sees whether one unit was there, the
history of the plan gives a least rate of misses at every rate of false alarms
(:func:`dpfl.privacy.meaning.trade_off_curve`). One minus it bounds the true positive rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from dpfl.attacks.members.likelihood import Trials
from dpfl.attacks.observation import Observation
from dpfl.core.types import Observer, Plain
from dpfl.privacy.accountant import spend
from dpfl.privacy.events import History
from dpfl.privacy.meaning import trade_off_curve

_GRID = np.union1d(np.geomspace(1e-5, 0.1, 81), np.linspace(0.1, 1.0, 181))
"""False positive rates at which a bound is computed."""


def claimed_bound(
    seen: Observation, clients: Sequence[str], view: View, rates: Sequence[float]
) -> ClaimedBound | None:
    """What the plan of a run claims for units of ``clients``, by what the adversary looks at.

    A published model is the world's to see, where the method accounts for the world apart; a
    transcript is the server's. Of several clients the one with the largest epsilon counts. At
    ``rates`` the bound is exact. None where nothing is claimed: a trusted server is no adversary.
    """
    own = seen.simulation
    strategy = own.strategy
    apart = own.agreement.charges_world
    observer = Observer.WORLD if view == "model" and apart else Observer.SERVER
    claims: list[tuple[float, float, History]] = []
    for client in clients if own.protects else ():
        budget = own.members[client].budget
        history = seen.history(client, observer)
        delta = budget.delta if budget else 1.0
        spent = spend(history, delta, adjacency=strategy.adjacency).epsilon
        claims.append((spent, delta, history))
    epsilon, delta, history = max(claims, default=(math.inf, 1.0, ()), key=lambda one: one[0])
    if not math.isfinite(epsilon):
        return None
    grid = np.union1d(_GRID, np.asarray(rates)).tolist()
    misses = trade_off_curve(history, strategy.adjacency, grid)
    points = tuple((rate, 1 - missed) for rate, missed in misses)
    # The bound rises: every stretch of the area lies below its right end.
    widths = np.diff([0.0, *(rate for rate, _ in points)])
    promised = strategy.observer is observer
    return ClaimedBound(
        adversary=strategy.promise.adversary if promised else str(observer),
        epsilon=epsilon,
        delta=delta,
        auc=min(1.0, float(widths @ np.array([hits for _, hits in points]))),
        points=points,
    )


def figures_of(
    trials: Trials,
    bound: ClaimedBound | None,
    rates: Sequence[float],
    *,
    confidence: float,
    tests: int,
) -> tuple[Measured, ...]:
    """The area under a curve, and its true positive rates at ``rates``, beside the ``bound``.

    Limits have the ``confidence`` each. Whether a rate exceeds the bound is decided at a stricter
    level, at which all ``tests`` of a result hold together (Bonferroni); for a rate, the limits of
    both rates are tests.
    """
    strict = 1 - (1 - confidence) / tests
    area = trials.auc(confidence)
    largest = bound.auc if bound else None
    found = [Measured(rate=None, **vars(area), bound=largest, exceeds=False)]
    for rate in rates:
        hits, _ = trials.hits(rate, confidence)
        surely, most = trials.hits(rate, strict)
        exceeds = bound is not None and surely.low > bound.at(most)
        allowed = bound.at(rate) if bound else None
        found.append(Measured(rate=rate, **vars(hits), bound=allowed, exceeds=exceeds))
    return tuple(found)


View = Literal["model", "transcript"]
VIEWS: dict[View, str] = {"model": "published model", "transcript": "server's transcript"}
"""What the adversary looks at, in words."""

Attack = Literal["likelihood", "threshold"]
ATTACKS: dict[Attack, str] = {"likelihood": "LiRA", "threshold": "threshold"}
"""How it decides, in words: by a law for every target, or by one threshold for all of them."""

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class ClaimedBound:
    """What is claimed of the targets against one adversary, and the largest true positive rate that
    the claim allows at every false positive rate.

    ``epsilon`` at ``delta`` is that of the planned releases and rounds; of several clients the
    largest. ``auc`` is the largest area under a curve below ``points``.
    """

    adversary: str
    epsilon: float
    delta: float
    auc: float
    points: Points

    def at(self, rate: float) -> float:
        """The bound at a false positive ``rate``, or a little to the right of it: it rises."""
        return next((hits for place, hits in self.points if place >= rate), 1.0)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ClaimedBound:
        """Read back plain values."""
        return cls(**{**values, "points": _points(values["points"])})


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One figure of an attack with its confidence limits: an area (``rate`` is None), or the true
    positive rate at a false positive ``rate``.

    ``bound`` is what the claim allows, None where nothing is claimed. ``exceeds``: a lower limit
    lies above the bound, with all figures of the result taken together, and with the uncertainty
    of the false positive rate counted in.
    """

    rate: float | None
    value: float
    low: float
    high: float
    bound: float | None
    exceeds: bool = False

    @property
    def words(self) -> str:
        """The figure by its usual name: AUC, or the TPR at a false positive rate."""
        return "AUC" if self.rate is None else hits_words(self.rate)


@dataclass(frozen=True, kw_only=True)
class MembershipCurve:
    """One attack on one view: its figures, and its ROC curve as pairs (FPR, TPR).

    ``missing`` are false positive rates for which there are too few trials.
    """

    view: View
    attack: Attack
    figures: tuple[Measured, ...]
    roc: Points
    missing: tuple[float, ...] = ()

    @property
    def auc(self) -> Measured:
        """The area under the curve."""
        return next(figure for figure in self.figures if figure.rate is None)

    @property
    def rates(self) -> list[Measured]:
        """The true positive rates, by rising false positive rates."""
        known = [(figure.rate, figure) for figure in self.figures if figure.rate is not None]
        return [figure for _, figure in sorted(known, key=lambda pair: pair[0])]

    def hits(self, rate: float) -> Measured | None:
        """The true positive rate at a false positive ``rate``; None where it was not measured."""
        return next((figure for figure in self.figures if figure.rate == rate), None)

    @property
    def exceeds(self) -> bool:
        """Whether any figure exceeds its bound."""
        return any(figure.exceeds for figure in self.figures)

    @property
    def words(self) -> str:
        """View and attack, in words."""
        return f"{VIEWS[self.view]}, {ATTACKS[self.attack]}"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MembershipCurve:
        """Read back plain values."""
        figures = tuple(Measured(**figure) for figure in values["figures"])
        own = {"figures": figures, "roc": _points(values["roc"]), "missing": (*values["missing"],)}
        return cls(**{**values, **own})


@dataclass(frozen=True, kw_only=True)
class MembershipResult:
    """What a membership attack found.

    ``client`` holds the targets where these are records (or persons). ``left_out``: absent records
    were left out, not replaced by nothing, because the method protects nobody. ``absences`` is in
    how many of the runs x ``targets`` trials the target was absent. ``bounds`` are by view; a view
    without one has no claim. ``seed`` is the root from which coins, draws and noise follow.
    """

    method: str
    unit: str
    adjacency: str
    client: str | None
    left_out: bool
    runs: int
    targets: int
    absences: int
    confidence: float
    bounds: Mapping[View, ClaimedBound]
    curves: tuple[MembershipCurve, ...]
    seed: int
    seconds: float

    @property
    def views(self) -> list[View]:
        """What was attacked, in order."""
        return list(dict.fromkeys(curve.view for curve in self.curves))

    @property
    def exceeding(self) -> list[MembershipCurve]:
        """The attacks that do better than the claim allows."""
        return [curve for curve in self.curves if curve.exceeds]

    def curve(self, view: View, attack: Attack) -> MembershipCurve:
        """The curve of an attack on a view."""
        kinds = {(curve.view, curve.attack): curve for curve in self.curves}
        return kinds[view, attack]

    def to_dict(self) -> Plain:
        """Return plain values that JSON can carry."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MembershipResult:
        """Read back what :meth:`to_dict` returned, also after JSON."""
        bounds = {view: ClaimedBound.from_dict(own) for view, own in values["bounds"].items()}
        curves = tuple(map(MembershipCurve.from_dict, values["curves"]))
        return cls(**{**values, "bounds": bounds, "curves": curves})


def hits_words(rate: float) -> str:
    """What a true positive rate at a false positive ``rate`` is called.

    >>> hits_words(0.001)
    'TPR at FPR 0.1 %'
    """
    return f"TPR at FPR {100 * rate:g} %"


def _points(pairs: Any) -> Points:
    return tuple((float(x), float(y)) for x, y in pairs)
