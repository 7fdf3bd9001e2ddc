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

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl.client.sampling import PoissonBatches, sampler
from dpfl.core.errors import DpflError
from dpfl.core.layout import Block, Layout
from dpfl.core.linalg import clip_factor
from dpfl.core.types import Phase
from dpfl.engine.bookkeeping import Booked, bookable
from dpfl.engine.one_by_one import OneByOne, into_ball
from dpfl.engine.process import one_thread
from dpfl.protocols import Job

ELEMENTWISE: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Softplus, nn.Tanh, nn.Sigmoid, nn.Identity,
)  # fmt: skip
_MOST_CLIENTS = 32
_MOST_NUMBERS = 1 << 26  # parameters held for one block


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


def _fits(steps: Chain, features: Tensor) -> bool:
    """Whether records are vectors by the time they meet the first linear layer."""
    before = steps[: next(i for i, step in enumerate(steps) if isinstance(step, _Linear))]
    return features.ndim == 2 or any(isinstance(step, nn.Flatten) for step in before)


class Stacked:
    """The default engine."""

    def blocks(self, plans: Sequence[tuple[Phase, ...]]) -> list[list[int]]:
        """Group clients of equal shape; a pure function of the cohort, so that workers never change a bit."""
        blocks: list[list[int]] = []
        for members in _alike(plans):
            count = max(math.ceil(len(members) / _MOST_CLIENTS), 2 if len(members) >= 8 else 1)
            size = math.ceil(len(members) / count)
            blocks.extend(members[i : i + size] for i in range(0, len(members), size))
        return blocks

    def run(self, model: nn.Module, layout: Layout, jobs: Sequence[Job]) -> list[Tensor]:
        """Run the jobs given, those of equal shape together; a model that is no chain runs one by one."""
        steps = chain(model, layout)
        if steps is None or (jobs and not _fits(steps, jobs[0].features)):
            return (Booked() if bookable(model) else OneByOne()).run(model, layout, jobs)
        results: dict[int, Tensor] = {}
        with one_thread():
            for block in _alike([job.phases for job in jobs]):
                at_once = max(1, _MOST_NUMBERS // max(layout.size, 1))
                for first in range(0, len(block), at_once):
                    some = block[first : first + at_once]
                    after = _named(steps, layout, [jobs[i] for i in some])
                    results.update(zip(some, after, strict=True))
        return [results[i] for i in range(len(jobs))]


def _named(steps: Chain, layout: Layout, jobs: list[Job]) -> list[Tensor]:
    """Run a block; an error names its clients."""
    try:
        return _run_block(steps, layout, jobs)
    except (RuntimeError, IndexError) as error:
        who = f"client '{jobs[0].client}'" + (f" to '{jobs[-1].client}'" if len(jobs) > 1 else "")
        raise DpflError(who, f"the model failed on its data ({error})", "check model and data") from error


def _run_block(steps: Chain, layout: Layout, jobs: list[Job]) -> list[Tensor]:
    vectors = torch.stack([job.start for job in jobs])
    for number in range(len(jobs[0].phases)):
        vectors = _run_phase(steps, layout, jobs, number, vectors)
    return list(vectors)


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def _run_phase(steps: Chain, layout: Layout, jobs: list[Job], number: int, start: Tensor) -> Tensor:
    phases = [job.phases[number] for job in jobs]
    first = phases[0]
    records = [sampler(phase, len(job.labels)) for phase, job in zip(phases, jobs, strict=True)]
    drawn = [r.draw(job.rng.child("records", number), first.steps) for r, job in zip(records, jobs, strict=True)]
    noise_rngs = [job.rng.child("noise", number) for job in jobs]
    lr, decay = _column([p.lr for p in phases]), _column([p.weight_decay for p in phases])
    clips = None if first.clip is None else _column([p.clip or 0.0 for p in phases])
    stds = _column([p.noise_multiplier * (p.clip or 0.0) for p in phases])
    noisy = [i for i, p in enumerate(phases) if p.noise_multiplier > 0]
    expected = [r.expected_size if isinstance(r, PoissonBatches) else None for r in records]
    vectors, gradients = start.clone(), torch.zeros_like(start)
    noise = torch.zeros_like(start)
    largest = max(len(batch) for batches in drawn for batch in batches)
    features = torch.zeros(len(jobs), largest, *jobs[0].features.shape[1:])
    labels = torch.zeros(len(jobs), largest, dtype=torch.int64)
    for step in range(first.steps):
        sizes = [len(batches[step]) for batches in drawn]
        width = max(sizes)
        counted = torch.zeros(len(jobs), width)
        for i, (job, batches) in enumerate(zip(jobs, drawn, strict=True)):
            torch.index_select(job.features, 0, batches[step], out=features[i, : sizes[i]])
            torch.index_select(job.labels, 0, batches[step], out=labels[i, : sizes[i]])
            features[i, sizes[i] : width] = 0.0
            counted[i, : sizes[i]] = 1.0
        if width > 0:
            _gradient_sums(steps, vectors, features[:, :width], labels[:, :width], counted, clips, gradients)
        else:
            gradients.zero_()
        for i in noisy:
            noise_rngs[i].normal_(noise[i])
        if noisy:
            gradients.addcmul_(stds, noise)
        sums = [
            e if e is not None and clips is not None else float(max(n, 1)) for e, n in zip(expected, sizes, strict=True)
        ]
        update = gradients / _column(sums)
        vectors.sub_(lr * update.addcmul_(decay, vectors))
        if first.ball is not None:
            balls = _column([p.ball or math.inf for p in phases])
            vectors = start + into_ball(vectors - start, balls)
    return vectors


def _gradient_sums(
    steps: Chain, vectors: Tensor, features: Tensor, labels: Tensor, counted: Tensor, clips: Tensor | None, out: Tensor
) -> None:
    """Write each client's sum of (clipped) per-record gradients into ``out``: one forward, one backward, no more."""
    clients, width = counted.shape
    activations: list[Tensor] = []
    outputs: list[Tensor] = []
    layers: list[_Linear] = []
    x = features
    for step in steps:
        if isinstance(step, _Linear):
            weight, bias = step.stacked(vectors)
            x = x.reshape(clients, width, -1)
            activations.append(x.detach())
            x = torch.bmm(x, weight.transpose(1, 2))
            x = x if bias is None else x + bias
            x = x if x.requires_grad else x.requires_grad_()
            outputs.append(x)
            layers.append(step)
        elif isinstance(step, nn.Flatten):
            x = x.reshape(clients, width, -1)
        else:
            x = step(x.clone() if getattr(step, "inplace", False) else x)
    loss = F.cross_entropy(x.reshape(clients * width, -1), labels.reshape(-1), reduction="sum")
    deltas = list(torch.autograd.grad(loss, outputs))
    with torch.no_grad():
        factor = counted
        if clips is not None:
            # In double precision and as |a| |d|: squares of float32 numbers under- and overflow where the product does not.
            squares = torch.zeros(counted.shape, dtype=torch.float64)
            for layer, a, d in zip(layers, activations, deltas, strict=True):
                inputs = torch.linalg.vector_norm(a, dim=-1, dtype=torch.float64)
                outputs_ = torch.linalg.vector_norm(d, dim=-1, dtype=torch.float64)
                squares += (inputs.square() + (0.0 if layer.bias is None else 1.0)) * outputs_.square()
            factor = clip_factor(squares.sqrt(), clips).to(counted.dtype) * counted
            broken = ~torch.isfinite(squares)
            if bool(broken.any()):  # zero times infinity is not zero: such records are taken out, not scaled
                activations = [a.masked_fill(broken[..., None], 0.0) for a in activations]
                deltas = [d.masked_fill(broken[..., None], 0.0) for d in deltas]
        for layer, a, d in zip(layers, activations, deltas, strict=True):
            weighted = d * factor[..., None]
            out[:, layer.weight.slice] = torch.bmm(weighted.transpose(1, 2), a).flatten(1)
            if layer.bias is not None:
                out[:, layer.bias.slice] = weighted.sum(1)
