"""How phases are executed.

``stacked`` (the default) computes many clients at once. ``one_by_one`` computes one client after
the other and writes per-record gradients out: it is slow, and what the others are tested against.
``ray`` is the stacked engine on the workers of a cluster: the simulation spreads the blocks.

Chains of linear layers are computed for many clients in one product (``stacks``,
``private_stacks``), plain SGD on few records in the span of the records (``row_span``), and every
other model client by client with ghost clipping (``ghost_clipping``), whose layers have rules of
their own (``layer_rules``, ``convolutions``, ``normalisation``, ``recurrent``, ``attention``). All
of them agree with ``one_by_one`` to a relative error of 5e-5 of the update. ``slow_layers`` names
the layers of a model that have no rule.
"""

from collections.abc import Callable

from dpfl.core.errors import unknown_name
from dpfl.engine.base import Engine
from dpfl.engine.coverage import slow_layers as slow_layers
from dpfl.engine.one_by_one import OneByOne
from dpfl.engine.process import check_device
from dpfl.engine.stacked import Stacked

ENGINES: dict[str, Callable[[str], Engine]] = {
    "stacked": Stacked,
    "one_by_one": OneByOne,
    "ray": Stacked,
}
"""Engines by name; each is made from the name of a device."""


def make_engine(name: str, device: str = "cpu") -> Engine:
    """Return the engine of this name, computing on this device (``cpu``, ``cuda``, ``cuda:1``).

    >>> make_engine("stacked").blocks([])
    []
    """
    if name not in ENGINES:
        raise unknown_name("engine", "engine", name, ENGINES)
    check_device(device)
    return ENGINES[name](device)
