"""Two kinds of randomness that cannot be confused.

A :class:`PublicSeed` may be printed, stored and sent: cohorts, partitions, initial models, shared projections.
A :class:`SecretRng` draws what a guarantee rests on (noise, record sampling). It has no serialiser and no printable
state. In deployment it is seeded by the operating system; a simulation may seed it from a public seed, and then says
so through :attr:`SecretRng.seeded`: such a run is stamped NOT PRIVATE: SEEDED.

All noise of the project is drawn by :meth:`SecretRng.normal_`: one seam, so that the generator can be replaced.

*Why the state is set whole.* ``torch.Generator.manual_seed`` keeps 32 bits of the seed. Four billion states can be
searched by brute force, and some 77,000 generators have an even chance that two of them agree. Both kinds here fill
all 624 words of the Mersenne twister instead: from the operating system, or from SHAKE-256 of the seed.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

_WORDS = 624
_STATE_OFFSET = 24  # int64 seed, int32 left, int32 seeded, uint64 next, then the words as uint64


def _generator(material: bytes) -> torch.Generator:
    """Build a CPU generator whose whole state comes from ``material`` (2,496 bytes)."""
    generator = torch.Generator()
    generator.manual_seed(0)
    state = generator.get_state().numpy().copy()
    words = np.frombuffer(material, dtype="<u4").astype("<u8")
    state[_STATE_OFFSET : _STATE_OFFSET + 8 * _WORDS] = words.view(np.uint8)
    generator.set_state(torch.from_numpy(state))
    return generator


@dataclass(frozen=True)
class PublicSeed:
    """A seed that may travel. Children are named by words and numbers, never by order of creation.

    >>> PublicSeed(7).child("cohort", 3) == PublicSeed(7).child("cohort", 3)
    True
    >>> PublicSeed(7).child("cohort", 3) == PublicSeed(7).child("cohort", 4)
    False
    """

    value: int

    def child(self, *labels: str | int) -> PublicSeed:
        """Derive the seed for a named purpose."""
        text = "\x1f".join([str(self.value), *(f"{type(x).__name__}:{x}" for x in labels)])
        return PublicSeed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big"))

    def generator(self) -> torch.Generator:
        """Return a fresh torch generator; equal seeds give equal streams."""
        return _generator(hashlib.shake_256(str(self.value).encode()).digest(4 * _WORDS))

    def numpy(self) -> np.random.Generator:
        """Return a fresh numpy generator; equal seeds give equal streams."""
        return np.random.default_rng(self.value)


class SecretRng:
    """Draws what the guarantee rests on. It cannot be copied, pickled, printed or sent."""

    __slots__ = ("_generator", "_process", "_seed")

    def __init__(self, seed: PublicSeed | None) -> None:
        self._seed = seed
        self._process = os.getpid()
        self._generator = _generator(os.urandom(4 * _WORDS)) if seed is None else seed.generator()

    @classmethod
    def from_system(cls) -> SecretRng:
        """Seed by the operating system: the only kind a deployment uses."""
        return cls(None)

    @classmethod
    def simulated(cls, seed: PublicSeed) -> SecretRng:
        """Seed reproducibly, for a simulation that is stamped NOT PRIVATE: SEEDED."""
        return cls(seed)

    @property
    def seeded(self) -> bool:
        """True where the draws can be reproduced by anyone who knows the seed."""
        return self._seed is not None

    def child(self, *labels: str | int) -> SecretRng:
        """Derive an independent generator: named if simulated, fresh from the system otherwise."""
        return SecretRng(None if self._seed is None else self._seed.child(*labels))

    def _stream(self) -> torch.Generator:
        if self._seed is None and os.getpid() != self._process:  # a fork must not repeat its parent's noise
            self._process = os.getpid()
            self._generator = _generator(os.urandom(4 * _WORDS))
        return self._generator

    def normal_(self, out: Tensor) -> Tensor:
        """Fill ``out`` with standard normal noise, in place. The one place where noise is made."""
        return out.normal_(generator=self._stream())

    def uniform(self, *shape: int) -> Tensor:
        """Draw from [0, 1) with 53 bits, so that a sampling rate is met to double precision."""
        return torch.rand(*shape, generator=self._stream(), dtype=torch.float64)

    def permutation(self, length: int) -> Tensor:
        """Draw a uniformly random order of ``length`` things."""
        return torch.randperm(length, generator=self._stream())

    def integer(self) -> int:
        """Draw 62 random bits, for code that only takes an integer seed (dropout layers)."""
        return int(torch.randint(0, 2**62, (1,), generator=self._stream()).item())

    def __repr__(self) -> str:
        return "SecretRng(simulated)" if self.seeded else "SecretRng(system)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SecretRng is never serialised: send a PublicSeed, or let the other side make its own")

    def __copy__(self) -> NoReturn:
        raise TypeError("a SecretRng is never copied: ask it for a child")

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("a SecretRng is never copied: ask it for a child")
