"""What a release costs: events, accountant, calibration, budgets, exposure, ledger.

Two questions need nothing else:

>>> round(epsilon(1.0, 0.05, 200, 2000**-1.1), 2)  # what do 200 steps at noise 1.0 cost?
3.7
>>> round(calibrate(3.0, 1e-5, 0.01, 1000), 2)  # how much noise keeps 1,000 steps within 3.0?
0.82

``events``       what was released, as immutable data
``exposure``     how much of one unit a message still shows
``accountant``   upper bounds on epsilon of whole histories; ``composition`` and ``renyi`` are its
                 curves, ``classic_rdp`` what papers print
``calibrate``    the least noise that keeps a plan within a budget
``budgets``      one budget per client: distributions, numbers, files
``selection``    what the best of a random number of runs costs
``filters``      what a budget admits when studies are chosen by looking at earlier results
``ledger``       what every account was planned for and charged, in one SQLite file
``chain``        the hash chain that its rows form
``statement``    what each account has spent, derived from stored events alone
``flags``        facts that limit a guarantee, each one worded once
``meaning``      what an epsilon means for groups, several sites, other deltas, and an adversary

Importing this package, or any module of it, does not import torch.
"""

from dpfl.privacy.accountant import epsilon
from dpfl.privacy.calibrate import calibrate

__all__ = ["calibrate", "epsilon"]
