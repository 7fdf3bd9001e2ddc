"""Many clients at once: who is computed together, and which models can be.

Clients of one block share shapes: equal steps and batch size. Their learning rates, clips, noise
and data differ. A model that is a chain of linear and elementwise layers is computed for all
clients of a block at once (:mod:`dpfl.engine.stacks`); others run one client at a time, by ghost
clipping (:mod:`dpfl.engine.ghost_clipping`) where all of their layers have a rule.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpfl.core.grid import WIDTHS
from dpfl.core.layout import Layout
from dpfl.core.threads import one_thread
from dpfl.core.types import Phase
from dpfl.data.inputs import NUMBERS
from dpfl.engine.base import Job, clips_records, mixing_of
from dpfl.engine.coverage import can_ghost_clip
from dpfl.engine.full_batches import FullBatches
from dpfl.engine.ghost_clipping import GhostClipping
from dpfl.engine.one_by_one import OneByOne
from dpfl.engine.phase_block import PhaseBlock, plain_sums
from dpfl.engine.private_stacks import ClippedSums, step_noise
from dpfl.engine.process import check_arithmetic, failures_of
from dpfl.engine.row_span import run_row_span
from dpfl.engine.stacks import Chain, same_at_every_place
from dpfl.models.separation import FORGETS, WATCHED, structure
from dpfl.numerics.clipping import clip_factor, squared_norms
from dpfl.strategy import Strategy
from dpfl.tasks import CLASSIFICATION, Task

KERNELS = (
    "a record's gradient does not depend on which other records are in its batch beyond rounding "
    "in the last digits: this is so bit for bit for chains of linear layers on processors whose "
    "matrix products treat all records alike, and assumed of other kernels"
)
_MOST_CLIENTS = 64
_LITTLE_WORK = 1 << 16  # records, or steps' worth of noise
_MOST_NUMBERS = 1 << 26  # parameters held for one block
_MOST_COPIED = 1 << 28  # numbers of features that are copied into one storage for a block


def assumptions_of(
    strategy: Strategy,
    model: nn.Module,
    layout: Layout,
    device: str = "cpu",
    task: Task = CLASSIFICATION,
) -> tuple[str, ...]:
    """What the guarantee of a strategy assumes beside the proof, in the words of its unit.

    Where records are clipped, matrix products are tried on this machine as they are computed in
    training. A model or loss of the user's own is computed under a watch, which assumes more.
    """
    known = structure(model, task, NUMBERS) is None
    chain = Chain.of(model, layout)
    if not strategy.local.private:
        found: tuple[str, ...] = () if known else (FORGETS,)
    elif not known:
        found = KERNELS, WATCHED
    elif chain is None or device != "cpu" or not task.plain:
        found = (KERNELS,)
    else:
        shapes = [layer.weight.shape for layer in chain.layers]
        shapes += [shape[::-1] for shape in shapes[1:]]  # and back again
        with one_thread():
            each = ((torch.bmm, *shape, width) for shape in shapes for width in WIDTHS)
            found = () if all(same_at_every_place(*one) for one in each) else (KERNELS,)
    return (*strategy.assumptions, *map(strategy.unit.reworded, found))


def _alike(plans: Sequence[tuple[Phase, ...]]) -> list[list[int]]:
    """Group plans whose stacks have one shape."""

    def shape(p: Phase) -> tuple[object, ...]:
        has = (p.clip is None, p.noise_multiplier > 0, p.ball is None)
        pulled = (p.momentum > 0, p.proximal > 0)
        same = (p.steps, p.batch_size, p.sampling, p.part, p.clipping, p.sum_only, p.whole)
        return (*same, *has, *pulled)

    groups: dict[tuple[object, ...], list[int]] = {}
    for i, phases in enumerate(plans):
        groups.setdefault(tuple(map(shape, phases)), []).append(i)
    return list(groups.values())


def _work(phases: tuple[Phase, ...]) -> int:
    """How much a client computes, in records; noise costs a small model as much as 64 records."""
    return sum(p.steps * (p.batch_size + (64 if p.noise_multiplier > 0 else 0)) for p in phases)


class Stacked:
    """The default engine: clients of equal shape at once, if the model is a chain of layers."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self._ghost_clipping, self._one_by_one = GhostClipping(device), OneByOne(device)
        self._full_batches = FullBatches(device)

    def blocks(self, plans: Sequence[tuple[Phase, ...]]) -> list[list[int]]:
        """Group clients of equal shape; a pure function of the cohort, never of the workers.

        Two blocks let two workers share the work. Where there is little of it, splitting costs more
        than it gains.
        """
        blocks: list[list[int]] = []
        for members in _alike(plans):
            heavy = len(members) >= 8 and sum(_work(plans[i]) for i in members) > _LITTLE_WORK
            count = max(math.ceil(len(members) / _MOST_CLIENTS), 2 if heavy else 1)
            size = math.ceil(len(members) / count)
            blocks.extend(members[i : i + size] for i in range(0, len(members), size))
        return blocks

    def run(self, model: nn.Module, layout: Layout, jobs: Sequence[Job]) -> list[Tensor]:
        """Run jobs of equal shape together; a model that is not a chain runs one by one."""
        if any(phase.sampling == "full" for job in jobs for phase in job.phases):
            return self._full_batches.run(model, layout, jobs)
        if any(map(clips_records, jobs)) and mixing_of(model, jobs):
            return self._one_by_one.run(model, layout, jobs)
        chain = Chain.of(model, layout)
        plain = all(job.task.plain and chain and chain.takes(job.features) for job in jobs[:1])
        if chain is None or not plain:
            engine = self._ghost_clipping if can_ghost_clip(model) else self._one_by_one
            return engine.run(model, layout, jobs)
        check_arithmetic(jobs)
        results: dict[int, Tensor] = {}
        at_once = max(1, _MOST_NUMBERS // max(layout.size, 1))
        storages = {job.features.untyped_storage().data_ptr() for job in jobs}
        if len(storages) > 1 and sum(job.features.numel() for job in jobs) > _MOST_COPIED:
            at_once = 1  # records in files of their own are not copied side by side
        with one_thread():
            for block in _alike([job.phases for job in jobs]):
                for first in range(0, len(block), at_once):
                    some = block[first : first + at_once]
                    after = self._run_block(chain, [jobs[i] for i in some])
                    results.update(zip(some, after, strict=True))
        return [results[i] for i in range(len(jobs))]

    def _run_block(self, chain: Chain, jobs: list[Job]) -> list[Tensor]:
        """Run all phases of a block; an error names its clients."""
        last = f" to '{jobs[-1].client}'" if len(jobs) > 1 else ""
        with failures_of(f"client '{jobs[0].client}'{last}"):
            vectors = torch.stack([job.start for job in jobs]).to(self.device)
            for number in range(len(jobs[0].phases)):
                block = PhaseBlock(chain, jobs, number, self.device)
                after = run_row_span(block, vectors)
                vectors = run_phase(block, vectors) if after is None else after
            return list(vectors.cpu())


def run_phase(block: PhaseBlock, start: Tensor) -> Tensor:
    """Run one phase of a block from the rows of ``start``, and return the rows after it.

    Every step adds up gradients, adds noise if there is any, moves what the phase moves, and brings
    clients back into their balls.
    """
    size = start.shape[1]
    moving = block.moving
    private = block.first.clip is not None
    vectors = nn.functional.pad(start, (0, -size % 16))[:, :size]  # rows are aligned in memory
    sums = ClippedSums(block, vectors) if private else plain_sums(block, vectors)
    noise = step_noise(block, size) if block.noisy else [None] * len(block.sizes)
    moved = torch.zeros_like(vectors[:, moving]) if block.momentum is not None else None
    for totals, drawn, rates in zip(sums, noise, block.rates, strict=True):
        if drawn is not None:
            totals.add_(drawn)
        if block.first.sum_only:  # in double precision, where the addition of integers is exact
            vectors = totals.neg_()
            continue
        if block.pull is None and moved is None:
            if block.decay is not None:
                vectors[:, moving].mul_(1 - block.decay)
            vectors[:, moving].addcmul_(totals[:, moving], rates, value=-1.0)
        else:
            _step(block, vectors[:, moving], start[:, moving], totals[:, moving] * rates, moved)
        if block.balls is not None:
            _into_balls(block.chain, vectors, start, block.balls)
    return vectors


def _step(
    block: PhaseBlock, weights: Tensor, start: Tensor, step: Tensor, moved: Tensor | None
) -> None:
    """Take a step with decay, proximal term and momentum; ``moved`` is the step before, if that
    counts, and all steps are multiplied by the learning rate.
    """
    if block.decay is not None:
        step.addcmul_(weights, block.decay)
    if block.pull is not None:
        step.addcmul_(weights - start, block.pull)
    if moved is not None and block.momentum is not None:
        step = moved.mul_(block.momentum).add_(step)
    weights.sub_(step)


def _into_balls(chain: Chain, vectors: Tensor, centres: Tensor, radii: Tensor) -> None:
    """Move clients that have left their ball back to its border; those within stay as they are."""
    apart = vectors - centres
    pieces = [squared_norms(apart[:, block.slice]) for block in chain.layout]
    squares = torch.stack(pieces).sum(dim=0)
    factor = clip_factor(squares[:, None].sqrt(), radii).to(vectors.dtype)
    outside = (factor < 1).flatten()
    if bool(outside.all()):
        torch.addcmul(centres, apart, factor, out=vectors)
    elif bool(outside.any()):
        vectors[outside] = torch.addcmul(centres[outside], apart[outside], factor[outside])
