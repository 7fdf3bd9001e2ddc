"""Named tensors <-> one flat vector. Everything that is sent is in the vector, so clipping it clips
everything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpfl.core.checks import check
from dpfl.core.errors import PeerError


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
        blocks, start = [], 0
        for name, tensor in tensors.items():
            block = Block(name, tuple(tensor.shape), tensor.dtype, start)
            blocks.append(block)
            start += block.size
        return cls(tuple(blocks))

    @classmethod
    def of_module(cls, module: nn.Module) -> Layout:
        """Lay out a module's parameters."""
        return cls.of(dict(module.named_parameters()))

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    @property
    def size(self) -> int:
        """Length of the flat vector."""
        return sum(block.size for block in self.blocks)

    @property
    def head(self) -> slice:
        """Where the last layer's tensors lie: at the end of the vector."""
        layer = self.blocks[-1].name.rpartition(".")[0]
        first = len(self.blocks)
        while first > 0 and self.blocks[first - 1].name.rpartition(".")[0] == layer:
            first -= 1
        return slice(self.blocks[first].start, self.size)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Put named tensors into one float32 vector; missing or misshapen ones are refused."""
        agreed = set(tensors) == {block.name for block in self.blocks}
        problem = f"tensors {sorted(tensors)} are not those agreed"
        check(agreed, "layout", problem, "send exactly the model's tensors", PeerError)
        pieces = []
        for block in self.blocks:
            tensor = tensors[block.name]
            shape = tuple(tensor.shape)
            problem = f"'{block.name}' has shape {shape}, not {block.shape}"
            check(shape == block.shape, "layout", problem, "send the agreed shape", PeerError)
            pieces.append(tensor.detach().to(torch.float32).reshape(-1))
        return torch.cat(pieces) if pieces else torch.zeros(0)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Cut the vector into named tensors of their own dtype; integers are rounded."""
        length = vector.shape[-1]
        problem, remedy = f"a vector of {length} numbers", f"send {self.size} numbers"
        check(length == self.size, "layout", problem, remedy, PeerError)
        result = {}
        for block in self.blocks:
            piece = vector[..., block.slice].reshape((*vector.shape[:-1], *block.shape))
            if not block.dtype.is_floating_point:
                piece = piece.round()
            result[block.name] = piece.to(block.dtype)
        return result

    def read(self, module: nn.Module) -> Tensor:
        """Copy a module's parameters into a flat vector."""
        return self.flatten(dict(module.named_parameters()))

    def write(self, vector: Tensor, module: nn.Module) -> None:
        """Copy a flat vector into a module's parameters."""
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, tensor in self.unflatten(vector).items():
                parameters[name].copy_(tensor)
