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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dpfl.core.checks import check, whole_number
from dpfl.core.layout import Layout
from dpfl.core.types import Claims, Metrics, PlugOutput, PlugState, Rows, Terms, Total
from dpfl.numerics.budget_split import BudgetSplit, PublicRows
from dpfl.numerics.subspace import bases, energy, project, spectra
from dpfl.plugs.base import FigureSpec, Gain, by_round, spectrum
from dpfl.plugs.denoise import RowDenoiser
from dpfl.plugs.stages import SharedSubspace
from dpfl.plugs.weights import EpsilonWeights
from dpfl.strategy import Strategy
from dpfl.strategy.method import method
from dpfl.strategy.record_level import RecordWork, record_level


def _public_state(terms: Terms) -> PlugState:
    return {f"public/{client}": torch.ones(1) for client in terms.public}


def _public_rows(state: PlugState, rows: Rows) -> PublicRows:
    return PublicRows.of([c for c in rows.cohort.ids if f"public/{c}" in state], rows)


# -- PFA -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PublicProjection(RowDenoiser):
    """Project private rows onto the subspace of the round's public ones, tensor by tensor.

    ``k`` dimensions a tensor. ``public`` says who is public (:class:`BudgetSplit`): a rule, with
    ``public_fraction`` for "top_fraction" and ``public_threshold`` for "threshold", or client ids.
    ``warm_up_only``: in the first round with a public client alone.
    """

    k: int = 1
    public: str | Sequence[str] = "gmm"
    public_fraction: float = 0.1
    public_threshold: float | None = None
    warm_up_only: bool = False

    def __post_init__(self) -> None:
        whole_number("pfa", "k", self.k)
        self._split()

    def _split(self) -> BudgetSplit:
        rule = self.public if isinstance(self.public, str) else tuple(self.public)
        fraction = self.public_fraction
        threshold = self.public_threshold
        return BudgetSplit(rule=rule, fraction=fraction, threshold=threshold)

    def resolve_terms(self, terms: Terms, claims: Mapping[str, Claims]) -> Terms:
        """Decide who is public."""
        return replace(terms, public=tuple(sorted(self._split()(claims))))

    def start(self, terms: Terms, layout: Layout) -> PlugState:
        """Remember who is public."""
        largest = max(block.size for block in layout)
        check(
            self.k <= largest,
            "pfa",
            f"k = {self.k} is more than any tensor has ({largest})",
            "give a smaller k",
        )
        return _public_state(terms)

    def __call__(self, state: PlugState, rows: Rows, round_: int) -> PlugOutput:
        """Return the rows with the private ones projected; all as they are if nobody public
        arrived.
        """
        public = _public_rows(state, rows)
        arrived = zip(rows.cohort.ids, public.named.tolist(), strict=True)
        metrics: Metrics = {"public": ", ".join(client for client, there in arrived if there)}
        found = [] if "done" in state else bases(public.rows, public.weights, rows.layout, self.k)
        if not found:
            return rows.matrix, state, metrics
        matrix = rows.matrix.clone()
        private = ~public.named
        mean = (public.weights.to(matrix.dtype) @ public.rows)[None]
        inside = torch.zeros_like(mean)
        for block, basis in zip(rows.layout, found, strict=True):
            matrix[private, block.slice] = project(rows.matrix[private, block.slice], basis)
            inside[:, block.slice] = project(mean[:, block.slice], basis)
        metrics |= {
            "private_energy_kept": energy(matrix[private], rows.matrix[private]),
            "public_energy_kept": energy(inside, mean),
            "dimensions": [float(basis.shape[1]) for basis in found],
            **spectra(public.rows, public.weights, rows.layout),
        }
        return matrix, ({**state, "done": torch.ones(1)} if self.warm_up_only else state), metrics

    def noise_gain(self, terms: Terms, layout: Layout, client: str | None = None) -> Gain:
        """Of a private client's noise k of each tensor's directions stay. Its signal counts as
        lost: our studies found about 1e-4 of it kept.
        """
        if client is None or client in terms.public:
            return Gain()
        kept = sum(min(self.k, block.size) for block in layout) / layout.size
        return Gain(noise=kept, signal=0.0)

    def figures(self) -> tuple[FigureSpec, ...]:
        """Show what the projection keeps, and the spectrum that k is chosen from."""
        kept = {"private_energy_kept": "private updates", "public_energy_kept": "public updates"}
        title = "energy inside the public subspace"
        share = "share of the squared norm"
        caption = "What a projection keeps. Noise spreads over all directions: hardly any is kept."
        energies = by_round("subspace", title, share, kept, caption)
        title = "spectrum of the public updates"
        share = "singular value, share of the largest"
        caption = "Of the last round, tensor by tensor; the first k directions are kept."
        values = {"/spectrum": ""}
        return energies, spectrum("public-spectrum", title, share, values, caption, log_y=True)


# -- PFA+ ------------------------------------------------------------------------------------------


class PublicSubspace(SharedSubspace):
    """Private clients send coordinates in the last round's public subspace."""

    def start(self, terms: Terms, layout: Layout) -> PlugState:
        """Remember who is public; there is no subspace yet."""
        return _public_state(terms)

    def learn(self, state: PlugState, rows: Rows | Total) -> PlugState:
        """Take this round's public updates for the next round's subspace."""
        assert isinstance(rows, Rows)
        public = _public_rows(state, rows)
        found = bases(public.rows, public.weights, rows.layout, self.k)
        return {**state, **{f"basis/{number:05d}": basis for number, basis in enumerate(found)}}


# -- the two methods -------------------------------------------------------------------------------

_TRIED, _NEEDS = {"k": (1, 2)}, "claimed epsilons that differ"
_FIXED = ("warm_up_only",)


@method(family="heterogeneous", simplicity=50, search=_TRIED, needs=_NEEDS, fixed=_FIXED)
def pfa(work: RecordWork, clean: PublicProjection) -> Strategy:
    """WeiAvg with the private updates projected onto the subspace of the public ones."""
    return record_level("pfa", work, EpsilonWeights(), clean=clean)


@method(family="heterogeneous", simplicity=60, search=_TRIED, needs=_NEEDS, fixed=_FIXED)
def pfa_plus(work: RecordWork, clean: PublicProjection) -> Strategy:
    """PFA in which private clients send k numbers per tensor."""
    clean, stages = replace(clean, warm_up_only=True), (PublicSubspace(k=clean.k),)
    return record_level("pfa_plus", work, EpsilonWeights(), clean=clean, stages=stages)
