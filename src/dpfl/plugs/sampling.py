"""How records are drawn. The object that draws also writes the event, so the two cannot differ."""

import bisect
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpfl.core.checks import check
from dpfl.core.errors import DataError, PrivacyRefusal
from dpfl.core.grid import effective_multiplier, part_width
from dpfl.core.random import SecretRng
from dpfl.core.types import Phase
from dpfl.privacy.events import Event

_CHUNK = 1 << 22  # coins drawn at once
_TAIL = 5e-26


@dataclass(frozen=True)
class Draw:
    """The records of every step, one step after the other, and how many there are in each."""

    records: Tensor
    sizes: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.split(self.records, self.sizes.tolist()))


@dataclass(frozen=True)
class _Batches:
    examples: int
    batch_size: int


class PoissonBatches(_Batches):
    """Each record joins each step on its own with rate min(1, batch_size / examples). A batch may
    be empty.
    """

    @property
    def rate(self) -> float:
        """Probability that a record takes part in a step."""
        return min(1.0, self.batch_size / self.examples)

    @property
    def expected_size(self) -> float:
        """The fixed, public denominator."""
        return self.rate * self.examples

    @property
    def parts(self) -> int:
        """In how many parts, at most, a step's sum is rounded onto the grid: ``part_width`` records
        each.

        Without a record all that follow it move up by one place, so every part may differ between
        neighbours.

        A Poisson batch has no largest size. The one taken here is exceeded with probability at most
        ``_TAIL`` a step, which the surcharge for a single noise value covers
        (:mod:`dpfl.privacy.accountant`).
        """
        return math.ceil(_largest_batch(self.examples, self.rate) / part_width(self.batch_size))

    def draw(self, rng: SecretRng, steps: int) -> Draw:
        """Draw the records of every step."""
        records, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        at_once = max(1, _CHUNK // self.examples)
        for first in range(0, steps, at_once):
            count = min(at_once, steps - first)
            chosen = np.flatnonzero(rng.chosen(count, self.examples, self.rate))
            step, record = np.divmod(chosen, self.examples)
            sizes.append(np.bincount(step, minlength=count))
            records.append(record)
        return Draw(*(torch.from_numpy(np.concatenate(found)) for found in (records, sizes)))

    def event(self, noise_multiplier: float, steps: int, parameters: int) -> Event:
        """What ``steps`` noisy clipped sums over these batches release of one record."""
        return Event(
            noise_multiplier=effective_multiplier(noise_multiplier, parameters, self.parts),
            steps=steps,
            sampling="poisson",
            sampling_rate=self.rate,
            numbers=parameters if noise_multiplier > 0 else 0,
        )


class ShuffledBatches(_Batches):
    """Epochs in random order, cut into batches: for work without noise. It amplifies nothing, and
    writes no event.
    """

    def draw(self, rng: SecretRng, steps: int) -> Draw:
        """Draw the records of every step."""
        sizes, epochs, count = _shuffled_sizes(self.examples, self.batch_size, steps)
        return Draw(rng.permutations(epochs, self.examples).flatten()[:count], sizes.clone())

    def event(self, noise_multiplier: float, steps: int, parameters: int) -> Event:
        """Refuse noise: shuffled batches charged as Poisson samples understate the loss several
        times over.
        """
        problem, remedy = "shuffled batches cannot be charged as Poisson samples", "use 'poisson'"
        check(noise_multiplier <= 0, "sampling", problem, remedy, PrivacyRefusal)
        return Event(noise_multiplier=0.0, steps=steps)


@functools.lru_cache(maxsize=1024)
def _shuffled_sizes(examples: int, batch_size: int, steps: int) -> tuple[Tensor, int, int]:
    """Batch sizes of so many steps of whole epochs, how many epochs they take, and how many records
    they hold.
    """
    each = math.ceil(examples / batch_size)
    epochs = math.ceil(steps / each)
    sizes = torch.full((epochs, each), batch_size)
    sizes[:, -1] = examples - (each - 1) * batch_size
    sizes = sizes.flatten()[:steps]
    return sizes, epochs, int(sizes.sum())


@functools.cache
def _largest_batch(examples: int, rate: float) -> int:
    """The smallest size that a Poisson batch exceeds with probability at most ``_TAIL``."""
    if rate >= 1:
        return examples
    from scipy.special import bdtrc

    sizes = range(math.floor(rate * examples), examples)
    return sizes.start + bisect.bisect_left(
        sizes, True, key=lambda size: bool(bdtrc(size, examples, rate) <= _TAIL)
    )


def sampler(phase: Phase, examples: int) -> PoissonBatches | ShuffledBatches:
    """Return the sampler that a phase's work uses, and that is asked for its cost."""
    check(examples >= 1, "client", "has no data", "leave it out of the federation", DataError)
    kind = PoissonBatches if phase.sampling == "poisson" else ShuffledBatches
    return kind(examples, phase.batch_size)


def steps_per_epoch(examples: int, batch_size: int) -> int:
    """Steps that make one epoch: ceil(1 / q) for Poisson batches, the number of batches
    otherwise.
    """
    return math.ceil(examples / min(batch_size, examples))
