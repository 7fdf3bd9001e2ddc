"""What a release costs: events, accountant, calibration, budgets, exposure, ledger.

Two questions need nothing else:

>>> round(epsilon(1.0, 0.05, 200, 2000**-1.1), 2)  # what do 200 steps at noise 1.0 cost?
3.7
>>> round(calibrate(3.0, 1e-5, 0.01, 1000), 2)  # how much noise keeps 1,000 steps within 3.0?
0.82

Importing this package, or any module of it, does not import torch.
"""

from dpfl.privacy.accountant import epsilon
from dpfl.privacy.calibrate import calibrate

__all__ = ["calibrate", "epsilon"]
