"""What the record-level methods share: DP-SGD at every client, rows at the server, everything after
it post-processing.
"""

from dataclasses import dataclass
from typing import Any

from dpfl.core.phases import Clipping
from dpfl.core.types import Adjacency, Observer, Unit
from dpfl.plugs.local_work import DpSgd
from dpfl.plugs.weights import Weights
from dpfl.privacy.budgets import Spending
from dpfl.strategy.fit import Strategy
from dpfl.strategy.work import Work

OWN_NOISE = (
    "each client runs its own DP-SGD with noise from its own generator and keeps its record sample "
    "secret"
)
ASSUMPTIONS = (
    OWN_NOISE,
    "neighbouring data sets differ in one record replaced by nothing; the number of records is "
    "public",
    "the server may be curious; what it publishes adds nothing to what it has seen",
)


@dataclass(frozen=True, kw_only=True)
class RecordWork(Work):
    """Settings of every record-level method. What decides privacy has no default.

    ``clip`` bounds the norm of one record's gradient, ``clipping`` says how. ``spending`` says
    which epsilon a client plans its noise for.
    """

    clip: float
    clipping: Clipping = "flat"
    spending: Spending = "heterogeneous"


def record_level(
    name: str, work: RecordWork, weights: Weights, assumptions: tuple[str, ...] = (), **slots: Any
) -> Strategy:
    """Assemble a strategy whose guarantee is made at the clients, per record, against the server.

    ``slots`` are further slots of the :class:`Strategy` (``clean``, ``stages``, ``step``).
    """
    kept = {"clip": work.clip, "clipping": work.clipping, "spending": work.spending}
    local = DpSgd(client_settings=work.client_settings, **{**work.optimiser, **kept})
    return Strategy(
        name=name,
        unit=Unit.RECORD,
        observer=Observer.SERVER,
        adjacency=Adjacency.ZERO_OUT,
        local=local,
        selection=work.cohorts,
        weights=weights,
        assumptions=(*assumptions, *ASSUMPTIONS),
        **slots,
    )
