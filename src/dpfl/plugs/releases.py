"""Statistics that are released once, before round one."""

from __future__ import annotations

from dpfl.plugs.base import Plug


class Release(Plug):
    """A bounded statistic per record."""

    share: float
