"""Seeds that may be printed, stored and sent. Importing this module does not import torch."""

from __future__ import annotations

import hashlib
import numbers
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as _json
from typing import TYPE_CHECKING

import numpy as np

from dpfl.core.errors import ConfigurationError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_WORDS = 624  # of the Mersenne twister's state
_STATE_OFFSET = 24  # int64 seed, int32 left, int32 seeded, uint64 next, then the words as uint64


@dataclass(frozen=True)
class PublicSeed:
    """A seed that may travel. Children are named by words and numbers, never by order of creation.

    ``value`` is the seed itself.

    >>> PublicSeed(7).child("cohort", 3) == PublicSeed(7).child("cohort", 3)
    True
    >>> PublicSeed(7).child("cohort", 3) == PublicSeed(7).child("cohort", 4)
    False
    """

    value: int

    def __post_init__(self) -> None:
        whole = type(self.value) is int or isinstance(self.value, numbers.Integral)
        if not whole or isinstance(self.value, bool) or self.value < 0:
            problem = f"{self.value!r} is not a seed"
            raise ConfigurationError("seed", problem, "give a whole number, 0 or above")

    def child(self, *labels: str | int) -> PublicSeed:
        """Derive the seed for a named purpose."""
        parts = (f"[{_json(type(x).__name__)}, {_json(str(x))}]" for x in labels)
        text = f"[{', '.join([_json(str(self.value)), *parts])}]"  # as JSON, written faster
        return PublicSeed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big"))

    def to_tensor(self) -> Tensor:
        """Write a child seed as 16 bytes, to be shared with everyone."""
        import torch

        return torch.tensor(list(self.value.to_bytes(16, "big")), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, code: Tensor) -> PublicSeed:
        """Read back.

        >>> PublicSeed.from_tensor(PublicSeed(7).child("x").to_tensor()) == PublicSeed(7).child("x")
        True
        """
        return cls(int.from_bytes(bytes(code.tolist()), "big"))

    def generator(self) -> torch.Generator:
        """Return a fresh torch generator; equal seeds give equal streams.

        ``torch.Generator.manual_seed`` keeps 32 bits of a seed: four billion streams can be
        searched. This fills all 624 words of the Mersenne twister's state.
        """
        import torch

        generator = torch.Generator()
        generator.manual_seed(0)
        state = generator.get_state().numpy().copy()
        material = hashlib.shake_256(str(self.value).encode()).digest(4 * _WORDS)
        words = np.frombuffer(material, dtype="<u4").astype("<u8")
        state[_STATE_OFFSET : _STATE_OFFSET + 8 * _WORDS] = words.view(np.uint8)
        generator.set_state(torch.from_numpy(state))
        return generator

    def numpy(self) -> np.random.Generator:
        """Return a fresh numpy generator; equal seeds give equal streams."""
        return np.random.default_rng(self.child("numpy").value)
