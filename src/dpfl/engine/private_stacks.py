"""One phase of DP-SGD of many clients at once: clipped sums on the grid of their noise.

For a linear layer with input a and output gradient d (of one record), the gradient of the weight is
the outer product d a^T, so its squared norm is |a|^2 |d|^2 and a weighted sum over records is one
matrix product. One forward and one backward give a and d of every layer; per-record norms, clip
factors and the clipped sum follow from them.

Every step, for every client with noise std s = noise_multiplier x clip and grid step g = s /
SCALE::

    q = sum over parts of round(sum of (clip factor / g) x gradient)      at most SUMMANDS records a
    part weights <- weights - (lr g / expected batch) (q + X)                  X: integers drawn by
    the client's generator

*Formal guarantees.* A record's contribution is a function of the record and of the weights alone:
every part has the same shape whatever was drawn (records that are missing are zero), and a record's
place in it does not change a bit (``tests/engine/test_private_stacks.py``). q + X is one correctly
rounded addition of two exact integers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dpfl.core.grid import Grid, part_width
from dpfl.core.grid_noise import SCALE
from dpfl.core.random import fill_grid_noise, look_ahead
from dpfl.core.types import Phase
from dpfl.data.inputs import Inputs
from dpfl.engine.base import Job
from dpfl.engine.stacks import (
    Chain,
    Linear,
    Stack,
    inputs_and_slopes,
    into_balls,
    layer_outputs,
    side_by_side,
)
from dpfl.numerics.clipping import (
    LARGEST_INPUT,
    LARGEST_NORM,
    clip_factor,
    squared_norms,
    stacked_product,
)
from dpfl.plugs.sampling import Draw, PoissonBatches, sampler

_AT_ONCE = (
    1 << 15
)  # noise values of one client drawn at once: all clients' together should stay in the cache
_LOOKED_AHEAD = (
    1 << 22
)  # noise values of one client whose rare ones are found beforehand: they take memory
_STEPS_AHEAD = 128  # steps whose records are looked up at once
_EXACT = 1 << 24  # integers up to here are exact in single precision


def run_private_phase(chain: Chain, jobs: list[Job], number: int, start: Tensor) -> Tensor:
    """Run phase ``number`` of all jobs, which share its shape, from the rows of ``start``."""
    phases, device = [job.phases[number] for job in jobs], start.device
    first = phases[0]
    samplers = [sampler(phase, len(job.labels)) for phase, job in zip(phases, jobs, strict=True)]
    draws = [
        s.draw(job.rng.child("records", number), first.steps)
        for s, job in zip(samplers, jobs, strict=True)
    ]
    sizes = torch.stack([draw.sizes for draw in draws], dim=1).numpy()  # (steps, clients)
    noisy = first.noise_multiplier > 0
    steps = [Grid.of(p.noise_multiplier * (p.clip or 0.0)).step if noisy else 1.0 for p in phases]
    parts = _Parts(jobs, draws, sizes, part_width(first.batch_size), steps, device)
    stacks = [Stack.of(layer, start) for layer in chain if isinstance(layer, Linear)]
    sums = _Sums(chain, stacks, phases, device)
    noise = _Noise(jobs, number, start) if noisy else None
    lr = np.array([p.lr for p in phases])
    decay = (
        _column([p.weight_decay * p.lr for p in phases], device)
        if any(p.weight_decay for p in phases)
        else None
    )
    balls = None if first.ball is None else _column([p.ball or math.inf for p in phases], device)
    centres = [] if balls is None else [Stack.of(stack.layer, start) for stack in stacks]
    # The fixed, public denominator of a Poisson sample; the batch's own size where nothing is
    # protected.
    fixed = np.array([s.expected_size if isinstance(s, PoissonBatches) else 0.0 for s in samplers])
    expected = np.where(fixed > 0, fixed, np.maximum(sizes, 1))
    all_rates = torch.as_tensor(lr / expected * np.array(steps), dtype=torch.float32, device=device)
    exact = (sizes / sums.multipliers).max(axis=1, initial=0.0) * SCALE < _EXACT
    for step in range(first.steps):
        totals = sums.of(parts, step, exact=bool(exact[step]))
        drawn, rates = None if noise is None else noise.next(), all_rates[step][:, None]
        for stack, total in zip(stacks, totals, strict=True):
            stack.move(total, drawn, rates, decay)
        if balls is not None:
            into_balls(stacks, centres, balls)
    if sums.cut_off:
        warnings.warn(
            f"{sums.cut_off} coordinate(s) of clipped sums were cut off at {_EXACT // SCALE} standard deviations of noise; "
            "privacy holds, but use smaller batches (this count is private: it must not leave this machine)",
            RuntimeWarning,
            stacklevel=2,
        )
    vectors = torch.empty_like(start)
    for stack in stacks:
        stack.write(vectors)
    return vectors


def _column(values: Sequence[float] | np.ndarray, device: torch.device) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float32, device=device)[:, None]


@dataclass(frozen=True)
class _Part:
    """Some records of every client in a (clients x width) table.

    ``counts`` is zero where a place holds no record, and one over the step of the client's grid
    elsewhere. ``norms`` are squared norms of records, where they are known; ``within`` says that
    all of them are within bounds.
    """

    features: Tensor
    labels: Tensor
    counts: Tensor
    norms: Tensor | None
    within: bool


@dataclass(frozen=True)
class _Table:
    """One part of some steps from ``first`` on, a row a step: which records, and the rest of a
    :class:`_Part`.
    """

    first: int
    rows: Tensor
    labels: Tensor
    counts: Tensor
    norms: Tensor | None
    within: bool


class _Parts:
    """The records of every step, in parts of one fixed shape; a place without a record repeats one,
    and is not counted.
    """

    def __init__(
        self,
        jobs: list[Job],
        draws: list[Draw],
        sizes: np.ndarray,
        width: int,
        steps: Sequence[float],
        device: torch.device,
    ) -> None:
        self.width, self._device, self._sizes = width, device, sizes
        self._inverse = 1 / np.array(steps)[:, None]
        self._inputs: Inputs = jobs[0].inputs
        self._features, starts = side_by_side([job.features for job in jobs])
        self._labels, label_starts = side_by_side([job.labels for job in jobs])
        self._records = torch.cat([draw.records for draw in draws]).numpy()
        self._starts = np.array(starts)[:, None]
        self._shift = np.array(label_starts)[:, None] - self._starts
        # Where each client's part of each step begins in the records, which lie client after
        # client.
        before = np.concatenate([[0], np.cumsum(sizes.sum(axis=0))[:-1]])
        self._begins = before + np.cumsum(sizes, axis=0) - sizes
        often = len(self._records) >= sum(len(job.labels) for job in jobs)
        self._norms = self._all_norms(jobs) if often else None
        self._ahead: _Table | None = None
        self._room: Tensor | None = None  # where a part is gathered, one after the other

    def _all_norms(self, jobs: list[Job]) -> Tensor:
        """Squared norms of all clients' records, where computing them once is less work than doing
        so for every step.
        """
        norms = torch.zeros(len(self._features), dtype=torch.float64)
        for job, start in zip(jobs, self._starts[:, 0].tolist(), strict=True):
            for first in range(0, len(job.features), 1024):
                some = self._inputs(job.features[first : first + 1024]).flatten(1)
                norms[start + first : start + first + len(some)] = squared_norms(some)
        return norms

    def count(self, step: int) -> int:
        """In how many parts this step's records come."""
        return max(1, math.ceil(int(self._sizes[step].max()) / self.width))

    def get(self, step: int, part: int) -> _Part:
        """Gather one part: one look-up for all clients."""
        if part > 0:  # few steps have more than one
            return self._gathered(self._looked_up(slice(step, step + 1), part), 0)
        if self._ahead is None or not self._ahead.first <= step < self._ahead.first + len(
            self._ahead.rows
        ):
            self._ahead = self._looked_up(slice(step, step + _STEPS_AHEAD), 0)
        return self._gathered(self._ahead, step - self._ahead.first)

    def _looked_up(self, steps: slice, part: int) -> _Table:
        """Which records one part of some steps holds, their labels and norms: everything but their
        features.
        """
        places = np.arange(part * self.width, (part + 1) * self.width)
        counted = places < self._sizes[steps, :, None]  # (steps, clients, width)
        chosen = np.minimum(self._begins[steps, :, None] + places, max(len(self._records) - 1, 0))
        own = (
            np.where(counted, self._records[chosen], 0)
            if len(self._records)
            else np.zeros_like(chosen)
        )
        rows = torch.from_numpy(own + self._starts)
        labels = rows + torch.from_numpy(self._shift) if self._shift.any() else rows
        norms = None if self._norms is None else self._norms[rows].to(self._device)
        return _Table(
            steps.start,
            rows.flatten(1),
            self._labels[labels.flatten(1)].to(self._device),
            torch.from_numpy(counted * self._inverse).to(self._device),
            norms,
            norms is not None and bool((norms <= LARGEST_NORM**2).all()),
        )

    def _gathered(self, table: _Table, index: int) -> _Part:
        rows = table.rows[index]
        if self._room is None:
            self._room = self._features.new_empty(len(rows), *self._features.shape[1:])
        torch.index_select(self._features, 0, rows, out=self._room)
        features = self._inputs(self._room.to(self._device))
        norms = None if table.norms is None else table.norms[index]
        return _Part(features, table.labels[index], table.counts[index], norms, table.within)


class _Sums:
    """Clipped sums of all clients in steps of their grids, layer by layer."""

    def __init__(
        self, chain: Chain, stacks: list[Stack], phases: list[Phase], device: torch.device
    ) -> None:
        self._chain, self._stacks = chain, stacks
        self._clips = torch.tensor(
            [p.clip or 0.0 for p in phases], dtype=torch.float64, device=device
        )[:, None]
        self._rounds = phases[0].noise_multiplier > 0
        self.multipliers = np.array(
            [p.noise_multiplier if self._rounds else math.inf for p in phases]
        )
        self.cut_off = 0  # coordinates of sums that were brought back to the exact integers
        self._minus_one = torch.tensor(-1.0, device=device)
        self._totals, self._more = (
            [stack.like() for stack in stacks],
            [stack.like() for stack in stacks],
        )
        linear = [step for step in chain if isinstance(step, Linear)]
        self._softmax = len(linear) == 1 and all(
            isinstance(step, Linear | nn.Flatten) for step in chain
        )

    def of(self, parts: _Parts, step: int, *, exact: bool) -> list[Stack]:
        """One step's sums as integers (without noise: as they are). ``exact``: no sum can leave the
        exact integers.

        Where one does, parts are added up in double precision, and only their sum is brought to the
        end of the exact integers. A part cut off on its own would hide how its records differ from
        a neighbour's, and all parts together would then differ by more than one record's
        contribution.
        """
        totals = [tensor for stack in self._totals for tensor in stack.tensors()]
        wide: list[
            Tensor
        ] = []  # the sums in double precision, once single precision might not hold them
        reach = 0.0  # no coordinate is larger
        for number in range(parts.count(step)):
            into = self._totals if number == 0 else self._more
            self._add_up(parts.get(step, number), into)
            own = [tensor for stack in into for tensor in stack.tensors()]
            if self._rounds:
                for tensor in own:
                    tensor.round_()
            reach += 0.0 if exact else max(_largest(tensor) for tensor in own)
            if reach > _EXACT and not wide:
                wide = [tensor.double() for tensor in totals]
            if number > 0:
                for whole, part in zip(wide or totals, own, strict=True):
                    whole.add_(part)
        for total, whole in zip(totals, wide, strict=bool(wide)):
            self.cut_off += int((whole.abs() > _EXACT).sum())
            total.copy_(whole.clamp_(-_EXACT, _EXACT))
        return self._totals

    def _add_up(self, part: _Part, into: list[Stack]) -> None:
        """Write each client's sum of clipped per-record gradients over its grid's step."""
        inputs, slopes = self._errors(part) if self._softmax else self._backward(part)
        with torch.no_grad():
            squares, broken = self._norms(part, inputs, slopes)
            factor = clip_factor(squares.sqrt(), self._clips).mul_(part.counts)
            if (
                broken is not None
            ):  # zero times infinity is not zero: such records are taken out, not scaled
                inputs = [a.masked_fill(broken[..., None], 0.0) for a in inputs]
                slopes = [d.masked_fill(broken[..., None], 0.0) for d in slopes]
            weights = factor.to(torch.float32)[..., None]
            for total, a, d in zip(into, inputs, slopes, strict=True):
                weighted = (d * weights).transpose(1, 2).contiguous()
                stacked_product(weighted, a, out=total.weight)
                if total.bias is not None:
                    torch.sum(weighted, 2, out=total.bias)

    def _norms(
        self, part: _Part, inputs: list[Tensor], slopes: list[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Squared norm of every record's gradient, and which records count as zero (None: none of
        them).
        """
        of_records, within = part.norms, part.within
        if of_records is None:
            of_records = squared_norms(part.features.reshape(*part.counts.shape, -1))
            within = bool((of_records <= LARGEST_NORM**2).all())
        squares, of_inputs = None, of_records
        for i, (stack, a, d) in enumerate(zip(self._stacks, inputs, slopes, strict=True)):
            if i > 0 or not self._raw_first:
                of_inputs = squared_norms(a)
                within = within and bool((of_inputs <= LARGEST_INPUT**2).all())
            more = (of_inputs if stack.bias is None else of_inputs + 1.0) * squared_norms(d)
            squares = more if squares is None else squares + more
        assert squares is not None
        if within and bool((squares <= LARGEST_NORM**2).all()):
            return squares, None
        broken = ~(squares <= LARGEST_NORM**2) | ~(of_records <= LARGEST_NORM**2)
        for a in inputs:
            broken |= ~(squared_norms(a) <= LARGEST_INPUT**2)
        return squares, broken

    @property
    def _raw_first(self) -> bool:
        """Whether the first linear layer is given the records themselves."""
        return isinstance(self._chain[0], Linear) or (
            isinstance(self._chain[0], nn.Flatten) and isinstance(self._chain[1], Linear)
        )

    def _errors(self, part: _Part) -> tuple[list[Tensor], list[Tensor]]:
        """One linear layer under cross-entropy: the gradient of its output is softmax - one-hot."""
        (stack,), (clients, width) = self._stacks, part.counts.shape
        x = part.features.reshape(clients, width, -1)
        errors = (
            layer_outputs(stack, x).transpose(1, 2).softmax(dim=1)
        )  # as the product has laid them out
        wanted = part.labels.view(clients, 1, width)
        errors.scatter_add_(1, wanted, self._minus_one.expand(wanted.shape))
        return [x], [errors.transpose(1, 2)]

    def _backward(self, part: _Part) -> tuple[list[Tensor], list[Tensor]]:
        return inputs_and_slopes(
            self._chain, self._stacks, part.features, part.labels, part.counts.shape
        )


def _largest(tensor: Tensor) -> float:
    return max(abs(float(end)) for end in torch.aminmax(tensor))


class _Noise:
    """Each client's noise from its own generator, drawn some steps ahead, as (clients, steps,
    numbers).
    """

    def __init__(self, jobs: list[Job], number: int, like: Tensor) -> None:
        self._rngs = [job.rng.child("noise", number) for job in jobs]
        self._left = jobs[0].phases[number].steps
        self._device, (clients, self._numbers) = like.device, like.shape
        self._ahead = max(1, min(self._left, _AT_ONCE // max(self._numbers, 1)))
        self._drawn = torch.empty(clients * self._ahead * self._numbers)
        self._block: Tensor | None = None
        self._next = 0
        look_ahead(self._rngs, min(self._left * self._numbers, _LOOKED_AHEAD))

    def next(self) -> Tensor:
        """One step's noise, a row a client."""
        if self._block is None or self._next == self._block.shape[1]:
            count, clients = min(self._ahead, self._left), len(self._rngs)
            rows = self._drawn[: clients * count * self._numbers].view(clients, -1)
            self._block = fill_grid_noise(self._rngs, rows).view(clients, count, self._numbers)
            self._next, self._left = 0, self._left - count
        self._next += 1
        return self._block[:, self._next - 1].to(self._device)
