"""How phases are executed: ``stacked`` (default), ``one_by_one`` (the oracle), ``ray`` (stacked, on
a cluster).
"""

from collections.abc import Callable

from dpfl.core.errors import unknown_name
from dpfl.engine.base import Engine
from dpfl.engine.one_by_one import OneByOne
from dpfl.engine.process import check_device
from dpfl.engine.stacked import Stacked

ENGINES: dict[str, Callable[[str], Engine]] = {
    "stacked": Stacked,
    "one_by_one": OneByOne,
    "ray": Stacked,
}
"""``ray`` is the stacked engine on the workers of a cluster: the simulation spreads the blocks."""


def make_engine(name: str, device: str = "cpu") -> Engine:
    """Return the engine of this name, computing on this device."""
    if name not in ENGINES:
        raise unknown_name("engine", "engine", name, ENGINES)
    check_device(device)
    return ENGINES[name](device)
