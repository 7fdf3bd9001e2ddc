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

from dpfl.core.errors import DpflError
from dpfl.core.grid import WIDTHS
from dpfl.core.layout import Layout
from dpfl.core.types import Phase
from dpfl.engine.base import Job
from dpfl.engine.ghost_clipping import GhostClipping, can_ghost_clip
from dpfl.engine.one_by_one import OneByOne
from dpfl.engine.phase_block import PhaseBlock, PlainSums
from dpfl.engine.private_stacks import ClippedSums, StepNoise
from dpfl.engine.process import check_arithmetic, one_thread
from dpfl.engine.row_span import fits_row_span, run_row_span
from dpfl.engine.stacks import Chain, Linear, into_balls, same_at_every_place, stacks_of

_NAMES = ["ReLU", "LeakyReLU", "ELU", "GELU", "SiLU", "Softplus", "Tanh", "Sigmoid", "Identity"]
ELEMENTWISE: tuple[type[nn.Module], ...] = tuple(getattr(nn, name) for name in _NAMES)
KERNELS = (
    "a record's gradient does not depend on which other records are in its batch beyond rounding "
    "in the last digits: this is so bit for bit for chains of linear layers on processors whose "
    "matrix products treat all records alike, and assumed of other kernels"
)
_MOST_CLIENTS = 64
_LITTLE_WORK = 1 << 16  # records, or steps' worth of noise
_MOST_NUMBERS = 1 << 26  # parameters held for one block
_MOVING = {"all": slice(None), "head": slice(-1, None), "body": slice(0, -1)}


def chain(model: nn.Module, layout: Layout) -> Chain | None:
    """Return the model as a chain of linear and elementwise layers, or None if it is not one.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> [type(step).__name__ for step in chain(model, Layout.of_module(model))]
    ['Linear', 'ReLU']
    """
    blocks = {block.name: block for block in layout}
    steps: Chain = []

    def walk(module: nn.Module, prefix: str) -> bool:
        if type(module) is nn.Sequential:
            children = ((name, child) for name, child in module._modules.items() if child)
            return all(walk(child, f"{prefix}{name}.") for name, child in children)
        if type(module) is nn.Linear:
            steps.append(Linear(blocks[f"{prefix}weight"], blocks.get(f"{prefix}bias")))
            return True
        steps.append(module)
        flattens = type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
        return flattens or type(module) in ELEMENTWISE

    whole = walk(model, "")
    layers = [step for step in steps if isinstance(step, Linear)]
    covered = sum(block.size for layer in layers for block in layer.blocks)
    return steps if whole and layers and covered == layout.size else None


def arithmetic_assumptions(
    model: nn.Module, layout: Layout, device: str = "cpu"
) -> tuple[str, ...]:
    """What per-record clipping of this model assumes beside the proof.

    Matrix products are tried on this machine, as they are computed in training.
    """
    steps = chain(model, layout)
    if steps is None or device != "cpu":
        return (KERNELS,)
    shapes = [step.weight.shape for step in steps if isinstance(step, Linear)]
    shapes += [shape[::-1] for shape in shapes[1:]]  # and back again
    with one_thread():
        alike = all(same_at_every_place(torch.bmm, *s, width) for s in shapes for width in WIDTHS)
    return () if alike else (KERNELS,)


def _alike(plans: Sequence[tuple[Phase, ...]]) -> list[list[int]]:
    """Group plans whose stacks have one shape."""

    def shape(p: Phase) -> tuple[object, ...]:
        has = (p.clip is None, p.noise_multiplier > 0, p.ball is None)
        return (p.steps, p.batch_size, p.sampling, p.part, *has)

    groups: dict[tuple[object, ...], list[int]] = {}
    for i, phases in enumerate(plans):
        groups.setdefault(tuple(map(shape, phases)), []).append(i)
    return list(groups.values())


def _work(phases: tuple[Phase, ...]) -> int:
    """How much a client computes, in records; noise costs a small model as much as 64 records."""
    return sum(p.steps * (p.batch_size + (64 if p.noise_multiplier > 0 else 0)) for p in phases)


def _fits(steps: Chain, job: Job) -> bool:
    """Whether records are vectors by the time they meet the first linear layer."""
    before = steps[: next(i for i, step in enumerate(steps) if isinstance(step, Linear))]
    return job.features.ndim == 2 or any(isinstance(step, nn.Flatten) for step in before)


class Stacked:
    """The default engine: clients of equal shape at once, if the model is a chain of layers."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self._ghost_clipping, self._one_by_one = GhostClipping(device), OneByOne(device)

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
        steps = chain(model, layout)
        if steps is None or (jobs and not _fits(steps, jobs[0])):
            engine = self._ghost_clipping if can_ghost_clip(model) else self._one_by_one
            return engine.run(model, layout, jobs)
        if any(phase.noise_multiplier > 0 for job in jobs for phase in job.phases):
            check_arithmetic()
        results: dict[int, Tensor] = {}
        at_once = max(1, _MOST_NUMBERS // max(layout.size, 1))
        with one_thread():
            for block in _alike([job.phases for job in jobs]):
                for first in range(0, len(block), at_once):
                    some = block[first : first + at_once]
                    after = self._run_block(steps, [jobs[i] for i in some])
                    results.update(zip(some, after, strict=True))
        return [results[i] for i in range(len(jobs))]

    def _run_block(self, steps: Chain, jobs: list[Job]) -> list[Tensor]:
        """Run all phases of a block; an error names its clients."""
        try:
            vectors = torch.stack([job.start for job in jobs]).to(self.device)
            for number in range(len(jobs[0].phases)):
                block, after = PhaseBlock.drawn(steps, jobs, number, self.device), None
                if fits_row_span(steps, jobs, number):
                    after = run_row_span(block, vectors)
                vectors = run_phase(block, vectors) if after is None else after
            return list(vectors.cpu())
        except (RuntimeError, IndexError) as error:
            last = f" to '{jobs[-1].client}'" if len(jobs) > 1 else ""
            problem = f"the model failed on its data ({error})"
            raise DpflError(
                f"client '{jobs[0].client}'{last}", problem, "check model and data"
            ) from error


def run_phase(block: PhaseBlock, start: Tensor) -> Tensor:
    """Run one phase of a block from the rows of ``start``, and return the rows after it.

    Every step adds up gradients, adds noise if there is any, moves what the phase moves, and brings
    clients back into their balls.
    """
    stacks, first = stacks_of(block.chain, start), block.phases[0]
    centres = [] if block.balls is None else stacks_of(block.chain, start)
    sums = PlainSums(block, stacks) if first.clip is None else ClippedSums(block, stacks)
    noise = StepNoise(block, start.shape[1]) if block.noisy else None
    moving = _MOVING[first.part]
    for step, rates in enumerate(block.rates):
        totals, drawn = sums.of(step), None if noise is None else noise.next()
        for stack, total in zip(stacks[moving], totals[moving], strict=True):
            stack.move(total, drawn, rates, block.decay)
        if block.balls is not None:
            into_balls(stacks, centres, block.balls)
    if isinstance(sums, ClippedSums):
        sums.warn()
    vectors = torch.empty_like(start)
    for stack in stacks:
        stack.write(vectors)
    return vectors
