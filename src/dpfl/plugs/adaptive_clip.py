"""Clip at a quantile of the clients' own updates, which is learned under the same noise.

Paper: Andrew, Thakkar, McMahan, Ramaswamy: *Differentially Private Learning with Adaptive
Clipping*, NeurIPS 2021. Every client votes whether its update was within the clip C of the round;
the noisy mean b of the votes moves the clip::

    C <- C exp(-clip_lr (b - target_quantile))

The paper noises update and votes apart, with multipliers z_update and 2 s_votes whose loss adds up:
1 / z^2 = 1 / z_update^2 + 1 / (2 s_votes)^2 (Theorem 1). Here the two are one vector in the unit
ball, which is the same mechanism::

    sent = (sqrt(1 - v) clip(update, C) / C, +-sqrt(v))      v = vote_share
    z_update = z / sqrt(1 - v),   s_votes = z / (2 sqrt(v))
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dpfl.core.checks import check, positive
from dpfl.core.errors import PeerError
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.core.types import Cohort, Metrics, PlugState, Shared, Terms, Who
from dpfl.numerics.clipping import CLIP_MARGIN, clip_factor
from dpfl.plugs.base import FigureSpec, Gain, by_round
from dpfl.plugs.stages import Stage
from dpfl.privacy.exposure import Exposure

RANGE = 1e3
"""The clip stays within so many times, and one over so many times, the first one."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveClip(Stage):
    """Scale updates into a ball whose radius follows a quantile of their norms.

    ``clip`` is the radius of the first round, ``target_quantile`` the share of updates that are to
    be within it, ``clip_lr`` how fast it moves. ``vote_share`` of 1 / z^2, the privacy loss of a
    round, is spent on the votes: the noise on updates grows by 1 / sqrt(1 - vote_share).

    *Formal guarantees.* What is sent has a norm of at most 1 whatever the clip is, so bound, noise
    and grid are the same in every round, and a clip that the server makes up changes no charge. An
    update that is zero or not finite is sent as zeros and votes for neither side: zero-out
    adjacency, where a client's contribution becomes zero, costs the norm 1, and replace-one, where
    a vote may turn round as well, twice as much. The clip is a function of noisy sums.
    """

    clip: float
    target_quantile: float = 0.5
    clip_lr: float = 0.2
    vote_share: float = 0.01
    linear: ClassVar[bool] = True
    needs_sum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive("adaptive clip", clip=self.clip, clip_lr=self.clip_lr)
        for name in ("target_quantile", "vote_share"):
            value = getattr(self, name)
            check(
                0 < value < 1, "adaptive clip", f"{name} = {value}", "give a number between 0 and 1"
            )

    @property
    def largest_clip(self) -> float:
        """The largest clip that a round may have."""
        return self.clip * RANGE

    def start(self, terms: Terms, layout: Layout) -> PlugState:
        """Return the clip of the first round; refuse votes that the noise drowns."""
        votes = (terms.noise_multiplier or 0.0) / (2 * math.sqrt(self.vote_share))
        spread = self.clip_lr * votes / terms.expected_cohort
        check(
            spread <= 1,
            "adaptive clip",
            f"noise on votes would move the log of the clip by {spread:.3g} a round",
            "raise vote_share, lower clip_lr, ask more clients, or leave target_quantile out",
        )
        return {"clip": torch.tensor([self.clip], dtype=torch.float64)}

    def open(self, state: PlugState, round_: int, cohort: Cohort, seed: PublicSeed) -> Shared:
        """Tell clients this round's clip, which earlier noisy votes have moved."""
        return {"clip": state["clip"].clone()}

    def client_rows(self, rows: Tensor, shared: Shared) -> Tensor:
        """Clip every row in units of the clip, and put its vote behind it."""
        clip = self._clip(shared)
        norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float64)
        scale = clip_factor(norm, clip) * (math.sqrt(1 - self.vote_share) / clip)
        vote = torch.where(norm <= clip, 1.0, -1.0) * (math.sqrt(self.vote_share) * CLIP_MARGIN)
        both = torch.cat([rows.to(torch.float64) * scale, vote], dim=-1)
        counts = torch.isfinite(norm) & (norm > 0)
        return torch.where(counts, both, torch.zeros_like(both)).to(torch.float32)

    def server(self, y: Tensor, shared: Shared, who: Who | None) -> Tensor:
        """Take the votes off, and return to the units of the model."""
        return y[..., :-1] * (self._clip(shared) / math.sqrt(1 - self.vote_share))

    def learn_sum(
        self, state: PlugState, total: Tensor, weight: float
    ) -> tuple[PlugState, Metrics]:
        """Move the clip by the noisy mean of the votes."""
        clip = float(state["clip"])
        votes = float(total[-1]) / (2 * math.sqrt(self.vote_share) * CLIP_MARGIN)
        within = 0.5 + weight * votes
        moved = clip * math.exp(min(-self.clip_lr * (within - self.target_quantile), 100.0))
        moved = min(max(moved, self.clip / RANGE), self.largest_clip)
        told: Metrics = {"clip": clip, "share_within": within}
        return {**state, "clip": torch.tensor([moved], dtype=torch.float64)}, told

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """One number more, and a norm of at most 1."""
        return exposure.projected(math.inf, exposure.numbers + 1).clipped(1.0)

    def upload_size(self, numbers: float, terms: Terms, layout: Layout) -> float:
        """Return one number more: the vote."""
        return numbers + 1

    def noise_gain(self, terms: Terms, layout: Layout, client: str | None = None) -> Gain:
        """Leave the update what the votes do not take of the unit ball."""
        return Gain(signal=math.sqrt(1 - self.vote_share))

    def figures(self) -> tuple[FigureSpec, ...]:
        """Show the clip, and how many updates were within it."""
        caption = "The clip follows a noisy quantile of the norms of the clients' updates."
        clips = by_round("clip", "clip", "norm", {"clip": "clip"}, caption)
        about = ("share-within", "updates within the clip", "share", {"share_within": "noisy"})
        return clips, by_round(*about, "It settles around the target quantile.", log_y=False)

    def _clip(self, shared: Shared) -> float:
        """The clip of the round, which must be one that the plan allows."""
        given = shared.get("clip", torch.zeros(0))
        check(
            given.numel() == 1 and self.clip / RANGE <= float(given) <= self.largest_clip,
            "adaptive clip",
            f"a clip of {given.flatten()[:3].tolist()}",
            f"send one number from {self.clip / RANGE:g} to {self.largest_clip:g}",
            PeerError,
        )
        return float(given)
