"""What the methods share in which clients add the noise: clip the whole update, add noise to it,
send it.
"""

from __future__ import annotations

from typing import Literal

from dpfl.core.checks import whole_number
from dpfl.core.errors import ConfigurationError
from dpfl.core.types import Adjacency, Observer, Unit
from dpfl.plugs.denoise import Denoiser
from dpfl.plugs.local_work import LocalWork
from dpfl.plugs.personal import Personal
from dpfl.plugs.row_denoise import RowDenoiser
from dpfl.plugs.selection import Everyone, Selection
from dpfl.plugs.stages import Clip, GaussianNoise
from dpfl.plugs.weights import ExpectedCohortWeights, UniformWeights
from dpfl.strategy.slots import Strategy

Noise = Literal["distributed", "local"]
SHARES = (
    "every client adds its share of the noise: against the server only that share counts, "
    "against the world the sum of all"
)
DRAWN = (
    "who was drawn stays the server's secret; for a drawn client that sends nothing the server adds the client's share",
    "whether a client says that it is willing to go on does not depend on whether it was drawn before",
)
SHARE_ALONE = (
    "every client adds a share of the noise, and that share alone counts, against the server and the world",
)
REMEMBERED = (
    "clients remember their own parts of the model, so the secret draw of cohorts is not counted on"
)
LOCAL = ("every client adds all of the noise itself: nobody else is counted on",)


def noisy_updates(
    name: str,
    local: LocalWork,
    clip: float,
    noise: Noise,
    noise_multiplier: float | None,
    tolerated_dropouts: int,
    selection: Selection | None,
    *,
    clean: RowDenoiser | None = None,
    denoise: tuple[Denoiser, ...] = (),
    personal: Personal | None = None,
    assumptions: tuple[str, ...] = (),
) -> Strategy:
    """Assemble a strategy whose guarantee is made of the clients' own noise on their whole updates."""
    if noise not in ("distributed", "local"):
        raise ConfigurationError(name, f"noise = '{noise}'", "choose distributed or local")
    tolerated_dropouts = whole_number(name, "tolerated_dropouts", tolerated_dropouts, least=0)
    selection, distributed = selection or Everyone(), noise == "distributed"
    stages = (
        Clip(clip=clip),
        GaussianNoise(
            noise_multiplier=noise_multiplier,
            clip=clip,
            distributed=distributed,
            tolerated_dropouts=tolerated_dropouts if distributed else 0,
        ),
    )
    return Strategy(
        name=name,
        unit=Unit.CLIENT,
        observer=Observer.WORLD if distributed else Observer.SERVER,
        adjacency=Adjacency.REPLACE_ONE if selection.sampling == "uniform" else Adjacency.ZERO_OUT,
        local=local,
        selection=selection,
        stages=stages,
        clean=clean,
        weights=ExpectedCohortWeights() if distributed else UniformWeights(),
        denoise=denoise,
        personal=personal,
        tolerated_dropouts=tolerated_dropouts if distributed else 0,
        assumptions=(*_assumptions(distributed, selection, clean, personal), *assumptions),
    )


def _assumptions(
    distributed: bool, selection: Selection, clean: RowDenoiser | None, personal: Personal | None
) -> tuple[str, ...]:
    if not distributed:
        return LOCAL
    if clean is not None:
        return SHARE_ALONE
    if personal is not None:
        return (SHARES, REMEMBERED)
    return (SHARES, *(DRAWN if selection.sampling == "uniform" else ()))
