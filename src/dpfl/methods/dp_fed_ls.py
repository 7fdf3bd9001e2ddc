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

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from dpfl.core.checks import check, one_of, positive, share
from dpfl.core.errors import ConfigurationError
from dpfl.core.layout import Layout
from dpfl.core.types import Aggregate, Metrics, Observer, PlugState, Terms, Unit
from dpfl.numerics.recursive_filter import check_smoothing, laplacian_smoothing, noise_gain
from dpfl.plugs.base import Gain
from dpfl.plugs.central_noise import CentralNoise
from dpfl.plugs.denoise import Denoiser
from dpfl.plugs.stages import Clip
from dpfl.plugs.weights import ExpectedCohortWeights
from dpfl.strategy import Strategy
from dpfl.strategy.client_level import ClientWork
from dpfl.strategy.method import method

ASSUMPTIONS = (
    "the server is trusted: it sees every client's update, and adds the noise",
    "who was drawn stays the server's secret",
    "each client keeps its update within the clip; the server clips nothing again",
)


# -- Eq. 2: Laplacian smoothing --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LaplacianSmoothing(Denoiser):
    """Smooth every tensor of the aggregate, or with ``scope = "model"`` the whole vector at once."""

    smoothing: float
    scope: Literal["tensor", "model"] = "tensor"
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_smoothing(self.smoothing)
        one_of("smoothing", ("tensor", "model"), scope=self.scope)

    def __call__(self, state: PlugState, aggregate: Aggregate) -> tuple[Tensor, PlugState, Metrics]:
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


# -- Theorems 1 and 2 ------------------------------------------------------------------------------

_THEOREMS = {"uniform": (14.0, 0.67), "poisson": (8.0, 0.53)}


def closed_form_noise(
    epsilon: float,
    delta: float,
    clip: float,
    sampling_rate: float,
    rounds: int,
    sampling: Literal["uniform", "poisson"] = "poisson",
) -> float:
    """Noise std on the sum by Theorem 1 (uniform) or 2 (poisson): the smallest over lambda that
    meets all side conditions.

    nu = rate clip / epsilon sqrt(c rounds / lambda (log(1/delta) / (1 - lambda) + epsilon)), c = 14
    or 8, provided that nu^2 / 4 clip^2 >= 0.67 or 0.53 and alpha - 1 <= nu^2 / 6 clip^2 log(1 /
    (rate alpha (1 + nu^2 / 4 clip^2))).

    Far more than the numerical accountant asks for; kept because the paper plans with it.

    >>> round(closed_form_noise(8.0, 1000**-1.1, 0.3, 0.05, 30), 4)
    0.5662
    """
    one_of("closed form", _THEOREMS, sampling=sampling)
    positive("closed form", epsilon=epsilon, clip=clip, rounds=rounds)
    share("closed form", delta=delta, sampling_rate=sampling_rate)
    check(delta < 1, "closed form", f"delta = {delta}", "give a number below 1")
    found = _closed_form(epsilon, delta, sampling_rate, rounds, sampling)
    if found is None:
        smallest = _smallest_epsilon(delta, sampling_rate, rounds, sampling)
        reach = "no epsilon at all" if smallest is None else f"epsilon >= {smallest:.2f}"
        raise ConfigurationError(
            "closed form",
            f"no lambda meets the theorem's conditions for epsilon = {epsilon:g}",
            f"for these rounds and this rate it covers {reach}; plan the noise with dpfl.privacy.calibrate instead",
        )
    return found * clip


def _closed_form(
    epsilon: float, delta: float, rate: float, rounds: int, sampling: str, points: int = 200_001
) -> float | None:
    """The noise multiplier, or None; on a grid of lambda that is dense at both ends."""
    constant, least = _THEOREMS[sampling]
    half = np.geomspace(1e-13, 0.5, points)
    shares = np.concatenate([half, 1 - half[::-1]])
    odds = math.log(1 / delta) / (1 - shares)
    alphas = odds / epsilon + 1
    multipliers = rate / epsilon * np.sqrt(constant * rounds / shares * (odds + epsilon))
    squares = multipliers**2
    room = squares / 6 * np.log(1 / (rate * alphas * (1 + squares / 4)))
    good = (squares / 4 >= least) & (alphas - 1 <= room)
    return float(multipliers[good].min()) if bool(good.any()) else None


def _smallest_epsilon(delta: float, rate: float, rounds: int, sampling: str) -> float | None:
    """The smallest epsilon the theorem covers, on a grid of a hundredth's steps, rounded up."""
    grid = np.geomspace(1e-3, 1e4, 1621)
    covered = [
        e for e in grid if _closed_form(float(e), delta, rate, rounds, sampling, points=2_001)
    ]
    return math.ceil(float(covered[0]) * 100) / 100 if covered else None


# -- the methods -----------------------------------------------------------------------------------


def _dp_fed(name: str, work: ClientWork, project: str, denoise: tuple[Denoiser, ...]) -> Strategy:
    one_of(name, ("every_step", "once"), project=project)
    return Strategy(
        name=name,
        unit=Unit.CLIENT,
        observer=Observer.WORLD,
        adjacency=work.adjacency,
        local=work.local(ball=work.clip if project == "every_step" else None),
        selection=work.cohorts,
        stages=(Clip(clip=work.clip),),
        weights=ExpectedCohortWeights(),
        central_noise=CentralNoise(noise_multiplier=work.noise_multiplier),
        denoise=denoise,
        assumptions=ASSUMPTIONS,
    )


@method(family="client", simplicity=10, sampling="poisson")
def dp_fed(work: ClientWork, *, project: Literal["every_step", "once"] = "every_step") -> Strategy:
    """Client-level privacy against the world: clipped updates, noise by a trusted server, a fixed
    denominator.
    """
    return _dp_fed("dp_fed", work, project, ())


@method(
    family="client",
    simplicity=30,
    sampling="poisson",
    search={"smoothing": (0.1, 1.0, 10.0)},
    remark="smoothing takes some of the signal as well, so compare it with dp_fed",
)
def dp_fed_ls(
    work: ClientWork,
    *,
    smoothing: float = 1.0,
    scope: Literal["tensor", "model"] = "tensor",
    project: Literal["every_step", "once"] = "every_step",
) -> Strategy:
    """DP-Fed with Laplacian smoothing of the noisy average: less noise, a little bias, the same
    privacy cost.
    """
    denoise = LaplacianSmoothing(smoothing=smoothing, scope=scope)
    return _dp_fed("dp_fed_ls", work, project, (denoise,))
