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

import numpy as np
import torch
from torch import Tensor

from dpfl.core.errors import ConfigurationError
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import (
    Claims,
    ClientSettings,
    Cohort,
    Metrics,
    PlugState,
    Rows,
    Shared,
    Terms,
    Total,
    Who,
)
from dpfl.numerics.subspace import public_subspace, spectrum
from dpfl.plugs.row_denoise import RowDenoiser
from dpfl.plugs.selection import Selection
from dpfl.plugs.stages import Stage
from dpfl.plugs.weights import EpsilonWeights
from dpfl.privacy.budgets import Spending
from dpfl.privacy.exposure import Exposure
from dpfl.strategy import Strategy
from dpfl.strategy.record_level import record_level

SPLITS = ("gmm", "kmeans", "top_fraction", "threshold")
_TOLD = 10  # singular values that are written down


def _project(row: Tensor, basis: Tensor) -> Tensor:
    return (row @ basis) @ basis.T


# -- who is public ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PublicSplit:
    """Who counts as public: decided once over all clients, from claimed epsilons."""

    rule: str | tuple[str, ...] = "gmm"
    fraction: float = 0.1
    threshold: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rule, str) and self.rule not in SPLITS:
            raise ConfigurationError(
                "public split",
                f"'{self.rule}'",
                f"choose one of {', '.join(SPLITS)}, or give a list of ids",
            )
        if self.rule == "threshold" and not (self.threshold is not None and self.threshold > 0):
            raise ConfigurationError(
                "public split", "threshold without a threshold", "give public_threshold"
            )
        if not 0 < self.fraction < 1:
            raise ConfigurationError(
                "public split", f"public_fraction = {self.fraction}", "give a share between 0 and 1"
            )

    def __call__(self, claims: Mapping[str, Claims]) -> frozenset[str]:
        """Return the public clients; at least one, and not everyone."""
        usable = {client: claim.epsilon for client, claim in claims.items() if claim.usable}
        if not isinstance(self.rule, str):
            unknown = [client for client in self.rule if client not in claims]
            if unknown:
                raise ConfigurationError(
                    "public split", f"'{unknown[0]}' is no client", "list ids of the federation"
                )
            found = frozenset(self.rule)
        elif self.rule == "top_fraction":
            count = max(1, round(self.fraction * len(claims)))
            found = frozenset(sorted(usable, key=lambda client: (-usable[client], client))[:count])
        elif self.rule == "threshold":
            assert self.threshold is not None
            found = frozenset(
                client for client, epsilon in usable.items() if epsilon >= self.threshold
            )
        else:
            found = self._clustered(usable)
        if not found or len(found) == len(claims):
            who = "nobody" if not found else "everybody"
            raise ConfigurationError(
                "public split",
                f"makes {who} public out of {len(claims)} clients",
                "use top_fraction, a threshold between the budgets, or weiavg",
            )
        return found

    def _clustered(self, usable: Mapping[str, float]) -> frozenset[str]:
        """Two groups on the logarithm of epsilon; one spread for both, so that more epsilon never
        makes private.
        """
        ids = sorted(usable)
        logs = np.log([[usable[client]] for client in ids])
        if len(ids) < 2 or np.ptp(logs) < 1e-9:
            raise ConfigurationError(
                "public split",
                "all claimed epsilons are equal, nothing tells public from private",
                "use weiavg, or top_fraction",
            )
        # Start from the extremes: a start drawn at random can split one group in two.
        means = np.array([[logs.min()], [logs.max()]])
        if self.rule == "kmeans":
            from sklearn.cluster import KMeans

            model = KMeans(2, init=means, n_init=1).fit(logs)
            groups, upper = model.labels_, int(model.cluster_centers_[:, 0].argmax())
        else:
            from sklearn.mixture import GaussianMixture

            model = GaussianMixture(
                2, covariance_type="tied", means_init=means, reg_covar=1e-4
            ).fit(logs)
            groups, upper = model.predict(logs), int(model.means_[:, 0].argmax())
        return frozenset(
            client for client, group in zip(ids, groups, strict=True) if group == upper
        )


def _public_state(terms: Terms) -> PlugState:
    return {f"public/{client}": torch.ones(1) for client in terms.public}


def _public_rows(state: PlugState, rows: Rows) -> Tensor:
    """Which of the rows are public and hold anything."""
    named = torch.tensor(
        [f"public/{client}" in state for client in rows.cohort.ids], dtype=torch.bool
    )
    return named & (rows.matrix.abs().amax(dim=1) > 0) if rows.matrix.numel() else named


def _within_group(rows: Rows, members: Tensor) -> Tensor:
    epsilons = [rows.cohort.claims[client].epsilon for client in rows.cohort.ids]
    usable = torch.tensor(
        [e if math.isfinite(e) and e > 0 else 0.0 for e in epsilons], dtype=torch.float64
    )[members]
    return (
        usable / usable.sum()
        if float(usable.sum()) > 0
        else torch.full_like(usable, 1 / max(len(usable), 1))
    )


def _bases(state: PlugState, rows: Rows, k: int) -> list[Tensor]:
    """One basis a tensor, from this round's public updates; none if there are no public updates."""
    public = _public_rows(state, rows)
    if not bool(public.any()):
        return []
    weights = _within_group(rows, public)
    found = [public_subspace(rows.matrix[public, block.slice], weights, k) for block in rows.layout]
    if any(
        0 < basis.shape[1] < min(k, block.size)
        for basis, block in zip(found, rows.layout, strict=True)
    ):
        warnings.warn(
            f"k = {k} is above the rank of the public updates of a round, and was clamped",
            RuntimeWarning,
            stacklevel=2,
        )
    return found


# -- PFA -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PublicProjection(RowDenoiser):
    """Project private rows onto the subspace of the round's public ones, tensor by tensor."""

    k: int = 1
    split: PublicSplit = PublicSplit()
    warm_up_only: bool = False
    ordered: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.k != int(self.k) or self.k < 1:
            raise ConfigurationError("pfa", f"k = {self.k}", "project onto at least one dimension")

    def agree(self, terms: Terms, claims: Mapping[str, Claims]) -> Terms:
        """Decide who is public."""
        return replace(terms, public=tuple(sorted(self.split(claims))))

    def start(self, terms: Terms, layout: Layout) -> PlugState:
        """Remember who is public."""
        largest = max(block.size for block in layout)
        if self.k > largest:
            raise ConfigurationError(
                "pfa", f"k = {self.k} is more than any tensor has ({largest})", "give a smaller k"
            )
        return _public_state(terms)

    def __call__(
        self, state: PlugState, rows: Rows, round_: int
    ) -> tuple[Tensor, PlugState, Metrics]:
        """Return the rows with the private ones projected; all as they are if nobody public
        arrived.
        """
        public = _public_rows(state, rows)
        names = [
            client for client, there in zip(rows.cohort.ids, public.tolist(), strict=True) if there
        ]
        told: Metrics = {"public": ", ".join(names)}
        if "done" in state:
            return rows.matrix, state, told
        bases = _bases(state, rows, self.k)
        if not bases:
            return rows.matrix, state, told
        matrix = rows.matrix.clone()
        for block, basis in zip(rows.layout, bases, strict=True):
            matrix[~public, block.slice] = _project(rows.matrix[~public, block.slice], basis)
        told["private_energy_kept"] = _share(matrix[~public], rows.matrix[~public])
        mean = (_within_group(rows, public).to(matrix.dtype) @ rows.matrix[public])[None]
        inside = torch.cat(
            [_project(mean[:, b.slice], v) for b, v in zip(rows.layout, bases, strict=True)], dim=1
        )
        told["public_energy_kept"] = _share(inside, mean)
        told["dimensions"] = [float(basis.shape[1]) for basis in bases]
        told |= _spectra_told(rows, public)
        return matrix, ({**state, "done": torch.ones(1)} if self.warm_up_only else state), told


def _spectra_told(rows: Rows, public: Tensor) -> Metrics:
    """Singular values of the weighted public updates, tensor by tensor, as shares of the largest:
    what k is chosen from.
    """
    roots = _within_group(rows, public).sqrt()[:, None]
    told: Metrics = {}
    for block in rows.layout:
        values, _ = spectrum(rows.matrix[public, block.slice], roots, torch.float32)
        if float(values[0]) > 0:
            told[f"{block.name}/spectrum"] = [
                float(f"{v:.5g}") for v in (values[:_TOLD] / values[0]).tolist()
            ]
    return told


def _share(part: Tensor, whole: Tensor) -> float:
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

    def coordinates(self, layout: Layout) -> int:
        """Numbers that a private client sends once there is a subspace."""
        return sum(min(self.k, block.size) for block in layout)

    def basis_size(self, layout: Layout) -> int:
        """Numbers of the subspace, which every client is sent."""
        return sum(min(self.k, block.size) * block.size for block in layout)

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
        bases = _in_order(shared)
        parts = torch.split(x, [basis.shape[0] for basis in bases])
        return torch.cat([part @ basis for part, basis in zip(parts, bases, strict=True)])

    def server(self, y: Tensor, shared: Shared, who: Who | None) -> Tensor:
        """Rebuild the update from its coordinates."""
        if who is None or who.public or not shared:
            return y
        bases = _in_order(shared)
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


def _in_order(shared: Shared) -> Sequence[Tensor]:
    return [shared[name] for name in sorted(shared)]


# -- the two methods -------------------------------------------------------------------------------


def _split(public: str | Sequence[str], fraction: float, threshold: float | None) -> PublicSplit:
    rule = public if isinstance(public, str) else tuple(public)
    return PublicSplit(rule=rule, fraction=fraction, threshold=threshold)


def pfa(
    *,
    lr: float,
    clip: float,
    batch_size: int,
    local_steps: int | None = None,
    local_epochs: int | None = None,
    selection: Selection | None = None,
    spending: Spending = "heterogeneous",
    k: int = 1,
    public: str | Sequence[str] = "gmm",
    public_fraction: float = 0.1,
    public_threshold: float | None = None,
) -> Strategy:
    """WeiAvg with the private updates projected onto the subspace of the public ones."""
    client_settings = ClientSettings(
        lr=lr, batch_size=batch_size, local_steps=local_steps, local_epochs=local_epochs
    )
    clean = PublicProjection(k=k, split=_split(public, public_fraction, public_threshold))
    return record_level("pfa", client_settings, clip, EpsilonWeights(), selection, spending, clean)


def pfa_plus(
    *,
    lr: float,
    clip: float,
    batch_size: int,
    local_steps: int | None = None,
    local_epochs: int | None = None,
    selection: Selection | None = None,
    spending: Spending = "heterogeneous",
    k: int = 1,
    public: str | Sequence[str] = "gmm",
    public_fraction: float = 0.1,
    public_threshold: float | None = None,
) -> Strategy:
    """PFA in which private clients send k numbers per tensor."""
    client_settings = ClientSettings(
        lr=lr, batch_size=batch_size, local_steps=local_steps, local_epochs=local_epochs
    )
    clean = PublicProjection(
        k=k, split=_split(public, public_fraction, public_threshold), warm_up_only=True
    )
    base = record_level(
        "pfa_plus", client_settings, clip, EpsilonWeights(), selection, spending, clean
    )
    return replace(base, stages=(PublicSubspace(k=k),))
