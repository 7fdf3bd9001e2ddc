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
    - Half of the spectrum is the other half's mirror image; slices are thresholded through their
      Gram matrices.
    - Without personal starts the smoothing acts on the mean itself, at threshold / n: the same
      global model.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

from dpfl.core.checks import check, one_of, positive, whole_number
from dpfl.core.layout import Block, Layout
from dpfl.core.types import Terms
from dpfl.plugs.base import chosen_noise
from dpfl.plugs.denoise import LowRankMean
from dpfl.plugs.row_denoise import LowRankStack, ThresholdSchedule
from dpfl.strategy import Strategy
from dpfl.strategy.client_level import NoisyWork, noisy_updates
from dpfl.strategy.method import method

PERSONAL = (
    "clients that start from their own smoothed models show the world more than a sum: its privacy "
    "cost is the server's"
)


@dataclass(frozen=True, kw_only=True)
class Schedule(ThresholdSchedule):
    """Every ``interval`` rounds; the threshold from a ``coefficient`` (the paper's lambda) or from
    the noise itself.

    ``row_std`` is the noise in every entry of one client's model: planned at enrolment from
    ``clip`` and from how the noise is shared out.
    """

    interval: int
    coefficient: float | None
    growth: float
    layers: int | Literal["all"]
    clip: float
    distributed: bool
    tolerated_dropouts: int = 0
    row_std: float | None = None

    def __post_init__(self) -> None:
        whole_number("fedceo", "interval", self.interval)
        positive("fedceo", coefficient=1.0 if self.coefficient is None else self.coefficient)
        good = math.isfinite(self.growth) and self.growth >= 1
        check(good, "fedceo", f"growth = {self.growth}", "give 1 or more")
        if self.layers != "all":
            whole_number("fedceo", "layers ('all', or the last so many)", self.layers)

    def resolve(self, terms: Terms) -> Self:
        """Take the noise of the terms; refuse a threshold that grows beyond all numbers."""
        largest = terms.rounds / self.interval * math.log(self.growth)
        check(
            largest - math.log(self.coefficient or 1.0) <= 600,
            "fedceo",
            f"growth = {self.growth}, coefficient = {self.coefficient} make a threshold beyond all "
            "numbers",
            "let it grow less, or give a larger coefficient",
        )
        if self.row_std is not None or terms.noise_multiplier is None:
            return self
        shares = max(1.0, terms.expected_cohort - self.tolerated_dropouts)
        shares = shares if self.distributed else 1.0
        return replace(self, row_std=terms.noise_multiplier * self.clip / math.sqrt(shares))

    def due(self, round_: int) -> bool:
        """Whether this round (from 0) ends in smoothing."""
        return (round_ + 1) % self.interval == 0

    def threshold(self, round_: int, rest: int, out: int, clients: int) -> float:
        """The threshold of a (rest, out, clients) stack."""
        growth = float(self.growth ** ((round_ + 1) / self.interval))
        if self.coefficient is not None:
            return growth / (2 * self.coefficient)
        std = chosen_noise(self.row_std, "fedceo")
        return growth * math.sqrt(clients) * std * (math.sqrt(rest) + math.sqrt(out))

    def matrices(self, layout: Layout) -> list[Block]:
        """The tensors that are smoothed: those with at least two axes, or the last few of them."""
        matrices = [block for block in layout if len(block.shape) >= 2]
        return matrices if self.layers == "all" else matrices[-self.layers :]


@method(family="client", simplicity=40, search={"coefficient": ("auto", 1.0, 10.0)})
def fedceo(
    work: NoisyWork,
    *,
    interval: int = 10,
    coefficient: float | Literal["auto"] = "auto",
    growth: float = 1.0,
    layers: int | Literal["all"] = "all",
    personal_starts: bool = True,
) -> Strategy:
    """UDP-FedAvg with a low-rank step on the stack of noisy models; the threshold comes from the
    noise, or from you.
    """
    if isinstance(coefficient, str):
        one_of("fedceo", ("auto",), coefficient=coefficient)
    number = None if isinstance(coefficient, str) else coefficient
    schedule = Schedule(
        interval=interval,
        coefficient=number,
        growth=growth,
        layers=layers,
        clip=work.clip,
        distributed=work.distributed,
        tolerated_dropouts=work.tolerated_dropouts,
    )
    if not personal_starts:
        return noisy_updates("fedceo", work, denoise=(LowRankMean(schedule=schedule),))
    stack = LowRankStack(schedule=schedule)
    return noisy_updates("fedceo", work, clean=stack, assumptions=(PERSONAL,))
