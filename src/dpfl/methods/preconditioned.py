"""Private preconditioning: a well-conditioned problem on public features, at full batch.

Paper
    None: a method of dpfl's own (``docs/preconditioning.md``).

In one sentence
    Clients privately release the mean and the second moments of public features once, which makes a
    linear head so well conditioned that a few full-batch gradients, whose noise composes exactly,
    are enough.

Equations
    mu_i is the Gaussian-DP parameter that (epsilon_i, delta_i) allows; shares of mu_i^2 go to the
    mean m, to the second moments G = U L U^T (noise edge e = 2 sqrt(d / 2) std), and rho to T
    rounds, with unit(x) = x / |x|::

        phi <- unit(phi - m),   phi <- unit((L_+ + 0.3 e)^(-1/2) U^T phi)
        u_i = (1 / n_i) [sum clip_C((p - y) phi^T) / C + N(0, T / (rho mu_i^2))]
        W  <- W - lr sum_i w_i u_i

    ``preconditioned``: the server sees every u_i and weighs by bias and variance. With
    sigma_i^2 = T / (rho (mu_i n_i)^2), D parameters and p_i = n_i / n::

        h^2 = half the weighted mean over pairs of |u_i - u_j|^2 - D (sigma_i^2 + sigma_j^2), in all
              rounds so far, each pair weighted by (sigma_i^2 + sigma_j^2)^-2, at least 0
        w_i = (p_i h^2 + lambda) / (h^2 + 0.02 D sigma_i^2), at least 0, of sum 1

    ``preconditioned_sum``: over a secure sum of k clients that count on h shares of one noise
    sigma, client i adds mu_i sqrt(h) sigma times its sum, so w_i ~ mu_i n_i and the noise of the
    mean is sqrt(k) / sum(mu_i sqrt(h) n_i).

Formal guarantees
    Each record (or each client, with unit = "client") within its own (epsilon, delta) under
    zero-out adjacency, against the server; over a secure sum against the server with the colluders
    that are planned for. Releases and rounds compose exactly, as Gaussians without sampling. The
    plan depends on claims and shapes alone, weights are post-processing, and a false claim moves
    the model, never what anyone is charged. Features are public functions of single records.

Departures
    Features must be public: what they were trained on is not accounted for.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfl.core.errors import ConfigurationError
from dpfl.core.layout import Layout
from dpfl.core.types import (
    Claims,
    PlugOutput,
    PlugState,
    Rows,
    Terms,
    Total,
)
from dpfl.plugs.fixed_denominator import FixedDenominator
from dpfl.plugs.full_gradient import FullGradient, SharedFullGradient
from dpfl.plugs.secure_sum import SecureSum
from dpfl.plugs.shared_gradient import SHARED
from dpfl.plugs.weights import EnrolledWeights, Weights
from dpfl.privacy.unsampled import unsampled_multiplier
from dpfl.strategy import Strategy
from dpfl.strategy.method import method
from dpfl.strategy.preconditioning import MOST_CLAIMED, Planned
from dpfl.strategy.record_level import ASSUMPTIONS, OWN_NOISE

FULL = "each client adds noise of its own to the gradient of all of its records"


@dataclass(frozen=True, kw_only=True)
class BiasVarianceWeights(Weights):
    """Weights that trade the noise of clients against how far their gradients are apart.

    ``caution`` is the factor 0.02 of the variance. Where the clients' gradients differ by no more
    than their noise, weights go with the inverse of its variance; where they differ by far more,
    with the number of records. Noise levels are those that claims lead to.
    """

    caution: float = 0.02
    whole: bool = False  # one contribution a client, not one a record

    def start(self, terms: Terms, layout: Layout) -> PlugState:
        """Keep how much noise a round has at mu n = 1, and sums over pairs of clients."""
        left = 1 - math.fsum(share for share, _ in terms.releases)
        noise = torch.tensor([math.sqrt(terms.participations / left)], dtype=torch.float64)
        return {"noise": noise, "apart": torch.zeros(2, dtype=torch.float64)}

    def __call__(self, state: PlugState, received: Rows | Total, round_: int) -> PlugOutput:
        """Estimate how far clients are apart, and weigh."""
        assert isinstance(received, Rows)
        scale = state["noise"] if state else torch.ones(1, dtype=torch.float64)
        claims = [received.cohort.claims[client] for client in received.cohort.ids]
        variances = (scale / torch.tensor([_signal(one, self.whole) for one in claims])).square()
        parameters = received.layout.size
        first, second = torch.triu_indices(len(claims), len(claims), 1).unbind()
        noise = variances[first] + variances[second]
        rows = received.matrix.double()
        apart = torch.cdist(rows, rows)[first, second].square() - parameters * noise
        counted = noise.square().reciprocal() * torch.isfinite(noise)
        now = torch.stack([(counted * apart.nan_to_num()).sum(), counted.sum()])
        total = state.get("apart", torch.zeros(2).double()) + now
        spread = float((total[0] / (2 * total[1])).clamp_min(0)) if total[1] > 0 else 0.0
        weights = _traded(variances, spread, self.caution * parameters, claims)
        return weights.float(), {**state, "apart": total}, {"apart": math.sqrt(spread)}

    def by_clients(self) -> EnrolledWeights | None:
        """Refuse: they need single uploads."""
        raise ConfigurationError(
            "secure sum of 'preconditioned'",
            "its weights need single uploads",
            "use preconditioned_sum",
        )


def _signal(claims: Claims, whole: bool) -> float:
    """mu_i n_i as claims lead to it; 0 where they lead to nothing."""
    if not claims.usable:
        return 0.0
    noise = unsampled_multiplier(claims.epsilon, claims.delta, claims.accountant)
    return (1 if whole else min(claims.examples, MOST_CLAIMED)) / noise


def _traded(variances: Tensor, spread: float, factor: float, claims: list[Claims]) -> Tensor:
    """w_i = (p_i h^2 + lambda) / (h^2 + factor sigma_i^2), negatives cut, summing to one."""
    known = torch.isfinite(variances)
    if not bool(known.any()):
        return torch.full_like(variances, 1 / len(variances))
    records = (
        torch.tensor([min(max(0, one.examples), MOST_CLAIMED) for one in claims]).double() * known
    )
    precision = torch.where(known, 1 / (spread + factor * variances), 0.0)
    pulled = records / records.sum() * spread * precision
    weights = (pulled + (1 - pulled.sum()) / precision.sum() * precision).clamp_min(0)
    return weights / weights.sum()


_MODEL = {"name": "linear_head", "features": "auto"}


@method(
    family="heterogeneous",
    simplicity=22,
    remark="it trains a linear head on public features, and plans everything from claims",
    model=_MODEL,
)
def preconditioned(work: Planned) -> Strategy:
    """A linear head on public features, conditioned by private statistics, at full batch."""
    kept = [FULL if text == OWN_NOISE else text for text in ASSUMPTIONS]
    return Strategy(
        **work.slots("preconditioned"),
        local=FullGradient(clip=work.gradient_clip or 1.0, whole=work.unit == "client"),
        weights=BiasVarianceWeights(whole=work.unit == "client"),
        assumptions=work.worded(kept),
    )


@method(
    family="heterogeneous",
    simplicity=24,
    needs="a secure sum",
    remark="clients share one noise, which only a secure sum can add up",
    model=_MODEL,
    secure=True,
)
def preconditioned_sum(
    work: Planned, *, tolerated_dropouts: int = 0, colluders: int = 1
) -> Strategy:
    """The same over a secure sum: one noise for everybody, scaled by each client's own budget.

    The adversary is the server together with up to ``colluders`` members of a sum, which may lack
    ``tolerated_dropouts`` uploads.
    """
    channel = SecureSum(tolerated_dropouts=tolerated_dropouts, colluders=colluders)
    local = SharedFullGradient(
        clip=work.gradient_clip or 1.0,
        whole=work.unit == "client",
        tolerated_dropouts=tolerated_dropouts + colluders,
    )
    kept = [text for text in ASSUMPTIONS if text != OWN_NOISE]
    return Strategy(
        **work.slots("preconditioned_sum"),
        local=local,
        channel=channel,
        weights=FixedDenominator(),
        tolerated_dropouts=tolerated_dropouts,
        assumptions=work.worded((*channel.assumptions, SHARED[0], *kept)),
    )
