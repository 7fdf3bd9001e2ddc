"""Aggregation that some clients cannot overturn: what robust methods are compared with.

Krum and the geometric median are weights of rows. The trimmed mean and the median mix the rows
coordinate by coordinate, which no weights of rows do: they replace every row by their result, so
that any weights that sum to one leave it as it is. Clipped rows keep the method's own weights. All
of them look at single rows, and are refused where none exist.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dpfl.core.checks import check, clip_bound, positive, whole_number
from dpfl.core.layout import Layout
from dpfl.core.types import Claims, PlugOutput, PlugState, Rows, Terms, Total
from dpfl.numerics import clipping
from dpfl.plugs.base import Gain, Plug
from dpfl.plugs.denoise import RowDenoiser
from dpfl.plugs.weights import Weights

_MOST_STEPS, _STILL = 100, 1e-9  # of Weiszfeld's iteration; moves below this share end it


@dataclass(frozen=True, kw_only=True)
class _Tolerant(Plug):
    """A piece that tolerates ``byzantine`` clients that send anything at all; left out, a quarter
    of those that answer.
    """

    byzantine: int | None = None
    least: ClassVar[int]  # clients that are needed beside 2 x byzantine

    def __post_init__(self) -> None:
        whole_number(type(self).__name__, "byzantine", self.byzantine or 0, least=0)

    def tolerated(self, clients: int) -> int:
        """How many of these clients may send anything: no more than the proofs allow."""
        asked = clients // 4 if self.byzantine is None else self.byzantine
        return min(asked, max(0, (clients - self.least) // 2))

    def resolve_terms(self, terms: Terms, claims: Mapping[str, Claims]) -> Terms:
        """Refuse cohorts that are too small for what was asked, before anyone pays for a round."""
        if self.byzantine is None:
            return terms
        least = 2 * self.byzantine + self.least
        problem = f"byzantine = {self.byzantine} needs {least} clients in a round"
        check(
            terms.expected_cohort >= least,
            type(self).__name__,
            f"{problem}, and {terms.expected_cohort:g} are expected",
            "lower byzantine",
        )
        return terms


@dataclass(frozen=True, kw_only=True)
class KrumWeights(Weights, _Tolerant):
    """The rows that are closest to their neighbours count alike, the others not at all.

    Blanchard, El Mhamdi, Guerraoui, Stainer: *Machine Learning with Adversaries: Byzantine Tolerant
    Gradient Descent*, NeurIPS 2017. With n rows, f of them ``byzantine``,

        score_i = sum of |x_i - x_j|^2 over the n - f - 2 nearest j,

    and the ``selected`` rows of least score are averaged: one (Krum), or more (multi-Krum). Rows
    with equal scores are selected together, so that nothing hangs on the order of clients.

    >>> rows = torch.tensor([[0.0], [1.0], [2.0], [3.0], [1e9]])
    >>> krum_weights(rows, byzantine=1)
    tensor([0.0000, 0.5000, 0.5000, 0.0000, 0.0000])
    """

    selected: int = 1
    least: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(type(self).__name__, "selected", self.selected)

    def __call__(self, state: PlugState, received: Rows | Total, round_: int) -> PlugOutput:
        """Return 1 / (number selected) for those selected, else 0."""
        assert isinstance(received, Rows)
        rows = received.matrix
        return krum_weights(rows, self.tolerated(len(rows)), self.selected), state, {}

    def expected_weights(
        self, claims: Mapping[str, Claims], noise: Mapping[str, float], layout: Layout
    ) -> dict[str, float]:
        """Select the rows with the least noise: they are the closest to the others."""
        first = sorted(claims, key=lambda client: (noise[client], client))[: self.selected]
        return {client: (client in first) / len(first) for client in claims}


def krum_weights(rows: Tensor, byzantine: int, selected: int = 1) -> Tensor:
    """The weights of :class:`KrumWeights` for rows (n, p)."""
    wide = rows.to(torch.float64)
    count = len(rows)
    if count < 2:
        return torch.ones(count)
    exact = "donot_use_mm_for_euclid_dist"
    squares = torch.cdist(wide, wide, compute_mode=exact).square().fill_diagonal_(math.inf)
    near = min(max(1, count - byzantine - 2), count - 1)
    scores = squares.sort(dim=1).values[:, :near].sum(dim=1)
    last = scores.sort().values[min(selected, count) - 1]
    chosen = (scores <= last * (1 + 1e-12)).to(torch.float32)
    return chosen / chosen.sum()


@dataclass(frozen=True, kw_only=True)
class GeometricMedianWeights(Weights):
    """The weights with which the mean of the rows is their geometric median.

    Pillutla, Kakade, Harchaoui: *Robust Aggregation for Federated Learning*, IEEE Transactions on
    Signal Processing 2022 (RFA). The point v that minimises sum_i |v - x_i|, by the smoothed
    Weiszfeld algorithm:

        b_i = 1 / max(smoothing, |v - x_i|),    v <- sum_i b_i x_i / sum_i b_i.

    ``smoothing`` is the least distance that counts. The median withstands any values of less than
    half of the rows. The iteration starts from the median of
    every coordinate, which no such values move far.
    """

    smoothing: float = 1e-6

    def __post_init__(self) -> None:
        positive(type(self).__name__, smoothing=self.smoothing)

    def __call__(self, state: PlugState, received: Rows | Total, round_: int) -> PlugOutput:
        """Return b_i / sum of b, once v stands still."""
        assert isinstance(received, Rows)
        return geometric_median_weights(received.matrix, self.smoothing), state, {}

    def expected_weights(
        self, claims: Mapping[str, Claims], noise: Mapping[str, float], layout: Layout
    ) -> dict[str, float]:
        """Inverse to the norm of each row's noise: its distance from the others."""
        inverse = {c: 1 / math.sqrt(max(noise[c], self.smoothing**2)) for c in claims}
        return {client: value / sum(inverse.values()) for client, value in inverse.items()}


def geometric_median_weights(rows: Tensor, smoothing: float = 1e-6) -> Tensor:
    """The weights of :class:`GeometricMedianWeights` for rows (n, p).

    >>> rows = torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 4.0]])
    >>> geometric_median_weights(rows).round(decimals=4)
    tensor([0.5000, 0.5000, 0.0000])
    """
    wide = rows.to(torch.float64)
    weights = torch.zeros(len(rows), dtype=torch.float64)
    middle = trimmed_mean(wide, len(wide))
    for _ in range(_MOST_STEPS):
        distances = torch.linalg.vector_norm(wide - middle, dim=1)
        inverse = 1 / distances.clamp_min(smoothing)
        before = weights
        weights = inverse / inverse.sum()
        middle = weights @ wide
        if float((weights - before).abs().max()) <= _STILL:
            break
    return weights.to(torch.float32)


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(RowDenoiser, _Tolerant):
    """In every coordinate, the mean without the ``byzantine`` smallest and largest values.

    Yin, Chen, Ramchandran, Bartlett: *Byzantine-Robust Distributed Learning: Towards Optimal
    Statistical Rates*, ICML 2018. With the values of one coordinate in order, x_(1) <= ... <=
    x_(n), and b = byzantine,

        (x_(b+1) + ... + x_(n-b)) / (n - 2 b).

    >>> trimmed_mean(torch.tensor([[0.0], [1.0], [2.0], [1e9]]), 1)
    tensor([1.5000])
    """

    least: ClassVar[int] = 1

    def __call__(self, state: PlugState, rows: Rows, round_: int) -> PlugOutput:
        """Replace every row by the trimmed mean."""
        found = trimmed_mean(rows.matrix, self.tolerated(len(rows.matrix)))
        return found.expand_as(rows.matrix), state, {}


class Median(RowDenoiser):
    """In every coordinate, the middle value, or the mean of the two middle ones.

    Yin, Chen, Ramchandran, Bartlett: *Byzantine-Robust Distributed Learning: Towards Optimal
    Statistical Rates*, ICML 2018. It is the trimmed mean that leaves one or two values.
    """

    def __call__(self, state: PlugState, rows: Rows, round_: int) -> PlugOutput:
        """Replace every row by the median."""
        return trimmed_mean(rows.matrix, len(rows.matrix)).expand_as(rows.matrix), state, {}

    def noise_gain(self, terms: Terms, layout: Layout, client: str | None = None) -> Gain:
        """The variance of a median of many Gaussians is pi / 2 times that of their mean."""
        return Gain(noise=math.pi / 2)


def trimmed_mean(rows: Tensor, cut: int) -> Tensor:
    """The mean of each column of rows (n, p) without its ``cut`` smallest and largest values; one
    or two values are always left.
    """
    cut = min(cut, (len(rows) - 1) // 2)
    kept = rows.sort(dim=0).values[cut : len(rows) - cut]
    return kept.to(torch.float64).mean(dim=0).to(rows.dtype)


@dataclass(frozen=True, kw_only=True)
class ClippedRows(RowDenoiser):
    """Rows longer than ``bound`` are scaled down to it: nobody moves the model further than that
    times its weight.

    Sun, Kairouz, Suresh, McMahan: *Can You Really Backdoor Federated Learning?*, 2019. ``bound``
    left out is the median length of the round's rows, which less than half of them cannot move
    beyond the others. Noise counts as length: rows with much of it are the longest.
    """

    bound: float | None = None

    def __post_init__(self) -> None:
        if self.bound is not None:
            clip_bound("clipped rows", bound=self.bound)

    def __call__(self, state: PlugState, rows: Rows, round_: int) -> PlugOutput:
        """Clip every row, and report the bound and the share of rows that were longer."""
        norms = torch.linalg.vector_norm(rows.matrix, dim=1, dtype=torch.float64)
        bound = self.bound or float(trimmed_mean(norms[:, None], len(norms)))
        clipped = clipping.clip(rows.matrix, bound)
        longer = float((norms > bound).double().mean())
        return clipped, state, {"bound": bound, "clipped": longer}


AGGREGATIONS: dict[str, type[Weights] | type[RowDenoiser]] = {
    "krum": KrumWeights,
    "trimmed_mean": TrimmedMean,
    "median": Median,
    "geometric_median": GeometricMedianWeights,
}
"""Robust aggregation by name, for any method whose server sees rows that are private already."""
