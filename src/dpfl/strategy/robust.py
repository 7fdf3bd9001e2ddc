"""Robust aggregation at the server of any method: another weighing of rows, or another mean."""

from dataclasses import fields, replace
from typing import Any

from dpfl.core.checks import check, one_of
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.types import Observer
from dpfl.plugs.robust import AGGREGATIONS
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
    where = "[server] aggregation"
    one_of(where, AGGREGATIONS, aggregation=name)
    kind = AGGREGATIONS[name]
    known = {field.name for field in fields(kind)}
    for setting in settings:
        remedy = f"it has {' and '.join(sorted(known)) or 'no settings'}"
        check(setting in known, f"[server] {setting}", f"{name} has none", remedy)
    check(strategy.channel.sees_rows, where, f"'{strategy.name}' delivers a sum, and {name} needs "
          "the rows of single clients", "use a method with a digital channel")  # fmt: skip
    problem = f"'{strategy.name}' is protected by noise in a sum, which {name} is not"
    remedy = "use a method whose clients add all of the noise themselves"
    private = strategy.central_noise is None and strategy.observer is not Observer.WORLD
    check(private, where, problem, remedy, PrivacyRefusal)
    plug = kind(**settings)
    if isinstance(plug, Weights):
        return replace(strategy, weights=plug)
    problem = f"'{strategy.name}' cleans rows in its own way"
    check(strategy.clean is None, where, problem, "use krum, geometric_median or another method")
    return replace(strategy, clean=plug, weights=UniformWeights())
