"""What a server has decided when it opens a round, and what comes back from a client."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from dpfl.core.types import Cohort, Shared


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the server decided when it opened the round; ``over`` says why there is none, and no
    further one.
    """

    round: int
    cohort: Cohort = field(default_factory=lambda: Cohort(ids=(), claims={}))
    downloads: Mapping[str, bytes] = field(default_factory=dict)
    shared: Mapping[str, Shared] = field(default_factory=dict)
    starts: Mapping[str, Tensor] = field(default_factory=dict)
    unwilling: tuple[str, ...] = ()
    over: str = ""


@dataclass(frozen=True, kw_only=True)
class Uplink:
    """What came back from a client: bytes, or the reason why there are none.

    A client that abstains, fails, is late or sends something that was not agreed on is an ordinary
    outcome of a round.
    """

    client: str
    payload: bytes | None
    reason: str = ""
