"""A stretch of local work, as data: how records are drawn, clipped and noised, and how weights
step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from dpfl.core.checks import (
    LARGEST_LEARNING_RATE,
    MOST_STEPS,
    check,
    not_negative,
    one_of,
    whole_number,
)

Clipping = Literal["flat", "per_layer", "normalised"]
CLIPPINGS: tuple[Clipping, ...] = get_args(Clipping)
"""How a record's gradient is brought within the clip: as a whole; every layer within clip /
sqrt(layers); or scaled to a norm just below the clip, short gradients too.
"""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of local work, as data, so that one engine can run many clients at once.

    A step, with w the weights and m a buffer that is zero when the phase begins::

        m <- momentum m + gradient + weight_decay w + proximal (w - start)
        w <- w - lr m

    ``gradient`` is the batch's mean, or the clipped and noised sum over the expected batch: in
    DP-SGD all else is post-processing of it. With ``sum_only`` there is one step, and what comes of
    it is minus that sum, as integers in steps of the grid of its noise.

    ``sampling`` is ``poisson``, ``shuffle``, or ``full``: all records in every step, added up in
    double precision. With ``whole`` the mean gradient of all records is clipped as one, where a
    whole client is protected.
    """

    steps: int
    batch_size: int
    sampling: Literal["poisson", "shuffle", "full"]
    lr: float
    clip: float | None = None  # bounds each record's gradient; without it this is plain SGD
    noise_multiplier: float = 0.0  # times clip: the noise on the sum of gradients
    ball: float | None = None  # the model stays within this distance of its start
    weight_decay: float = 0.0
    momentum: float = 0.0
    proximal: float = 0.0  # FedProx's mu: pulls the model towards its start
    clipping: Clipping = "flat"
    lr_decay: float = 1.0  # multiplies the learning rate once a round
    part: Literal["all", "head", "body"] = "all"  # what moves; the head is the last layer
    rates: tuple[tuple[int, float], ...] = ()  # (records, rate), one after the other, if not alike
    sum_only: bool = False  # the noisy sum of one step is wanted, not a model
    whole: bool = False  # the mean gradient is clipped, not each record's

    def __post_init__(self) -> None:
        steps = whole_number("phase", "steps", self.steps)
        check(
            steps <= MOST_STEPS,
            "phase",
            f"{steps} local steps in a round",
            f"take at most {MOST_STEPS}",
        )
        whole_number("phase", "batch_size", self.batch_size)
        clipped = self.clip is not None
        noisy = self.noise_multiplier > 0
        check(
            self.part == "all" or not clipped,
            "phase",
            f"clipped, but only the {self.part} moves",
            "move everything",
        )
        check(clipped or not noisy, "phase", "there is noise but nothing is clipped", "give a clip")
        check(
            self.sampling != "shuffle" or not noisy,
            "phase",
            f"noise on {self.sampling} batches",
            "use sampling = 'poisson'",
        )
        one_of("phase", CLIPPINGS, clipping=self.clipping)
        check(
            clipped or self.clipping == "flat",
            "phase",
            f"clipping = '{self.clipping}', but nothing is clipped",
            "give a clip",
        )
        check_optimiser("phase", vars(self))
        full = self.sampling == "full" and clipped
        check(
            full or not self.whole,
            "phase",
            "the mean gradient of all records is clipped, and not all of them are taken",
            "use sampling = 'full' and a clip",
        )
        alone = self.steps == 1 and noisy and self.ball is None and self.weight_decay == 0
        check(
            alone or not self.sum_only,
            "phase",
            "the sum of one noisy step is wanted, and there is more to do",
            "use one step with noise, without weight decay and without a ball",
        )

    def in_round(self, round_: int) -> Phase:
        """The same work with the learning rate that round has."""
        if self.lr_decay == 1.0:
            return self
        return replace(self, lr=self.lr * self.lr_decay**round_, lr_decay=1.0)


def check_optimiser(where: str, settings: Mapping[str, Any]) -> None:
    """Refuse a momentum, weight decay or proximal term that no step can have."""
    momentum = settings["momentum"]
    check(0 <= momentum < 1, where, f"momentum = {momentum}", "give 0 or more, below 1")
    pulls = {name: settings[name] for name in ("weight_decay", "proximal")}
    not_negative(where, **pulls)
    for name, own in pulls.items():
        check(
            own <= LARGEST_LEARNING_RATE,
            where,
            f"{name} = {own}",
            f"give a number of at most {LARGEST_LEARNING_RATE:g}",
        )
