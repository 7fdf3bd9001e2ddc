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
from dpfl.core.grid import DOUBLE_SUM, effective_multiplier, part_width
from dpfl.core.grid_noise import SCALE
from dpfl.core.random import SecretRng
from dpfl.core.types import Phase
from dpfl.privacy.events import Event

ALL = 1 << 40
"""A batch of all records: more than anybody has."""

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
        """The fixed, public denominator: at least the expected size of a batch."""
        return self.rate * self.examples

    @property
    def largest(self) -> int:
        """The public size that a batch exceeds with probability at most ``_TAIL`` a step.

        The surcharge for a single noise value covers it (:mod:`dpfl.privacy.accountant`).
        """
        return _largest_batch(self.examples, self.rate)

    @property
    def parts(self) -> int:
        """In how many parts, at most, a step's sum is rounded onto the grid: ``part_width`` records
        each.

        Without a record all that follow it move up by one place, so every part may differ between
        neighbours.
        """
        return math.ceil(self.largest / part_width(self.batch_size))

    def draw(self, rng: SecretRng, steps: int) -> Draw:
        """Draw the records of every step."""
        found, sizes = _poisson(rng, steps, self.examples, self.rate)
        return Draw(torch.from_numpy(found), torch.from_numpy(sizes))

    def event(self, noise_multiplier: float, steps: int, parameters: int) -> Event:
        """What ``steps`` noisy clipped sums over these batches release of one record."""
        return Event(
            noise_multiplier=effective_multiplier(noise_multiplier, parameters, self.parts),
            steps=steps,
            sampling="poisson",
            sampling_rate=self.rate,
            numbers=parameters if noise_multiplier > 0 else 0,
        )


@dataclass(frozen=True)
class RatedBatches(PoissonBatches):
    """Each record joins each step on its own, with the rate that its owner's budget allows.

    ``rates`` say how many records, one after the other, have which rate. ``batch_size`` is the
    fixed, public denominator, and at least the expected size of a batch.

    *Formal guarantees.* What a step releases of a record depends on that record's own rate
    (Boenisch, Muhl, Dziedzic, Rinberg, Papernot 2023). The event is that of the largest rate: of a
    single owner's records, their own.
    """

    rates: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        check(
            sum(n for n, _ in self.rates) == self.examples,
            "sampling",
            f"rates of {sum(n for n, _ in self.rates)} records for {self.examples}",
            "give every record one",
            DataError,
        )
        expected = math.fsum(count * rate for count, rate in self.rates)
        check(
            expected <= self.batch_size * (1 + 1e-9),
            "sampling",
            f"{expected:g} records a step are expected, and {self.batch_size} were planned",
            "plan with the clients' own budgets",
            PrivacyRefusal,
        )

    @property
    def rate(self) -> float:
        """The largest probability that a record takes part in a step."""
        return max(rate for _, rate in self.rates)

    @property
    def expected_size(self) -> float:
        """The fixed, public denominator."""
        return float(self.batch_size)

    @property
    def largest(self) -> int:
        """The public size that a batch exceeds with probability at most ``_TAIL`` a step.

        The size of a batch is a sum of independent coins. Above its mean, its tail is at most that
        of a Poisson law of the same mean (Hoeffding 1956; Anderson and Samuels 1967).
        """
        return _largest_poisson(self.batch_size)

    def draw(self, rng: SecretRng, steps: int) -> Draw:
        """Draw the records of every step, owner by owner."""
        records = []
        places = []
        first = 0
        sizes = np.zeros(steps, np.int64)
        for owner, (count, rate) in enumerate(self.rates):
            found, own = _poisson(rng.child("owner", owner), steps, count, rate)
            records.append(found + first)
            places.append(np.repeat(np.arange(steps), own))
            sizes = sizes + own
            first = first + count
        order = np.argsort(np.concatenate(places), kind="stable")
        return Draw(torch.from_numpy(np.concatenate(records)[order]), torch.from_numpy(sizes))


def _poisson(
    rng: SecretRng, steps: int, examples: int, rate: float
) -> tuple[np.ndarray, np.ndarray]:
    """Records of every step, one step after the other, and how many there are in each."""
    records = [np.zeros(0, np.int64)]
    sizes = [np.zeros(0, np.int64)]
    at_once = max(1, _CHUNK // examples)
    for first in range(0, steps, at_once):
        count = min(at_once, steps - first)
        chosen = np.flatnonzero(rng.chosen(count, examples, rate))
        step, record = np.divmod(chosen, examples)
        sizes.append(np.bincount(step, minlength=count))
        records.append(record)
    return np.concatenate(records), np.concatenate(sizes)


@dataclass(frozen=True)
class FullBatches(PoissonBatches):
    """Every step takes all records, each in its place: nothing is drawn, and nothing amplified.

    ``batch_size`` is ``examples``. Of a ``whole`` client there is one contribution, its mean.

    *Formal guarantees.* A record that is replaced by nothing keeps its place and contributes zero,
    so that no other record's contribution changes. Contributions are added up in double precision,
    and their sum is rounded onto the grid once.
    """

    whole: bool = False

    @property
    def expected_size(self) -> float:
        """How many contributions are added up: what their sum is divided by."""
        return 1.0 if self.whole else float(self.examples)

    @property
    def largest(self) -> int:
        """All records."""
        return self.examples

    def draw(self, rng: SecretRng, steps: int) -> Draw:
        """Return all records for every step."""
        return Draw(torch.arange(self.examples).repeat(steps), torch.full((steps,), self.examples))

    def event(self, noise_multiplier: float, steps: int, parameters: int) -> Event:
        """What ``steps`` noisy clipped sums over all records release of one record."""
        widening = noise_multiplier * math.sqrt(parameters) / SCALE
        count = self.expected_size
        bound = 1 + count * (count + 3) * DOUBLE_SUM + widening
        numbers = parameters if noise_multiplier > 0 else 0
        return Event(noise_multiplier=noise_multiplier / bound, steps=steps, numbers=numbers)


class ShuffledBatches(_Batches):
    """Epochs in random order, cut into batches: for work without noise. It amplifies nothing, and
    writes no event.
    """

    @property
    def largest(self) -> int:
        """The size of a whole batch."""
        return min(self.batch_size, self.examples)

    def draw(self, rng: SecretRng, steps: int) -> Draw:
        """Draw the records of every step."""
        sizes, epochs, count = _shuffled_sizes(self.examples, self.batch_size, steps)
        return Draw(rng.permutations(epochs, self.examples).flatten()[:count], sizes.clone())

    def event(self, noise_multiplier: float, steps: int, parameters: int) -> Event:
        """Refuse noise: shuffled batches charged as Poisson samples understate the loss several
        times over.
        """
        check(
            noise_multiplier <= 0,
            "sampling",
            "shuffled batches cannot be charged as Poisson samples",
            "use 'poisson'",
            PrivacyRefusal,
        )
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


@functools.cache
def _largest_poisson(mean: int) -> int:
    """The smallest size that a Poisson law exceeds with probability at most ``_TAIL``."""
    from scipy.special import pdtrc

    sizes = range(mean, 2 * mean + 1000)
    return sizes.start + bisect.bisect_left(
        sizes, True, key=lambda size: bool(pdtrc(size, mean) <= _TAIL)
    )


def sampler(phase: Phase, examples: int) -> PoissonBatches | ShuffledBatches:
    """Return the sampler that a phase's work uses, and that is asked for its cost."""
    check(examples >= 1, "client", "has no data", "leave it out of the federation", DataError)
    if phase.rates:
        return RatedBatches(examples, phase.batch_size, phase.rates)
    if phase.sampling == "shuffle":
        return ShuffledBatches(examples, phase.batch_size)
    if phase.sampling == "full":
        return FullBatches(examples, examples, phase.whole)
    return PoissonBatches(examples, phase.batch_size)


def steps_per_epoch(examples: int, batch_size: int) -> int:
    """Steps that make one epoch: ceil(1 / q) for Poisson batches, the number of batches
    otherwise.
    """
    return math.ceil(examples / min(batch_size, examples))
