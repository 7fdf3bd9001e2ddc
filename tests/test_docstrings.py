"""Every public function and class documents its arguments."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import dpfl
from dpfl.methods import METHODS

PACKAGES = ("data", "tasks", "models", "experiments", "report", "sim")
MODULES = (
    *("data.federation", "data.records"),
    *("experiments.compare", "experiments.describe", "experiments.plan", "experiments.planning"),
    *("experiments.ranking", "experiments.results", "experiments.studies", "experiments.study"),
    *("sim.callbacks", "sim.experiment", "sim.result", "sim.train"),
)
"""Where people import from, beside ``dpfl`` itself and what the packages export."""

WHOLE = {"dpfl.Federation", "dpfl.Predictor", "dpfl.Result", "dpfl.RoundEnd", "dpfl.StudyResult"}
"""Classes whose methods people call."""


def _members() -> Iterator[tuple[str, Any]]:
    for name in dpfl.__all__:
        yield f"dpfl.{name}", getattr(dpfl, name)
    for name in (*PACKAGES, *MODULES):
        module = importlib.import_module(f"dpfl.{name}")
        for key in dir(module):
            thing = getattr(module, key)
            inside = str(getattr(thing, "__module__", "")).startswith(f"dpfl.{name}")
            if inside and not key.startswith("_"):
                yield f"dpfl.{name}.{key}", thing


def _public() -> dict[str, Callable[..., Any]]:
    """Functions and classes, each once, and the methods of a few classes."""
    found: dict[str, Callable[..., Any]] = {}
    for name, thing in _members():
        if not callable(thing) or thing in found.values() or thing in METHODS.values():
            continue
        found[name] = thing
        if name in WHOLE:
            own = {key: getattr(thing, key) for key in vars(thing) if not key.startswith("_")}
            found |= {
                f"{name}.{key}": one
                for key, one in own.items()
                if inspect.isfunction(one) or inspect.ismethod(one)
            }
    return found


PUBLIC = _public()


def undocumented(thing: Callable[..., Any]) -> list[str]:
    """The parameters of a function or a class that its docstring does not name."""
    if inspect.isclass(thing) and issubclass(thing, BaseException | str | dict):
        return []
    text = inspect.getdoc(thing) or ""
    if inspect.ismodule(thing):
        text = inspect.getdoc(type(thing).__call__) or ""
    if inspect.isclass(thing):  # fields of a base class are documented there
        text += " ".join(inspect.getdoc(base) or "" for base in thing.__mro__[1:-1])
    known = set(re.findall(r"\w+", text))
    return [name for name in inspect.signature(thing).parameters if name not in {*known, "self"}]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_argument_is_documented(name: str) -> None:
    assert not undocumented(PUBLIC[name])


def test_an_argument_that_is_not_documented_is_found() -> None:
    def function(known: int, unknown: int) -> None:
        """Take what is ``known``."""

    assert undocumented(function) == ["unknown"]
    assert "dpfl.train" in PUBLIC
    assert "dpfl.Federation.from_arrays" in PUBLIC


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_documents_every_setting(name: str) -> None:
    missing = [one for one in METHODS[name].settings if f"``{one}``" not in METHODS[name].__doc__]
    assert missing == []
    assert METHODS[name].about == METHODS[name].about.strip().partition("\n")[0]
    assert "0x" not in repr(METHODS[name])
