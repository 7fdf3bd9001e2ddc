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

from dpfl.plugs.weights import EpsilonWeights
from dpfl.strategy import Strategy
from dpfl.strategy.method import method
from dpfl.strategy.record_level import RecordWork, record_level


@method(family="heterogeneous", simplicity=30, remark="it believes what clients claim")
def weiavg(work: RecordWork) -> Strategy:
    """FedAvg over DP-SGD clients, weighted by claimed epsilon."""
    return record_level("weiavg", work, EpsilonWeights())
