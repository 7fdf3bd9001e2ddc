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
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from dpfl.core.errors import ConfigurationError
from dpfl.core.layout import Layout
from dpfl.core.types import Adjacency, Aggregate, ClientSettings, Metrics, Observer, Unit
from dpfl.numerics.recursive_filter import check_smoothing, laplacian_smoothing, noise_gain
from dpfl.plugs.central_noise import CentralNoise
from dpfl.plugs.denoise import Denoiser
from dpfl.plugs.local_work import Sgd
from dpfl.plugs.selection import Everyone, Selection
from dpfl.plugs.stages import Clip
from dpfl.plugs.weights import ExpectedCohortWeights
from dpfl.strategy import Strategy

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
        if self.scope not in ("tensor", "model"):
            raise ConfigurationError(
                "smoothing", f"scope = '{self.scope}'", "choose tensor or model"
            )

    def __call__(self, aggregate: Aggregate) -> tuple[Tensor, Metrics]:
        """Return the smoothed vector, and by how much white noise in it shrinks (root of the
        variance's gain).
        """
        vector = aggregate.vector
        smoothed = torch.cat(
            [laplacian_smoothing(vector[s], self.smoothing) for s in self._slices(aggregate.layout)]
        )
        return smoothed, {"noise_norm_factor": math.sqrt(self.gain(aggregate.layout))}

    def gain(self, layout: Layout) -> float:
        """Variance of white noise after smoothing, relative to before."""
        sizes = [piece.stop - piece.start for piece in self._slices(layout)]
        return math.fsum(size * noise_gain(size, self.smoothing) for size in sizes) / layout.size

    def _slices(self, layout: Layout) -> list[slice]:
        return (
            [block.slice for block in layout] if self.scope == "tensor" else [slice(0, layout.size)]
        )


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
    if sampling not in _THEOREMS:
        raise ConfigurationError(
            "closed form", f"sampling = '{sampling}'", "choose uniform or poisson"
        )
    for name, value, good in (
        ("epsilon", epsilon, epsilon > 0),
        ("delta", delta, 0 < delta < 1),
        ("clip", clip, clip > 0),
        ("sampling_rate", sampling_rate, 0 < sampling_rate <= 1),
        ("rounds", rounds, rounds >= 1),
    ):
        if not (good and math.isfinite(value)):
            raise ConfigurationError(
                "closed form", f"{name} = {value}", "give a number in its range"
            )
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


def dp_fed(
    *,
    lr: float,
    clip: float,
    batch_size: int,
    local_steps: int | None = None,
    local_epochs: int | None = None,
    noise_multiplier: float | None = None,
    lr_decay: float = 1.0,
    weight_decay: float = 0.0,
    project: Literal["every_step", "once"] = "every_step",
    selection: Selection | None = None,
) -> Strategy:
    """Client-level privacy against the world: clipped updates, noise by a trusted server, a fixed
    denominator.
    """
    if project not in ("every_step", "once"):
        raise ConfigurationError("dp_fed", f"project = '{project}'", "choose every_step or once")
    client_settings = ClientSettings(
        lr=lr, batch_size=batch_size, local_steps=local_steps, local_epochs=local_epochs
    )
    selection = selection or Everyone()
    stage = Clip(clip=clip)
    ball = clip if project == "every_step" else None
    return Strategy(
        name="dp_fed",
        unit=Unit.CLIENT,
        observer=Observer.WORLD,
        adjacency=Adjacency.REPLACE_ONE if selection.sampling == "uniform" else Adjacency.ZERO_OUT,
        local=Sgd(
            client_settings=client_settings, ball=ball, weight_decay=weight_decay, lr_decay=lr_decay
        ),
        selection=selection,
        stages=(stage,),
        weights=ExpectedCohortWeights(),
        central_noise=CentralNoise(noise_multiplier=noise_multiplier),
        assumptions=ASSUMPTIONS,
    )


def dp_fed_ls(
    *,
    lr: float,
    clip: float,
    batch_size: int,
    smoothing: float = 1.0,
    scope: Literal["tensor", "model"] = "tensor",
    local_steps: int | None = None,
    local_epochs: int | None = None,
    noise_multiplier: float | None = None,
    lr_decay: float = 1.0,
    weight_decay: float = 0.0,
    project: Literal["every_step", "once"] = "every_step",
    selection: Selection | None = None,
) -> Strategy:
    """DP-Fed with Laplacian smoothing of the noisy average: less noise, a little bias, the same
    bill.
    """
    base = dp_fed(
        lr=lr,
        clip=clip,
        batch_size=batch_size,
        local_steps=local_steps,
        local_epochs=local_epochs,
        noise_multiplier=noise_multiplier,
        lr_decay=lr_decay,
        weight_decay=weight_decay,
        project=project,
        selection=selection,
    )
    return replace(
        base, name="dp_fed_ls", denoise=(LaplacianSmoothing(smoothing=smoothing, scope=scope),)
    )
