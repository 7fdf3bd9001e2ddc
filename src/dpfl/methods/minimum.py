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

from dataclasses import replace

from dpfl.plugs.weights import UniformWeights
from dpfl.strategy import Strategy
from dpfl.strategy.method import method
from dpfl.strategy.record_level import RecordWork, record_level

RAISED = "HYPOTHETICAL: every client is given the largest budget, whatever it asked for"


@method(family="heterogeneous", simplicity=70, fixed=("spending",))
def minimum(work: RecordWork) -> Strategy:
    """Everyone on the smallest claimed budget."""
    return record_level("minimum", replace(work, spending="smallest"), UniformWeights())


@method(family="heterogeneous", simplicity=80, fixed=("spending",), needs="a simulation")
def maximum(work: RecordWork) -> Strategy:
    """Everyone on the largest claimed budget: a hypothetical federation, for comparison."""
    raised = replace(work, spending="largest")
    return record_level("maximum", raised, UniformWeights(), assumptions=(RAISED,))
