"""Named tensors <-> one flat vector. Everything that is sent is in the vector, so clipping it clips
everything.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpfl.core.checks import check
from dpfl.core.errors import PeerError


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a module learns, by name; a shared one has the first of its names."""
    return {name: own for name, own in module.named_parameters() if own.requires_grad}


@dataclass(frozen=True)
class Block:
    """One tensor's place in the flat vector."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def size(self) -> int:
        """How many numbers the tensor holds."""
        return math.prod(self.shape)

    @property
    def slice(self) -> slice:
        """Where the tensor lies in the flat vector."""
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True)
class Layout:
    """The order and shapes of a model's tensors; parameters, buffers, integers and scalars alike.

    >>> layout = Layout.of({"weight": torch.zeros(2, 3), "count": torch.tensor(4)})
    >>> layout.size, [block.name for block in layout]
    (7, ['weight', 'count'])
    >>> vector = layout.flatten({"weight": torch.ones(2, 3), "count": torch.tensor(4)})
    >>> int(layout.unflatten(vector)["count"])
    4
    """

    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """Lay out named tensors in the order given."""
        starts = itertools.accumulate((tensor.numel() for tensor in tensors.values()), initial=0)
        rows = zip(tensors.items(), starts, strict=False)
        return cls(tuple(Block(name, tuple(x.shape), x.dtype, start) for (name, x), start in rows))

    @classmethod
    def of_module(cls, module: nn.Module) -> Layout:
        """Lay out the parameters that a module learns; frozen ones are public and stay in it."""
        return cls.of(trainable(module))

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    @property
    def size(self) -> int:
        """Length of the flat vector."""
        return sum(block.size for block in self.blocks)

    @property
    def layers(self) -> dict[str, list[Block]]:
        """The tensors of every layer, by the name of the module that they belong to.

        >>> [*Layout.of_module(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))).layers]
        ['0', '1']
        """
        found: dict[str, list[Block]] = {}
        for block in self.blocks:
            found.setdefault(block.name.rpartition(".")[0], []).append(block)
        return found

    @property
    def head(self) -> slice:
        """Where the last layer's tensors lie: at the end of the vector."""
        layers = itertools.groupby(self.blocks, key=lambda block: block.name.rpartition(".")[0])
        *_, last = ([*blocks] for _, blocks in layers)
        return slice(last[0].start, self.size)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Put named tensors into one float32 vector; missing or misshapen ones are refused."""
        given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        agreed = {block.name: block.shape for block in self.blocks}
        check(
            given == agreed,
            "layout",
            f"tensors {sorted(given.items() ^ agreed.items())} are not those agreed",
            "send exactly the model's tensors",
            PeerError,
        )
        pieces = [tensors[name].detach().to(torch.float32).reshape(-1) for name in agreed]
        return torch.cat(pieces) if pieces else torch.zeros(0)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Cut the vector into named tensors of their own dtype; integers are rounded."""
        check(
            vector.shape[-1] == self.size,
            "layout",
            f"a vector of {vector.shape[-1]} numbers",
            f"send {self.size} numbers",
            PeerError,
        )
        result = {}
        for block in self.blocks:
            piece = vector[..., block.slice].reshape((*vector.shape[:-1], *block.shape))
            whole = piece if block.dtype.is_floating_point else piece.round()
            result[block.name] = whole.to(block.dtype)
        return result

    def read(self, module: nn.Module) -> Tensor:
        """Copy the parameters that a module learns into a flat vector."""
        return self.flatten(trainable(module))

    def write(self, vector: Tensor, module: nn.Module) -> None:
        """Copy a flat vector into the parameters that a module learns."""
        parameters = trainable(module)
        with torch.no_grad():
            for name, tensor in self.unflatten(vector).items():
                parameters[name].copy_(tensor)
