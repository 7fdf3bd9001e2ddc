"""Krum, trimmed mean, median and geometric median over DP-SGD clients.

Paper
    Blanchard, El Mhamdi, Guerraoui, Stainer: *Machine Learning with Adversaries: Byzantine Tolerant
    Gradient Descent*, NeurIPS 2017 (``krum``); Yin, Chen, Ramchandran, Bartlett: *Byzantine-Robust
    Distributed Learning: Towards Optimal Statistical Rates*, ICML 2018 (``trimmed_mean``,
    ``median``); Pillutla, Kakade, Harchaoui: *Robust Aggregation for Federated Learning*, IEEE
    Transactions on Signal Processing 2022 (``geometric_median``).

In one sentence
    The server replaces the mean of the clients' updates by one that no few of them can move far.

Equations
    ``krum``: the ``selected`` updates with the least sum of squared distances to their n - f - 2
    nearest. ``trimmed_mean``: coordinate by coordinate, the mean without the f smallest and largest
    values. ``median``: coordinate by coordinate. ``geometric_median``: the point with the least sum
    of distances to the updates (:mod:`dpfl.plugs.robust`).

Formal guarantees
    As ``fedavg_dp``: made at the clients, so that robust aggregation is post-processing. With f of
    n updates replaced by anything (n >= 2 f + 3 for ``krum``, n > 2 f elsewhere) the result stays
    near the honest updates. DP noise is not distinguished from an attack: clients with small
    budgets may be left out for good.

Departures
    Krum's ties are averaged instead of broken by number. The geometric median iterates until it
    stands still, and counts clients alike. Where fewer clients answer than were expected, f is
    lowered to what they allow.
"""

from dpfl.plugs.robust import GeometricMedianWeights, KrumWeights, Median, TrimmedMean
from dpfl.plugs.weights import UniformWeights
from dpfl.strategy import Strategy
from dpfl.strategy.method import method
from dpfl.strategy.record_level import RecordWork, record_level


@method(family="heterogeneous", simplicity=52, search={"selected": (1, 5)})
def krum(work: RecordWork, weights: KrumWeights) -> Strategy:
    """DP-SGD clients; the server follows the update that is closest to its neighbours, or the mean
    of several such.
    """
    return record_level("krum", work, weights)


@method(family="heterogeneous", simplicity=54, search={"byzantine": (1, 2)})
def trimmed_mean(work: RecordWork, clean: TrimmedMean) -> Strategy:
    """DP-SGD clients; the server leaves out the extremes of every coordinate, and averages the
    rest.
    """
    return record_level("trimmed_mean", work, UniformWeights(), clean=clean)


@method(family="heterogeneous", simplicity=56)
def median(work: RecordWork) -> Strategy:
    """DP-SGD clients; the server takes the median of every coordinate."""
    return record_level("median", work, UniformWeights(), clean=Median())


@method(family="heterogeneous", simplicity=58)
def geometric_median(work: RecordWork, weights: GeometricMedianWeights) -> Strategy:
    """DP-SGD clients; the server takes the point with the least sum of distances to the updates."""
    return record_level("geometric_median", work, weights)
