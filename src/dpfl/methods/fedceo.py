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
    - Half of the spectrum mirrors the other; slices are thresholded through their Gram matrices.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from dpfl.core.checks import check, one_of, positive, whole_number
from dpfl.core.layout import Block, Layout
from dpfl.core.types import Aggregate, Metrics, PlugOutput, PlugState, Rows, Terms
from dpfl.numerics import tensor_svt as svt
from dpfl.plugs.base import FigureKind, FigureSpec, Plug, planned, spectrum
from dpfl.plugs.denoise import Denoiser, RowDenoiser
from dpfl.strategy import Strategy
from dpfl.strategy.client_level import Noise, NoisyWork, noisy_updates
from dpfl.strategy.method import method

TRIED = {"coefficient": ("auto", 1.0, 10.0)}
PERSONAL = (
    "clients that start from their own smoothed models show the world more than a sum: its privacy "
    "cost is the server's"
)


@dataclass(frozen=True, kw_only=True)
class LowRank(Plug):
    """When singular values are thresholded, at which level, and of which tensors.

    Every ``interval`` rounds, of "all" ``layers`` or the last few; the threshold from the noise or
    a ``coefficient``, times ``growth`` per interval. ``personal_starts``: from own smoothed models.
    """

    clip: float
    interval: int = 10
    coefficient: float | Literal["auto"] = "auto"
    growth: float = 1.0
    layers: int | Literal["all"] = "all"
    noise: Noise = "distributed"
    tolerated_dropouts: int = 0
    noise_multiplier: float | None = None
    expected_cohort: float | None = None

    def __post_init__(self) -> None:
        whole_number("fedceo", "interval", self.interval)
        if isinstance(self.coefficient, str):
            one_of("fedceo", ("auto",), coefficient=self.coefficient)
        else:
            positive("fedceo", coefficient=self.coefficient)
        check(
            math.isfinite(self.growth) and self.growth >= 1,
            "fedceo",
            f"growth = {self.growth}",
            "give 1 or more",
        )
        if self.layers != "all":
            whole_number("fedceo", "layers ('all', or the last so many)", self.layers)

    def resolve(self, terms: Terms) -> Self:
        """Take noise and cohort of the terms; refuse a threshold that grows beyond all numbers."""
        coefficient = 1.0 if isinstance(self.coefficient, str) else self.coefficient
        largest = terms.rounds / self.interval * math.log(self.growth) - math.log(coefficient)
        check(
            largest <= 600,
            "fedceo",
            f"growth = {self.growth} makes a threshold beyond all numbers",
            "let it grow less, or raise the coefficient",
        )
        return super().resolve(terms)

    @property
    def row_std(self) -> float:
        """The noise in every entry of one client's model."""
        std = planned(self.noise_multiplier, "fedceo") * self.clip
        shares = planned(self.expected_cohort, "fedceo") - self.tolerated_dropouts
        return std / math.sqrt(max(1.0, shares)) if self.noise == "distributed" else std

    def due(self, round_: int) -> bool:
        """Whether this round (from 0) ends in smoothing."""
        return (round_ + 1) % self.interval == 0

    def threshold(self, round_: int, rest: int, out: int, clients: int) -> float:
        """The threshold of a (rest, out, clients) stack."""
        growth = float(self.growth ** ((round_ + 1) / self.interval))
        if not isinstance(self.coefficient, str):
            return growth / (2 * self.coefficient)
        return growth * math.sqrt(clients) * self.row_std * (math.sqrt(rest) + math.sqrt(out))

    def matrices(self, layout: Layout) -> list[Block]:
        """The tensors that are smoothed: those with at least two axes, or the last few of them."""
        matrices = [block for block in layout if len(block.shape) >= 2]
        return matrices if self.layers == "all" else matrices[-self.layers :]

    def smooth(
        self, models: Tensor, layout: Layout, round_: int, clients: float
    ) -> tuple[Metrics, Metrics]:
        """Smooth models in place, a row each: those of all clients, or their mean alone. Return
        what became of singular values, and how far clients are from each other.
        """
        spectra = Metrics()
        roughness = Metrics()
        matrices = self.matrices(layout)
        for block in matrices:
            stack = models[:, block.slice].reshape(len(models), block.shape[0], -1).permute(2, 1, 0)
            rest, out, rows = stack.shape
            level = self.threshold(round_, rest, out, round(clients)) / (clients / rows)
            smoothed, values = svt.svt_with_values(stack, level)
            if float(values[0, 0]) <= level:  # nothing would be left of what the models share
                smoothed = stack.mean(dim=2, keepdim=True).expand_as(stack)
            spectra |= svt.spectrum_metrics(block.name, values, level)
            if block is matrices[-1]:
                roughness = svt.smoothness_metrics(stack, smoothed)
            models[:, block.slice] = smoothed.permute(2, 1, 0).reshape(len(models), -1)
        return spectra, roughness

    def figures(self) -> tuple[FigureSpec, ...]:
        """Show the singular values beside the threshold that is taken off them."""
        title = "spectrum and threshold"
        level = "/threshold"
        values = {"/singular_values": "first slice"}
        caption = "What is below the dashed line is taken away; what is above loses as much."
        about = (title, "singular value", values, f"{caption} First slice: the sum over clients.")
        return (spectrum("spectrum", *about, threshold=level),)


class LowRankStack(LowRank, RowDenoiser):
    """Smooth the cohort's models against each other; each client starts next from its own."""

    ordered: ClassVar[bool] = True
    without_rows: ClassVar[str] = "set personal_starts = false"

    def personal_starts(self, round_: int) -> bool:
        """Whether the round ended in smoothing."""
        return self.due(round_)

    def __call__(self, state: PlugState, rows: Rows, round_: int) -> PlugOutput:
        """Return the smoothed rows, and what became of the singular values."""
        if not self.due(round_) or len(rows.cohort) == 0:
            return rows.matrix, state, {}
        models = (rows.origin + rows.matrix).to(torch.float32)
        for block in (b for b in rows.layout if len(b.shape) < 2):
            models[:, block.slice] = models[:, block.slice].mean(dim=0)
        spectra, roughness = self.smooth(models, rows.layout, round_, len(models))
        return models - rows.origin, state, spectra | roughness

    def figures(self) -> tuple[FigureSpec, ...]:
        """Show the spectrum, and how far clients are from each other (the paper's Figure 1)."""
        maps = {f"smoothness_map_{when}": f"{when} smoothing" for when in ("before", "after")}
        caption = "Mean squared distance of a class's weights from the others'; small is smooth."
        about = (FigureKind.CLIENT_MAP, "smoothness", "roughness", "class", maps, caption)
        return (*super().figures(), FigureSpec(*about, x_label="client"))


class LowRankMean(LowRank, Denoiser):
    """Smooth the mean of the models alone, at threshold / clients: the same global model."""

    def __call__(self, state: PlugState, aggregate: Aggregate) -> PlugOutput:
        """Return the update that leads to the smoothed mean."""
        if not self.due(aggregate.round):
            return aggregate.vector, state, {}
        clients = planned(self.expected_cohort, "fedceo")
        mean = (aggregate.model + aggregate.vector)[None]
        spectra, _ = self.smooth(mean, aggregate.layout, aggregate.round, clients)
        return mean[0] - aggregate.model, state, spectra


@method(family="client", simplicity=40, search=TRIED, fixed=("expected_cohort",))
def fedceo(work: NoisyWork, stack: LowRankStack, *, personal_starts: bool = True) -> Strategy:
    """UDP-FedAvg with a low-rank step on the stack of noisy models; the threshold comes from the
    noise, or from you.
    """
    if not personal_starts:
        return noisy_updates("fedceo", work, denoise=(LowRankMean(**vars(stack)),))
    return noisy_updates("fedceo", work, clean=stack, assumptions=(PERSONAL,))
