"""Checks that many constructors share: one clear sentence for what is no number of the right kind."""

from __future__ import annotations

import math
from typing import Any

from dpfl.core.errors import ConfigurationError


def whole_number(where: str, name: str, value: Any, least: int = 1) -> int:
    """Return a whole number of at least ``least``; anything else is refused.

    >>> whole_number("here", "count", 3.0)
    3
    """
    good = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value == int(value)
    )
    if not good or value < least:
        raise ConfigurationError(
            where, f"{name} = {value!r}", f"give a whole number of at least {least}"
        )
    return int(value)
