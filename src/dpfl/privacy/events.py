"""What was released, as immutable data that any accountant can read again years later."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from dpfl.core.checks import check, not_negative, one_of, whole_number
from dpfl.core.types import Plain

Sampling = Literal["none", "poisson", "uniform"]
SAMPLINGS: tuple[Sampling, ...] = ("none", "poisson", "uniform")
MOST_NOISE = 1e100  # above it, the square of a noise multiplier is not a number any more


@dataclass(frozen=True, kw_only=True)
class Event:
    """Independent releases of a clipped sum with Gaussian noise, each over a fresh sample.

    ``noise_multiplier`` is std / clip under any adjacency: the accountant applies the adjacency's
    factor, once. Zero means that nothing was hidden. ``steps`` is how many releases there are.
    ``sampling`` is ``poisson`` (each unit on its own with ``sampling_rate``), ``uniform`` (a
    fixed-size sample without replacement of that fraction) or ``none``. ``failure`` is the
    probability, per step, that the clip did not hold. ``numbers`` is how many noise values one step
    draws from the grid sampler, whose distance to the ideal law is charged once per history; 0
    means ideal, continuous noise.
    """

    noise_multiplier: float
    steps: int = 1
    sampling: Sampling = "none"
    sampling_rate: float = 1.0
    failure: float = 0.0
    numbers: int = 0

    def __post_init__(self) -> None:
        not_negative("event", noise_multiplier=self.noise_multiplier)
        one_of("event", SAMPLINGS, sampling=self.sampling)
        sampled = self.sampling != "none"
        check(
            sampled or self.sampling_rate == 1,
            "event",
            f"sampling_rate = {self.sampling_rate}",
            "name the sampling",
        )
        # Equal events must be written equally: 2 and 2.0 are one number.
        for name, most in (("noise_multiplier", MOST_NOISE), ("sampling_rate", 1), ("failure", 1)):
            value = getattr(self, name)
            check(0 <= value <= most, "event", f"{name} = {value}", f"give 0 to {most:g}")
            object.__setattr__(self, name, float(value))
        for name in ("steps", "numbers"):
            object.__setattr__(self, name, whole_number("event", name, getattr(self, name), 0))

    def times(self, steps: int) -> Event:
        """Return the same mechanism, run ``steps`` times in all."""
        return replace(self, steps=steps)

    def to_json(self) -> str:
        """Write canonically: equal events give equal text."""
        return json.dumps(vars(self), sort_keys=True)

    @classmethod
    def from_dict(cls, fields: Plain) -> Event:
        """Read back what was written; an unknown or missing field is refused, never guessed."""
        if set(fields) != set(cls.__dataclass_fields__):
            raise ValueError(f"an event with the fields {sorted(fields)}")
        return cls(**fields)


History = tuple[Event, ...]


def merged(events: Iterable[Event]) -> History:
    """Add up the steps of equal mechanisms, in a canonical order.

    Composition does not depend on the order of the events.

    >>> events = [Event(noise_multiplier=1.0), Event(noise_multiplier=1.0, steps=4)]
    >>> [event.steps for event in merged(events)]
    [5]
    """
    steps: Counter[Event] = Counter()
    for event in events:
        steps[event.times(1)] += event.steps
    kept = (mechanism.times(n) for mechanism, n in steps.items() if n > 0)
    return tuple(sorted(kept, key=Event.to_json))
