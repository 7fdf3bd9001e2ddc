"""One phase of many clients at once, without per-record gradients: book-keeping on stacks of linear layers.

For a linear layer with input a and output gradient d (of one record), the gradient of the weight is the outer product
d a^T, so its squared norm is |a|^2 |d|^2 and a weighted sum over records is one matrix product. One forward and one
backward give a and d of every layer; per-record norms, clipping factors and the clipped sum follow from them.

Every layer's weights lie in one stack, (clients, out, in). The work is little more than reading and writing those stacks,
so what matters is how often: noise is laid down first, gradients are added to it in the same product that makes them, and
the sum is subtracted, once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl.client.sampling import Draw, PoissonBatches, sampler
from dpfl.core.layout import Block
from dpfl.core.linalg import clip_factor, squared_norms
from dpfl.core.types import Phase
from dpfl.protocols import Job

_MOST_AHEAD = 1 << 22  # noise drawn at once


@dataclass(frozen=True)
class Linear:
    """Where a linear layer's weight and bias lie in a client's vector."""

    weight: Block
    bias: Block | None


Chain = list[Linear | nn.Module]


@dataclass
class _Stack:
    """One layer of all clients: weights (clients, out, in) and biases (clients, out)."""

    layer: Linear
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, layer: Linear, vectors: Tensor) -> _Stack:
        """Cut a layer out of the clients' vectors."""
        weight = vectors[:, layer.weight.slice].reshape(len(vectors), *layer.weight.shape).clone()
        return cls(layer, weight, None if layer.bias is None else vectors[:, layer.bias.slice].clone())

    def lay(self, at: _Stack, noise: Tensor | None, stds: Tensor, decay: Tensor | None) -> None:
        """Begin an update: a step's noise (rows of clients' vectors), and what weight decay takes off ``at``."""
        for block, own, theirs in (
            (self.layer.weight, self.weight, at.weight),
            (self.layer.bias, self.bias, at.bias),
        ):
            if block is None or own is None or theirs is None:
                continue
            shape = (-1, *[1] * (own.ndim - 1))
            if noise is None:
                own.zero_()
            else:
                torch.mul(noise[:, block.slice].view(own.shape), stds.view(shape), out=own)
            if decay is not None:
                own.addcmul_(decay.view(shape), theirs)

    def clear(self) -> None:
        """Hold nothing."""
        self.weight.zero_()
        if self.bias is not None:
            self.bias.zero_()

    def write(self, vectors: Tensor) -> None:
        """Lay the layer back into the clients' vectors."""
        vectors[:, self.layer.weight.slice] = self.weight.flatten(1)
        if self.bias is not None and self.layer.bias is not None:
            vectors[:, self.layer.bias.slice] = self.bias


def run_phase(chain: Chain, jobs: list[Job], number: int, start: Tensor) -> Tensor:
    """Run phase ``number`` of all jobs, which share its shape, from the rows of ``start``; the head is the last layer."""
    phases, device = [job.phases[number] for job in jobs], start.device
    first = phases[0]
    samplers = [sampler(phase, len(job.labels)) for phase, job in zip(phases, jobs, strict=True)]
    drawn = [s.draw(job.rng.child("records", number), first.steps) for s, job in zip(samplers, jobs, strict=True)]
    batches = _Batches(jobs, drawn, device)

    def column(values: Sequence[float] | np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float32, device=device)[:, None]

    clips = None if first.clip is None else column([p.clip or 0.0 for p in phases])
    # The fixed, public denominator of a Poisson sample; the batch's own size where nothing is protected.
    expected = np.array(
        [s.expected_size if isinstance(s, PoissonBatches) and clips is not None else 0.0 for s in samplers]
    )
    lr = np.array([p.lr for p in phases])
    stds = np.array([p.noise_multiplier * (p.clip or 0.0) for p in phases])
    decay = column([p.weight_decay * p.lr for p in phases]) if any(p.weight_decay for p in phases) else None
    balls = None if first.ball is None else column([p.ball or math.inf for p in phases])
    noise = _Noise(jobs, phases, number, start) if stds.any() else None
    bare = noise is None and decay is None
    stacks = [_Stack.of(layer, start) for layer in chain if isinstance(layer, Linear)]
    updates = [_Stack.of(s.layer, start) for s in stacks]
    moving = {"all": slice(None), "head": slice(-1, None), "body": slice(0, -1)}[first.part]
    centres = [] if balls is None else [_Stack.of(s.layer, start) for s in stacks]
    for step in range(first.steps):
        rates = lr / np.where(expected > 0, expected, np.maximum(batches.sizes[step], 1))
        rows = batches.step(step)
        if not bare:
            drawn_noise = None if noise is None else noise.next()
            for stack, update in zip(stacks, updates, strict=True):
                update.lay(stack, drawn_noise, column(rates * stds), decay)
        _add_gradients(chain, stacks, rows, clips, column(rates), updates, bare=bare)
        for stack, update in zip(stacks[moving], updates[moving], strict=True):
            # All of a step in one rounding: products added to the weights themselves would round at their size.
            stack.weight.sub_(update.weight)
            if stack.bias is not None and update.bias is not None:
                stack.bias.sub_(update.bias)
        if balls is not None:
            _into_balls(stacks, centres, balls)
    vectors = torch.empty_like(start)
    for stack in stacks:
        stack.write(vectors)
    return vectors


@dataclass(frozen=True)
class _Rows:
    """One step's records, client after client, in a (clients x width) table; ``counted`` says which are in the batch."""

    features: Tensor
    labels: Tensor
    counted: Tensor


class _Batches:
    """The records of every step.

    A client with fewer records than the widest repeats its own first one; what is repeated is not counted.
    """

    def __init__(self, jobs: list[Job], drawn: list[Draw], device: torch.device) -> None:
        self._features, starts = _side_by_side([job.features for job in jobs])
        self._labels, label_starts = _side_by_side([job.labels for job in jobs])
        self._inputs, self._device = jobs[0].inputs, device
        self.sizes = torch.stack([draw.sizes for draw in drawn], dim=1).numpy()  # (steps, clients)
        self._records = torch.cat([draw.records for draw in drawn]).numpy()
        self._starts, self._shift = (
            np.array(starts)[:, None],
            np.array(label_starts)[:, None] - np.array(starts)[:, None],
        )
        # Where each client's part of each step begins in the records, which lie client after client.
        before = np.concatenate([[0], np.cumsum(self.sizes.sum(axis=0))[:-1]])
        self._begins = before + np.cumsum(self.sizes, axis=0) - self.sizes

    def step(self, number: int) -> _Rows:
        """Gather one step's records: one look-up for all clients."""
        sizes = self.sizes[number]
        places = np.arange(sizes.max())
        counted = places < sizes[:, None]
        chosen = np.minimum(self._begins[number][:, None] + places, len(self._records) - 1)
        rows = np.where(counted, self._records[chosen], 0) + self._starts
        features = self._inputs(self._features.index_select(0, torch.from_numpy(rows.ravel())).to(self._device))
        if self._shift.any():
            rows = rows + self._shift
        labels = self._labels.index_select(0, torch.from_numpy(rows.ravel())).to(self._device)
        return _Rows(features, labels, torch.from_numpy(counted).to(self._device))


def _side_by_side(tensors: list[Tensor]) -> tuple[Tensor, list[int]]:
    """One tensor that holds all clients' rows, and each one's first row: without copying where they share storage."""
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


class _Noise:
    """Each client's noise from its own generator, drawn some steps ahead: one call instead of one a step."""

    def __init__(self, jobs: list[Job], phases: list[Phase], number: int, like: Tensor) -> None:
        self._rngs = {i: jobs[i].rng.child("noise", number) for i, p in enumerate(phases) if p.noise_multiplier > 0}
        self._device = like.device
        self._left = phases[0].steps
        self._ahead = max(1, min(self._left, _MOST_AHEAD // max(like.numel(), 1)))
        self._drawn = torch.empty(self._ahead, *like.shape)
        self._next = self._ahead

    def next(self) -> Tensor:
        """One step's noise, a row a client; zero for those without."""
        if self._next == self._ahead:
            count = min(self._ahead, self._left)
            for i in range(self._drawn.shape[1]):
                rng = self._rngs.get(i)
                if rng is not None:
                    rng.normal_(self._drawn[:count, i])
                else:
                    self._drawn[:count, i] = 0.0
            self._next, self._left = 0, self._left - count
        self._next += 1
        return self._drawn[self._next - 1].to(self._device)


def _into_balls(stacks: list[_Stack], centres: list[_Stack], radii: Tensor) -> None:
    """Bring clients that have left their ball back to its border; those within stay as they are."""
    pairs = [
        pair
        for stack, centre in zip(stacks, centres, strict=True)
        for pair in ((stack.weight, centre.weight), (stack.bias, centre.bias))
    ]
    apart = [(a.flatten(1), b.flatten(1), (a - b).flatten(1)) for a, b in pairs if a is not None and b is not None]
    squares = torch.stack([squared_norms(difference) for _, _, difference in apart]).sum(dim=0)
    factor = clip_factor(squares.sqrt(), radii[:, 0]).to(radii.dtype)[:, None]
    outside = (factor < 1).flatten()
    for at, centre, difference in apart:
        if bool(outside.all()):
            torch.addcmul(centre, difference, factor, out=at)
        elif bool(outside.any()):
            at[outside] = torch.addcmul(centre[outside], difference[outside], factor[outside])


def _add_gradients(
    chain: Chain,
    stacks: list[_Stack],
    rows: _Rows,
    clips: Tensor | None,
    rates: Tensor,
    updates: list[_Stack],
    *,
    bare: bool,
) -> None:
    """Add each client's ``rate`` times its sum of (clipped) per-record gradients: one forward, one backward, no more.

    ``bare`` updates hold nothing yet, and are written over.
    """
    clients, width = rows.counted.shape
    if width == 0:
        for update in updates if bare else []:
            update.clear()
        return
    activations: list[Tensor] = []
    outputs: list[Tensor] = []
    x = rows.features.reshape(clients, width, *rows.features.shape[1:])
    for step in chain:
        if isinstance(step, Linear):
            stack = stacks[len(activations)]
            x = x.reshape(clients, width, -1)
            activations.append(x.detach())
            x = torch.bmm(stack.weight, x.transpose(1, 2)).transpose(1, 2)  # twice as fast as the other way round
            x = x if stack.bias is None else x + stack.bias[:, None]
            x = x if x.requires_grad else x.requires_grad_()
            outputs.append(x)
        elif isinstance(step, nn.Flatten):
            x = x.reshape(clients, width, -1)
        else:
            x = step(x.clone() if getattr(step, "inplace", False) else x)
    loss = F.cross_entropy(x.reshape(clients * width, -1), rows.labels, reduction="sum")
    deltas = list(torch.autograd.grad(loss, outputs))
    with torch.no_grad():
        factor = rows.counted.to(torch.float32)
        if clips is None:  # what is not counted must not be multiplied by zero if it is not finite
            broken = ~rows.counted & ~torch.isfinite(deltas[-1]).all(dim=-1)
        else:
            # In double precision and as |a| |d|: squares of float32 numbers under- and overflow where the product does not.
            squares = torch.zeros(factor.shape, dtype=torch.float64, device=factor.device)
            for stack, a, d in zip(stacks, activations, deltas, strict=True):
                squares += (squared_norms(a) + (0.0 if stack.bias is None else 1.0)) * squared_norms(d)
            factor = clip_factor(squares.sqrt(), clips).to(torch.float32) * factor
            broken = ~torch.isfinite(squares)
        if bool(broken.any()):  # zero times infinity is not zero: such records are taken out, not scaled
            activations = [a.masked_fill(broken[..., None], 0.0) for a in activations]
            deltas = [d.masked_fill(broken[..., None], 0.0) for d in deltas]
        factor = (factor * rates)[..., None]
        for update, a, d in zip(updates, activations, deltas, strict=True):
            weighted = (d * factor).transpose(1, 2).contiguous()  # one layout, whatever was taken out: one result
            beta = 0.0 if bare else 1.0
            update.weight.baddbmm_(weighted, a.contiguous(), beta=beta)
            if update.bias is not None:
                if bare:  # what lies there may not be a number
                    update.bias.zero_()
                update.bias.add_(weighted.sum(2))
