"""The methods, one file a paper, and those that other packages bring along.

A method declares itself (:func:`dpfl.strategy.method.method`); nothing else in dpfl names it.
Modules of this package are searched for declared factories, and so is every object or module
behind the entry-point group ``dpfl.methods`` of the packages that are installed.
"""

import importlib
import pkgutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from dpfl.core.checks import check
from dpfl.core.errors import unknown_name
from dpfl.strategy import Strategy
from dpfl.strategy.method import Method

GROUP = "dpfl.methods"


class Methods(Mapping[str, Method]):
    """All methods by name, found when first asked for."""

    @cached_property
    def _found(self) -> dict[str, Method]:
        found: dict[str, Method] = {}
        for source, declared in _sources():
            for one in declared:
                check(
                    found.setdefault(one.name, one) is one,
                    f"method '{one.name}'",
                    f"comes twice, once from {source}",
                    "rename one of the two",
                )
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
    ordered = sorted(METHODS.values(), key=lambda one: (not one.reference, one.simplicity))
    return {
        family: tuple(one.name for one in ordered if one.reference or one.family == family)
        for family in sorted({one.family for one in ordered if not one.reference})
    }


def with_baselines(names: Sequence[str]) -> list[str]:
    """Add the baselines of the families that some methods belong to.

    >>> with_baselines(["weiavg"])
    ['weiavg', 'local_only', 'pooled_dp']
    """
    known = {METHODS[name].family for name in names if name in METHODS}
    own = [one.name for one in METHODS.values() if one.baseline and one.family in known]
    return [*names, *(name for name in own if name not in names)]


def _sources() -> Iterator[tuple[str, list[Method]]]:
    """Where methods come from, and those that each place declares."""
    for module in pkgutil.iter_modules(__path__):
        yield "dpfl", _declared(importlib.import_module(f"{__name__}.{module.name}"))
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        yield entry.value, _loaded(entry)


def _declared(thing: object) -> list[Method]:
    """A method itself, or those that a module declares (not those it imports)."""
    if isinstance(thing, Method):
        return [thing]
    own = [value for value in vars(thing).values() if isinstance(value, Method)]
    return [one for one in own if one.factory.__module__ == getattr(thing, "__name__", "")]


def _loaded(entry: EntryPoint) -> list[Method]:
    """What another package brings; one without a method, or that fails, is named and left out."""
    try:
        found = _declared(entry.load())
        problem = "it declares no method: use dpfl.strategy.method.method"
    except Exception as error:
        found = []
        problem = f"{type(error).__name__}: {error}"
    if not found:
        said = f"method '{entry.name}' of {entry.value} is left out: {problem}"
        warnings.warn(said, stacklevel=2)
    return found
