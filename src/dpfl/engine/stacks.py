"""One phase of plain SGD of many clients at once, on stacks of linear layers.

Every layer's weights lie in one stack, (clients, out, in). The work is little more than reading and
writing those stacks, so what matters is how often. DP-SGD is in :mod:`dpfl.engine.private_stacks`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl.core.layout import Block
from dpfl.core.random import PublicSeed
from dpfl.engine.base import Job
from dpfl.numerics.clipping import clip_factor, squared_norms, stacked_product
from dpfl.plugs.sampling import Draw, sampler


@dataclass(frozen=True)
class Linear:
    """Where a linear layer's weight and bias lie in a client's vector."""

    weight: Block
    bias: Block | None


Chain = list[Linear | nn.Module]


@dataclass(frozen=True)
class Stack:
    """One layer of all clients: weights (clients, out, in) and biases (clients, out)."""

    layer: Linear
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, layer: Linear, vectors: Tensor) -> Stack:
        """Cut a layer out of the clients' vectors."""
        weight = vectors[:, layer.weight.slice].reshape(len(vectors), *layer.weight.shape).clone()
        return cls(
            layer, weight, None if layer.bias is None else vectors[:, layer.bias.slice].clone()
        )

    def tensors(self) -> list[Tensor]:
        """The weights, and the biases if there are any."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def like(self) -> Stack:
        """Another stack of the same shape, whose numbers mean nothing yet."""
        return Stack(
            self.layer,
            torch.empty_like(self.weight),
            None if self.bias is None else torch.empty_like(self.bias),
        )

    def move(self, total: Stack, noise: Tensor | None, rates: Tensor, decay: Tensor | None) -> None:
        """Step along a sum, with noise (rows of clients' vectors) added to it, and by what weight
        decay takes off.
        """
        for block, own, sums in (
            (self.layer.weight, self.weight, total.weight),
            (self.layer.bias, self.bias, total.bias),
        ):
            if block is None or own is None or sums is None:
                continue
            shape = (-1, *[1] * (own.ndim - 1))
            if noise is not None:
                sums.add_(noise[:, block.slice].view(own.shape))
            if decay is not None:
                own.mul_(1 - decay.view(shape))
            own.addcmul_(sums, rates.view(shape), value=-1.0)

    def clear(self) -> None:
        """Set every number to zero."""
        self.weight.zero_()
        if self.bias is not None:
            self.bias.zero_()

    def write(self, vectors: Tensor) -> None:
        """Lay the layer back into the clients' vectors."""
        vectors[:, self.layer.weight.slice] = self.weight.flatten(1)
        if self.bias is not None and self.layer.bias is not None:
            vectors[:, self.layer.bias.slice] = self.bias


def run_phase(chain: Chain, jobs: list[Job], number: int, start: Tensor) -> Tensor:
    """Run phase ``number`` of all jobs, which share its shape, from the rows of ``start``; the head
    is the last layer.
    """
    phases, device = [job.phases[number] for job in jobs], start.device
    first = phases[0]
    samplers = [sampler(phase, len(job.labels)) for phase, job in zip(phases, jobs, strict=True)]
    drawn = [
        s.draw(job.rng.child("records", number), first.steps)
        for s, job in zip(samplers, jobs, strict=True)
    ]
    batches = _Batches(jobs, drawn, device)

    def column(values: Sequence[float] | np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float32, device=device)[:, None]

    lr = np.array([p.lr for p in phases])
    decay = (
        column([p.weight_decay * p.lr for p in phases])
        if any(p.weight_decay for p in phases)
        else None
    )
    balls = None if first.ball is None else column([p.ball or math.inf for p in phases])
    stacks = [Stack.of(layer, start) for layer in chain if isinstance(layer, Linear)]
    updates = [s.like() for s in stacks]
    moving = {"all": slice(None), "head": slice(-1, None), "body": slice(0, -1)}[first.part]
    centres = [] if balls is None else [Stack.of(s.layer, start) for s in stacks]
    for step in range(first.steps):
        rates = lr / np.maximum(batches.sizes[step], 1)
        _add_gradients(chain, stacks, batches.step(step), updates)
        for stack, update in zip(stacks[moving], updates[moving], strict=True):
            stack.move(update, None, column(rates), decay)
        if balls is not None:
            into_balls(stacks, centres, balls)
    vectors = torch.empty_like(start)
    for stack in stacks:
        stack.write(vectors)
    return vectors


@dataclass(frozen=True)
class _Rows:
    """One step's records, client after client, in a (clients x width) table; ``counted`` says which
    are in the batch.
    """

    features: Tensor
    labels: Tensor
    counted: Tensor


class _Batches:
    """The records of every step.

    A client with fewer records than the widest repeats its own first one; what is repeated is not
    counted.
    """

    def __init__(self, jobs: list[Job], drawn: list[Draw], device: torch.device) -> None:
        self._features, starts = side_by_side([job.features for job in jobs])
        self._labels, label_starts = side_by_side([job.labels for job in jobs])
        self._inputs, self._device = jobs[0].inputs, device
        self.sizes = torch.stack([draw.sizes for draw in drawn], dim=1).numpy()  # (steps, clients)
        self._records = torch.cat([draw.records for draw in drawn]).numpy()
        self._starts, self._shift = (
            np.array(starts)[:, None],
            np.array(label_starts)[:, None] - np.array(starts)[:, None],
        )
        # Where each client's part of each step begins in the records, which lie client after
        # client.
        before = np.concatenate([[0], np.cumsum(self.sizes.sum(axis=0))[:-1]])
        self._begins = before + np.cumsum(self.sizes, axis=0) - self.sizes

    def step(self, number: int) -> _Rows:
        """Gather one step's records: one look-up for all clients."""
        sizes = self.sizes[number]
        places = np.arange(sizes.max())
        counted = places < sizes[:, None]
        chosen = np.minimum(self._begins[number][:, None] + places, len(self._records) - 1)
        rows = np.where(counted, self._records[chosen], 0) + self._starts
        features = self._inputs(
            self._features.index_select(0, torch.from_numpy(rows.ravel())).to(self._device)
        )
        if self._shift.any():
            rows = rows + self._shift
        labels = self._labels.index_select(0, torch.from_numpy(rows.ravel())).to(self._device)
        return _Rows(features, labels, torch.from_numpy(counted).to(self._device))


def side_by_side(tensors: list[Tensor]) -> tuple[Tensor, list[int]]:
    """One tensor that holds all clients' rows, and each one's first row: without copying where they
    share storage.
    """
    first = tensors[0]
    row = first.stride(0) if first.ndim else 0
    together = row > 0 and all(
        t.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and t.stride() == first.stride()
        and (t.storage_offset() - first.storage_offset()) % row == 0
        for t in tensors
    )
    if not together:
        return torch.cat(tensors), [0, *accumulate(len(t) for t in tensors[:-1])]
    origin = min(t.storage_offset() for t in tensors)
    starts = [(t.storage_offset() - origin) // row for t in tensors]
    height = max(start + len(t) for start, t in zip(starts, tensors, strict=True))
    return first.as_strided((height, *first.shape[1:]), first.stride(), origin), starts


def into_balls(stacks: list[Stack], centres: list[Stack], radii: Tensor) -> None:
    """Bring clients that have left their ball back to its border; those within stay as they are."""
    pairs = [
        pair
        for stack, centre in zip(stacks, centres, strict=True)
        for pair in ((stack.weight, centre.weight), (stack.bias, centre.bias))
    ]
    apart = [
        (a.flatten(1), b.flatten(1), (a - b).flatten(1))
        for a, b in pairs
        if a is not None and b is not None
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
    """Whether a product of weights and ``width`` records gives a record the same bits wherever it
    stands.

    It is tried on this machine with made-up numbers: a kernel may add up in another order where its
    tiles end.
    """
    generator, count = PublicSeed(0).generator(), max(1, min(16, (1 << 20) // (rows * columns)))
    weights = torch.rand(count, rows, columns, generator=generator) - 0.5
    records = (
        (torch.rand(count, 1, columns, generator=generator) - 0.5)
        .expand(-1, width, -1)
        .contiguous()
    )
    outputs = product(weights, records.transpose(1, 2))
    return bool((outputs == outputs[..., :1]).all())


def layer_outputs(stack: Stack, x: Tensor) -> Tensor:
    """Outputs of one layer of all clients, for inputs (clients, records, in)."""
    product: Product = torch.bmm
    if not x.requires_grad and same_at_every_place(
        stacked_product, *stack.weight.shape[1:], x.shape[1]
    ):
        product = stacked_product
    outputs = product(stack.weight, x.transpose(1, 2))  # twice as fast as the other way round
    return (outputs if stack.bias is None else outputs + stack.bias[..., None]).transpose(1, 2)


def inputs_and_slopes(
    chain: Chain, stacks: list[Stack], features: Tensor, labels: Tensor, shape: torch.Size
) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs of every linear layer, and gradients of the summed loss with respect to their
    outputs.
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
            stack = stacks[len(inputs)]
            inputs.append(x.detach().contiguous())
            x = layer_outputs(stack, x)
            x = x if x.requires_grad else x.requires_grad_()
            outputs.append(x)
        elif not isinstance(step, nn.Flatten):
            x = step(x.clone() if getattr(step, "inplace", False) else x)
    loss = F.cross_entropy(x.reshape(clients * width, -1), labels, reduction="sum")
    return inputs, list(torch.autograd.grad(loss, outputs))


def _add_gradients(chain: Chain, stacks: list[Stack], rows: _Rows, updates: list[Stack]) -> None:
    """Write each client's sum of per-record gradients into ``updates``: one forward, one backward,
    no more.
    """
    if rows.counted.shape[1] == 0:
        for update in updates:
            update.clear()
        return
    activations, deltas = inputs_and_slopes(
        chain, stacks, rows.features, rows.labels, rows.counted.shape
    )
    with torch.no_grad():
        # What is not counted must not be multiplied by zero if it is not finite.
        broken = ~rows.counted & ~torch.isfinite(deltas[-1]).all(dim=-1)
        if bool(broken.any()):
            activations = [a.masked_fill(broken[..., None], 0.0) for a in activations]
            deltas = [d.masked_fill(broken[..., None], 0.0) for d in deltas]
        counted = rows.counted.to(torch.float32)[..., None]
        for update, a, d in zip(updates, activations, deltas, strict=True):
            weighted = (
                (d * counted).transpose(1, 2).contiguous()
            )  # one layout, whatever was taken out: one result
            stacked_product(weighted, a, out=update.weight)
            if update.bias is not None:
                torch.sum(weighted, 2, out=update.bias)
