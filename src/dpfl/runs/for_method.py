"""An experiment for one method or another: what a method brings along, and what it lacks."""

from collections.abc import Iterable
from typing import Any

from dpfl.core.errors import ConfigurationError, did_you_mean
from dpfl.core.types import Plain
from dpfl.methods import METHODS, find


def with_own_model(values: Any) -> Any:
    """Return the values of a file with the model that its method brings along, if it does."""
    method = values.get("method") if isinstance(values, dict) else None
    name = str(method.get("name")) if isinstance(method, dict) else ""
    own = METHODS[name].model if name in METHODS else None
    if own is None:
        return values
    given = values.get("model", {})
    whole = {"run": {}, **values}  # rounds are planned
    return {**whole, "model": {**own, **given}} if isinstance(given, dict) else whole


def settings_of(methods: Iterable[str]) -> set[str]:
    """The settings that any of these methods has."""
    return {setting for method in methods for setting in find(method).settings}


def foreign_settings(values: Plain, methods: Iterable[str]) -> list[str]:
    """The method settings in ``values`` that none of these ``methods`` has; one that no method at
    all has is refused.
    """
    foreign = values.get("method", {}).keys() - settings_of(methods) - {"name"}
    for setting in foreign and foreign - settings_of(METHODS):
        raise ConfigurationError(
            "[method]",
            f"none of the methods has '{setting}'",
            did_you_mean(setting, settings_of(METHODS)),
        )
    return sorted(foreign)


def for_method(values: Plain, method: str, *, compared: bool = True) -> Plain:
    """Return the same experiment for another method; settings that only other methods have are
    left out, and one that no method has is refused.

    With ``compared``, references and baselines, which others are held against, are run without a
    secure sum.
    """
    found = find(method)
    foreign = foreign_settings(values, [method])
    kept = {k: value for k, value in values.get("method", {}).items() if k not in foreign}
    same = {**values, "method": {**kept, "name": method}}
    if found.model is not None:  # it brings its own model and plans its own rounds and step
        given = values.get("model", {})
        same["model"] = {k: given[k] for k in ("features",) if k in given}
        same["run"] = {k: own for k, own in values.get("run", {}).items() if k != "rounds"}
        same.pop("server", None)
    if compared and (found.reference or found.baseline):
        same.pop("secure_sum", None)
    return same
