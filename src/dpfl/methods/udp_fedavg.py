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

from dpfl.strategy import Strategy
from dpfl.strategy.client_level import NoisyWork, noisy_updates
from dpfl.strategy.method import method


@method(family="client", simplicity=20)
def udp_fedavg(work: NoisyWork) -> Strategy:
    """Client-level privacy by the clients' own noise on their clipped updates."""
    return noisy_updates("udp_fedavg", work)
