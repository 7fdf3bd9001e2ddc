"""CENTAUR: a shared representation, a personal head.

Paper
    Shen, Ye, Kang, Hassani, Shokri: *Share Your Representation Only: Guaranteed Improvement of the
    Privacy-Utility Tradeoff in Federated Learning*, ICLR 2023.

In one sentence
    Each round a client fits its own last layer on the current representation, then moves the
    representation, and sends only that, clipped and noised.

Equations
    head_i <- SGD on head_i with the body fixed;  body update_i <- SGD on the body with head_i
    fixed; body <- body + sum_i (clip(update_i) + noise) / cohort;  with a linear representation,
    columns orthonormalised by QR.

Formal guarantees
    As ``udp_fedavg`` for what is sent, but without amplification by the draw of cohorts: clients
    remember their heads, and the proof needs rounds that depend on nothing but the models published
    before. The head's coordinates are exactly zero before the noise. The head never leaves its
    client and is not charged.

Departures
    The head is the layer that the module registers last. Plain SGD in both phases, as many epochs
    of each as ``head_epochs`` and the local work say. QR only where ``linear_representation`` says
    that nothing stands between the matrices: elsewhere it would change what the model computes.
    ModelTested are the clients' own models, each on its own records.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpfl.core.checks import check, whole_number
from dpfl.core.layout import Layout
from dpfl.core.types import Aggregate, Phase, PlugOutput, PlugState, Terms
from dpfl.plugs.base import Participant
from dpfl.plugs.denoise import Denoiser
from dpfl.plugs.local_work import Sgd
from dpfl.plugs.personal import Personal
from dpfl.plugs.sampling import steps_per_epoch
from dpfl.strategy import Strategy
from dpfl.strategy.client_level import NoisyWork, noisy_updates
from dpfl.strategy.method import method

STAYS = "the last layer of the model stays at its client and is not charged"


@dataclass(frozen=True, kw_only=True)
class HeadThenBody(Sgd):
    """Local work in two phases: the head for ``head_epochs``, then the body as the
    client's settings say.
    """

    head_epochs: int

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("centaur", "head_epochs", self.head_epochs)

    def phases(self, terms: Terms, participant: Participant) -> tuple[Phase, ...]:
        """Plan the head's phase, then the body's."""
        (body,) = super().phases(terms, participant)
        steps = int(self.head_epochs) * steps_per_epoch(participant.examples, body.batch_size)
        return replace(body, part="head", steps=steps), replace(body, part="body")


class PersonalHead(Personal):
    """The last layer is the client's own."""

    def merge(self, shared: Tensor, private: Tensor | None, layout: Layout) -> Tensor:
        """Put the client's head on the shared body; before the first round, the one that everybody
        starts with.
        """
        check(
            layout.head.start > 0,
            "centaur",
            "the model has one layer, so there is no body to share",
            "use a deeper one",
        )
        merged = shared.clone()
        if private is not None:
            merged[layout.head] = private
        return merged

    def split(
        self, shared: Tensor, before: Tensor, after: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """The body is shared, the head is kept; what is no number is not."""
        head = after[layout.head]
        common = after.clone()
        common[layout.head] = shared[layout.head]
        return common, torch.where(torch.isfinite(head), head, before[layout.head]).clone()


@dataclass(frozen=True, kw_only=True)
class SharedBody(Denoiser):
    """Only the body moves: what arrives for the head is noise. Every matrix of a
    ``linear_representation`` is made orthonormal after the step.
    """

    linear_representation: bool = False

    def __call__(self, state: PlugState, aggregate: Aggregate) -> PlugOutput:
        """Return the update that leads there."""
        model = aggregate.model + aggregate.vector
        head = aggregate.layout.head
        model[head] = aggregate.model[head]
        for block in aggregate.layout if self.linear_representation else ():
            if len(block.shape) != 2 or block.start >= head.start:
                continue
            matrix = model[block.slice].reshape(block.shape)
            tall = matrix if block.shape[0] >= block.shape[1] else matrix.T
            q, r = torch.linalg.qr(tall.to(torch.float64))
            # The nearest frame, not its mirror image.
            q = q * torch.where(r.diagonal() < 0, -1.0, 1.0)
            model[block.slice] = (q if tall is matrix else q.T).to(model.dtype).reshape(-1)
        return model - aggregate.model, state, {}


@method(family="client", simplicity=50, needs="a model of two layers or more")
def centaur(work: NoisyWork, denoise: SharedBody, *, head_epochs: int = 1) -> Strategy:
    """A shared representation, clipped and noised, under a last layer that never leaves its
    client.

    ``head_epochs`` are the epochs on the last layer before the representation moves.
    """
    return noisy_updates(
        "centaur",
        work,
        local=HeadThenBody(**vars(work.local()), head_epochs=head_epochs),
        denoise=(denoise,),
        personal=PersonalHead(),
        assumptions=(STAYS,),
    )
