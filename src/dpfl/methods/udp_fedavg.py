"""UDP-FedAvg: clients clip their updates and add the noise themselves.

Paper
    Li, Fu, Wang, Chen, Lou, Chen, Yang, Shen, Zheng: *Clients Collaborate: Flexible Differentially
    Private Federated Learning with Guaranteed Improvement of Utility-Privacy Trade-off*, ICML 2025,
    Algorithm 1.

In one sentence
    FedAvg over updates that each client clips and noises: with a share of the noise, so that the
    sum is protected, or with all of it, so that the update is.

Equations
    sent_i = clip(update_i) + N(0, std^2),  std = noise_multiplier x clip / sqrt(cohort) (``noise =
    "distributed"``, as printed) or noise_multiplier x clip (``"local"``);  model <- model + sum_i
    sent_i / cohort.

Formal guarantees
    A client's whole contribution. ``distributed``: against the world by the sum of all shares,
    amplified by the secret draw of a fixed-size cohort (replace-one) out of the least number of
    willing clients that the plan allows; against the server by one share alone, without
    amplification, which is stated beside it. ``local``: against the server, and so against
    everyone. The number of clients and the noise level, which follows from their claims, are public
    terms.

Departures
    - Line 10 multiplies the mean update by the learning rate: a server step. It is 1 here.
    - Shares are made for the clients really drawn, less ``tolerated_dropouts``. With more missing
      nothing is published; where the draw is counted on, the server adds the missing shares
      instead, and every round is published.
    - Cohorts of random size are refused for shares: the size of a share would tell who was drawn.
"""

from __future__ import annotations

from dpfl.core.types import ClientSettings
from dpfl.plugs.local_work import Sgd
from dpfl.plugs.selection import Selection
from dpfl.strategy import Strategy
from dpfl.strategy.noisy_updates import Noise, noisy_updates


def udp_fedavg(
    *,
    lr: float,
    clip: float,
    batch_size: int,
    local_steps: int | None = None,
    local_epochs: int | None = None,
    noise: Noise = "distributed",
    noise_multiplier: float | None = None,
    tolerated_dropouts: int = 0,
    lr_decay: float = 1.0,
    weight_decay: float = 0.0,
    selection: Selection | None = None,
) -> Strategy:
    """Client-level privacy by the clients' own noise on their clipped updates."""
    client_settings = ClientSettings(
        lr=lr, batch_size=batch_size, local_steps=local_steps, local_epochs=local_epochs
    )
    local = Sgd(client_settings=client_settings, weight_decay=weight_decay, lr_decay=lr_decay)
    return noisy_updates(
        "udp_fedavg", local, clip, noise, noise_multiplier, tolerated_dropouts, selection
    )
