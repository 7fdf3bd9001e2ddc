"""Robust aggregation at the server of any method: another weighing of rows, or another mean."""

from dataclasses import fields, replace
from typing import Any

from dpfl.core.checks import check, one_of
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.types import Observer
from dpfl.plugs.robust import AGGREGATIONS, ClippedRows
from dpfl.plugs.weights import UniformWeights, Weights
from dpfl.strategy.fit import Strategy


def with_aggregation(strategy: Strategy, name: str, **settings: Any) -> Strategy:
    """Return a strategy that aggregates by ``name`` (:data:`dpfl.plugs.robust.AGGREGATIONS`).

    ``settings`` are those of the plug, such as ``byzantine``. Krum and the geometric median take
    the place of the method's weights; the trimmed mean and the median are averaged by equal
    weights. Refused are sums, which have no rows to look at, and methods whose guarantee rests on
    noise in a sum: a row that is selected alone carries only a share of that noise, and the
    sensitivity of a median is not that of a mean.

    ::

        dpfl.train(model, federation, with_aggregation(dpfl.weiavg(...), "krum", byzantine=2), ...)
    """
    where = "aggregation"
    one_of(where, AGGREGATIONS, aggregation=name)
    kind = AGGREGATIONS[name]
    known = {field.name for field in fields(kind)}
    for setting in settings:
        check(
            setting in known,
            f"aggregation {setting}",
            f"{name} has none",
            f"it has {' and '.join(sorted(known)) or 'no settings'}",
        )
    _check_rows(strategy, where, name)
    plug = kind(**settings)
    if isinstance(plug, Weights):
        return replace(strategy, weights=plug)
    _check_not_cleaned(strategy, where, "use krum, geometric_median or another method")
    return replace(strategy, clean=plug, weights=UniformWeights())


def with_clipped_rows(strategy: Strategy, bound: float | None = None) -> Strategy:
    """Return a strategy whose server scales down rows longer than ``bound``, or than the median
    length of the round's rows, before it weighs them as the method does.

    *Formal guarantees.* Rows are private before the server sees them, and clipping them is
    post-processing. Methods whose guarantee rests on noise in a sum are refused, as for any other
    robust aggregation (:func:`with_aggregation`).
    """
    where = "clip"
    _check_rows(strategy, where, "clipping rows")
    _check_not_cleaned(strategy, where, "leave clip out, or use another method or aggregation")
    return replace(strategy, clean=ClippedRows(bound=bound))


def _check_rows(strategy: Strategy, where: str, name: str) -> None:
    """Refuse a strategy whose server has no rows, or none that are private already."""
    check(
        strategy.channel.sees_rows,
        where,
        f"'{strategy.name}' delivers a sum, and {name} needs the rows of single clients",
        "use a method with a digital channel",
    )
    check(
        strategy.central_noise is None and strategy.observer is not Observer.WORLD,
        where,
        f"'{strategy.name}' is protected by noise in a sum, which {name} is not",
        "use a method whose clients add all of the noise themselves",
        PrivacyRefusal,
    )


def _check_not_cleaned(strategy: Strategy, where: str, remedy: str) -> None:
    """Refuse a strategy that cleans rows itself: there is one way at a time."""
    check(strategy.clean is None, where, f"'{strategy.name}' cleans rows in its own way", remedy)
