"""Many clients at once, without per-record gradients: book-keeping on stacks of linear layers.

For a linear layer with input a and output gradient d (of one record), the gradient of the weight is the outer product
d a^T, so its squared norm is |a|^2 |d|^2 and a weighted sum over records is one matrix product. One forward and one
backward give a and d of every layer; per-record norms, clipping factors and the clipped sum follow from them.

Clients of one block share shapes: equal steps and batch size. Their learning rates, clips, noise and data differ.
Batches are padded to the largest of the block's step; padding counts as zero. Models that are not a chain of supported
layers run one client at a time, by the rules of their layers (:mod:`dpfl.engine.bookkeeping`) where they all have one.
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

from dpfl.client.sampling import PoissonBatches, sampler
from dpfl.core.errors import DpflError
from dpfl.core.layout import Block, Layout
from dpfl.core.linalg import clip_factor, squared_norms
from dpfl.core.types import Phase
from dpfl.engine.bookkeeping import Booked, bookable
from dpfl.engine.one_by_one import OneByOne, into_ball
from dpfl.engine.process import one_thread
from dpfl.protocols import Job

ELEMENTWISE: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Softplus, nn.Tanh, nn.Sigmoid, nn.Identity,
)  # fmt: skip
_MOST_CLIENTS = 64
_LITTLE_WORK = 1 << 16  # records, or steps' worth of noise
_MOST_NUMBERS = 1 << 26  # parameters held for one block
_MOST_AHEAD = 1 << 22  # noise drawn at once


@dataclass(frozen=True)
class _Linear:
    weight: Block
    bias: Block | None

    def stacked(self, vectors: Tensor) -> tuple[Tensor, Tensor | None]:
        """Views of every client's weight and bias in the stack of flat vectors."""
        weight = vectors[:, self.weight.slice].view(len(vectors), *self.weight.shape)
        return weight, None if self.bias is None else vectors[:, None, self.bias.slice]


Chain = list[_Linear | nn.Module]


def chain(model: nn.Module, layout: Layout) -> Chain | None:
    """Return the model as a chain of linear and elementwise layers, or None if it is something else."""
    blocks = {block.name: block for block in layout}
    steps: Chain = []

    def walk(module: nn.Module, prefix: str) -> bool:
        if type(module) is nn.Sequential:
            return all(walk(child, f"{prefix}{name}.") for name, child in module._modules.items() if child)
        if type(module) is nn.Linear:
            steps.append(_Linear(blocks[f"{prefix}weight"], blocks.get(f"{prefix}bias")))
            return True
        if type(module) in ELEMENTWISE or (
            type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
        ):
            steps.append(module)
            return True
        return False

    whole = walk(model, "") and any(isinstance(step, _Linear) for step in steps)
    covered = sum(b.size for s in steps if isinstance(s, _Linear) for b in (s.weight, s.bias) if b is not None)
    return steps if whole and covered == layout.size else None


def _alike(plans: Sequence[tuple[Phase, ...]]) -> list[list[int]]:
    """Group plans whose stacks have one shape."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, phases in enumerate(plans):
        shape = tuple((p.steps, p.batch_size, p.sampling, p.clip is None, p.ball is None) for p in phases)
        groups.setdefault(shape, []).append(i)
    return list(groups.values())


def _work(phases: tuple[Phase, ...]) -> int:
    """How much a client computes: records, and noise as the 64 records it costs in a small model."""
    return sum(p.steps * (p.batch_size + (64 if p.noise_multiplier > 0 else 0)) for p in phases)


def _fits(steps: Chain, job: Job) -> bool:
    """Whether records are vectors by the time they meet the first linear layer."""
    before = steps[: next(i for i, step in enumerate(steps) if isinstance(step, _Linear))]
    return job.features.ndim == 2 or any(isinstance(step, nn.Flatten) for step in before)


class Stacked:
    """The default engine."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    def blocks(self, plans: Sequence[tuple[Phase, ...]]) -> list[list[int]]:
        """Group clients of equal shape; a pure function of the cohort, so that workers never change a bit."""
        blocks: list[list[int]] = []
        for members in _alike(plans):
            # Two blocks let two workers share the work; where there is little of it, splitting costs more than it gives.
            heavy = len(members) >= 8 and sum(_work(plans[i]) for i in members) > _LITTLE_WORK
            count = max(math.ceil(len(members) / _MOST_CLIENTS), 2 if heavy else 1)
            size = math.ceil(len(members) / count)
            blocks.extend(members[i : i + size] for i in range(0, len(members), size))
        return blocks

    def run(self, model: nn.Module, layout: Layout, jobs: Sequence[Job]) -> list[Tensor]:
        """Run the jobs given, those of equal shape together; a model that is no chain runs one by one."""
        steps = chain(model, layout)
        if steps is None or (jobs and not _fits(steps, jobs[0])):
            alone = Booked if bookable(model) else OneByOne
            return alone(str(self.device)).run(model, layout, jobs)
        results: dict[int, Tensor] = {}
        with one_thread():
            for block in _alike([job.phases for job in jobs]):
                at_once = max(1, _MOST_NUMBERS // max(layout.size, 1))
                for first in range(0, len(block), at_once):
                    some = block[first : first + at_once]
                    after = _named(steps, [jobs[i] for i in some], self.device)
                    results.update(zip(some, after, strict=True))
        return [results[i] for i in range(len(jobs))]


def _named(steps: Chain, jobs: list[Job], device: torch.device) -> list[Tensor]:
    """Run a block; an error names its clients."""
    try:
        vectors = torch.stack([job.start for job in jobs]).to(device)
        for number in range(len(jobs[0].phases)):
            vectors = _run_phase(steps, jobs, number, vectors)
        return list(vectors.cpu())
    except (RuntimeError, IndexError) as error:
        who = f"client '{jobs[0].client}'" + (f" to '{jobs[-1].client}'" if len(jobs) > 1 else "")
        raise DpflError(who, f"the model failed on its data ({error})", "check model and data") from error


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


class _Batches:
    """The records of every step, as rows of one tensor laid into a (clients x width) table.

    A client with fewer records than the widest repeats its own first one; what is repeated is not counted.
    """

    def __init__(self, drawn: list[list[Tensor]], starts: list[int]) -> None:
        self.sizes = np.array([[len(batch) for batch in batches] for batches in drawn]).T  # (steps, clients)
        self._starts = np.array(starts)
        self._rows = [torch.cat(batches).numpy() for batches in drawn]
        self._ends = np.cumsum(self.sizes, axis=0)

    def step(self, number: int) -> tuple[Tensor, Tensor]:
        """The rows of a step, client after client, and which of them count."""
        sizes = self.sizes[number]
        counted = np.arange(sizes.max()) < sizes[:, None]
        rows = np.zeros(counted.shape, dtype=np.int64)
        ends = self._ends[number]
        rows[counted] = np.concatenate(
            [rows[end - size : end] for rows, end, size in zip(self._rows, ends, sizes, strict=True)]
        )
        rows += self._starts[:, None]
        return torch.from_numpy(rows.ravel()), torch.from_numpy(counted)


def _run_phase(steps: Chain, jobs: list[Job], number: int, start: Tensor) -> Tensor:
    phases, device = [job.phases[number] for job in jobs], start.device
    first = phases[0]
    samplers = [sampler(phase, len(job.labels)) for phase, job in zip(phases, jobs, strict=True)]
    drawn = [s.draw(job.rng.child("records", number), first.steps) for s, job in zip(samplers, jobs, strict=True)]
    features, starts = _side_by_side([job.features for job in jobs])
    labels, label_starts = _side_by_side([job.labels for job in jobs])
    batches = _Batches(drawn, starts)
    shifts = torch.tensor(label_starts)[:, None] - torch.tensor(starts)[:, None]
    noise = _Noise(jobs, phases, number, start)

    def column(values: Sequence[float] | np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float32, device=device)[:, None]

    clips = None if first.clip is None else column([p.clip or 0.0 for p in phases])
    expected = [s.expected_size if isinstance(s, PoissonBatches) and clips is not None else None for s in samplers]
    lr, decay = np.array([p.lr for p in phases]), column([p.weight_decay * p.lr for p in phases])
    decaying = bool(decay.any())
    balls = None if first.ball is None else column([p.ball or math.inf for p in phases])
    vectors, update = start.clone(), torch.empty_like(start)
    for step in range(first.steps):
        sizes = batches.sizes[step]
        rates = lr / [e or max(int(n), 1) for e, n in zip(expected, sizes, strict=True)]
        rows, counted = batches.step(step)
        if counted.shape[1] > 0:
            x = jobs[0].inputs(features.index_select(0, rows).to(device))
            y = labels.index_select(0, (rows.view(counted.shape) + shifts).view(-1)).to(device)
            _gradient_sums(steps, vectors, x, y, counted.to(device), clips, column(rates), update)
        else:
            update.zero_()
        noise.add(update, column(rates * noise.stds))
        if decaying:
            update.addcmul_(decay, vectors)
        vectors.sub_(update)  # all of a step in one rounding
        if balls is not None:
            vectors = into_ball(vectors, start, balls)
    return vectors


class _Noise:
    """Each client's noise from its own generator, drawn some steps ahead: one call instead of one a step."""

    def __init__(self, jobs: list[Job], phases: list[Phase], number: int, like: Tensor) -> None:
        self.stds = np.array([p.noise_multiplier * (p.clip or 0.0) for p in phases])
        self._rngs = {i: jobs[i].rng.child("noise", number) for i, p in enumerate(phases) if p.noise_multiplier > 0}
        self._left = phases[0].steps
        self._ahead = max(1, min(self._left, _MOST_AHEAD // max(like.numel(), 1)))
        self._drawn = torch.empty(self._ahead if self._rngs else 0, *like.shape)
        self._next = self._ahead

    def add(self, update: Tensor, scale: Tensor) -> None:
        """Add a step's noise to the clients' updates."""
        if not self._rngs:
            return
        if self._next == self._ahead:
            count = min(self._ahead, self._left)
            for i in range(self._drawn.shape[1]):
                if i in self._rngs:
                    self._rngs[i].normal_(self._drawn[:count, i])
                else:
                    self._drawn[:count, i] = 0.0
            self._next, self._left = 0, self._left - count
        update.addcmul_(scale, self._drawn[self._next].to(update.device))
        self._next += 1


def _gradient_sums(
    steps: Chain,
    vectors: Tensor,
    features: Tensor,
    labels: Tensor,
    counted: Tensor,
    clips: Tensor | None,
    rates: Tensor,
    out: Tensor,
) -> None:
    """Write each client's ``rate`` times its sum of (clipped) per-record gradients: one forward, one backward, no more."""
    clients, width = counted.shape
    activations: list[Tensor] = []
    outputs: list[Tensor] = []
    layers: list[_Linear] = []
    x = features.reshape(clients, width, *features.shape[1:])
    for step in steps:
        if isinstance(step, _Linear):
            weight, bias = step.stacked(vectors)
            x = x.reshape(clients, width, -1)
            activations.append(x.detach())
            x = torch.bmm(weight, x.transpose(1, 2)).transpose(1, 2)  # twice as fast as the other way round
            x = x if bias is None else x + bias
            x = x if x.requires_grad else x.requires_grad_()
            outputs.append(x)
            layers.append(step)
        elif isinstance(step, nn.Flatten):
            x = x.reshape(clients, width, -1)
        else:
            x = step(x.clone() if getattr(step, "inplace", False) else x)
    loss = F.cross_entropy(x.reshape(clients * width, -1), labels, reduction="sum")
    deltas = list(torch.autograd.grad(loss, outputs))
    with torch.no_grad():
        factor = counted.to(torch.float32)
        if clips is None:
            broken = ~counted & ~torch.isfinite(deltas[-1]).all(dim=-1)  # not counted, and not to be multiplied by zero
        else:
            # In double precision and as |a| |d|: squares of float32 numbers under- and overflow where the product does not.
            squares = torch.zeros(counted.shape, dtype=torch.float64, device=counted.device)
            for layer, a, d in zip(layers, activations, deltas, strict=True):
                squares += (squared_norms(a) + (0.0 if layer.bias is None else 1.0)) * squared_norms(d)
            factor = clip_factor(squares.sqrt(), clips).to(torch.float32) * factor
            broken = ~torch.isfinite(squares)
        if bool(broken.any()):  # zero times infinity is not zero: such records are taken out, not scaled
            activations = [a.masked_fill(broken[..., None], 0.0) for a in activations]
            deltas = [d.masked_fill(broken[..., None], 0.0) for d in deltas]
        factor = (factor * rates)[..., None]
        for layer, a, d in zip(layers, activations, deltas, strict=True):
            weighted = (d * factor).transpose(1, 2).contiguous()  # one layout, whatever was taken out: one result
            out[:, layer.weight.slice] = torch.bmm(weighted, a.contiguous()).flatten(1)
            if layer.bias is not None:
                out[:, layer.bias.slice] = weighted.sum(2)
