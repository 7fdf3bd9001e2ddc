"""Two kinds of randomness that cannot be confused.

A :class:`PublicSeed` may be printed, stored and sent: cohorts, partitions, initial models, shared projections.
A :class:`SecretRng` draws what a guarantee rests on (noise, record sampling). It has no serialiser and no printable
state. In deployment it is seeded by the operating system; a simulation may seed it from a public seed, and then says
so through :attr:`SecretRng.seeded`: such a run is stamped NOT PRIVATE: SEEDED.

All noise of the project is drawn by :meth:`SecretRng.normal_`: one seam, so that the generator can be replaced.

*Why not torch's own noise.* ``torch.Tensor.normal_`` in float32 turns 24-bit uniforms into normals: nothing beyond 5.77
standard deviations ever comes out. What would need a larger deviation is then impossible under one of two neighbours,
and gives them apart: calibrated to (10, 1e-6) in one step, that happens with probability 4e-5, far above delta. Here
normals are drawn in double precision by a ziggurat with an exact tail (numpy's), over SFC64, and then rounded.

*Why seeds are wide.* ``torch.Generator.manual_seed`` keeps 32 bits of a seed: four billion streams can be searched, and
some 77,000 generators have an even chance that two of them agree. Secret generators take 256 bits from the operating
system, or from SHAKE-256 of a seed; public torch generators fill all 624 words of the Mersenne twister's state.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

_WORDS = 624
_AT_ONCE = 1 << 14
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
        text = json.dumps([str(self.value), *([type(x).__name__, str(x)] for x in labels)])
        return PublicSeed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big"))

    def to_tensor(self) -> Tensor:
        """Write a child seed as 16 bytes, to be shared with everyone."""
        return torch.tensor(list(self.value.to_bytes(16, "big")), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, code: Tensor) -> PublicSeed:
        """Read back.

        >>> PublicSeed.from_tensor(PublicSeed(7).child("x").to_tensor()) == PublicSeed(7).child("x")
        True
        """
        return cls(int.from_bytes(bytes(code.tolist()), "big"))

    def generator(self) -> torch.Generator:
        """Return a fresh torch generator; equal seeds give equal streams."""
        return _generator(hashlib.shake_256(str(self.value).encode()).digest(4 * _WORDS))

    def numpy(self) -> np.random.Generator:
        """Return a fresh numpy generator; equal seeds give equal streams."""
        return np.random.default_rng(self.child("numpy").value)


def _secret_stream(seed: PublicSeed | None) -> np.random.Generator:
    """A generator with 256 bits of state entropy: from the system, or from a seed."""
    material = os.urandom(32) if seed is None else hashlib.shake_256(f"secret:{seed.value}".encode()).digest(32)
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(int.from_bytes(material, "big"), pool_size=8)))


class SecretRng:
    """Draws what the guarantee rests on. It cannot be copied, pickled, printed or sent."""

    __slots__ = ("_generator", "_process", "_seed")

    def __init__(self, seed: PublicSeed | None) -> None:
        self._seed = seed
        self._process = os.getpid()
        self._generator: np.random.Generator | None = None  # made when first drawn from: most only name their children

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

    def _stream(self) -> np.random.Generator:
        forked = self._seed is None and os.getpid() != self._process  # a fork must not repeat its parent's noise
        if self._generator is None or forked:
            self._process = os.getpid()
            self._generator = _secret_stream(self._seed)
        return self._generator

    def normal_(self, out: Tensor) -> Tensor:
        """Fill ``out`` with standard normal noise, in place. The one place where noise is made."""
        if not out.is_contiguous() and out.ndim > 1:
            for row in out:  # in the same order as if it were contiguous
                self.normal_(row)
            return out
        stream, count = self._stream(), out.numel()
        double = np.empty(min(count, _AT_ONCE))  # small enough to stay in the cache between drawing and rounding
        flat = out.view(-1) if out.is_contiguous() else out
        for first in range(0, count, _AT_ONCE):
            part = double[: min(_AT_ONCE, count - first)]
            stream.standard_normal(out=part)
            flat[first : first + len(part)] = torch.from_numpy(part)
        return out

    def uniform(self, *shape: int) -> Tensor:
        """Draw from [0, 1) with 53 bits, so that a sampling rate is met to double precision."""
        return torch.from_numpy(self._stream().random(shape))

    def permutation(self, length: int) -> Tensor:
        """Draw a uniformly random order of ``length`` things."""
        return torch.from_numpy(self._stream().permutation(length))

    def integer(self) -> int:
        """Draw 62 random bits, for code that only takes an integer seed (dropout layers)."""
        return int(self._stream().integers(0, 2**62))

    def secret_seed(self) -> PublicSeed:
        """Draw a seed of 128 bits for code that takes one. Despite its type it must stay where it was drawn."""
        return PublicSeed(int.from_bytes(self._stream().bytes(16), "big"))

    def __repr__(self) -> str:
        return "SecretRng(simulated)" if self.seeded else "SecretRng(system)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SecretRng is never serialised: send a PublicSeed, or let the other side make its own")

    def __copy__(self) -> NoReturn:
        raise TypeError("a SecretRng is never copied: ask it for a child")

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("a SecretRng is never copied: ask it for a child")
