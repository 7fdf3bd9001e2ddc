"""Checks that constructors share: each refuses in one clear sentence."""

import math
import numbers
from collections.abc import Callable, Collection
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
    _each(where, values, lambda value: value > 0 and finite(value), "give a finite number above 0")


def not_negative(where: str, **values: Any) -> None:
    """Refuse what is not a finite number, 0 or above."""
    _each(where, values, lambda value: value >= 0 and finite(value), "give 0 or a number above 0")


def share(where: str, **values: Any) -> None:
    """Refuse what is not a number above 0 and at most 1."""
    _each(where, values, lambda value: 0 < value <= 1, "give a number above 0 and at most 1")


LARGEST_LEARNING_RATE = 1e4
"""No learning rate above this can be meant: one step would destroy any model."""


def learning_rate(where: str, **values: Any) -> None:
    """Refuse what is not a number above 0 and at most :data:`LARGEST_LEARNING_RATE`.

    >>> learning_rate("client settings", lr=1e9)
    Traceback (most recent call last):
    dpfl.core.errors.ConfigurationError: client settings: lr = 1000000000.0; \
give a number above 0 and at most 10000
    """
    remedy = f"give a number above 0 and at most {LARGEST_LEARNING_RATE:g}"
    _each(where, values, lambda value: 0 < value <= LARGEST_LEARNING_RATE, remedy)


MOST_ROUNDS, MOST_STEPS = 10**6, 10**7
"""No study has more rounds, and no round more local steps: no plan of them fits into memory."""

LARGEST_CLIP = 1e30
"""No clip above this can be meant: noise in proportion to it cannot be computed."""


def clip_bound(where: str, **values: Any) -> None:
    """Refuse what is not a number above 0 and at most :data:`LARGEST_CLIP`."""
    positive(where, **values)
    remedy = f"give a number of at most {LARGEST_CLIP:g}"
    _each(where, values, lambda value: value <= LARGEST_CLIP, remedy)


LONGEST_NAME = 200
"""No run, study or site has a longer name."""


def check_name(where: str, name: str, kind: type[DpflError] = ConfigurationError) -> str:
    """Return a name that is printable and not too long; any other is refused.

    >>> check_name("study", "north and south")
    'north and south'
    """
    if name.isprintable() and 0 < len(name) <= LONGEST_NAME:
        return name
    raise kind(
        where,
        f"{name!r:.60} is a name of {len(name)} characters",
        f"give 1 to {LONGEST_NAME} printable characters",
    )


def one_of(where: str, choices: Collection[str], **values: str) -> None:
    """Refuse a word that is not among the choices."""
    for name, value in values.items():
        if not isinstance(value, str) or value not in choices:
            near = did_you_mean(str(value), choices)
            raise ConfigurationError(
                where,
                f"{name} = {value!r}",
                near if "?" in near else f"choose one of {', '.join(choices)}",
            )


def whole_number(where: str, name: str, value: Any, least: int = 1, most: float = math.inf) -> int:
    """Return a whole number of at least ``least`` and at most ``most``; anything else is refused.

    >>> whole_number("here", "count", 3.0)
    3
    """
    bound = "" if most == math.inf else f" and at most {most}"
    remedy = f"give a whole number of at least {least}{bound}"
    _each(where, {name: value}, lambda x: least <= x <= most and finite(x) and x % 1 == 0, remedy)
    return int(value)


def finite(value: Any) -> bool:
    """Whether a number is finite, of whatever type; an integer of hundreds of digits is not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_number(value: Any) -> bool:
    """Whether a value is a real number, of whatever type; true and false are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _each(where: str, values: dict[str, Any], good: Callable[[Any], bool], remedy: str) -> None:
    """Refuse values that are not numbers, or not good ones."""
    for name, value in values.items():
        check(is_number(value) and bool(good(value)), where, f"{name} = {value!r:.60}", remedy)
