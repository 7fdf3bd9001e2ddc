"""How much of one unit a message still shows: the second thing a strategy's pieces are folded over.

Clip before noise: the bound shrinks. Scale: bound and noise together. Projection: the bound
stretches, failure grows. Noise: on a grid, whose rounding widens the bound. Weighted sum: the bound
times one's own weight, the noise of all shares assumed honest. Once there is noise, whatever is not
linear and orthonormal is post-processing: it leaves the event as it is and seals it, so that later
noise is not counted either.

One fold gives noise, sensitivity and cost, so the three cannot drift apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dpfl.core.checks import check
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.grid import DOUBLE_SUM, Grid
from dpfl.core.types import Unit
from dpfl.privacy.events import Event, History, Sampling


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """How much of one unit a message still shows.

    ``bound``: largest norm of one unit's contribution; ``noise``: Gaussian std that each coordinate
    already carries. ``numbers``: how many coordinates there are; ``draws``: how many noise values
    the mechanism has drawn for them. ``failure``: probability that the bound is false. ``paid``:
    what was already released upstream (DP-SGD's steps); where something was paid for this unit,
    everything that follows is post-processing of it. ``sampling`` and ``sampling_rate`` say how
    units within a client are drawn, secretly, before any of this.

    >>> (event,) = Exposure(unit=Unit.CLIENT, numbers=100).clipped(2.0).noised(3.0).events()
    >>> round(event.noise_multiplier, 4), event.numbers
    (1.5, 100)
    """

    unit: Unit
    bound: float = math.inf
    noise: float = 0.0
    numbers: int = 0
    draws: int = 0
    failure: float = 0.0
    paid: History = ()
    sealed: bool = False
    sampling: Sampling = "none"
    sampling_rate: float = 1.0

    def clipped(self, clip: float) -> Exposure:
        """Norms above ``clip`` are scaled down to it."""
        check(clip > 0, "clip", f"{clip} is not a positive number", "give a clip above 0")
        return self.processed() if self.noise > 0 else replace(self, bound=min(self.bound, clip))

    def scaled(self, factor: float) -> Exposure:
        """Everything is multiplied by ``factor``."""
        return replace(self, bound=self.bound * abs(factor), noise=self.noise * abs(factor))

    def projected(self, stretch: float, numbers: int, failure: float = 0.0) -> Exposure:
        """A linear map onto ``numbers`` coordinates: norms grow by at most ``stretch``, but for
        ``failure``.
        """
        if self.noise > 0:
            return replace(self.processed(), numbers=numbers)
        failure += self.failure
        return replace(self, bound=self.bound * stretch, numbers=numbers, failure=failure)

    def noised(self, std: float, *, summands: int = 1) -> Exposure:
        """Add noise of this std on the grid; the bound grows by what rounding may move.

        Noise on two different grids has no common law that is proven: the larger of the two is what
        counts. ``summands``: how many contributions are added up, in double precision, before they
        are rounded.
        """
        # Noise on what is not bounded protects nobody.
        if self.sealed or std <= self.noise or math.isinf(self.bound):
            return self
        summed = self.bound * (1 + summands * (summands + 3) * DOUBLE_SUM)
        widened = summed + Grid.of(std).widening(self.numbers)
        check(
            widened < 2 * self.bound,
            "noise",
            f"a std of {std:g} makes the grid coarser than a bound of {self.bound:g}",
            "use less noise, a larger clip or a smaller model",
            PrivacyRefusal,
        )
        return replace(self, bound=widened, noise=std, draws=self.draws + self.numbers)

    def processed(self) -> Exposure:
        """Apply any function to what is already noisy.

        The event stays as it is, and later noise does not count.
        """
        if self.noise == 0 and not self.paid:
            # An arbitrary function of something unprotected bounds nothing.
            return replace(self, bound=math.inf)
        return replace(self, sealed=True)

    def summed(self, weight: float, shares: float) -> Exposure:
        """A sum over a cohort whose shares have this one's ``weight``; ``shares`` are honest."""
        scaled = self.scaled(weight)
        # Sealed shares are no longer Gaussian noise: one's own event is all that is proven.
        if self.sealed:
            return scaled
        draws = math.ceil(scaled.draws * shares)
        return replace(scaled, noise=scaled.noise * math.sqrt(shares), draws=draws)

    @property
    def finite(self) -> bool:
        """Whether any epsilon can be stated at all."""
        paid = bool(self.paid) and all(event.noise_multiplier > 0 for event in self.paid)
        return paid or (self.noise > 0 and math.isfinite(self.bound))

    def events(self, sampling: Sampling = "none", sampling_rate: float = 1.0) -> History:
        """What one round of this releases; a zero multiplier states that nothing is hidden.

        ``sampling`` and ``sampling_rate`` are those of clients, where units are whole clients.
        """
        if self.paid:
            return self.paid
        if self.bound == 0:
            return ()  # nothing of the unit is in it
        if self.sampling != "none":
            sampling = self.sampling
            sampling_rate = self.sampling_rate
        event = Event(
            noise_multiplier=self.noise / self.bound if self.finite else 0.0,
            sampling=sampling,
            sampling_rate=1.0 if sampling == "none" else sampling_rate,
            failure=self.failure,
            numbers=self.draws,
        )
        return (event,)
