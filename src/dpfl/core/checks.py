"""Checks that constructors share: each refuses in one clear sentence."""

import math
import numbers
from collections.abc import Collection
from typing import Any

from dpfl.core.errors import ConfigurationError, DpflError, did_you_mean


def check(
    good: bool, where: str, problem: str, remedy: str, kind: type[DpflError] = ConfigurationError
) -> None:
    """Raise ``kind`` unless ``good``: where, what was given and why it cannot be, what to do."""
    if not good:
        raise kind(where, problem, remedy)


def positive(where: str, **values: Any) -> None:
    """Refuse what is not a finite number above 0.

    >>> positive("clip", clip=-1)
    Traceback (most recent call last):
    dpfl.core.errors.ConfigurationError: clip: clip = -1; give a finite number above 0
    """
    for name, value in values.items():
        good = _is_number(value) and math.isfinite(value) and value > 0
        check(good, where, f"{name} = {value!r}", "give a finite number above 0")


def not_negative(where: str, **values: Any) -> None:
    """Refuse what is not a finite number, 0 or above."""
    for name, value in values.items():
        good = _is_number(value) and math.isfinite(value) and value >= 0
        check(good, where, f"{name} = {value!r}", "give 0 or a number above 0")


def share(where: str, **values: Any) -> None:
    """Refuse what is not a number above 0 and at most 1."""
    for name, value in values.items():
        good = _is_number(value) and 0 < value <= 1
        check(good, where, f"{name} = {value!r}", "give a number above 0 and at most 1")


def one_of(where: str, choices: Collection[str], **values: str) -> None:
    """Refuse a word that is not among the choices."""
    for name, value in values.items():
        remedy = f"choose one of {', '.join(choices)}"
        near = did_you_mean(str(value), choices)
        check(value in choices, where, f"{name} = {value!r}", near if "?" in near else remedy)


def whole_number(where: str, name: str, value: Any, least: int = 1) -> int:
    """Return a whole number of at least ``least``; anything else is refused.

    >>> whole_number("here", "count", 3.0)
    3
    """
    good = _is_number(value) and math.isfinite(value) and value == int(value) and value >= least
    remedy = f"give a whole number of at least {least}"
    check(good, where, f"{name} = {value!r}", remedy)
    return int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
