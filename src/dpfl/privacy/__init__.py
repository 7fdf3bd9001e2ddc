"""What a release costs: events, accountant, calibration, budgets, exposure, ledger."""

from dpfl.privacy.accountant import epsilon
from dpfl.privacy.calibrate import calibrate

__all__ = ["calibrate", "epsilon"]
