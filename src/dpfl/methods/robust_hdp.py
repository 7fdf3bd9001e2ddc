"""Robust-HDP: find each update's noise in the updates themselves, and weigh by its inverse.

Paper
    Malekmohammadi, Yu, Cao: *Noise-Aware Algorithm for Heterogeneous Differentially Private
    Federated Learning*, ICML 2024.

In one sentence
    The updates of a round are nearly of low rank, their noise is not: principal component pursuit
    splits the two, and the squared norm of what is left over of an update is its noise, whatever
    epsilon its client claims.

Equations
    M (p x n, a column a client) = L + S with  min |L|_* + lambda |S|_1,  lambda = 1 / sqrt(max(p,
    n)),  by the inexact augmented Lagrangian method:

        L <- SVT_{1/mu}(M - S + Y/mu),  S <- shrink_{lambda/mu}(M - L + Y/mu),  Y <- Y + mu (M - L -
        S),  mu <- 1.1 mu.

    estimate_i = |S_i|^2,  w_i proportional to 1 / estimate_i (Eq. 8).

Formal guarantees
    As ``fedavg_dp``: made at the clients; weighing is post-processing. Claims are not used at all:
    a false epsilon changes nothing.

Departures
    - Algorithm 3 prints the wrong sign of Y in the low-rank step; with it the residual still
      vanishes and the answer is garbage. The equations above are those of Lin, Chen, Ma (2010).
    - Stops when the relative residual is below 1e-7 *and* the sparse part has stopped moving
      (1e-5); a loose 1e-3 stops at the second iteration. Not converged is reported.
    - Safety: fewer than three clients or nothing but zeros weigh alike; estimates are floored at
      1e-12 of their mean; ``max_weight`` caps what one client can grab, if asked for.
    - Singular values are soft-thresholded through the n x n Gram matrix, in double precision, in
      one pass over the rows per iteration: never an SVD of p rows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dpfl.core.checks import check, one_of, share, whole_number
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.core.types import Claims, Metrics, PlugOutput, PlugState, Rows, Total
from dpfl.numerics.noise_estimates import BLOCK_ROWS, capped, moment_estimates, noise_estimates
from dpfl.plugs.base import FigureKind, FigureSpec
from dpfl.plugs.weights import TRUE_NOISE, Weights
from dpfl.strategy import Strategy
from dpfl.strategy.method import method
from dpfl.strategy.record_level import RecordWork, record_level

Estimator = Literal["pcp", "moment", "oracle"]
_FLOOR = 1e-12


def inverse_weights(estimates: Tensor, max_weight: float | None = None) -> Tensor:
    """w_i proportional to 1 / estimate_i (Eq. 8), floored, and capped at ``max_weight`` if that is
    given.

    >>> inverse_weights(torch.tensor([1.0, 1.0, 2.0]))
    tensor([0.4000, 0.4000, 0.2000], dtype=torch.float64)
    """
    mean = estimates.mean()
    if len(estimates) < 3 or not bool(torch.isfinite(mean)) or float(mean) <= 0:
        return torch.full((len(estimates),), 1 / max(len(estimates), 1), dtype=torch.float64)
    inverse = 1 / estimates.to(torch.float64).clamp_min(_FLOOR * mean)
    weights = inverse / inverse.sum()
    return weights if max_weight is None else capped(weights, max_weight)


@dataclass(frozen=True, kw_only=True)
class NoiseAwareWeights(Weights):
    """Inverse to each update's noise, estimated from the updates of the round, or of the last
    ``refresh`` rounds.

    ``estimator`` is "pcp" (pursuit), "moment" (one Gram matrix, far cheaper) or "oracle" (in
    simulations only). A pursuit looks at ``block_rows`` coordinates; ``blocks`` says how many such
    blocks there are (all if None), and ``sampled_rows`` how many random coordinates are looked at
    instead. ``max_weight`` is the largest share that one client may get.
    """

    estimator: Estimator = "pcp"
    block_rows: int = BLOCK_ROWS
    blocks: int | None = None
    sampled_rows: int | None = None
    refresh: int | None = 1
    max_weight: float | None = None

    def __post_init__(self) -> None:
        one_of("robust_hdp", ("pcp", "moment", "oracle"), estimator=self.estimator)
        for name in ("block_rows", "blocks", "sampled_rows", "refresh"):
            if (value := getattr(self, name)) is not None:
                whole_number("robust_hdp", name, value)
        if self.max_weight is not None:
            share("robust_hdp", max_weight=self.max_weight)

    @property
    def needs_true_noise(self) -> bool:
        """Whether weights come from the noise that was really added, for comparison."""
        return self.estimator == "oracle"

    def __call__(self, state: PlugState, received: Rows | Total, round_: int) -> PlugOutput:
        """Return the weights, what is remembered of the estimates, and how the pursuit went."""
        assert isinstance(received, Rows)
        ids = received.cohort.ids
        rows = received.matrix
        metrics = Metrics()
        there = rows.ne(0).any(dim=1)
        oracle = self.needs_true_noise
        names = [f"{TRUE_NOISE}{client}" if oracle else client for client in ids]
        known = all(name in state for name in names)
        check(
            known or not oracle,
            "robust_hdp",
            "estimator = 'oracle' knows the clients' true noise",
            "use it in a simulation only",
        )
        if oracle or (known and (self.refresh is None or round_ % self.refresh != 0)):
            estimates = torch.stack([state[name] for name in names]).flatten().to(torch.float64)
        else:
            estimates = torch.zeros(len(rows), dtype=torch.float64)
            if int(there.sum()) >= 3:
                estimates[there], metrics = self._estimated(self._sampled(rows, round_)[there])
            own = zip(ids, estimates[:, None], strict=True)
            state = state | {client: estimate.clone() for client, estimate in own}
        weights = torch.zeros(len(rows), dtype=torch.float64)
        some = there if bool(there.any()) else torch.ones_like(there)
        weights[some] = inverse_weights(estimates[some], self.max_weight)
        metrics["estimated_noise"] = estimates.tolist()
        return weights.to(torch.float32), state, metrics

    def expected_weights(
        self, claims: Mapping[str, Claims], noise: Mapping[str, float], layout: Layout
    ) -> dict[str, float]:
        """Inverse to the noise, as if every estimate were exact."""
        inverse = {c: 1 / noise[c] if noise[c] > 0 else math.inf for c in sorted(claims)}
        total = sum(inverse.values())
        return {client: value / total for client, value in inverse.items()}

    def figures(self) -> tuple[FigureSpec, ...]:
        """Show estimates beside the noise that was really added."""
        about = ("noise-estimates", "estimated and true noise", "estimated")
        metrics = {"estimated_noise": "clients"}
        true = "true noise variance"
        caption = "A point a client, means over rounds. Only ratios between clients matter."
        kind = FigureKind.AGAINST_TRUE_NOISE
        return (FigureSpec(kind, *about, metrics, caption, x_label=true),)

    def _sampled(self, rows: Tensor, round_: int) -> Tensor:
        """Some coordinates, drawn anew each round; the noise of an update is the same in all of
        them.
        """
        if self.sampled_rows is None or self.sampled_rows >= rows.shape[1]:
            return rows
        generator = PublicSeed(round_).child("sampled rows").generator()
        order = torch.randperm(rows.shape[1], generator=generator)
        return rows[:, order[: self.sampled_rows].sort().values]

    def _estimated(self, rows: Tensor) -> tuple[Tensor, Metrics]:
        if self.estimator == "moment":
            return moment_estimates(rows), {}
        estimates, metrics = noise_estimates(rows, block_rows=self.block_rows, blocks=self.blocks)
        signal = float(rows.to(torch.float64).square().sum())
        if float(estimates.sum()) <= 1e-14 * signal:  # identical updates: rounding is not noise
            estimates = torch.zeros_like(estimates)
        return estimates, metrics


@method(family="heterogeneous", simplicity=40)
def robust_hdp(work: RecordWork, weights: NoiseAwareWeights) -> Strategy:
    """FedAvg over DP-SGD clients, weighted by the inverse of the noise found in their updates;
    claims are not used.
    """
    return record_level("robust_hdp", work, weights)
