"""A strategy: plugs in a fixed order, checked for fit, folded over data and over exposures."""

from dpfl.strategy.fit import Strategy

__all__ = ["Strategy"]
