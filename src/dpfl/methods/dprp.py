"""DPRP-FedSGD: project, add noise, and add up over the air.

Paper
    Sonee, Rini, Huang: *Wireless Federated Learning with Limited Communication and Differential
    Privacy*, 2021; without projection: Seif, Tandon, Li: *Wireless Federated Learning with Local
    Differential Privacy*, ISIT 2020.

In one sentence
    Every client projects its clipped gradient onto a few random directions that all share,
    transmits it together with the others, and the server, who hears one noisy sum, projects back.

Equations
    z_i = U g_i / sqrt(r), U an r x d matrix fresh every round (Eq. 6, 7);  y = sum_i |h_i| x_i + n
    (Eq. 8, 9; see :mod:`dpfl.plugs.over_the_air`);  g = U^T y / (sqrt(r) n c),  c = sqrt(signal) /
    clip (Eq. 10).

Formal guarantees
    A client's gradient, against the server, as long as the signals really add up in the air.
    Charged are Gaussian mechanisms with the noise that ``honest`` says may be counted on, by tight
    composition. With ``clip_after`` (the default) the projected vector is clipped again: the
    sensitivity is sure, no failure probability is paid. Without it the Johnson-Lindenstrauss bound
    is charged, each round's failure probability comes off delta, and where nothing is left the
    epsilon is infinite. That probability is over the projection, whose seed the operating system
    draws each round in an unseeded run.

Departures
    - The paper fixes the signal at the weakest client's strength, so that epsilon depends on the
      channel's luck. Here the strength is chosen each round so that noise over signal is what was
      charged. ``paper_epsilon`` and ``plan_power`` keep the paper's rule.
    - ``clip_after`` shortens long projections: the estimate is then scaled by E[|z| min(|z|, clip)]
      / |g|^2.
    - The paper composes linearly over rounds; that is in :mod:`dpfl.experiments.power`, for its
      figures only.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dpfl.core.checks import check
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.core.types import Cohort, PlugState, Shared, Terms, Who
from dpfl.numerics import clipping, projections
from dpfl.plugs.base import Gain
from dpfl.plugs.over_the_air import OverTheAir
from dpfl.plugs.stages import Stage
from dpfl.privacy.exposure import Exposure
from dpfl.strategy import Strategy
from dpfl.strategy.method import method
from dpfl.strategy.wireless import AirWork, over_the_air


@dataclass(frozen=True, kw_only=True)
class RandomProjection(Stage):
    """The client projects, the server projects back; both from the round's public seed.

    ``dimension`` is how many numbers are sent. ``projection`` names the random matrix;
    ``sparsity`` is that of "achlioptas": one entry in so many is not zero. ``clip_after`` clips
    the projection again by ``clip``; without it ``distortion`` and ``failure`` are those of the
    Johnson-Lindenstrauss bound.
    """

    dimension: int
    clip: float
    projection: projections.Projection = "rademacher"
    sparsity: float = 1.0
    clip_after: bool = True
    distortion: float = 0.5
    failure: float = 1e-9
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check(max(1, self.dimension))
        check(
            0 < self.distortion < 1 and 0 < self.failure < 1,
            "projection",
            f"distortion = {self.distortion}, failure = {self.failure}",
            "give numbers between 0 and 1",
        )
        check(
            self.projection != "fourier" or self.clip_after,
            "projection",
            "nothing bounds a Fourier projection's norm",
            "use clip_after",
            PrivacyRefusal,
        )

    def _check(self, length: int) -> None:
        projections.check_projection(self.projection, self.dimension, length, self.sparsity)

    def start(self, terms: Terms, layout: Layout) -> PlugState:
        """Refuse a dimension that the model does not have, or for which the JL bound does not
        hold.
        """
        self._check(layout.size)
        if not self.clip_after:
            known = (terms.population, self.failure, self.distortion)
            least = projections.smallest_jl_dimension(*known)
            check(
                self.dimension >= least,
                "projection",
                f"the Johnson-Lindenstrauss bound begins at {least}, not {self.dimension}",
                "use clip_after, or more dimensions",
                PrivacyRefusal,
            )
        return {"length": torch.tensor([layout.size])}

    def open(self, state: PlugState, round_: int, cohort: Cohort, seed: PublicSeed) -> Shared:
        """Publish the round's seed."""
        return {"seed": seed.to_tensor(), "length": state["length"].clone()}

    def client_rows(self, rows: Tensor, shared: Shared) -> Tensor:
        """Project all clients with one matrix."""
        seed = PublicSeed.from_tensor(shared["seed"])
        how = (self.projection, self.sparsity)
        projected = projections.project(rows, seed, self.dimension, *how)
        return clipping.clip(projected, self.clip) if self.clip_after else projected

    def server(self, y: Tensor, shared: Shared, who: Who | None) -> Tensor:
        """Project the sum back to the length of the model."""
        seed = PublicSeed.from_tensor(shared["seed"])
        how = (self.projection, self.sparsity)
        return projections.lift(y, seed, int(shared["length"]), *how)

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """Clipped again the bound is sure; otherwise norms stretch, except with probability
        ``failure``.
        """
        if self.clip_after:
            return exposure.projected(math.inf, self.dimension).clipped(self.clip)
        return exposure.projected(math.sqrt(1 + self.distortion), self.dimension, self.failure)

    def upload_size(self, numbers: float, terms: Terms, layout: Layout) -> float:
        """Return the number of directions."""
        return self.dimension

    def noise_gain(self, terms: Terms, layout: Layout, client: str | None = None) -> Gain:
        """Projecting there and back adds an error of its own."""
        lost = max(0, layout.size - 1) / self.dimension if self.dimension < layout.size else 0.0
        return Gain(error=math.sqrt(lost))


# -- the methods -----------------------------------------------------------------------------------

_NEEDS, _FIXED = "a simulated channel", ("numbers",)


@method(family="wireless", simplicity=10, needs=_NEEDS, fixed=_FIXED)
def airsgd(work: AirWork, channel: OverTheAir) -> Strategy:
    """Gradients noised and added up over the air, all of them: DPRP without the projection."""
    return over_the_air("airsgd", work, channel)


@method(
    family="wireless",
    simplicity=20,
    search={"dimension": (1 / 64, 1 / 8)},
    needs=_NEEDS,
    fixed=_FIXED,
)
def dprp(work: AirWork, channel: OverTheAir, stage: RandomProjection) -> Strategy:
    """Gradients projected onto a few shared random directions, noised, and added up over the
    air.
    """
    return over_the_air("dprp", work, replace(channel, numbers=stage.dimension), (stage,))
