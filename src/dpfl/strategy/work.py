"""Settings that methods share: what clients do with their records, and who takes part."""

from dataclasses import dataclass, fields
from typing import Any

from dpfl.core.types import ClientSettings
from dpfl.plugs.selection import Everyone, Selection


@dataclass(frozen=True, kw_only=True)
class Work:
    """Settings of every method whose clients train for a while; what is not given has no default.

    ``lr`` is the learning rate of local steps and ``batch_size`` the (expected) number of records
    of a step; the length of local work is given in ``local_steps`` or in ``local_epochs``.
    ``momentum``, ``weight_decay`` and ``proximal`` (FedProx) are those of local steps
    (:class:`dpfl.core.phases.Phase`). Everyone takes part, unless ``selection`` says otherwise.
    """

    lr: float
    batch_size: int
    local_steps: int | None = None
    local_epochs: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0
    selection: Selection | None = None

    @property
    def client_settings(self) -> ClientSettings:
        """What a client without settings of its own does."""
        return ClientSettings(**{f.name: getattr(self, f.name) for f in fields(ClientSettings)})

    @property
    def optimiser(self) -> dict[str, Any]:
        """Settings of local steps, as local work takes them."""
        return {n: getattr(self, n) for n in ("momentum", "weight_decay", "proximal")}

    @property
    def cohorts(self) -> Selection:
        """How cohorts are drawn: everyone, unless ``selection`` was given."""
        return self.selection or Everyone()
