"""The methods, one file a paper, and those that other packages bring along.

A method declares itself (:func:`dpfl.strategy.method.method`); nothing else in dpfl names it.
Modules of this package are searched for declared factories, and so is every object or module
behind the entry-point group ``dpfl.methods`` of the packages that are installed.
"""

import importlib
import pkgutil
import warnings
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from dpfl.core.errors import ConfigurationError, unknown_name
from dpfl.strategy import Strategy
from dpfl.strategy.method import Method

GROUP = "dpfl.methods"


class Methods(Mapping[str, Method]):
    """All methods by name, found when first asked for."""

    @cached_property
    def _found(self) -> dict[str, Method]:
        found: dict[str, Method] = {}
        for module in pkgutil.iter_modules(__path__):
            for one in _declared(importlib.import_module(f"{__name__}.{module.name}")):
                _add(found, one, "dpfl")
        for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
            for one in _loaded(entry):
                _add(found, one, entry.value)
        return dict(sorted(found.items()))

    def __getitem__(self, name: str) -> Method:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


METHODS = Methods()


def find(name: str) -> Method:
    """Return the method of this name; an unknown one is refused, with the nearest known name."""
    if name not in METHODS:
        raise unknown_name("method", "method", name, METHODS)
    return METHODS[name]


def make_strategy(name: str, settings: Mapping[str, Any]) -> Strategy:
    """Build a method from its name and settings."""
    return find(name).build(settings)


def families() -> dict[str, tuple[str, ...]]:
    """Methods that are worth comparing with each other, simplest first, after the references."""
    ordered = sorted(
        METHODS.values(), key=lambda one: (not one.reference, one.simplicity, one.name)
    )
    names = sorted({one.family for one in ordered if not one.reference})
    return {
        family: tuple(one.name for one in ordered if one.reference or one.family == family)
        for family in names
    }


def _declared(thing: object) -> list[Method]:
    """A method itself, or those that a module declares (not those it imports)."""
    if isinstance(thing, Method):
        return [thing]
    own = [value for value in vars(thing).values() if isinstance(value, Method)]
    return [one for one in own if one.factory.__module__ == getattr(thing, "__name__", "")]


def _loaded(entry: EntryPoint) -> list[Method]:
    """What another package brings; a package that cannot be imported is named, and left out."""
    try:
        found = _declared(entry.load())
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"method '{entry.name}' of {entry.value} is left out: {problem}", stacklevel=2
        )
        return []
    if not found:
        said = f"{entry.value} declares no method: use dpfl.strategy.method.method"
        warnings.warn(f"method '{entry.name}' is left out: {said}", stacklevel=2)
    return found


def _add(found: dict[str, Method], one: Method, source: str) -> None:
    if one.name in found and found[one.name] is not one:
        raise ConfigurationError(
            f"method '{one.name}'", f"comes twice, once from {source}", "rename one of the two"
        )
    found[one.name] = one
