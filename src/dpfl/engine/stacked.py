"""Many clients at once: who is computed together, and which models can be.

Clients of one block share shapes: equal steps and batch size. Their learning rates, clips, noise
and data differ. A model that is a chain of linear and elementwise layers is computed for all
clients of a block at once (:mod:`dpfl.engine.stacks`); others run one client at a time, by the
rules of their layers (:mod:`dpfl.engine.ghost_clipping`) where they all have one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpfl.core.errors import DpflError
from dpfl.core.grid import WIDTHS
from dpfl.core.layout import Layout
from dpfl.core.types import Phase
from dpfl.engine.base import Job
from dpfl.engine.ghost_clipping import Booked, bookable
from dpfl.engine.one_by_one import OneByOne
from dpfl.engine.private_stacks import run_private_phase
from dpfl.engine.process import check_arithmetic, one_thread
from dpfl.engine.row_span import run_spanned, spannable
from dpfl.engine.stacks import Chain, Linear, run_phase, same_at_every_place

ELEMENTWISE: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Softplus, nn.Tanh, nn.Sigmoid, nn.Identity,
)  # fmt: skip
_MOST_CLIENTS = 64
_LITTLE_WORK = 1 << 16  # records, or steps' worth of noise
_MOST_NUMBERS = 1 << 26  # parameters held for one block


def chain(model: nn.Module, layout: Layout) -> Chain | None:
    """Return the model as a chain of linear and elementwise layers, or None if it is something
    else.
    """
    blocks = {block.name: block for block in layout}
    steps: Chain = []

    def walk(module: nn.Module, prefix: str) -> bool:
        if type(module) is nn.Sequential:
            return all(
                walk(child, f"{prefix}{name}.") for name, child in module._modules.items() if child
            )
        if type(module) is nn.Linear:
            steps.append(Linear(blocks[f"{prefix}weight"], blocks.get(f"{prefix}bias")))
            return True
        if type(module) in ELEMENTWISE or (
            type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
        ):
            steps.append(module)
            return True
        return False

    whole = walk(model, "") and any(isinstance(step, Linear) for step in steps)
    covered = sum(
        b.size for s in steps if isinstance(s, Linear) for b in (s.weight, s.bias) if b is not None
    )
    return steps if whole and covered == layout.size else None


KERNELS = (
    "a record's gradient does not depend on which other records are in its batch beyond rounding in the last digits: this "
    "is so bit for bit for chains of linear layers on processors whose matrix products treat all records alike, and "
    "assumed of other kernels"
)


def arithmetic_assumptions(
    model: nn.Module, layout: Layout, device: str = "cpu"
) -> tuple[str, ...]:
    """What per-record clipping of this model rests on beside the proof; matrix products are tried
    on this machine.
    """
    steps = chain(model, layout)
    if steps is None or device != "cpu":
        return (KERNELS,)
    shapes = [
        (step.weight.shape[0], step.weight.shape[1]) for step in steps if isinstance(step, Linear)
    ]
    shapes += [(inputs, outputs) for outputs, inputs in shapes[1:]]  # and back again
    with one_thread():  # as they are computed
        alike = all(
            same_at_every_place(torch.bmm, *shape, width) for shape in shapes for width in WIDTHS
        )
    return () if alike else (KERNELS,)


def _alike(plans: Sequence[tuple[Phase, ...]]) -> list[list[int]]:
    """Group plans whose stacks have one shape."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, phases in enumerate(plans):
        shape = tuple(
            (
                p.steps,
                p.batch_size,
                p.sampling,
                p.clip is None,
                p.noise_multiplier > 0,
                p.ball is None,
                p.part,
            )
            for p in phases
        )
        groups.setdefault(shape, []).append(i)
    return list(groups.values())


def _work(phases: tuple[Phase, ...]) -> int:
    """How much a client computes: records, and noise as the 64 records it costs in a small
    model.
    """
    return sum(p.steps * (p.batch_size + (64 if p.noise_multiplier > 0 else 0)) for p in phases)


def _fits(steps: Chain, job: Job) -> bool:
    """Whether records are vectors by the time they meet the first linear layer."""
    before = steps[: next(i for i, step in enumerate(steps) if isinstance(step, Linear))]
    return job.features.ndim == 2 or any(isinstance(step, nn.Flatten) for step in before)


class Stacked:
    """The default engine."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self._booked, self._plain = Booked(device), OneByOne(device)

    def blocks(self, plans: Sequence[tuple[Phase, ...]]) -> list[list[int]]:
        """Group clients of equal shape; a pure function of the cohort, so that workers never change
        a bit.
        """
        blocks: list[list[int]] = []
        for members in _alike(plans):
            # Two blocks let two workers share the work; where there is little of it, splitting
            # costs more than it gives.
            heavy = len(members) >= 8 and sum(_work(plans[i]) for i in members) > _LITTLE_WORK
            count = max(math.ceil(len(members) / _MOST_CLIENTS), 2 if heavy else 1)
            size = math.ceil(len(members) / count)
            blocks.extend(members[i : i + size] for i in range(0, len(members), size))
        return blocks

    def run(self, model: nn.Module, layout: Layout, jobs: Sequence[Job]) -> list[Tensor]:
        """Run the jobs given, those of equal shape together; a model that is no chain runs one by
        one.
        """
        steps = chain(model, layout)
        if steps is None or (jobs and not _fits(steps, jobs[0])):
            return (self._booked if bookable(model) else self._plain).run(model, layout, jobs)
        if any(phase.noise_multiplier > 0 for job in jobs for phase in job.phases):
            check_arithmetic()
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
            spanned = None
            if spannable(steps, jobs, number):
                layer = next(step for step in steps if isinstance(step, Linear))
                spanned = run_spanned(layer, jobs, number, vectors)
            if spanned is not None:
                vectors = spanned
            elif jobs[0].phases[number].clip is not None:
                vectors = run_private_phase(steps, jobs, number, vectors)
            else:
                vectors = run_phase(steps, jobs, number, vectors)
        return list(vectors.cpu())
    except (RuntimeError, IndexError) as error:
        who = f"client '{jobs[0].client}'" + (f" to '{jobs[-1].client}'" if len(jobs) > 1 else "")
        raise DpflError(
            who, f"the model failed on its data ({error})", "check model and data"
        ) from error
