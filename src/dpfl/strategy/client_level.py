"""What the client-level methods share: the whole update of a client is clipped; noise comes from
the clients, or from a trusted server.
"""

from dataclasses import dataclass
from typing import Literal

from dpfl.core.checks import one_of, whole_number
from dpfl.core.types import Adjacency, ClientSettings, Observer, Unit
from dpfl.plugs.denoise import Denoiser
from dpfl.plugs.local_work import LocalWork, Sgd
from dpfl.plugs.personal import Personal
from dpfl.plugs.row_denoise import RowDenoiser
from dpfl.plugs.selection import Everyone, Selection
from dpfl.plugs.stages import Clip, GaussianNoise
from dpfl.plugs.weights import ExpectedCohortWeights, UniformWeights
from dpfl.strategy.fit import Strategy

Noise = Literal["distributed", "local"]
SHARES = (
    "every client adds its share of the noise: against the server only that share counts, "
    "against the world the sum of all"
)
DRAWN = (
    "who was drawn stays the server's secret; for a drawn client that sends nothing the server "
    "adds the client's share",
    "whether a client says that it is willing to go on does not depend on whether it was drawn "
    "before",
)
SHARE_ALONE = (
    "every client adds a share of the noise, and that share alone counts, against the server and "
    "the world",
)
REMEMBERED = (
    "clients remember their own parts of the model, so the secret draw of cohorts is not counted on"
)
LOCAL = ("every client adds all of the noise itself: nobody else is counted on",)


@dataclass(frozen=True, kw_only=True)
class ClientWork:
    """Settings of every client-level method. What decides privacy has no default.

    ``clip`` bounds the norm of a client's whole update. ``noise_multiplier`` (std over clip) left
    out is planned from the smallest budget anyone claims. ``lr_decay`` multiplies the learning rate
    once a round.
    """

    lr: float
    clip: float
    batch_size: int
    local_steps: int | None = None
    local_epochs: int | None = None
    noise_multiplier: float | None = None
    lr_decay: float = 1.0
    weight_decay: float = 0.0
    selection: Selection | None = None

    def local(self, *, lr: float | None = None, ball: float | None = None) -> Sgd:
        """Plain SGD with these settings."""
        settings = ClientSettings(
            lr=self.lr if lr is None else lr,
            batch_size=self.batch_size,
            local_steps=self.local_steps,
            local_epochs=self.local_epochs,
        )
        return Sgd(
            client_settings=settings,
            ball=ball,
            weight_decay=self.weight_decay,
            lr_decay=self.lr_decay,
        )

    @property
    def cohorts(self) -> Selection:
        """Who takes part: everyone, unless said otherwise."""
        return self.selection or Everyone()

    @property
    def adjacency(self) -> Adjacency:
        """Replace-one for cohorts of a fixed size, which have no proven bound under less."""
        uniform = self.cohorts.sampling == "uniform"
        return Adjacency.REPLACE_ONE if uniform else Adjacency.ZERO_OUT


@dataclass(frozen=True, kw_only=True)
class NoisyWork(ClientWork):
    """The same, where clients add the noise: each a share of it, or all of it.

    ``tolerated_dropouts``: shares are made for so many clients fewer than are drawn.
    """

    noise: Noise = "distributed"
    tolerated_dropouts: int = 0

    @property
    def distributed(self) -> bool:
        """Whether every client adds a share."""
        return self.noise == "distributed"


def noisy_updates(
    name: str,
    work: NoisyWork,
    *,
    local: LocalWork | None = None,
    clean: RowDenoiser | None = None,
    denoise: tuple[Denoiser, ...] = (),
    personal: Personal | None = None,
    assumptions: tuple[str, ...] = (),
) -> Strategy:
    """Assemble a strategy whose guarantee is made of the clients' own noise on their whole
    updates.
    """
    one_of(name, ("distributed", "local"), noise=work.noise)
    dropouts = whole_number(name, "tolerated_dropouts", work.tolerated_dropouts, least=0)
    dropouts = dropouts if work.distributed else 0
    noise = GaussianNoise(
        noise_multiplier=work.noise_multiplier,
        clip=work.clip,
        distributed=work.distributed,
        tolerated_dropouts=dropouts,
    )
    return Strategy(
        name=name,
        unit=Unit.CLIENT,
        observer=Observer.WORLD if work.distributed else Observer.SERVER,
        adjacency=work.adjacency,
        local=local or work.local(),
        selection=work.cohorts,
        stages=(Clip(clip=work.clip), noise),
        clean=clean,
        weights=ExpectedCohortWeights() if work.distributed else UniformWeights(),
        denoise=denoise,
        personal=personal,
        tolerated_dropouts=dropouts,
        assumptions=(*_assumptions(work, clean, personal), *assumptions),
    )


def _assumptions(
    work: NoisyWork, clean: RowDenoiser | None, personal: Personal | None
) -> tuple[str, ...]:
    if not work.distributed:
        return LOCAL
    if clean is not None:
        return SHARE_ALONE
    if personal is not None:
        return (SHARES, REMEMBERED)
    return (SHARES, *(DRAWN if work.cohorts.sampling == "uniform" else ()))
