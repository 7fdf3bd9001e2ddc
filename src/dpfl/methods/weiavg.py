"""WeiAvg: weigh updates by claimed budget.

Paper
    Liu, Lou, Xiong, Liu, Meng: *Projected Federated Averaging with Heterogeneous Differential
    Privacy*, VLDB 2022, Eq. 6.

In one sentence
    A client with a larger epsilon adds less noise, so its update gets a proportionally larger
    weight.

Equations
    model <- model + sum_i w_i u_i,  w_i = epsilon_i / sum over the cohort of epsilon_j.

Formal guarantees
    As ``fedavg_dp``: made at the clients, so weighing is post-processing. The epsilons are
    *claims*: a false one moves the model, never what is charged.

Departures
    The introduction's "tighter budgets get a larger weight" is a slip; the equation is followed. A
    claim that is no positive number weighs nothing.
"""

from __future__ import annotations

from dpfl.core.types import ClientSettings
from dpfl.plugs.selection import Selection
from dpfl.plugs.weights import EpsilonWeights
from dpfl.privacy.budgets import Spending
from dpfl.strategy import Strategy
from dpfl.strategy.record_level import record_level


def weiavg(
    *,
    lr: float,
    clip: float,
    batch_size: int,
    local_steps: int | None = None,
    local_epochs: int | None = None,
    selection: Selection | None = None,
    spending: Spending = "heterogeneous",
) -> Strategy:
    """FedAvg over DP-SGD clients, weighted by claimed epsilon."""
    client_settings = ClientSettings(
        lr=lr, batch_size=batch_size, local_steps=local_steps, local_epochs=local_epochs
    )
    return record_level("weiavg", client_settings, clip, EpsilonWeights(), selection, spending)
