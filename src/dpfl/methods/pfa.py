"""PFA and PFA+: project the noisy updates onto the subspace of the quiet ones.

Paper
    Liu, Lou, Xiong, Liu, Meng: *Projected Federated Averaging with Heterogeneous Differential
    Privacy*, VLDB 2022, Algorithms 3 to 5.

In one sentence
    Clients with large budgets ("public") span a subspace that their little noise hardly disturbs;
    the updates of the others ("private") are projected onto it before all are averaged by budget,
    and in PFA+ only the coordinates travel.

Equations
    Per tensor, with public updates u_i and weights w_i = epsilon_i / sum of the public epsilons:

        k = 1:  V = (sum_i w_i u_i) / |sum_i w_i u_i|
        k > 1:  V = the top k left singular vectors of [sqrt(w_i) u_i], not centred
        private row <- V V^T row;   model <- model + sum_i (epsilon_i / sum_j epsilon_j) row_i

    PFA+: from the second round on, a private client sends V^T u (k numbers per tensor) with the V
    of the round before.

Formal guarantees
    As ``fedavg_dp``: made at the clients; projecting is post-processing. The split rests on
    *claims*: a false one moves the model, never what is charged.

Departures
    - Algorithm 3's second-moment matrix of the averaged update has rank one, so for k > 1 the
      subspace is that of all public updates, as appendix D.2 has it. k above the numerical rank is
      clamped, with one warning.
    - A tensor in which the public updates vanish projects to zero.
    - A round without a public client: WeiAvg for that round (PFA), the last subspace (PFA+).
    - Algorithm 5 uses the public mean before defining it; the order here is the only possible one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dpfl.core.checks import check, whole_number
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Claims, Cohort, Metrics, PlugState, Rows, Shared, Terms, Total, Who
from dpfl.numerics.budget_split import BudgetSplit
from dpfl.numerics.subspace import public_subspace, spectrum
from dpfl.plugs.base import Gain
from dpfl.plugs.figures import FigureKind, FigureSpec
from dpfl.plugs.row_denoise import RowDenoiser
from dpfl.plugs.stages import Stage
from dpfl.plugs.weights import EpsilonWeights
from dpfl.privacy.exposure import Exposure
from dpfl.strategy import Strategy
from dpfl.strategy.method import method
from dpfl.strategy.record_level import RecordWork, record_level

_REPORTED = 10  # singular values


def _public_state(terms: Terms) -> PlugState:
    return {f"public/{client}": torch.ones(1) for client in terms.public}


def _public_rows(state: PlugState, rows: Rows) -> Tensor:
    """Which of the rows are public and hold anything."""
    named = [f"public/{client}" in state for client in rows.cohort.ids]
    public = torch.tensor(named, dtype=torch.bool)
    return public & (rows.matrix.abs().amax(dim=1) > 0) if rows.matrix.numel() else public


def _within_group(rows: Rows, members: Tensor) -> Tensor:
    """epsilon_i / sum over the group; equal shares where no claim is usable."""
    epsilons = [rows.cohort.claims[client].epsilon for client in rows.cohort.ids]
    sane = [e if math.isfinite(e) and e > 0 else 0.0 for e in epsilons]
    usable = torch.tensor(sane, dtype=torch.float64)[members]
    equal = torch.full_like(usable, 1 / max(len(usable), 1))
    return usable / usable.sum() if float(usable.sum()) > 0 else equal


def _bases(state: PlugState, rows: Rows, k: int) -> list[Tensor]:
    """One basis a tensor, from this round's public updates; none if there are no public updates."""
    public = _public_rows(state, rows)
    if not bool(public.any()):
        return []
    weights = _within_group(rows, public)
    found = [public_subspace(rows.matrix[public, b.slice], weights, k) for b in rows.layout]
    sizes = zip(found, rows.layout, strict=True)
    if any(0 < basis.shape[1] < min(k, block.size) for basis, block in sizes):
        said = f"k = {k} is above the rank of the public updates of a round, and was clamped"
        warnings.warn(said, RuntimeWarning, stacklevel=2)
    return found


def _project(row: Tensor, basis: Tensor) -> Tensor:
    return (row @ basis) @ basis.T


def _gain(k: int, terms: Terms, layout: Layout, client: str | None) -> Gain:
    """Of a private client's noise k of each tensor's directions stay. Its signal counts as lost: our
    studies found about 1e-4 of it kept.
    """
    if client is None or client in terms.public:
        return Gain()
    return Gain(noise=sum(min(k, block.size) for block in layout) / layout.size, signal=0.0)


# -- PFA -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PublicProjection(RowDenoiser):
    """Project private rows onto the subspace of the round's public ones, tensor by tensor."""

    k: int = 1
    split: BudgetSplit = BudgetSplit()
    warm_up_only: bool = False
    ordered: ClassVar[bool] = False

    def __post_init__(self) -> None:
        whole_number("pfa", "k", self.k)

    def resolve_terms(self, terms: Terms, claims: Mapping[str, Claims]) -> Terms:
        """Decide who is public."""
        return replace(terms, public=tuple(sorted(self.split(claims))))

    def start(self, terms: Terms, layout: Layout) -> PlugState:
        """Remember who is public."""
        largest = max(block.size for block in layout)
        problem = f"k = {self.k} is more than any tensor has ({largest})"
        check(self.k <= largest, "pfa", problem, "give a smaller k")
        return _public_state(terms)

    def __call__(
        self, state: PlugState, rows: Rows, round_: int
    ) -> tuple[Tensor, PlugState, Metrics]:
        """Return the rows with the private ones projected; all as they are if nobody public
        arrived.
        """
        public = _public_rows(state, rows)
        arrived = zip(rows.cohort.ids, public.tolist(), strict=True)
        metrics: Metrics = {"public": ", ".join(client for client, there in arrived if there)}
        bases = [] if "done" in state else _bases(state, rows, self.k)
        if not bases:
            return rows.matrix, state, metrics
        matrix = rows.matrix.clone()
        for block, basis in zip(rows.layout, bases, strict=True):
            matrix[~public, block.slice] = _project(rows.matrix[~public, block.slice], basis)
        mean = (_within_group(rows, public).to(matrix.dtype) @ rows.matrix[public])[None]
        pairs = zip(rows.layout, bases, strict=True)
        inside = torch.cat([_project(mean[:, block.slice], v) for block, v in pairs], dim=1)
        metrics |= {
            "private_energy_kept": _energy(matrix[~public], rows.matrix[~public]),
            "public_energy_kept": _energy(inside, mean),
            "dimensions": [float(basis.shape[1]) for basis in bases],
        }
        metrics |= _spectra(rows, public)
        return matrix, ({**state, "done": torch.ones(1)} if self.warm_up_only else state), metrics

    def noise_gain(self, terms: Terms, layout: Layout, client: str | None = None) -> Gain:
        """Private clients lose most of their noise, and count for nothing else."""
        return _gain(self.k, terms, layout, client)

    def figures(self) -> tuple[FigureSpec, ...]:
        """Show what the projection keeps, and the spectrum that k is chosen from."""
        kept = {"private_energy_kept": "private updates", "public_energy_kept": "public updates"}
        return (
            FigureSpec(
                name="subspace",
                title="energy inside the public subspace",
                kind=FigureKind.BY_ROUND,
                metrics=kept,
                y_label="share of the squared norm",
                caption="What a projection keeps. Noise spreads over all directions, so almost none "
                "of it is kept.",
                log_y=True,
            ),
            FigureSpec(
                name="public-spectrum",
                title="spectrum of the public updates",
                kind=FigureKind.SPECTRUM,
                metrics={"/spectrum": ""},
                x_label="direction",
                y_label="singular value, share of the largest",
                caption="Of the last round, tensor by tensor; the first k directions are kept.",
                log_y=True,
            ),
        )


def _spectra(rows: Rows, public: Tensor) -> Metrics:
    """Singular values of the weighted public updates, tensor by tensor, as shares of the largest."""
    roots = _within_group(rows, public).sqrt()[:, None]
    found: Metrics = {}
    for block in rows.layout:
        values, _ = spectrum(rows.matrix[public, block.slice], roots, torch.float32)
        if float(values[0]) > 0:
            first = (values[:_REPORTED] / values[0]).tolist()
            found[f"{block.name}/spectrum"] = [float(f"{v:.5g}") for v in first]
    return found


def _energy(part: Tensor, whole: Tensor) -> float:
    total = float(whole.to(torch.float64).square().sum())
    return float(part.to(torch.float64).square().sum()) / total if total > 0 else 0.0


# -- PFA+ ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PublicSubspace(Stage):
    """Private clients send coordinates in the last round's public subspace; public ones, and the
    first round, all of it.
    """

    k: int = 1
    linear: ClassVar[bool] = False

    def start(self, terms: Terms, layout: Layout) -> PlugState:
        """Remember who is public; there is no subspace yet."""
        return _public_state(terms)

    def open(self, state: PlugState, round_: int, cohort: Cohort, seed: PublicSeed) -> Shared:
        """Send the subspace of the round before, one basis a tensor, in the order of the model."""
        return {name: basis for name, basis in state.items() if name.startswith("basis/")}

    def client(self, x: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        """Take coordinates."""
        if who.public or not shared:
            return x
        bases = [shared[name] for name in sorted(shared)]
        parts = torch.split(x, [basis.shape[0] for basis in bases])
        return torch.cat([part @ basis for part, basis in zip(parts, bases, strict=True)])

    def server(self, y: Tensor, shared: Shared, who: Who | None) -> Tensor:
        """Rebuild the update from its coordinates."""
        if who is None or who.public or not shared:
            return y
        bases = [shared[name] for name in sorted(shared)]
        parts = torch.split(y, [basis.shape[1] for basis in bases])
        return torch.cat([basis @ part for part, basis in zip(parts, bases, strict=True)])

    def learn(self, state: PlugState, rows: Rows | Total) -> PlugState:
        """Take this round's public updates for the next round's subspace."""
        assert isinstance(rows, Rows)
        bases = _bases(state, rows, self.k)
        return {**state, **{f"basis/{number:05d}": basis for number, basis in enumerate(bases)}}

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """What left DP-SGD is noisy already: a function of it."""
        return exposure.processed()

    def upload_size(self, numbers: float, terms: Terms, layout: Layout) -> float:
        """Private clients send k numbers a tensor once there is a subspace."""
        public = len(terms.public) / terms.population
        coordinates = sum(min(self.k, block.size) for block in layout)
        return public * numbers + (1 - public) * coordinates

    def download_size(self, layout: Layout) -> int:
        """Return the numbers of the subspace."""
        return sum(min(self.k, block.size) * block.size for block in layout)

    def noise_gain(self, terms: Terms, layout: Layout, client: str | None = None) -> Gain:
        """The projection is the same as PFA's, and counted there."""
        return Gain()


# -- the two methods -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PfaWork(RecordWork):
    """Settings of both: ``k`` dimensions a tensor, and who is public (see :class:`BudgetSplit`)."""

    k: int = 1
    public: str | Sequence[str] = "gmm"
    public_fraction: float = 0.1
    public_threshold: float | None = None

    def projection(self, *, warm_up_only: bool = False) -> PublicProjection:
        """Return the piece that projects private rows."""
        rule = self.public if isinstance(self.public, str) else tuple(self.public)
        fraction, threshold = self.public_fraction, self.public_threshold
        split = BudgetSplit(rule=rule, fraction=fraction, threshold=threshold)
        return PublicProjection(k=self.k, split=split, warm_up_only=warm_up_only)


_K = {"k": (1, 2)}
_NEEDS = "claimed epsilons that differ"


@method(family="heterogeneous", simplicity=50, search=_K, needs=_NEEDS)
def pfa(work: PfaWork) -> Strategy:
    """WeiAvg with the private updates projected onto the subspace of the public ones."""
    return record_level("pfa", work, EpsilonWeights(), clean=work.projection())


@method(family="heterogeneous", simplicity=60, search=_K, needs=_NEEDS)
def pfa_plus(work: PfaWork) -> Strategy:
    """PFA in which private clients send k numbers per tensor."""
    clean, stages = work.projection(warm_up_only=True), (PublicSubspace(k=work.k),)
    return record_level("pfa_plus", work, EpsilonWeights(), clean=clean, stages=stages)
