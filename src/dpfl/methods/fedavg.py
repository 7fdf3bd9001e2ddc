"""FedAvg: without privacy, with heterogeneous DP, and weighted by records.

Paper
    McMahan, Moore, Ramage, Hampson, Aguera y Arcas: *Communication-Efficient Learning of Deep
    Networks from Decentralized Data*, AISTATS 2017; with DP-SGD at every client as in Liu, Lou,
    Xiong, Liu, Meng: *Projected Federated Averaging with Heterogeneous Differential Privacy*, VLDB
    2022 (baseline), and Malekmohammadi, Yu, Cao: *Noise-Aware Algorithm for Heterogeneous
    Differentially Private Federated Learning*, ICML 2024 (DPFedAvg).

In one sentence
    The server averages the clients' updates: equally (``fedavg``, ``fedavg_dp``) or by number of
    records (``dpfedavg``).

Equations
    model <- model + sum_i w_i u_i, with u_i = model of client i after its local work - model, and
    w_i = 1 / cohort or w_i = N_i / sum over the cohort.

Formal guarantees
    ``fedavg``: none, and it says so. ``fedavg_dp``, ``dpfedavg``: each client's records, within its
    own (epsilon, delta) under zero-out adjacency, against the server and so against everyone (see
    :class:`dpfl.plugs.local_work.DpSgd`).

Departures
    The non-private baseline draws shuffled batches; the private ones draw Poisson batches, as they
    are charged for.
"""

from dpfl.core.types import Adjacency, Observer, Unit
from dpfl.plugs.local_work import Sgd
from dpfl.plugs.weights import ExampleWeights, UniformWeights
from dpfl.strategy import Strategy
from dpfl.strategy.method import method
from dpfl.strategy.record_level import RecordWork, record_level
from dpfl.strategy.work import Work


@method(family="heterogeneous", simplicity=0, reference=True)
def fedavg(work: Work) -> Strategy:
    """Plain FedAvg without privacy: every epsilon is infinite."""
    return Strategy(
        name="fedavg",
        unit=Unit.RECORD,
        observer=Observer.NOBODY,
        adjacency=Adjacency.ZERO_OUT,
        local=Sgd(client_settings=work.client_settings, unit=Unit.RECORD, **work.optimiser),
        selection=work.cohorts,
        assumptions=("nothing is protected: the server and the world may learn any record",),
    )


@method(family="heterogeneous", simplicity=10)
def fedavg_dp(work: RecordWork) -> Strategy:
    """FedAvg over clients that run DP-SGD within their own budgets; every update counts alike."""
    return record_level("fedavg_dp", work, UniformWeights())


@method(family="heterogeneous", simplicity=20)
def dpfedavg(work: RecordWork) -> Strategy:
    """FedAvg over clients that run DP-SGD within their own budgets, weighted by number of
    records.
    """
    return record_level("dpfedavg", work, ExampleWeights())
