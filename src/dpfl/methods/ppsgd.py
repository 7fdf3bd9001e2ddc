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
    Tested are the clients' own models, each on its own records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfl.core.errors import ConfigurationError
from dpfl.core.layout import Layout
from dpfl.core.types import ClientSettings
from dpfl.plugs.local_work import Sgd
from dpfl.plugs.selection import Selection
from dpfl.strategy import Strategy
from dpfl.strategy.noisy_updates import Noise, noisy_updates

STAYS = "the personal part of the model stays at its client and is not billed"


@dataclass(frozen=True, kw_only=True)
class PersonalSum:
    """The client works with shared + personal; ``shared_part`` of every step is the shared model's."""

    shared_part: float

    def merge(self, shared: Tensor, private: Tensor | None, layout: Layout) -> Tensor:
        """Add the two; before the first round the personal part is zero."""
        return shared if private is None else shared + private

    def split(
        self, shared: Tensor, before: Tensor, after: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """Part the way travelled."""
        moved = after - before
        personal = (before - shared) + (1 - self.shared_part) * moved
        # What is no number is not kept: the client would never get rid of it.
        personal = torch.where(torch.isfinite(personal), personal, torch.zeros_like(personal))
        return shared + self.shared_part * moved, personal


def ppsgd(
    *,
    lr: float,
    clip: float,
    batch_size: int,
    personal_lr: float | None = None,
    local_steps: int | None = None,
    local_epochs: int | None = None,
    noise: Noise = "distributed",
    noise_multiplier: float | None = None,
    tolerated_dropouts: int = 0,
    lr_decay: float = 1.0,
    selection: Selection | None = None,
) -> Strategy:
    """A shared model, clipped and noised, plus a personal one that never leaves its client."""
    own = lr if personal_lr is None else personal_lr
    if not (math.isfinite(lr) and lr > 0 and math.isfinite(own) and own >= 0):
        raise ConfigurationError(
            "ppsgd", f"lr = {lr}, personal_lr = {own}", "give an lr above 0, personal_lr 0 or above"
        )
    client_settings = ClientSettings(
        lr=lr + own, batch_size=batch_size, local_steps=local_steps, local_epochs=local_epochs
    )
    return noisy_updates(
        "ppsgd",
        Sgd(client_settings=client_settings, lr_decay=lr_decay),
        clip,
        noise,
        noise_multiplier,
        tolerated_dropouts,
        selection,
        personal=PersonalSum(shared_part=lr / (lr + own)),
        assumptions=(STAYS,),
    )
