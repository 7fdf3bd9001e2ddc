"""How phases are executed: ``stacked`` (default) and ``one_by_one`` (the oracle)."""

from dpfl.core.errors import unknown_name
from dpfl.engine.one_by_one import OneByOne
from dpfl.engine.stacked import Stacked
from dpfl.protocols import Engine

ENGINES: dict[str, type[Engine]] = {"stacked": Stacked, "one_by_one": OneByOne}


def make_engine(name: str) -> Engine:
    """Return the engine of this name."""
    if name not in ENGINES:
        raise unknown_name("engine", "engine", name, ENGINES)
    return ENGINES[name]()
