"""DP-SGD of many clients at once: clipped sums on the grid of their noise.

For a linear layer with input a and output gradient d (of one record), the gradient of the weight is
the outer product d a^T, so its squared norm is |a|^2 |d|^2 and a weighted sum over records is one
matrix product. One forward and one backward give a and d of every layer; per-record norms, clip
factors and the clipped sum follow from them.

Every step, for every client with noise std s = noise_multiplier x clip and grid step g = s / SCALE,
where X are integers drawn by the client's generator and a part holds at most SUMMANDS records::

    q = sum over parts of round(sum of (clip factor / g) x gradient)
    weights <- weights - (lr g / expected batch) (q + X)

*Formal guarantees.* A record's contribution is a function of the record and of the weights alone:
every part has the same shape whatever was drawn (records that are missing are zero), and a record's
place in it does not change a bit (``tests/engine/test_private_stacks.py``). q + X is one correctly
rounded addition of two exact integers.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dpfl.core.grid import part_width
from dpfl.core.grid_noise import SCALE
from dpfl.core.random import fill_grid_noise, look_ahead
from dpfl.engine.phase_block import BlockRecords, PhaseBlock
from dpfl.engine.stacks import Linear, Slopes, Stack, backward, layer_outputs
from dpfl.numerics.clipping import LARGEST_INPUT, LARGEST_NORM, clip_factor, squared_norms

_NOISE_AT_ONCE = 1 << 15  # values of one client: all clients' together should stay in the cache
_NOISE_AHEAD = 1 << 22  # values of one client whose rare ones are found beforehand, in memory
_STEPS_AHEAD = 128  # steps whose records are looked up at once
_EXACT = 1 << 24  # integers up to here are exact in single precision


@dataclass(frozen=True)
class Part:
    """Some records of every client, in a table of (clients, width) places.

    ``rows`` says where the features lie. ``counts`` is zero where a place holds no record, and one
    over the step of the client's grid elsewhere. ``norms`` are squared norms of records, where they
    are known; ``within`` says that all of them are within bounds. The same parts of several steps
    have one more axis in front.
    """

    rows: Tensor
    labels: Tensor
    counts: Tensor
    norms: Tensor | None
    within: bool

    def at(self, step: int) -> Part:
        """One step of several."""
        norms = None if self.norms is None else self.norms[step]
        return Part(self.rows[step], self.labels[step], self.counts[step], norms, self.within)


class Parts:
    """The records of every step, in parts of one fixed shape.

    Records of many steps are looked up at once: what a step then costs is gathering its features.
    """

    def __init__(self, block: PhaseBlock) -> None:
        self.width = part_width(block.phases[0].batch_size)
        self._block, self._records = block, BlockRecords(block)
        self._inverse = 1 / block.grid_steps[:, None]
        often = len(self._records.drawn) >= sum(len(job.labels) for job in block.jobs)
        self._norms = self._all_norms() if often else None
        self._ahead: tuple[range, Part] | None = None
        self._gathered: Tensor | None = None  # room for one part after the other

    def _all_norms(self) -> Tensor:
        """Squared norms of all records, where that is less work than those of every step."""
        norms = torch.zeros(len(self._records.features), dtype=torch.float64)
        starts = self._records.starts[:, 0].tolist()
        for job, start in zip(self._block.jobs, starts, strict=True):
            for first in range(0, len(job.features), 1024):
                some = job.inputs(job.features[first : first + 1024]).flatten(1)
                norms[start + first : start + first + len(some)] = squared_norms(some)
        return norms

    def count(self, step: int) -> int:
        """How many parts this step's records make."""
        return max(1, math.ceil(int(self._block.sizes[step].max()) / self.width))

    def get(self, step: int, number: int) -> Part:
        """Part ``number`` of a step."""
        if number > 0:  # few steps have more than one
            return self._look_up(slice(step, step + 1), number).at(0)
        if self._ahead is None or step not in self._ahead[0]:
            steps = range(step, step + _STEPS_AHEAD)
            self._ahead = steps, self._look_up(slice(steps.start, steps.stop), 0)
        return self._ahead[1].at(step - self._ahead[0].start)

    def _look_up(self, steps: slice, number: int) -> Part:
        places, device = np.arange(self.width) + number * self.width, self._block.device
        rows, label_rows, counted = self._records.look_up(steps, places)
        labels = self._records.labels[label_rows.flatten(1)].to(device)
        counts = torch.from_numpy(counted * self._inverse).to(device)
        norms = None if self._norms is None else self._norms[rows].to(device)
        within = norms is not None and bool((norms <= LARGEST_NORM**2).all())
        return Part(rows.flatten(1), labels, counts, norms, within)

    def features(self, part: Part) -> Tensor:
        """Gather a part's features as the model takes them; valid until the next call."""
        if self._gathered is None:
            stored = self._records.features
            self._gathered = stored.new_empty(len(part.rows), *stored.shape[1:])
        torch.index_select(self._records.features, 0, part.rows, out=self._gathered)
        return self._block.jobs[0].inputs(self._gathered.to(self._block.device))


class ClippedSums:
    """Each client's sum of clipped per-record gradients in a step, in steps of its grid.

    ``stacks`` are the clients' weights; they are read, and moved by the caller.
    """

    def __init__(self, block: PhaseBlock, stacks: list[Stack]) -> None:
        self._chain, self._stacks, self._rounds = block.chain, stacks, block.noisy
        self.parts = Parts(block)
        self._clips = block.column([p.clip or 0.0 for p in block.phases], torch.float64)
        multipliers = [p.noise_multiplier if block.noisy else math.inf for p in block.phases]
        # Steps in which no sum can leave the exact integers.
        largest = (block.sizes / np.array(multipliers)).max(axis=1, initial=0.0) * SCALE
        self._exact: list[bool] = (largest < _EXACT).tolist()
        self._cut_off = 0  # coordinates of sums that were brought back to the exact integers
        self._minus_one = torch.tensor(-1.0, device=block.device)
        self._totals, self._more = ([stack.like() for stack in stacks] for _ in range(2))
        flat = all(isinstance(step, Linear | nn.Flatten) for step in block.chain)
        self._softmax = flat and len(stacks) == 1
        # Whether the first linear layer is given the records themselves.
        first = next(step for step in block.chain if not isinstance(step, nn.Flatten))
        self._raw_first = isinstance(first, Linear)

    def of(self, step: int) -> list[Stack]:
        """One step's sums as integers (without noise: as they are).

        Where a sum leaves the exact integers, parts are added up in double precision, and only
        their sum is brought to the end of the exact integers. A part cut off on its own would hide
        how its records differ from a neighbour's, and all parts together would then differ by more
        than one record's contribution.
        """
        totals = [tensor for stack in self._totals for tensor in stack.tensors]
        wide: list[Tensor] = []  # the sums in double precision, where single may not hold them
        reach = 0.0  # no coordinate is larger
        for number in range(self.parts.count(step)):
            into = self._totals if number == 0 else self._more
            self._add_up(self.parts.get(step, number), into)
            own = [tensor for stack in into for tensor in stack.tensors]
            if self._rounds:
                for tensor in own:
                    tensor.round_()
            reach += 0.0 if self._exact[step] else max(map(_largest, own))
            if reach > _EXACT and not wide:
                wide = [tensor.double() for tensor in totals]
            if number > 0:
                for whole, part in zip(wide or totals, own, strict=True):
                    whole.add_(part)
        for total, whole in zip(totals, wide, strict=bool(wide)):
            self._cut_off += int((whole.abs() > _EXACT).sum())
            total.copy_(whole.clamp_(-_EXACT, _EXACT))
        return self._totals

    def warn(self) -> None:
        """Warn where sums had to be cut off."""
        if self._cut_off:
            warnings.warn(
                f"{self._cut_off} coordinate(s) of clipped sums were cut off at {_EXACT // SCALE} "
                "standard deviations of noise; privacy holds, but use smaller batches (this count "
                "is private: it must not leave this machine)",
                RuntimeWarning,
                stacklevel=3,
            )

    def _add_up(self, part: Part, into: list[Stack]) -> None:
        """Write each client's sum of clipped per-record gradients over its grid's step."""
        features = self.parts.features(part)
        found = self.slopes(part, features)
        with torch.no_grad():
            squares, broken = self.norms(part, features, found)
            factor = clip_factor(squares.sqrt(), self._clips).mul_(part.counts)
            found = found if broken is None else found.without(broken)
            found.add_up(factor.to(torch.float32), into)

    def slopes(self, part: Part, features: Tensor) -> Slopes:
        """Inputs and output gradients of every layer.

        One linear layer under cross-entropy needs no backward: the gradient of its output is
        softmax - one-hot.
        """
        if not self._softmax:
            return backward(self._chain, self._stacks, features, part.labels, part.counts.shape)
        clients, width = part.counts.shape
        x = features.reshape(clients, width, -1)
        outputs = layer_outputs(self._stacks[0], x)
        errors = outputs.transpose(1, 2).softmax(dim=1)  # as the product has laid them out
        wanted = part.labels.view(clients, 1, width)
        errors.scatter_add_(1, wanted, self._minus_one.expand(wanted.shape))
        return Slopes([x], [errors.transpose(1, 2)])

    def norms(self, part: Part, features: Tensor, found: Slopes) -> tuple[Tensor, Tensor | None]:
        """Squared norm of every record's gradient, and which records count as zero (None: none).

        A record counts as zero if it, its gradient or the input of a layer is too large or not
        finite.
        """
        of_records, within = part.norms, part.within
        if of_records is None:
            of_records = squared_norms(features.reshape(*part.counts.shape, -1))
            within = bool((of_records <= LARGEST_NORM**2).all())
        squares: Tensor | None = None
        for i, (stack, a, d) in enumerate(
            zip(self._stacks, found.inputs, found.slopes, strict=True)
        ):
            of_inputs = of_records
            if i > 0 or not self._raw_first:
                of_inputs = squared_norms(a)
                within = within and bool((of_inputs <= LARGEST_INPUT**2).all())
            more = (of_inputs if stack.bias is None else of_inputs + 1.0) * squared_norms(d)
            squares = more if squares is None else squares + more
        assert squares is not None
        if within and bool((squares <= LARGEST_NORM**2).all()):
            return squares, None
        broken = ~(squares <= LARGEST_NORM**2) | ~(of_records <= LARGEST_NORM**2)
        for a in found.inputs:
            broken |= ~(squared_norms(a) <= LARGEST_INPUT**2)
        return squares, broken


def _largest(tensor: Tensor) -> float:
    return max(abs(float(end)) for end in torch.aminmax(tensor))


class StepNoise:
    """Each client's noise from its own generator, drawn some steps ahead.

    ``numbers`` is the size of the model. Noise is made of integers: steps of the client's grid.
    """

    def __init__(self, block: PhaseBlock, numbers: int) -> None:
        self._rngs = [job.rng.child("noise", block.number) for job in block.jobs]
        self._left, self._device, self._numbers = block.phases[0].steps, block.device, numbers
        self._ahead = max(1, min(self._left, _NOISE_AT_ONCE // max(numbers, 1)))
        self._drawn = torch.empty(len(self._rngs) * self._ahead * numbers)
        self._steps: list[Tensor] = []
        look_ahead(self._rngs, min(self._left * numbers, _NOISE_AHEAD))

    def next(self) -> Tensor:
        """One step's noise, one row per client, in steps of the clients' grids."""
        if not self._steps:
            count, clients = min(self._ahead, self._left), len(self._rngs)
            rows = self._drawn[: clients * count * self._numbers].view(clients, -1)
            drawn = fill_grid_noise(self._rngs, rows).view(clients, count, self._numbers)
            self._steps, self._left = list(drawn.unbind(1))[::-1], self._left - count
        return self._steps.pop().to(self._device)
