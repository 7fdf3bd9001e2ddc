"""What was released, as immutable data that any accountant can read again years later."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from dpfl.core.errors import ConfigurationError, LedgerError

Sampling = Literal["none", "poisson", "uniform"]
SAMPLINGS: tuple[Sampling, ...] = ("none", "poisson", "uniform")


@dataclass(frozen=True, kw_only=True)
class Event:
    """``steps`` independent releases of a clipped sum with Gaussian noise, each over a fresh
    sample.

    ``noise_multiplier`` is std / clip under any adjacency: the accountant applies the adjacency's
    factor, once. Zero means that nothing was hidden. ``sampling`` is ``poisson`` (each unit on its
    own with ``sampling_rate``), ``uniform`` (a fixed-size sample without replacement of that
    fraction) or ``none``. ``failure`` is the probability, per step, that the clip did not hold.
    ``numbers`` is how many noise values one step draws from the grid sampler, whose distance to the
    ideal law is charged once per history; 0 means ideal, continuous noise.
    """

    noise_multiplier: float
    steps: int = 1
    sampling: Sampling = "none"
    sampling_rate: float = 1.0
    failure: float = 0.0
    numbers: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise ConfigurationError(
                "event",
                f"noise_multiplier = {self.noise_multiplier}",
                "give a finite number, 0 or above",
            )
        if self.sampling not in SAMPLINGS:
            remedy = f"choose one of {', '.join(SAMPLINGS)}"
            raise ConfigurationError("event", f"sampling = '{self.sampling}'", remedy)
        if not 0 <= self.sampling_rate <= 1:
            raise ConfigurationError(
                "event", f"sampling_rate = {self.sampling_rate}", "give 0 to 1"
            )
        if self.sampling == "none" and self.sampling_rate != 1:
            raise ConfigurationError(
                "event",
                f"sampling_rate = {self.sampling_rate} without sampling",
                "name the sampling",
            )
        if not math.isfinite(self.steps) or self.steps < 0 or self.steps != int(self.steps):
            raise ConfigurationError(
                "event", f"steps = {self.steps}", "give a whole number, 0 or above"
            )
        if not 0 <= self.failure <= 1:
            raise ConfigurationError("event", f"failure = {self.failure}", "give a probability")
        if not math.isfinite(self.numbers) or self.numbers < 0 or self.numbers != int(self.numbers):
            raise ConfigurationError(
                "event", f"numbers = {self.numbers}", "give a whole number, 0 or above"
            )
        # Equal events must be written equally: 2 and 2.0 are one number.
        for name in ("noise_multiplier", "sampling_rate", "failure"):
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("steps", "numbers"):
            object.__setattr__(self, name, int(getattr(self, name)))

    def times(self, steps: int) -> Event:
        """Return the same mechanism, run ``steps`` times in all."""
        return replace(self, steps=steps)

    def to_json(self) -> str:
        """Write canonically: equal events give equal text."""
        fields = {
            "failure": self.failure,
            "noise_multiplier": self.noise_multiplier,
            "numbers": self.numbers,
            "sampling": self.sampling,
            "sampling_rate": self.sampling_rate,
            "steps": self.steps,
        }
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Event:
        """Read back; an unknown or missing field is refused, never guessed."""
        try:
            fields = json.loads(text)
            if set(fields) != set(cls.__dataclass_fields__):
                raise ValueError(f"fields {sorted(fields)}")
            return cls(**fields)
        except (ValueError, TypeError, ConfigurationError) as error:
            raise LedgerError(
                "ledger",
                f"holds an event that cannot be read ({error})",
                "use the version of dpfl that wrote it",
            ) from error


History = tuple[Event, ...]


def merged(events: Iterable[Event]) -> History:
    """Add up the steps of equal mechanisms, in a canonical order. Composition does not depend on
    order.

    >>> events = [Event(noise_multiplier=1.0), Event(noise_multiplier=1.0, steps=4)]
    >>> [event.steps for event in merged(events)]
    [5]
    """
    steps: dict[Event, int] = {}
    for event in events:
        mechanism = event.times(1)
        steps[mechanism] = steps.get(mechanism, 0) + event.steps
    kept = (mechanism.times(n) for mechanism, n in steps.items() if n > 0)
    return tuple(sorted(kept, key=Event.to_json))
