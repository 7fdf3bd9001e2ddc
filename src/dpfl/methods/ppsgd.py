"""PPSGD: a shared model plus a private one, added up.

Paper
    Bietti, Wei, Dudik, Langford, Wu: *Personalization Improves Privacy-Accuracy Tradeoffs in
    Federated Learning*, ICML 2022.

In one sentence
    Each client works with shared + personal weights, trains both at once, sends the shared part's
    update clipped and noised, and keeps the personal part for ever.

Equations
    w_i = shared + personal_i;  g = gradient at w_i;  shared <- shared - lr g,  personal_i <-
    personal_i - personal_lr g. Both move along the same gradients, so work at rate lr + personal_lr
    and part the way: lr / (lr + personal_lr) of it is the shared part's.

Formal guarantees
    As ``udp_fedavg`` for what is sent, but without amplification by the draw of cohorts: clients
    remember their personal parts, and the proof needs rounds that depend on nothing but the models
    published before. The personal part never leaves its client and is not charged: whoever
    publishes it publishes something that no epsilon covers.

Departures
    Local epochs instead of single steps, and noise on the update instead of the gradient, as in the
    FedCEO comparison. A client's own learning rate, if it has one, is that of both parts together.
    ModelTested are the clients' own models, each on its own records.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpfl.core.checks import learning_rate, not_negative
from dpfl.core.layout import Layout
from dpfl.plugs.personal import Personal
from dpfl.strategy import Strategy
from dpfl.strategy.client_level import NoisyWork, noisy_updates
from dpfl.strategy.method import method

STAYS = "the personal part of the model stays at its client and is not charged"


@dataclass(frozen=True, kw_only=True)
class PersonalSum(Personal):
    """The client works with shared + personal; ``shared_part`` of every step is the shared
    model's.
    """

    shared_part: float

    def merge(self, shared: Tensor, private: Tensor | None, layout: Layout) -> Tensor:
        """Add the two; before the first round the personal part is zero."""
        return shared if private is None else shared + private

    def split(
        self, shared: Tensor, before: Tensor, after: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """Split an update into its shared part and the part that stays with the client."""
        moved = after - before
        personal = (before - shared) + (1 - self.shared_part) * moved
        # What is no number is not kept: the client would never get rid of it.
        personal = torch.where(torch.isfinite(personal), personal, torch.zeros_like(personal))
        return shared + self.shared_part * moved, personal


@method(
    family="client", simplicity=60, search={"personal_lr": (0.03, 0.3)}, fixed=("weight_decay",)
)
def ppsgd(work: NoisyWork, *, personal_lr: float | None = None) -> Strategy:
    """A shared model, clipped and noised, plus a personal one that never leaves its client.

    ``personal_lr`` is the learning rate of the personal part (``lr`` if None).
    """
    own = work.lr if personal_lr is None else personal_lr
    learning_rate("ppsgd", lr=work.lr)
    not_negative("ppsgd", personal_lr=own)
    return noisy_updates(
        "ppsgd",
        work,
        local=work.local(lr=work.lr + own),
        personal=PersonalSum(shared_part=work.lr / (work.lr + own)),
        assumptions=(STAYS,),
    )
