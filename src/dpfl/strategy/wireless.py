"""What the methods over the air share: one gradient a client, clipped, added up by the channel."""

from dataclasses import dataclass
from typing import Literal

from dpfl.core.checks import check
from dpfl.core.types import Adjacency, ClientSettings, Observer, Unit
from dpfl.plugs.local_work import Sgd
from dpfl.plugs.over_the_air import Honest, OverTheAir
from dpfl.plugs.selection import Everyone, Selection
from dpfl.plugs.stages import Clip, Stage
from dpfl.plugs.step import LearningRate, ServerSgd
from dpfl.plugs.weights import ExpectedCohortWeights
from dpfl.privacy.accountant import adjacency_named
from dpfl.strategy.fit import Strategy

_WHOLE = 1 << 40  # a batch no data set exceeds
ASSUMPTIONS = (
    "the signals really add up in the air: whoever hears one client alone hears its message "
    "without the others' noise",
    "no more clients fall silent than are tolerated: the receiver would have heard the others with "
    "less noise",
    "phases and strengths are corrected as planned; gains and the projection's seed are public",
)


@dataclass(frozen=True, kw_only=True)
class AirWork:
    """Settings of the methods over the air. What decides privacy has no default.

    ``lr`` is the server's; a client sends one gradient, of all its records or of ``batch_size`` of
    them. The others are those of :class:`dpfl.plugs.over_the_air.OverTheAir`.
    """

    lr: float
    clip: float
    batch_size: int | None = None
    noise_multiplier: float | None = None
    honest: Honest = 1.0
    power: float = 1.0
    receiver_noise: float = 1.0
    fading: Literal["block", "static"] = "block"
    min_gain: float = 0.0
    gain_seed: int = 0
    tolerated_dropouts: int = 0
    adjacency: str = "replace_one"
    selection: Selection | None = None

    def strategy(
        self, name: str, stages: tuple[Stage, ...] = (), numbers: int | None = None
    ) -> Strategy:
        """Assemble clip, ``stages`` and a channel for messages of ``numbers`` numbers."""
        adjacency = adjacency_named(self.adjacency)
        check(
            adjacency is not Adjacency.ADD_REMOVE,
            f"method '{name}'",
            "adjacency = 'add_remove': a client that is removed takes its own noise with it, and "
            "no privacy cost would hold",
            "use replace_one or zero_out",
        )
        same = (
            *("clip", "noise_multiplier", "honest", "power", "receiver_noise"),
            *("fading", "min_gain", "gain_seed", "tolerated_dropouts"),
        )
        channel = OverTheAir(numbers=numbers, **{field: getattr(self, field) for field in same})
        settings = ClientSettings(lr=1.0, batch_size=self.batch_size or _WHOLE, local_steps=1)
        return Strategy(
            name=name,
            unit=Unit.CLIENT,
            observer=Observer.SERVER,
            adjacency=adjacency,
            local=Sgd(client_settings=settings),
            selection=self.selection or Everyone(),
            stages=(Clip(clip=self.clip), *stages),
            channel=channel,
            weights=ExpectedCohortWeights(),
            step=ServerSgd(lr=LearningRate(rate=self.lr)),
            tolerated_dropouts=self.tolerated_dropouts,
            assumptions=(_counted_on(self.honest), *ASSUMPTIONS),
        )


def _counted_on(honest: Honest) -> str:
    if honest == "own":
        return "nobody's noise but the client's own is counted on"
    if honest == "own_and_receiver":
        return (
            "the client's own noise and the receiver's are counted on: the receiver's hardware is "
            "not the adversary's"
        )
    others = f"that of {100 * float(honest):g} % of the other clients"
    return f"the receiver's noise and {others} are counted on"
