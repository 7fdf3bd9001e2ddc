"""Two kinds of randomness that cannot be confused.

A :class:`PublicSeed` may be printed, stored and sent: partitions, initial models, shared
projections. A :class:`SecretRng` draws what a guarantee rests on (noise, record sampling, cohorts).
It has no serialiser and no printable state. In deployment it is keyed by the operating system; a
simulation may key it from a public seed, and then says so through :attr:`SecretRng.seeded`: such a
run is marked NOT PRIVATE: SEEDED.

All secret randomness comes from AES-256 in counter mode, one key for each generator: 32 bytes from
the operating system, or from SHAKE-256 of a seed in a simulation. Noise is drawn on the integers
(:mod:`dpfl.core.grid_noise`); nothing in the project adds noise that was computed in floating
point.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from dpfl.core import grid_noise
from dpfl.core.grid import NoiseSource
from dpfl.core.seeds import PublicSeed

__all__ = ["NoiseAhead", "PublicSeed", "SecretRng", "fill_grid_noise", "look_ahead"]

# Counter ranges that a noise stream takes; the one after them serves everything else.
_NOISE_PURPOSES = 5
_MOST_AHEAD = 1 << 19  # noise values drawn at once

# How often this process and its ancestors were forked: process ids may come again, this does not.
_forks = 0


def _note_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_note_fork)


class SecretRng:
    """Draws what the guarantee rests on. It cannot be copied, pickled, printed or sent.

    With a ``seed`` it can be repeated, and protects nobody; None draws from the operating system.
    """

    __slots__ = ("_key", "_noise", "_process", "_seed", "_words")

    def __init__(self, seed: PublicSeed | None) -> None:
        self._seed = seed
        self._process = _forks
        # Made when first drawn from: most generators only name their children.
        self._key: bytes | None = None
        self._noise: grid_noise.GridNoise | None = None
        self._words: Any = None

    @classmethod
    def from_system(cls) -> SecretRng:
        """Key by the operating system: the only kind a deployment uses."""
        return cls(None)

    @classmethod
    def simulated(cls, seed: PublicSeed) -> SecretRng:
        """Key reproducibly, for a simulation that is marked NOT PRIVATE: SEEDED."""
        return cls(seed)

    @property
    def seeded(self) -> bool:
        """True where the draws can be reproduced by anyone who knows the seed."""
        return self._seed is not None

    def child(self, *labels: str | int) -> SecretRng:
        """Derive an independent generator: named if simulated, fresh from the system otherwise."""
        return SecretRng(None if self._seed is None else self._seed.child(*labels))

    def _own_key(self) -> bytes:
        """The key of this process. A fork gets another one, and drops what its parent had drawn
        ahead.
        """
        if self._key is None or (self._seed is None and _forks != self._process):
            self._process = _forks
            self._noise = None
            self._words = None
            seeded = None if self._seed is None else f"secret:{self._seed.value}".encode()
            self._key = os.urandom(32) if seeded is None else hashlib.shake_256(seeded).digest(32)
        return self._key

    def _grid(self) -> grid_noise.GridNoise:
        key = self._own_key()
        self._noise = self._noise or grid_noise.GridNoise(key)
        return self._noise

    def _bytes(self, count: int) -> bytes:
        key = self._own_key()
        self._words = self._words or grid_noise.keystream(key, _NOISE_PURPOSES)
        return bytes(self._words.update(bytes(count)))

    def _uint64(self, count: int) -> np.ndarray:
        return np.frombuffer(self._bytes(8 * count), dtype="<u8") if count else np.empty(0, "<u8")

    def grid_noise_(self, out: Tensor) -> Tensor:
        """Fill a contiguous float32 tensor with integers of the law round(N(0, SCALE^2)), in place.

        >>> rng = SecretRng.simulated(PublicSeed(7))
        >>> noise = rng.grid_noise_(torch.empty(1000))
        >>> bool((noise == noise.round()).all()), 0.9 < float(noise.std()) / grid_noise.SCALE < 1.1
        (True, True)
        """
        fill_grid_noise([self], out.view(1, -1))
        return out

    def chosen(self, rows: int, columns: int, rate: float) -> Tensor:
        """Draw a table of independent coins, each true with probability ``rate`` (to 2^-64, never
        above).

        The first 16 of a coin's 64 bits settle it, but for one coin in 65,536.
        """
        if rate >= 1:
            return torch.ones(rows, columns, dtype=torch.bool)
        first, rest = divmod(int(rate * 2**64), 1 << 48)
        words = np.frombuffer(self._bytes(2 * rows * columns), dtype="<u2")
        coins = words < np.uint16(first)
        (open_,) = np.nonzero(words == np.uint16(first))
        coins[open_] = self._uint64(len(open_)) >> np.uint64(16) < np.uint64(rest)
        return torch.from_numpy(coins.reshape(rows, columns))

    def permutation(self, length: int) -> Tensor:
        """Draw a uniformly random order of ``length`` things."""
        return self.permutations(1, length)[0]

    def permutations(self, count: int, length: int) -> Tensor:
        """Draw several orders, one a row: those that ``permutation`` gives one after the other."""
        words = self._uint64(count * length).reshape(count, length)
        return torch.from_numpy(np.argsort(words, axis=1, kind="stable"))

    def integer(self) -> int:
        """Draw 62 random bits, for code that only takes an integer seed (dropout layers)."""
        return int.from_bytes(self._bytes(8), "little") >> 2

    def secret_seed(self) -> PublicSeed:
        """Draw a seed of 128 bits for code that takes one. Despite its type it must stay where it
        was drawn.
        """
        return PublicSeed(int.from_bytes(self._bytes(16), "big"))

    def __repr__(self) -> str:
        return "SecretRng(simulated)" if self.seeded else "SecretRng(system)"

    def __reduce__(self) -> NoReturn:  # copies are made by it, too
        raise TypeError("a SecretRng is never serialised or copied: ask it for a child")


def look_ahead(rngs: Sequence[SecretRng], numbers: int) -> None:
    """Prepare for so many numbers of noise from each generator: short requests then cost less."""
    for rng in rngs:
        rng._grid().look_ahead(numbers)


def fill_grid_noise(rngs: Sequence[SecretRng], out: Tensor) -> Tensor:
    """Fill row i of a contiguous float32 matrix from ``rngs[i]``: the numbers ``grid_noise_``
    gives, in fewer passes.
    """
    grid_noise.fill_rows([rng._grid() for rng in rngs], out.numpy())
    return out


class NoiseAhead:
    """Noise for the steps of one phase, drawn some steps at a time: the same numbers, faster.

    The sampler's tables stay in the cache. An instance is made where the phase runs and ends with
    it, so that no fork shares what was drawn ahead.

    >>> ahead = NoiseAhead(SecretRng.simulated(PublicSeed(1)), numbers=3, steps=2)
    >>> own = SecretRng.simulated(PublicSeed(1))
    >>> draws = [[source.grid_noise_(torch.empty(3)) for source in (ahead, own)] for _ in range(4)]
    >>> all(torch.equal(*pair) for pair in draws)
    True
    """

    def __init__(self, source: NoiseSource, numbers: int, steps: int) -> None:
        self._source = source
        self._left = steps
        self._ahead = max(1, _MOST_AHEAD // max(numbers, 1))
        self._drawn: Iterator[Tensor] = iter(())

    def grid_noise_(self, out: Tensor) -> Tensor:
        """Fill one step's tensor."""
        found = next(self._drawn, None)
        if found is None:
            count = min(self._ahead, self._left)
            if count <= 1:
                return self._source.grid_noise_(out)
            self._left -= count
            self._drawn = iter(self._source.grid_noise_(torch.empty(count, out.numel())))
            found = next(self._drawn)
        return out.copy_(found.view(out.shape))
