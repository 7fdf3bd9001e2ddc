"""Methods by name, with one sentence each and the settings they take."""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any

from dpfl.core.errors import ConfigurationError, did_you_mean, unknown_name
from dpfl.methods.centaur import centaur
from dpfl.methods.dp_fed_ls import dp_fed, dp_fed_ls
from dpfl.methods.dprp import airsgd, dprp
from dpfl.methods.fedavg import dpfedavg, fedavg, fedavg_dp
from dpfl.methods.fedceo import fedceo
from dpfl.methods.minimum import maximum, minimum
from dpfl.methods.pfa import pfa, pfa_plus
from dpfl.methods.ppsgd import ppsgd
from dpfl.methods.robust_hdp import robust_hdp
from dpfl.methods.udp_fedavg import udp_fedavg
from dpfl.methods.weiavg import weiavg
from dpfl.strategy import Strategy

METHODS: dict[str, Callable[..., Strategy]] = {
    "airsgd": airsgd,
    "centaur": centaur,
    "dp_fed": dp_fed,
    "dp_fed_ls": dp_fed_ls,
    "dpfedavg": dpfedavg,
    "dprp": dprp,
    "fedavg": fedavg,
    "fedavg_dp": fedavg_dp,
    "fedceo": fedceo,
    "maximum": maximum,
    "minimum": minimum,
    "pfa": pfa,
    "pfa_plus": pfa_plus,
    "ppsgd": ppsgd,
    "robust_hdp": robust_hdp,
    "udp_fedavg": udp_fedavg,
    "weiavg": weiavg,
}


FAMILIES: dict[str, tuple[str, ...]] = {
    "heterogeneous": (
        "fedavg", "minimum", "maximum", "fedavg_dp", "dpfedavg", "weiavg", "pfa", "pfa_plus", "robust_hdp",
    ),
    "client": ("fedavg", "dp_fed", "dp_fed_ls", "udp_fedavg", "fedceo", "ppsgd", "centaur"),
    "wireless": ("fedavg", "airsgd", "dprp"),
}  # fmt: skip
"""Methods that are worth comparing with each other, each family with plain averaging for reference.
"""

KNOBS: dict[str, tuple[str, tuple[float | str, ...]]] = {
    "dp_fed_ls": ("smoothing", (0.1, 1.0, 10.0)),
    "dprp": ("dimension", (1 / 64, 1 / 8)),
    "fedceo": ("coefficient", ("auto", 1.0, 10.0)),
    "pfa": ("k", (1, 2)),
    "pfa_plus": ("k", (1, 2)),
    "ppsgd": ("personal_lr", (0.03, 0.3)),
}
"""The setting that is a method's own, and what a search tries; a dimension is a share of the
model's parameters.
"""


def usual_sampling(name: str) -> str:
    """How a method's paper draws cohorts, where the user does not say."""
    return "poisson" if name in ("dp_fed", "dp_fed_ls") else "uniform"


def settings_of(name: str) -> dict[str, inspect.Parameter]:
    """Return the settings a method takes."""
    if name not in METHODS:
        raise unknown_name("method", "method", name, METHODS)
    return dict(inspect.signature(METHODS[name]).parameters)


def make_strategy(name: str, settings: Mapping[str, Any]) -> Strategy:
    """Build a method; a setting it does not know, or one it lacks, is refused by name."""
    known = settings_of(name)
    for setting in settings:
        if setting not in known:
            raise ConfigurationError(
                f"method '{name}'", f"has no setting '{setting}'", did_you_mean(setting, known)
            )
    missing = [
        p.name
        for p in known.values()
        if p.default is inspect.Parameter.empty and p.name not in settings
    ]
    if missing:
        raise ConfigurationError(
            f"method '{name}'", f"needs {' and '.join(missing)}", "give a value: it has no default"
        )
    hints = typing.get_type_hints(METHODS[name])
    for setting, value in settings.items():
        _check_kind(name, setting, hints[setting], value)
    return METHODS[name](**settings)


def _kinds(annotation: Any) -> set[Any]:
    """The plain kinds a setting may have: of float | Literal["auto"] they are float and str."""
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return {type(value) for value in parts}
    return {kind for part in parts for kind in _kinds(part)} if parts else {annotation}


def _check_kind(method: str, setting: str, annotation: Any, value: Any) -> None:
    """Refuse text where only numbers belong, what is no number at all, and broken numbers where
    whole ones belong.
    """
    kinds = _kinds(annotation) & {int, float, str}
    where, given = f"method '{method}'", f"{setting} = {value!r}"
    if isinstance(value, str) and kinds and str not in kinds:
        raise ConfigurationError(where, f"{given} is no number", "give a number")
    if isinstance(value, float) and kinds:
        if math.isnan(value):
            raise ConfigurationError(where, given, "give a number")
        if float not in kinds and not value.is_integer():
            raise ConfigurationError(where, given, "give a whole number")


def about(name: str) -> str:
    """Return the first line of a method's own description."""
    return (inspect.getdoc(METHODS[name]) or "").splitlines()[0]
