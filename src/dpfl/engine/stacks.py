"""Layers of many clients at once: forward, backward and steps on stacks of linear layers.

Every layer's weights lie in one stack, (clients, out, in). The work is little more than reading and
writing those stacks, so what matters is how often.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl.core.layout import Block
from dpfl.core.random import PublicSeed
from dpfl.numerics.clipping import clip_factor, squared_norms, stacked_product


@dataclass(frozen=True)
class Linear:
    """Where a linear layer's weight and bias lie in a client's vector."""

    weight: Block
    bias: Block | None

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The weight, and the bias if there is one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


Chain = list[Linear | nn.Module]


@dataclass(frozen=True)
class Stack:
    """One layer of all clients: weights (clients, out, in), then biases (clients, out) if any."""

    layer: Linear
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, layer: Linear, vectors: Tensor) -> Stack:
        """Copy a layer out of the clients' vectors, one a row."""
        cut = (vectors[:, b.slice].reshape(len(vectors), *b.shape) for b in layer.blocks)
        return cls(layer, tuple(tensor.clone() for tensor in cut))

    @property
    def weight(self) -> Tensor:
        """The weights, (clients, out, in)."""
        return self.tensors[0]

    @property
    def bias(self) -> Tensor | None:
        """The biases, (clients, out), if the layer has any."""
        return self.tensors[1] if len(self.tensors) > 1 else None

    def like(self) -> Stack:
        """Another stack of the same shape, whose numbers are not set yet."""
        return Stack(self.layer, tuple(map(torch.empty_like, self.tensors)))

    def move(self, total: Stack, noise: Tensor | None, rates: Tensor, decay: Tensor | None) -> None:
        """Step against a sum of gradients, in place.

        ``noise`` (rows of clients' vectors) is added to the sum first. ``rates`` and ``decay`` are
        columns with one number per client.
        """
        for block, own, sums in zip(self.layer.blocks, self.tensors, total.tensors, strict=True):
            shape = (-1, *[1] * (own.ndim - 1))
            if noise is not None:
                sums.add_(noise[:, block.slice].view(own.shape))
            if decay is not None:
                own.mul_(1 - decay.view(shape))
            own.addcmul_(sums, rates.view(shape), value=-1.0)

    def write(self, vectors: Tensor) -> None:
        """Copy the layer back into the clients' vectors."""
        for block, own in zip(self.layer.blocks, self.tensors, strict=True):
            vectors[:, block.slice] = own.flatten(1)


def stacks_of(chain: Chain, vectors: Tensor) -> list[Stack]:
    """Copy all linear layers of a chain out of the clients' vectors, in the order of the chain."""
    return [Stack.of(layer, vectors) for layer in chain if isinstance(layer, Linear)]


def into_balls(stacks: list[Stack], centres: list[Stack], radii: Tensor) -> None:
    """Move clients that have left their ball back to its border; those within stay as they are."""
    apart = [
        (own.flatten(1), centre.flatten(1), (own - centre).flatten(1))
        for stack, start in zip(stacks, centres, strict=True)
        for own, centre in zip(stack.tensors, start.tensors, strict=True)
    ]
    squares = torch.stack([squared_norms(difference) for _, _, difference in apart]).sum(dim=0)
    factor = clip_factor(squares.sqrt(), radii[:, 0]).to(radii.dtype)[:, None]
    outside = (factor < 1).flatten()
    for at, centre, difference in apart:
        if bool(outside.all()):
            torch.addcmul(centre, difference, factor, out=at)
        elif bool(outside.any()):
            at[outside] = torch.addcmul(centre[outside], difference[outside], factor[outside])


Product = Callable[[Tensor, Tensor], Tensor]


@functools.cache
def same_at_every_place(product: Product, rows: int, columns: int, width: int) -> bool:
    """Whether a product of weights and ``width`` records gives equal records equal bits.

    It is tried on this machine with made-up numbers: a kernel may add up in another order where its
    tiles end.
    """
    generator, count = PublicSeed(0).generator(), max(1, min(16, (1 << 20) // (rows * columns)))
    weights = torch.rand(count, rows, columns, generator=generator) - 0.5
    record = torch.rand(count, 1, columns, generator=generator) - 0.5
    outputs = product(weights, record.expand(-1, width, -1).contiguous().transpose(1, 2))
    return bool((outputs == outputs[..., :1]).all())


def layer_outputs(stack: Stack, x: Tensor) -> Tensor:
    """Outputs of one layer of all clients, for inputs (clients, records, in)."""
    shape = (*stack.weight.shape[1:], x.shape[1])
    fast = not x.requires_grad and same_at_every_place(stacked_product, *shape)
    product: Product = stacked_product if fast else torch.bmm
    outputs = product(stack.weight, x.transpose(1, 2))  # twice as fast as the other way round
    return (outputs if stack.bias is None else outputs + stack.bias[..., None]).transpose(1, 2)


@dataclass(frozen=True)
class Slopes:
    """What per-record gradients are made of, layer by layer.

    ``inputs`` of every linear layer and ``slopes``, the gradients of the summed loss with respect
    to its outputs; both are (clients, records, numbers).
    """

    inputs: list[Tensor]
    slopes: list[Tensor]

    def without(self, broken: Tensor) -> Slopes:
        """Set some records (clients, records) to zero: zero times infinity would not be zero."""
        mask = broken[..., None]
        inputs = [a.masked_fill(mask, 0.0) for a in self.inputs]
        return Slopes(inputs, [d.masked_fill(mask, 0.0) for d in self.slopes])

    def add_up(self, weights: Tensor, into: list[Stack]) -> None:
        """Write each client's weighted sum of per-record gradients into stacks."""
        for total, a, d in zip(into, self.inputs, self.slopes, strict=True):
            # One layout, whatever was taken out: one result.
            weighted = (d * weights[..., None]).transpose(1, 2).contiguous()
            stacked_product(weighted, a, out=total.weight)
            if total.bias is not None:
                torch.sum(weighted, 2, out=total.bias)


def backward(
    chain: Chain, stacks: list[Stack], features: Tensor, labels: Tensor, shape: torch.Size
) -> Slopes:
    """One forward and one backward of all clients.

    ``features`` and ``labels`` hold one client after the other; ``shape`` is (clients, records).
    """
    clients, width = shape
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    # Records are the innermost axis of every stack: their number divides the 32 numbers that
    # elementwise functions work on at once, so that a record is computed alike at every place.
    x = features.reshape(clients, width, -1)
    if not isinstance(chain[0], Linear | nn.Flatten):
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    for step in chain:
        if isinstance(step, Linear):
            inputs.append(x.detach().contiguous())
            x = layer_outputs(stacks[len(outputs)], x)
            x = x if x.requires_grad else x.requires_grad_()
            outputs.append(x)
        elif not isinstance(step, nn.Flatten):
            x = step(x.clone() if getattr(step, "inplace", False) else x)
    loss = F.cross_entropy(x.reshape(clients * width, -1), labels, reduction="sum")
    return Slopes(inputs, list(torch.autograd.grad(loss, outputs)))
