"""What the methods over the air share: one gradient a client, clipped, added up by the channel."""

from dataclasses import dataclass

from dpfl.core.checks import check
from dpfl.core.types import Adjacency, ClientSettings, Observer, Unit
from dpfl.plugs.local_work import Sgd
from dpfl.plugs.over_the_air import Honest, OverTheAir
from dpfl.plugs.sampling import ALL
from dpfl.plugs.selection import Everyone, Selection
from dpfl.plugs.stages import Clip, Stage
from dpfl.plugs.step import LearningRate, ServerSgd
from dpfl.plugs.weights import ExpectedCohortWeights
from dpfl.privacy.accountant import adjacency_named
from dpfl.strategy.fit import Strategy

ASSUMPTIONS = (
    "the signals really add up in the air: whoever hears one client alone hears its message "
    "without the others' noise",
    "no more clients fall silent than are tolerated: the receiver would have heard the others with "
    "less noise",
    "phases and strengths are corrected as planned; gains and the projection's seed are public",
)


@dataclass(frozen=True, kw_only=True)
class AirWork:
    """Settings of the methods over the air, beside those of their channel
    (:class:`dpfl.plugs.over_the_air.OverTheAir`). What decides privacy has no default.

    ``lr`` is the server's; a client sends one gradient, of all its records or of ``batch_size`` of
    them, of a norm of at most ``clip``. ``adjacency`` is "replace_one" or "zero_out". Everyone
    takes part, unless ``selection`` says otherwise. Of the channel, ``power`` is that of a client
    and ``receiver_noise`` the variance at the receiver; ``fading`` is "block" (drawn anew each
    round) or "static", by ``gain_seed``; with more than ``tolerated_dropouts`` clients missing,
    nothing is published.
    """

    lr: float
    clip: float
    batch_size: int | None = None
    adjacency: str = "replace_one"
    selection: Selection | None = None


def over_the_air(
    name: str, work: AirWork, channel: OverTheAir, stages: tuple[Stage, ...] = ()
) -> Strategy:
    """Assemble a strategy of a clip, ``stages`` and a channel."""
    adjacency = adjacency_named(work.adjacency)
    check(
        adjacency is not Adjacency.ADD_REMOVE,
        f"method '{name}'",
        "adjacency = 'add_remove': a client that is removed takes its own noise with it",
        "use replace_one or zero_out",
    )
    settings = ClientSettings(lr=1.0, batch_size=work.batch_size or ALL, local_steps=1)
    return Strategy(
        name=name,
        unit=Unit.CLIENT,
        observer=Observer.SERVER,
        adjacency=adjacency,
        local=Sgd(client_settings=settings),
        selection=work.selection or Everyone(),
        stages=(Clip(clip=work.clip), *stages),
        channel=channel,
        weights=ExpectedCohortWeights(),
        step=ServerSgd(lr=LearningRate(rate=work.lr)),
        tolerated_dropouts=channel.tolerated_dropouts,
        assumptions=(_counted_on(channel.honest), *ASSUMPTIONS),
    )


def _counted_on(honest: Honest) -> str:
    if not isinstance(honest, str):
        others = f"that of {100 * float(honest):g} % of the other clients"
        return f"the receiver's noise and {others} are counted on"
    if honest == "own":
        return "nobody's noise but the client's own is counted on"
    why = "the receiver's hardware is not the adversary's"
    return f"the client's own noise and the receiver's are counted on: {why}"
