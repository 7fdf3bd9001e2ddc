"""Chains of linear layers of many clients at once: forward, backward, weighted sums of gradients.

The clients' models are the rows of one matrix, and the weights of a layer are a view of it,
(clients, out, in). The work is little more than reading and writing that matrix, so what matters is
how often.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.numerics.clipping import stacked_product
from dpfl.tasks import Task

_NAMES = "ReLU LeakyReLU ELU GELU SiLU Softplus Tanh Sigmoid Identity"
ELEMENTWISE: tuple[type[nn.Module], ...] = tuple(getattr(nn, name) for name in _NAMES.split())


class Stack(NamedTuple):
    """One layer of all clients: weights (clients, out, in), and biases (clients, out) if any."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Chain:
    """A model that is a chain of linear and elementwise layers.

    ``layout`` holds the weight, and the bias if there is one, of every linear layer in turn.
    """

    steps: tuple[nn.Module, ...]
    layout: Layout

    @classmethod
    def of(cls, model: nn.Module, layout: Layout) -> Chain | None:
        """Return the model as a chain, or None if it is not one.

        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        >>> [type(step).__name__ for step in Chain.of(model, Layout.of_module(model)).steps]
        ['Linear', 'ReLU']
        """
        steps = []
        names = []
        for name, module in model.named_modules(remove_duplicate=False):
            flattens = type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
            if type(module) is nn.Linear:
                parts = ("weight",) if module.bias is None else ("weight", "bias")
                names += [f"{name}.{part}".removeprefix(".") for part in parts]
            elif not (flattens or type(module) in (nn.Sequential, *ELEMENTWISE)):
                return None
            steps += [] if type(module) is nn.Sequential else [module]
        return cls(tuple(steps), layout) if names and names == [b.name for b in layout] else None

    @functools.cached_property
    def layers(self) -> list[nn.Linear]:
        """The linear layers of the chain, in the order in which they act."""
        return [step for step in self.steps if isinstance(step, nn.Linear)]

    @functools.cached_property
    def one_layer(self) -> bool:
        """Whether there is one linear layer, and nothing else to compute."""
        flat = all(isinstance(step, nn.Linear | nn.Flatten) for step in self.steps)
        return flat and len(self.layers) == 1

    def takes(self, records: Tensor) -> bool:
        """Whether records are vectors by the time they meet the first linear layer."""
        before = self.steps[: self.steps.index(self.layers[0])]
        return records.ndim == 2 or any(isinstance(step, nn.Flatten) for step in before)

    def stacks(self, vectors: Tensor) -> list[Stack]:
        """View all linear layers in the clients' vectors, one a row."""
        views = (vectors[:, block.slice].view(-1, *block.shape) for block in self.layout)
        return [Stack(next(views), None if x.bias is None else next(views)) for x in self.layers]


Product = Callable[[Tensor, Tensor], Tensor]


@functools.cache
def same_at_every_place(product: Product, rows: int, columns: int, width: int) -> bool:
    """Whether a product of weights and ``width`` records gives equal records equal bits.

    It is tried on this machine with made-up numbers: a kernel may add up in another order where its
    tiles end.
    """
    generator = PublicSeed(0).generator()
    count = max(1, min(16, (1 << 20) // (rows * columns)))
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
        if not bool(broken.any()):
            return self
        both = (self.inputs, self.slopes)
        return Slopes(*([x.masked_fill(broken[..., None], 0.0) for x in some] for some in both))

    def add_up(self, weights: Sequence[Tensor], into: list[Stack]) -> None:
        """Write each client's weighted sum of per-record gradients into stacks.

        ``weights`` are (clients, records), one tensor a layer.
        """
        for total, a, d, own in zip(into, self.inputs, self.slopes, weights, strict=True):
            # One layout, whatever was taken out: one result.
            weighted = (d * own[..., None]).transpose(1, 2).contiguous()
            stacked_product(weighted, a, out=total.weight)
            if total.bias is not None:
                torch.sum(weighted, 2, out=total.bias)


def backward(
    chain: Chain,
    stacks: list[Stack],
    features: Tensor,
    labels: Tensor,
    shape: torch.Size,
    task: Task,
) -> Slopes:
    """One forward and one backward of all clients.

    ``features`` and ``labels`` hold one client after the other; ``shape`` is (clients, records).
    ``task`` has the loss.
    """
    clients, width = shape
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    # Records are the innermost axis of every stack: their number divides the 32 numbers that
    # elementwise functions work on at once, so that a record is computed alike at every place.
    x = features.reshape(clients, width, -1)
    if not isinstance(chain.steps[0], nn.Linear | nn.Flatten):
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    for step in chain.steps:
        if isinstance(step, nn.Linear):
            inputs.append(x.detach().contiguous())
            x = layer_outputs(stacks[len(outputs)], x)
            outputs.append(x if x.requires_grad else x.requires_grad_())
        elif not isinstance(step, nn.Flatten):
            x = step(x.clone() if getattr(step, "inplace", False) else x)
    loss = task.losses(x.reshape(clients * width, -1), labels).sum()
    return Slopes(inputs, list(torch.autograd.grad(loss, outputs)))
