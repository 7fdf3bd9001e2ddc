"""What the record-level methods share: DP-SGD at every client, rows at the server, everything after
it post-processing.
"""

from __future__ import annotations

from dpfl.core.types import Adjacency, ClientSettings, Observer, Unit
from dpfl.plugs.local_work import DpSgd
from dpfl.plugs.row_denoise import RowDenoiser
from dpfl.plugs.selection import Everyone, Selection
from dpfl.plugs.weights import Weights
from dpfl.privacy.budgets import Spending
from dpfl.strategy.slots import Strategy

ASSUMPTIONS = (
    "each client runs its own DP-SGD with noise from its own generator and keeps its record sample secret",
    "neighbouring data sets differ in one record replaced by nothing; the number of records is public",
    "the server may be curious; what it publishes adds nothing to what it has seen",
)


def record_level(
    name: str,
    client_settings: ClientSettings,
    clip: float,
    weights: Weights,
    selection: Selection | None,
    spending: Spending,
    clean: RowDenoiser | None = None,
) -> Strategy:
    """Assemble a strategy whose guarantee is made at the clients, per record, against the server."""
    return Strategy(
        name=name,
        unit=Unit.RECORD,
        observer=Observer.SERVER,
        adjacency=Adjacency.ZERO_OUT,
        local=DpSgd(client_settings=client_settings, clip=clip, spending=spending),
        selection=selection or Everyone(),
        clean=clean,
        weights=weights,
        assumptions=ASSUMPTIONS,
    )
