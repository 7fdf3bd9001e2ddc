"""Renyi costs of histories at fixed orders, and the exact Gaussian curve."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np

from dpfl.core.errors import PrivacyRefusal
from dpfl.core.types import Adjacency
from dpfl.privacy.accountant import _as_dp_event, _poisson, _released
from dpfl.privacy.events import History
from dpfl.privacy.gaussian import gaussian_mu

ORDERS: tuple[float, ...] = (
    1.5,
    2.0,
    2.5,
    3.0,
    4.0,
    5.0,
    6.0,
    8.0,
    10.0,
    12.0,
    16.0,
    20.0,
    24.0,
    32.0,
    48.0,
    64.0,
    128.0,
)
"""Fixed beforehand, for every ledger."""

__all__ = ["ORDERS", "gaussian_mu", "renyi_costs", "renyi_epsilon"]


def renyi_costs(history: History, adjacency: Adjacency) -> tuple[float, ...]:
    """Upper bounds on the Renyi divergence of a history at each of ORDERS."""
    from dp_accounting import NeighboringRelation, rdp

    events = _released(history)
    if any(event.noise_multiplier <= 0 for event in events):
        return (math.inf,) * len(ORDERS)
    replace_one = adjacency is Adjacency.REPLACE_ONE
    if replace_one and any(_poisson(event) for event in events):
        raise PrivacyRefusal(
            "accountant", "RDP has no bound for Poisson samples under replace_one", "use allotments"
        )
    if not replace_one and any(event.sampling == "uniform" and event.sampling_rate < 1 for event in events):
        raise PrivacyRefusal(
            "accountant",
            f"fixed-size samples have no proven bound under {adjacency}",
            "charge them as replace_one",
        )
    logging.getLogger("absl").setLevel(logging.ERROR)
    relation = NeighboringRelation.REPLACE_ONE if replace_one else NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant: Any = rdp.RdpAccountant(orders=list(ORDERS), neighboring_relation=relation)
    for event in events:
        accountant.compose(_as_dp_event(event, 0.5 if replace_one else 1.0), event.steps)
    return tuple(float(value) for value in np.asarray(accountant._rdp))


def renyi_epsilon(costs: tuple[float, ...], delta: float) -> float:
    """Epsilon of summed costs, each order with its own share of delta."""
    share = delta / len(ORDERS)
    return max(
        0.0,
        min(
            cost + math.log((order - 1) / order) - (math.log(share) + math.log(order)) / (order - 1)
            for order, cost in zip(ORDERS, costs, strict=True)
        ),
    )
