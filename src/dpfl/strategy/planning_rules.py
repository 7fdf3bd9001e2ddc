"""What private preconditioning plans from the signal S, for images, tables, text and whole clients.

The constants were chosen once, on other seeds of public data sets, and are not tuned per run.
"""

import math
from dataclasses import dataclass

from dpfl.models.features import Kind
from dpfl.models.preconditioning import CONSTANTS

MOST_WHITENED = 4096
"""With more features a Gram matrix takes too much memory and upload: there is no whitening."""

COHERENCE = 4.0
"""How much more the signal of whole clients counts, for images and tables: their mean gradients
agree, and nearly all of them are as long as the clip, where those of single records point apart."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What follows from the signal S, for ``size`` features and so many ``classes``."""

    kind: Kind
    size: int
    classes: int
    whole: bool = False  # whole clients are protected
    summed: bool = False  # over a secure sum

    @property
    def reach(self) -> float:
        """sqrt(K d), less for whole clients: the signal that is as strong as the noise."""
        parameters = self.classes * (self.size + (self.kind in CONSTANTS))
        return math.sqrt(parameters) / self.coherence

    @property
    def coherence(self) -> float:
        """How much more the signal of whole clients counts; 1 for records."""
        return COHERENCE if self.whole and self.kind != "text" else 1.0

    def plan(self, signal: float) -> dict[str, float]:
        """Plan rounds, clip, learning rate and the shares of the releases."""
        rules = {"images": self._images, "tables": self._tables, "text": self._text}
        rule = self._whole if self.whole else rules[self.kind]
        return {"signal": signal, "reach": signal / self.reach, **rule(signal)}

    def _whole(self, signal: float) -> dict[str, float]:
        rate = min(30.0 if self.kind == "images" else 1.5, signal / 50)
        second = 0.0 if self.kind == "images" and self.size > MOST_WHITENED else 0.15
        return _numbers(rounds=32, clip=0.03, lr=rate, mean=0.15, second=second)

    def _images(self, signal: float) -> dict[str, float]:
        constant = 0.04 if signal < 2_000 else 0.045
        rate = constant * self.classes * signal**0.7
        if signal < 32 * math.sqrt(self.size) or self.size > MOST_WHITENED:
            return _numbers(rounds=16, clip=0.3, lr=rate, mean=0.08, second=0.0)
        rounds = 32 if signal >= 10_000 and self.summed else 16
        return _numbers(rounds=rounds, clip=0.3, lr=rate, mean=0.05, second=0.10)

    def _tables(self, signal: float) -> dict[str, float]:
        rounds = min(32, max(8, round(signal / 40)))
        clip = 1.0 if signal >= 1_000 else 0.5
        return _numbers(rounds=rounds, clip=clip, lr=10.0, mean=0.06, second=0.04)

    def _text(self, signal: float) -> dict[str, float]:
        clip = 1.0 if signal >= 3_000 else 0.5
        rate = min(100.0, max(15.0, signal / 45))
        return _numbers(rounds=8, clip=clip, lr=rate, mean=0.06, second=0.04)


def _numbers(
    *, rounds: int, clip: float, lr: float, mean: float, second: float
) -> dict[str, float]:
    shares = {"mean_share": mean, "second_share": second}
    return {"rounds": float(rounds), "clip": clip, "lr": lr, **shares}
