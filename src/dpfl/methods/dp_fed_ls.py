"""DP-Fed and DP-Fed-LS: client-level privacy by a trusted server, and Laplacian smoothing of the
noisy average.

Paper
    Liang, Wang, Gu, Osher, Yao: *Exploring Private Federated Learning with Laplacian Smoothing*,
    2020; DP-Fed goes back to McMahan, Ramage, Talwar, Zhang: *Learning Differentially Private
    Recurrent Language Models*, ICLR 2018.

In one sentence
    Clients keep their models in a ball around the global one, the server adds Gaussian noise to the
    sum of their updates, divides by the expected cohort, and smooths every tensor of the result,
    which costs no privacy.

Equations
    u = (sum_i clip(update_i) + N(0, nu^2)) / (rate x population),  nu = noise_multiplier x clip;
    (I + smoothing x Lap) v = u per tensor, Lap the circulant 1-D Laplacian (Eq. 2): in Fourier
    space v_k = u_k / (1 + 2 smoothing (1 - cos w_k)).

Formal guarantees
    A client's whole contribution is hidden from the world, which sees the models and not who was
    drawn. The server sees every update: it is trusted. Poisson cohorts: zero-out adjacency (a
    client's update becomes zero), sensitivity ``clip``. Fixed-size cohorts: replace-one,
    sensitivity 2 x ``clip`` (charged so; the paper charges ``clip``, which no adjacency we can
    prove justifies). Not add/remove: sum and noise are divided by rate x population, so the
    published noise tells how many clients there are. The number of clients and the noise level,
    which follows from their claims, are public terms.

Departures
    - The denominator is the expected cohort's size, never the realised one; an empty cohort is a
      round of noise.
    - Only the circulant reading of the Laplacian fits both Eq. 2 and Proposition 1. Tensors with
      fewer than 3 entries are left alone. ``scope = "model"`` smooths the whole vector instead.
    - Theorems 1 and 2 are here as :func:`closed_form_noise`; noise is planned by the numerical
      accountant, which needs a fourth to a twentieth of it.
    - The system is solved by a recursive filter forth and back, exactly periodic: (I + s Lap)
      factors into (s / r) (1 - r S) (1 - r S^T) with S the cyclic shift.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from dpfl.core.checks import check, one_of
from dpfl.core.layout import Layout
from dpfl.core.types import Aggregate, Observer, PlugOutput, PlugState, Terms, Unit
from dpfl.numerics.recursive_filter import check_smoothing, laplacian_smoothing, noise_gain
from dpfl.plugs.base import Gain
from dpfl.plugs.central_noise import CentralNoise
from dpfl.plugs.denoise import Denoiser
from dpfl.plugs.weights import ExpectedCohortWeights
from dpfl.strategy import Strategy
from dpfl.strategy.client_level import HIDDEN_DRAW, TRUSTED, ClientWork
from dpfl.strategy.method import method

ASSUMPTIONS = (
    TRUSTED,
    HIDDEN_DRAW,
    "each client keeps its update within the clip; the server clips nothing again",
)


# -- Eq. 2: Laplacian smoothing --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LaplacianSmoothing(Denoiser):
    """Smooth every tensor of the aggregate, or the whole vector at once.

    ``smoothing`` is the strength; 0 smooths nothing. ``scope`` is "tensor" or "model".
    """

    smoothing: float = 1.0
    scope: Literal["tensor", "model"] = "tensor"
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_smoothing(self.smoothing)
        one_of("smoothing", ("tensor", "model"), scope=self.scope)

    def __call__(self, state: PlugState, aggregate: Aggregate) -> PlugOutput:
        """Return the smoothed vector, and by how much white noise in it shrinks (root of the
        variance's gain).
        """
        parts = [aggregate.vector[piece] for piece in self._slices(aggregate.layout)]
        smoothed = torch.cat([laplacian_smoothing(part, self.smoothing) for part in parts])
        return smoothed, state, {"noise_norm_factor": math.sqrt(self.gain(aggregate.layout))}

    def gain(self, layout: Layout) -> float:
        """Variance of white noise after smoothing, relative to before."""
        sizes = [piece.stop - piece.start for piece in self._slices(layout)]
        return math.fsum(size * noise_gain(size, self.smoothing) for size in sizes) / layout.size

    def noise_gain(self, terms: Terms, layout: Layout, client: str | None = None) -> Gain:
        """Smoothing shrinks white noise; how much signal it takes depends on the model."""
        return Gain(noise=self.gain(layout))

    def _slices(self, layout: Layout) -> list[slice]:
        whole = [slice(0, layout.size)]
        return [block.slice for block in layout] if self.scope == "tensor" else whole


# -- the methods -----------------------------------------------------------------------------------


Project = Literal["every_step", "once"]


def _dp_fed(name: str, work: ClientWork, project: Project, *denoise: Denoiser) -> Strategy:
    one_of(name, ("every_step", "once"), project=project)
    check(
        work.target_quantile is None or project == "once",
        name,
        "project = 'every_step' holds updates within the first clip, so it could not grow",
        "give project = 'once' beside a target_quantile",
    )
    return Strategy(
        name=name,
        unit=Unit.CLIENT,
        observer=Observer.WORLD,
        adjacency=work.adjacency,
        stages=(work.clip_stage,),
        local=work.local(ball=work.clip if project == "every_step" else None),
        selection=work.cohorts,
        weights=ExpectedCohortWeights(),
        central_noise=CentralNoise(noise_multiplier=work.noise_multiplier),
        denoise=denoise,
        assumptions=ASSUMPTIONS,
    )


@method(family="client", simplicity=10, sampling="poisson")
def dp_fed(work: ClientWork, *, project: Project = "every_step") -> Strategy:
    """Client-level privacy against the world: clipped updates, noise by a trusted server, a fixed
    denominator.

    ``project`` is "every_step" (back into the ball of the clip after each local step) or "once".
    """
    return _dp_fed("dp_fed", work, project)


@method(
    family="client",
    simplicity=30,
    sampling="poisson",
    search={"smoothing": (0.1, 1.0, 10.0)},
    remark="smoothing takes some of the signal as well, so compare it with dp_fed",
)
def dp_fed_ls(
    work: ClientWork, denoise: LaplacianSmoothing, *, project: Project = "every_step"
) -> Strategy:
    """DP-Fed with Laplacian smoothing of the noisy average: less noise, a little bias, the same
    privacy cost.

    ``project`` is "every_step" (back into the ball of the clip after each local step) or "once".
    """
    return _dp_fed("dp_fed_ls", work, project, denoise)
