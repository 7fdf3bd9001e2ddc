"""What a file should have held, in the words of dpfl rather than of the validator."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a table",
    "mapping": "a table",
    "model": "a table",
    "dataclass": "a table",
}
"""What was wanted, by the first word of the validator's name for the error."""

_BOUNDS = {
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number of at least {ge:g}",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "finite_number": "a finite number",
    "too_short": "at least {min_length} value(s)",
    "string_too_short": "at least {min_length} character(s)",
    "string_pattern_mismatch": "a name of at most 100 characters, without slashes or line breaks, "
    "that begins with neither a dot nor a space",
    "none_required": "nothing, since it is not at the sites",
    "literal_error": "{expected}",
    "enum": "{expected}",
}


IDENTITY_KEY = "^[0-9a-f]{64}$"
"""How a public identity key is written."""


class Problem(NamedTuple):
    """The first thing that is wrong: where it is, what was given there, and what was wanted.

    ``kind`` is the validator's name for it, ``near`` advice where a key is unknown.
    """

    path: list[str]
    kind: str
    given: str
    wanted: str
    near: str = ""


def first_problem(error: ValidationError, values: Any) -> Problem:
    """Say what is wrong first; ``values`` are those that were validated.

    A misspelt key also makes the right one missing: the misspelling is named. A value that may be
    of several kinds fails once for each: all of them are named.
    """
    problems = error.errors()
    first = next((one for one in problems if one["type"] == "unknown_key"), problems[0])
    told = first.get("ctx", {})
    path = _path(first["loc"], values)
    if first["type"] == "unknown_key":
        return Problem([*path, told["key"]], first["type"], told["key"], "", told["near"])
    if first["type"] == "missing":
        return Problem([*path, str(first["loc"][-1])], first["type"], "", "")
    # Of a value that may be a list, an element may be what is wrong: the deepest place is named.
    own = [one for one in problems if _path(one["loc"], values)[: len(path)] == path]
    first = max(own, key=lambda one: len(_path(one["loc"], values)))
    path = _path(first["loc"], values)
    same = [one for one in own if _path(one["loc"], values) == path]
    words = dict.fromkeys(_wanted(one["type"], one.get("ctx", {})) for one in same)
    if "a number" in words:
        words.pop("a whole number", None)
    shown = f"{first['input']!r}"
    given = shown if len(shown) <= 100 else f"{shown[:100]}..."
    return Problem(path, first["type"], given, " or ".join(filter(None, words)))


def _path(place: Sequence[str | int], values: Any) -> list[str]:
    """The keys that lead to a value; names that the validator gives to its attempts are left out.

    >>> _path(("budgets", "epsilon", "float"), {"budgets": {"epsilon": "x"}})
    ['budgets', 'epsilon']
    """
    path = []
    here = values
    for part in place:
        known = isinstance(here, Mapping) and part in here
        if known or (isinstance(here, list | tuple) and isinstance(part, int)):
            here = here[part]
            path.append(str(part))
    return path


def _wanted(kind: str, told: Mapping[str, Any]) -> str:
    """What would have been right, for one error of the validator; empty if that is not known."""
    if kind == "string_pattern_mismatch" and told.get("pattern") == IDENTITY_KEY:
        return "64 hexadecimal digits, as 'dpfl site identity' prints them"
    if kind in _BOUNDS:
        return _BOUNDS[kind].format(**told)
    return _KINDS.get(kind.partition("_")[0], "")


def check_types(read: object, kind: Any = None) -> None:
    """Raise a ValueError where a field of a dataclass, or of one in it, is of another type.

    What was read from a file is put into dataclasses as it is; whoever uses it counts on the types
    that they declare. ``kind`` is the type of what is not a dataclass.
    """
    declared: Any = kind or type(read)
    try:
        _strict(declared).validate_python([read])
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][1:]))
        wanted = _wanted(first["type"], first.get("ctx", {})) or "what belongs there"
        raise ValueError(f"{place}: {first['input']!r:.60} instead of {wanted}") from error


@cache
def _strict(kind: Any) -> TypeAdapter[Any]:
    """What checks a dataclass and all that is in it; only in a list can it be told how."""
    config = ConfigDict(strict=True, revalidate_instances="always", arbitrary_types_allowed=True)
    return TypeAdapter(list[kind], config=config)
