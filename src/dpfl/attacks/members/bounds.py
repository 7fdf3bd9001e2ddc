"""The bound that a stated epsilon puts on every membership attack, and figures beside it.

*Formal guarantees.* For whoever decides from what an adversary sees whether one unit was there, the
history of the plan gives a least rate of misses at every rate of false alarms
(:func:`dpfl.privacy.meaning.trade_off_curve`). One minus it bounds the true positive rate.
"""

import math
from collections.abc import Sequence

import numpy as np

from dpfl.attacks.members.likelihood import Trials
from dpfl.attacks.members.result import ClaimedBound, Measured, View
from dpfl.attacks.observation import Observation
from dpfl.core.types import Observer
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
