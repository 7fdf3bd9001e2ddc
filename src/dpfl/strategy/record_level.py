"""What the record-level methods share: DP-SGD at every client, rows at the server, everything after
it post-processing.
"""

from dataclasses import dataclass

from dpfl.core.types import Adjacency, ClientSettings, Observer, Unit
from dpfl.plugs.local_work import DpSgd
from dpfl.plugs.row_denoise import RowDenoiser
from dpfl.plugs.selection import Everyone, Selection
from dpfl.plugs.stages import Stage
from dpfl.plugs.weights import Weights
from dpfl.privacy.budgets import Spending
from dpfl.strategy.fit import Strategy

ASSUMPTIONS = (
    "each client runs its own DP-SGD with noise from its own generator and keeps its record sample "
    "secret",
    "neighbouring data sets differ in one record replaced by nothing; the number of records is "
    "public",
    "the server may be curious; what it publishes adds nothing to what it has seen",
)


@dataclass(frozen=True, kw_only=True)
class RecordWork:
    """Settings of every record-level method. What decides privacy has no default.

    ``clip`` bounds the norm of one record's gradient, ``batch_size`` is the expected number of
    records of a step; the length of local work is given in steps or in epochs. ``spending`` says
    which epsilon a client plans its noise for.
    """

    lr: float
    clip: float
    batch_size: int
    local_steps: int | None = None
    local_epochs: int | None = None
    selection: Selection | None = None
    spending: Spending = "heterogeneous"

    @property
    def client_settings(self) -> ClientSettings:
        """What a client without settings of its own does."""
        return ClientSettings(
            lr=self.lr,
            batch_size=self.batch_size,
            local_steps=self.local_steps,
            local_epochs=self.local_epochs,
        )


def record_level(
    name: str,
    work: RecordWork,
    weights: Weights,
    *,
    clean: RowDenoiser | None = None,
    stages: tuple[Stage, ...] = (),
    assumptions: tuple[str, ...] = (),
) -> Strategy:
    """Assemble a strategy whose guarantee is made at the clients, per record, against the
    server.
    """
    return Strategy(
        name=name,
        unit=Unit.RECORD,
        observer=Observer.SERVER,
        adjacency=Adjacency.ZERO_OUT,
        local=DpSgd(client_settings=work.client_settings, clip=work.clip, spending=work.spending),
        selection=work.selection or Everyone(),
        stages=stages,
        clean=clean,
        weights=weights,
        assumptions=(*assumptions, *ASSUMPTIONS),
    )
