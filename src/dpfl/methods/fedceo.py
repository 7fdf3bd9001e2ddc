"""FedCEO: low-rank the stack of the clients' noisy models.

Paper
    Li, Fu, Wang, Chen, Lou, Chen, Yang, Shen, Zheng: *Clients Collaborate: Flexible Differentially
    Private Federated Learning with Guaranteed Improvement of Utility-Privacy Trade-off*, ICML 2025.

In one sentence
    UDP-FedAvg in which, every few rounds, the server stacks the cohort's noisy models and
    soft-thresholds the singular values of the stack in Fourier space along the clients: what the
    models share stays, noise goes.

Equations
    Per tensor, models as a stack (rest, out, clients): DFT along clients, of every frequency slice
    U S V^H  keep U max(S - threshold, 0) V^H, inverse DFT (Theorem 3.1; no factor of the number of
    clients with the unnormalised DFT). threshold = growth^(t / interval) / (2 coefficient), or,
    automatic, growth^(t / interval) sqrt(n) s (sqrt(rest) + sqrt(out)): the top singular value of a
    slice that holds nothing but noise of std s per entry.

Formal guarantees
    As ``udp_fedavg``, but for what is published: the global model after smoothing depends on the
    rows through their sum alone (mean of the smoothed stack = the mean, thresholded at threshold /
    n), a personal start does not, and through the next round neither does the global model. So with
    ``personal_starts`` (the paper) the cost against the world **is** that against the server: one
    share of noise, no amplification. Without them the sum's noise and the secret draw count.

Departures
    - Left open by the text: the global model after smoothing is the mean of the smoothed models; in
      the next round each client of that cohort starts from its own smoothed model, everyone else
      from the global one.
    - Where uploads are missing, their updates count as zero in the mean: the denominator is fixed.
    - Clients are stacked in canonical order: a DFT along clients depends on it.
    - 1-D tensors (biases) become their mean. A tensor of which the threshold would leave nothing is
      averaged instead, and the record says so.
    - Half of the spectrum is the other half's mirror image; slices are thresholded through their
      Gram matrices.
    - Without personal starts the smoothing acts on the mean itself, at threshold / n: the same
      global model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from dpfl.core.checks import whole_number
from dpfl.core.errors import ConfigurationError
from dpfl.core.layout import Block, Layout
from dpfl.core.types import Aggregate, ClientSettings, Metrics, PlugState, Rows, Terms
from dpfl.numerics.tensor_svt import svt_with_values, thresholded
from dpfl.plugs.denoise import Denoiser
from dpfl.plugs.local_work import Sgd
from dpfl.plugs.row_denoise import RowDenoiser
from dpfl.plugs.selection import Selection
from dpfl.strategy import Strategy
from dpfl.strategy.noisy_updates import Noise, noisy_updates

_TOLD = 10  # singular values a slice tells
PERSONAL = "clients that start from their own smoothed models show the world more than a sum: its bill is the server's"


# -- Theorem 3.1: the tensor's singular values, thresholded ----------------------------------------


def smoothness(stack: Tensor) -> Tensor:
    """How far a client's (rest, out, clients) weights of each class are from the others': (out,
    clients), small is smooth.

    Figure 1's Laplacian regularisation along the clients, on the complete graph: mean_j |w_ci -
    w_cj|^2.
    """
    centred = stack.to(torch.float64) - stack.to(torch.float64).mean(dim=2, keepdim=True)
    own = centred.square().sum(dim=0)
    return own + own.mean(dim=1, keepdim=True)


# -- when, and how much ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Every ``interval`` rounds; the threshold from a ``coefficient`` (the paper's lambda) or from
    the noise itself.

    ``row_std``, the noise in every entry of one client's model, is settled at enrolment.
    """

    interval: int
    coefficient: float | None
    growth: float
    layers: int | Literal["all"]
    row_std: float | None = None

    def __post_init__(self) -> None:
        whole_number("fedceo", "interval", self.interval)
        if self.coefficient is not None and not (
            math.isfinite(self.coefficient) and self.coefficient > 0
        ):
            raise ConfigurationError(
                "fedceo", f"coefficient = {self.coefficient}", "give a positive number, or none"
            )
        if not (math.isfinite(self.growth) and self.growth >= 1):
            raise ConfigurationError("fedceo", f"growth = {self.growth}", "give 1 or more")
        if self.layers != "all":
            whole_number("fedceo", "layers ('all', or the last so many)", self.layers)

    def due(self, round_: int) -> bool:
        """Whether this round (from 0) ends in smoothing."""
        return (round_ + 1) % self.interval == 0

    def threshold(self, round_: int, rest: int, out: int, clients: int) -> float:
        """The threshold of a (rest, out, clients) stack."""
        growth = float(self.growth ** ((round_ + 1) / self.interval))
        if self.coefficient is not None:
            return growth / (2 * self.coefficient)
        if self.row_std is None:
            raise ConfigurationError(
                "fedceo", "the noise was left open", "enrol first, or give a coefficient"
            )
        return growth * math.sqrt(clients) * self.row_std * (math.sqrt(rest) + math.sqrt(out))

    def matrices(self, layout: Layout) -> list[Block]:
        """The tensors that are smoothed: those with at least two axes, or the last few of them."""
        matrices = [block for block in layout if len(block.shape) >= 2]
        return matrices if self.layers == "all" else matrices[-self.layers :]


@dataclass(frozen=True, kw_only=True)
class LowRankStack(RowDenoiser):
    """Smooth the cohort's models against each other; each client starts next from its own."""

    schedule: Schedule
    clip: float
    distributed: bool
    tolerated_dropouts: int = 0
    ordered: ClassVar[bool] = True

    def resolve(self, terms: Terms) -> Self:
        """Learn the noise in a client's model."""
        return replace(self, schedule=_with_noise(self, terms))

    def personal_starts(self, round_: int) -> bool:
        """After a smoothing round."""
        return self.schedule.due(round_)

    def __call__(
        self, state: PlugState, rows: Rows, round_: int
    ) -> tuple[Tensor, PlugState, Metrics]:
        """Return the smoothed rows, and what became of the singular values."""
        if not self.schedule.due(round_) or len(rows.cohort) == 0:
            return rows.matrix, state, {}
        models = (rows.origin + rows.matrix).to(torch.float32)
        told: Metrics = {}
        matrices = self.schedule.matrices(rows.layout)
        for block in (b for b in rows.layout if len(b.shape) < 2):
            models[:, block.slice] = models[:, block.slice].mean(dim=0)
        for block in matrices:
            stack = _stacked(models, block)
            level = self.schedule.threshold(round_, *stack.shape)
            smoothed, values = svt_with_values(stack, level)
            if float(values[0, 0]) <= level:  # nothing would be left of what the models share
                smoothed = stack.mean(dim=2, keepdim=True).expand_as(stack)
            told |= _spectrum(block.name, values, level)
            if block is matrices[-1]:
                told |= _smoothness_told(stack, smoothed)
            models[:, block.slice] = smoothed.permute(2, 1, 0).reshape(len(models), -1)
        return models - rows.origin, state, told


@dataclass(frozen=True, kw_only=True)
class LowRankMean(Denoiser):
    """Smooth the mean of the models alone, at threshold / clients: the same global model, from the
    sum alone.
    """

    schedule: Schedule
    clip: float
    distributed: bool
    tolerated_dropouts: int = 0
    clients: float | None = None

    def resolve(self, terms: Terms) -> Self:
        """Learn the noise in a client's model, and how many there are."""
        return replace(
            self, schedule=_with_noise(self, terms), clients=self.clients or terms.expected_cohort
        )

    def __call__(self, aggregate: Aggregate) -> tuple[Tensor, Metrics]:
        """Return the update that leads to the smoothed mean."""
        if not self.schedule.due(aggregate.round):
            return aggregate.vector, {}
        if self.clients is None:
            raise ConfigurationError("fedceo", "the cohort was left open", "enrol first")
        mean = aggregate.model + aggregate.vector
        told: Metrics = {}
        for block in self.schedule.matrices(aggregate.layout):
            matrix = mean[block.slice].reshape(block.shape[0], -1).T
            rest, out = matrix.shape
            level = (
                self.schedule.threshold(aggregate.round, rest, out, round(self.clients))
                / self.clients
            )
            tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
            smoothed, values = thresholded(tall, level)
            told |= _spectrum(block.name, values[None], level)
            if float(values[0]) > level:
                shaped = smoothed if tall is matrix else smoothed.T
                mean[block.slice] = shaped.T.reshape(-1)
        return mean - aggregate.model, told


def _with_noise(piece: LowRankStack | LowRankMean, terms: Terms) -> Schedule:
    """Settle the noise in every entry of one client's model; refuse a threshold that grows beyond
    all numbers.
    """
    schedule = piece.schedule
    shares = (
        max(1.0, terms.expected_cohort - piece.tolerated_dropouts) if piece.distributed else 1.0
    )
    largest = terms.rounds / schedule.interval * math.log(schedule.growth) - math.log(
        schedule.coefficient or 1.0
    )
    if largest > 600:
        raise ConfigurationError(
            "fedceo",
            f"growth = {schedule.growth}, coefficient = {schedule.coefficient} make a threshold beyond all numbers",
            "let it grow less, or give a larger coefficient",
        )
    if schedule.row_std is not None or terms.noise_multiplier is None:
        return schedule
    return replace(schedule, row_std=terms.noise_multiplier * piece.clip / math.sqrt(shares))


def _stacked(models: Tensor, block: Block) -> Tensor:
    """One tensor of all models as (rest, out, clients)."""
    return models[:, block.slice].reshape(len(models), block.shape[0], -1).permute(2, 1, 0)


def _spectrum(name: str, values: Tensor, level: float) -> Metrics:
    """Largest singular values of each slice, one slice after the other, how many survived, and what
    they had to exceed.
    """
    return {
        f"{name}/threshold": level,
        f"{name}/singular_values": [round(v, 6) for row in values[:, :_TOLD].tolist() for v in row],
        f"{name}/survived": [float(count) for count in (values > level).sum(dim=-1).tolist()],
        f"{name}/slices": len(values),
    }


def _smoothness_told(before: Tensor, after: Tensor) -> Metrics:
    old, new = smoothness(before), smoothness(after)
    told: Metrics = {"smoothness_before": float(old.mean()), "smoothness_after": float(new.mean())}
    if old.numel() <= 1000:  # a picture, class by class
        told |= {"smoothness_map_before": _rounded(old), "smoothness_map_after": _rounded(new)}
    return told


def _rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.5g}") for value in values.flatten().tolist()]


def fedceo(
    *,
    lr: float,
    clip: float,
    batch_size: int,
    local_steps: int | None = None,
    local_epochs: int | None = None,
    noise: Noise = "distributed",
    noise_multiplier: float | None = None,
    interval: int = 10,
    coefficient: float | Literal["auto"] = "auto",
    growth: float = 1.0,
    layers: int | Literal["all"] = "all",
    personal_starts: bool = True,
    tolerated_dropouts: int = 0,
    lr_decay: float = 1.0,
    weight_decay: float = 0.0,
    selection: Selection | None = None,
) -> Strategy:
    """UDP-FedAvg with a low-rank step on the stack of noisy models; the threshold comes from the
    noise, or from you.
    """
    client_settings = ClientSettings(
        lr=lr, batch_size=batch_size, local_steps=local_steps, local_epochs=local_epochs
    )
    local = Sgd(client_settings=client_settings, weight_decay=weight_decay, lr_decay=lr_decay)
    if isinstance(coefficient, str) and coefficient != "auto":
        raise ConfigurationError(
            "fedceo", f"coefficient = '{coefficient}'", "give a positive number, or 'auto'"
        )
    number = None if isinstance(coefficient, str) else coefficient
    schedule = Schedule(interval=interval, coefficient=number, growth=growth, layers=layers)
    shared = {"distributed": noise == "distributed", "tolerated_dropouts": tolerated_dropouts}
    stack = LowRankStack(schedule=schedule, clip=clip, **shared) if personal_starts else None  # type: ignore[arg-type]
    mean = () if personal_starts else (LowRankMean(schedule=schedule, clip=clip, **shared),)  # type: ignore[arg-type]
    return noisy_updates(
        "fedceo",
        local,
        clip,
        noise,
        noise_multiplier,
        tolerated_dropouts,
        selection,
        clean=stack,
        denoise=mean,
        assumptions=(PERSONAL,) if personal_starts else (),
    )
