"""How a stored record becomes a model's input.

Records are stored small; a batch is made ready when it is needed. The constants that scale pixels
are fixed and public: statistics of private data would be releases that nobody charges.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Numbers:
    """Numbers, taken as they are.

    ``picture`` is the shape in which a flat record is a picture, channels first; empty where it is
    not one. It changes no number, so that fingerprints, which hash the text, do not hold it.
    """

    picture: tuple[int, ...] = field(default=(), repr=False)

    def __call__(self, raw: Tensor) -> Tensor:
        """Return a batch of stored records as the model takes it."""
        return raw

    def made_up(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return made-up records, stored as real ones are: for trying a model."""
        return torch.rand(count, *shape, generator=generator)


@dataclass(frozen=True)
class Pixels:
    """Bytes (channels first), scaled to numbers: (byte / 255 - mean) / deviation, per channel.

    >>> Pixels(mean=(0.5,), deviation=(0.5,))(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
    tensor([[[[-1.0000,  1.0000]]]])
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, raw: Tensor) -> Tensor:
        """Return a batch of stored records (n, channels, height, width) as the model takes it."""
        channels = list(zip(self.mean, self.deviation, strict=True))
        slope = torch.tensor([1 / (255 * d) for _, d in channels], device=raw.device)
        shift = torch.tensor([-m / d for m, d in channels], device=raw.device)
        return torch.addcmul(shift[:, None, None], raw.to(torch.float32), slope[:, None, None])

    def made_up(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return made-up records, stored as real ones are: for trying a model."""
        return torch.randint(0, 256, (count, *shape), generator=generator, dtype=torch.uint8)


@dataclass(frozen=True)
class Tokens:
    """Whole numbers below ``vocabulary``, for a model that begins with an embedding.

    >>> Tokens(vocabulary=3)(torch.tensor([[0, 2]], dtype=torch.uint8)).dtype
    torch.int64
    """

    vocabulary: int

    def __call__(self, raw: Tensor) -> Tensor:
        """Return a batch of stored records as the model takes it."""
        return raw.to(torch.int64)

    def made_up(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return made-up records, stored as real ones are: for trying a model."""
        return torch.randint(0, self.vocabulary, (count, *shape), generator=generator)


Inputs = Numbers | Pixels | Tokens
NUMBERS = Numbers()
