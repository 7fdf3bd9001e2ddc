"""Differentially private federated learning for federations whose members do not agree on how much
privacy they need.
"""

from dpfl.core.errors import DpflError
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Adjacency, Budget, Claims, ClientSettings, Observer, Unit
from dpfl.core.version import __version__
from dpfl.data.federation import Federation
from dpfl.methods.centaur import centaur
from dpfl.methods.dp_fed_ls import dp_fed, dp_fed_ls
from dpfl.methods.dprp import airsgd, dprp
from dpfl.methods.fedavg import dpfedavg, fedavg, fedavg_dp
from dpfl.methods.fedceo import fedceo
from dpfl.methods.minimum import maximum, minimum
from dpfl.methods.pfa import pfa, pfa_plus
from dpfl.methods.ppsgd import ppsgd
from dpfl.methods.robust_hdp import robust_hdp
from dpfl.methods.udp_fedavg import udp_fedavg
from dpfl.methods.weiavg import weiavg
from dpfl.plugs.selection import Everyone, FixedCohort, PoissonCohort
from dpfl.privacy.budgets import make_budgets
from dpfl.privacy.statement import Statement
from dpfl.sim.train import Result, train
from dpfl.strategy import Strategy

__all__ = [
    "Adjacency",
    "Budget",
    "Claims",
    "DpflError",
    "Everyone",
    "Federation",
    "FixedCohort",
    "Observer",
    "PoissonCohort",
    "ClientSettings",
    "PublicSeed",
    "Result",
    "SecretRng",
    "Statement",
    "Strategy",
    "Unit",
    "__version__",
    "airsgd",
    "centaur",
    "dp_fed",
    "dp_fed_ls",
    "dpfedavg",
    "dprp",
    "fedavg",
    "fedavg_dp",
    "fedceo",
    "make_budgets",
    "maximum",
    "minimum",
    "pfa",
    "pfa_plus",
    "ppsgd",
    "robust_hdp",
    "train",
    "udp_fedavg",
    "weiavg",
]
