"""Minimum and Maximum: everybody on one budget.

Paper
    Liu, Lou, Xiong, Liu, Meng: *Projected Federated Averaging with Heterogeneous Differential
    Privacy*, VLDB 2022 (baselines); the minimum mechanism goes back to Jorgensen, Yu, Cormode:
    *Conservative or Liberal? Personalized Differential Privacy*, ICDE 2015.

In one sentence
    Every client plans its noise for the smallest (largest) epsilon anyone claims, and updates count
    alike.

Equations
    epsilon_i <- min_j epsilon_j (``minimum``) or max_j epsilon_j (``maximum``); then FedAvg.

Formal guarantees
    ``minimum``: every client spends at most min(own epsilon, smallest claim): a false claim can
    only make noise larger. ``maximum``: the clients' own budgets are **not** respected; it shows
    what a federation of generous clients would reach. It runs only in a simulation, which gives
    everyone the largest budget and flags the run HYPOTHETICAL; a real site's ledger refuses it.

Departures
    Deltas stay each client's own.
"""

from __future__ import annotations

from dataclasses import replace

from dpfl.core.types import ClientSettings
from dpfl.plugs.selection import Selection
from dpfl.plugs.weights import UniformWeights
from dpfl.strategy import Strategy
from dpfl.strategy.record_level import ASSUMPTIONS, record_level


def minimum(
    *,
    lr: float,
    clip: float,
    batch_size: int,
    local_steps: int | None = None,
    local_epochs: int | None = None,
    selection: Selection | None = None,
) -> Strategy:
    """Everyone on the smallest claimed budget."""
    client_settings = ClientSettings(
        lr=lr, batch_size=batch_size, local_steps=local_steps, local_epochs=local_epochs
    )
    return record_level("minimum", client_settings, clip, UniformWeights(), selection, "smallest")


def maximum(
    *,
    lr: float,
    clip: float,
    batch_size: int,
    local_steps: int | None = None,
    local_epochs: int | None = None,
    selection: Selection | None = None,
) -> Strategy:
    """Everyone on the largest claimed budget: a hypothetical federation, for comparison."""
    client_settings = ClientSettings(
        lr=lr, batch_size=batch_size, local_steps=local_steps, local_epochs=local_epochs
    )
    strategy = record_level(
        "maximum", client_settings, clip, UniformWeights(), selection, "largest"
    )
    raised = "HYPOTHETICAL: every client is granted the largest budget, whatever it asked for"
    return replace(strategy, assumptions=(raised, *ASSUMPTIONS))
