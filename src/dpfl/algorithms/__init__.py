"""Names of version 0.1, kept until 0.3.

``dpfl.algorithms.robust_hdp.principal_component_pursuit`` and its like point to where they live
now: papers in :mod:`dpfl.methods`, kernels in :mod:`dpfl.numerics`, planning over the air in
:mod:`dpfl.experiments.power`.
"""

import importlib
import sys
import types
import warnings
from contextlib import suppress
from typing import Any

_HOMES = {
    "dp_fed_ls": ("methods.dp_fed_ls", "numerics.recursive_filter", "numerics.closed_form"),
    "dprp": ("methods.dprp", "experiments.power", "numerics.projections"),
    "fedceo": ("methods.fedceo", "numerics.tensor_svt"),
    "pfa": ("methods.pfa", "numerics.subspace", "numerics.budget_split"),
    "power_planning": ("experiments.power", "numerics.projections"),
    "registry": ("methods",),
    "robust_hdp": ("methods.robust_hdp", "numerics.pursuit"),
}


class _Alias(types.ModuleType):
    """An old module, whose names are looked up where they live now."""

    def __getattr__(self, name: str) -> Any:
        for home in () if name.startswith("__") else _HOMES[self.__name__.rpartition(".")[2]]:
            module = importlib.import_module(f"dpfl.{home}")
            if hasattr(module, name):
                said = f"{self.__name__}.{name} is now dpfl.{home}.{name}"
                warnings.warn(f"{said}; the old name goes with 0.3", FutureWarning, stacklevel=2)
                return getattr(module, name)
        raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")


_MODULES = {old: _Alias(f"{__name__}.{old}", __doc__) for old in _HOMES}
sys.modules.update({module.__name__: module for module in _MODULES.values()})


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return _MODULES[name]
    for module in _MODULES.values():
        with suppress(AttributeError):
            return getattr(module, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
