"""What the client-level methods share: the whole update of a client is clipped; noise comes from
the clients, or from a trusted server.
"""

from dataclasses import dataclass
from typing import Any, Literal

from dpfl.core.checks import one_of, whole_number
from dpfl.core.types import Adjacency, ClientSettings, Observer, Unit
from dpfl.plugs.adaptive_clip import AdaptiveClip
from dpfl.plugs.local_work import Sgd
from dpfl.plugs.stages import Clip, GaussianNoise
from dpfl.plugs.weights import ExpectedCohortWeights, UniformWeights
from dpfl.strategy.fit import Strategy
from dpfl.strategy.work import Work

Noise = Literal["distributed", "local"]
LOCAL = "every client adds all of the noise itself: nobody else is counted on"
SHARE_ALONE = (
    "every client adds a share of the noise, and that share alone counts, against the server and "
    "the world"
)
SHARES = (
    "every client adds its share of the noise: against the server only that share counts, "
    "against the world the sum of all"
)
TRUSTED = "the server is trusted: it sees every client's update, and adds the noise"
HIDDEN_DRAW = "who was drawn stays the server's secret"
REMEMBERED = (
    "clients remember their own parts of the model, so the secret draw of cohorts is not counted on"
)
DRAWN = (
    f"{HIDDEN_DRAW}; for a drawn client that sends nothing the server adds the client's share",
    "whether a client says that it is willing to go on does not depend on whether it was drawn "
    "before",
)


@dataclass(frozen=True, kw_only=True)
class ClientWork(Work):
    """Settings of every client-level method. What decides privacy has no default.

    ``clip`` bounds the norm of a client's whole update. ``noise_multiplier`` (std over clip) left
    out is planned from the smallest budget anyone claims. ``lr_decay`` multiplies the learning rate
    once a round.

    With a ``target_quantile`` the clip adapts: ``clip`` is that of the first round, and later ones
    follow that quantile of the updates' norms at the speed ``clip_lr``, for ``vote_share`` of the
    privacy loss (:class:`dpfl.plugs.adaptive_clip.AdaptiveClip`).
    """

    clip: float
    target_quantile: float | None = None
    clip_lr: float = 0.2
    vote_share: float = 0.01
    noise_multiplier: float | None = None
    lr_decay: float = 1.0

    def local(self, *, lr: float | None = None, ball: float | None = None) -> Sgd:
        """Plain SGD with these settings."""
        settings = ClientSettings(lr=lr).over(self.client_settings)
        return Sgd(client_settings=settings, ball=ball, lr_decay=self.lr_decay, **self.optimiser)

    @property
    def clip_stage(self) -> Clip | AdaptiveClip:
        """The stage that bounds updates."""
        if self.target_quantile is None:
            return Clip(clip=self.clip)
        names = ("clip", "target_quantile", "clip_lr", "vote_share")
        return AdaptiveClip(**{name: getattr(self, name) for name in names})

    @property
    def sent_norm(self) -> float:
        """The largest norm of what is sent: an adaptive clip sends in units of itself."""
        return self.clip if self.target_quantile is None else 1.0

    @property
    def adjacency(self) -> Adjacency:
        """Replace-one for cohorts of a fixed size, which have no proven bound under less."""
        uniform = self.cohorts.sampling == "uniform"
        return Adjacency.REPLACE_ONE if uniform else Adjacency.ZERO_OUT


@dataclass(frozen=True, kw_only=True)
class NoisyWork(ClientWork):
    """The same, where clients add the noise: each a share of it, or all of it.

    ``noise`` is "distributed" (shares) or "local" (each adds all of it).
    ``tolerated_dropouts``: shares are made for so many clients fewer than are drawn.
    """

    noise: Noise = "distributed"
    tolerated_dropouts: int = 0


def noisy_updates(
    name: str, work: NoisyWork, *, assumptions: tuple[str, ...] = (), **slots: Any
) -> Strategy:
    """Assemble a strategy whose guarantee is made of the clients' own noise on their whole updates.

    ``slots`` are further slots of the :class:`Strategy` (``local``, ``clean``, ``denoise``,
    ``personal``).
    """
    one_of(name, ("distributed", "local"), noise=work.noise)
    dropouts = whole_number(name, "tolerated_dropouts", work.tolerated_dropouts, least=0)
    shared = work.noise == "distributed"
    dropouts = dropouts if shared else 0
    noise = GaussianNoise(
        noise_multiplier=work.noise_multiplier,
        clip=work.sent_norm,
        distributed=shared,
        tolerated_dropouts=dropouts,
    )
    drawn = DRAWN if work.cohorts.sampling == "uniform" else ()
    counted: tuple[str, ...] = (SHARES, *((REMEMBERED,) if "personal" in slots else drawn))
    counted = (SHARE_ALONE,) if "clean" in slots else counted
    return Strategy(
        name=name,
        unit=Unit.CLIENT,
        observer=Observer.WORLD if shared else Observer.SERVER,
        adjacency=work.adjacency,
        selection=work.cohorts,
        stages=(work.clip_stage, noise),
        weights=ExpectedCohortWeights() if shared else UniformWeights(),
        tolerated_dropouts=dropouts,
        assumptions=(*(counted if shared else (LOCAL,)), *assumptions),
        **{"local": work.local(), **slots},
    )
