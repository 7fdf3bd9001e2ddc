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

import math
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from dpfl.core.grid import LARGEST_SUM, part_width
from dpfl.core.grid_noise import SCALE
from dpfl.core.random import fill_grid_noise, look_ahead
from dpfl.engine.phase_block import BlockRecords, Part, PhaseBlock
from dpfl.engine.stacks import Slopes, Stack, backward, layer_outputs
from dpfl.numerics.clipping import LARGEST_INPUT, LARGEST_NORM, layer_factors, squared_norms

_NOISE_AT_ONCE = 1 << 15  # values of one client: all clients' together should stay in the cache
_NOISE_AHEAD = 1 << 22  # values of one client whose rare ones are found beforehand, in memory
_STEPS_AHEAD = 128  # steps whose records are looked up at once
_EXACT = 1 << 24  # integers up to here are exact in single precision


class ClippedSums:
    """Each client's sum of clipped per-record gradients, step by step, in steps of its grid.

    ``vectors`` are the clients' weights; they are read, and moved by the caller. ``width`` is how
    many records a part holds.
    """

    def __init__(self, block: PhaseBlock, vectors: Tensor) -> None:
        self._block, self._records = block, BlockRecords(block)
        self.width = part_width(block.first.batch_size)
        self._stacks = block.chain.stacks(vectors)
        rooms = torch.empty_like(vectors), torch.empty_like(vectors)
        self._rooms = [(room, block.chain.stacks(room)) for room in rooms]
        self._clips = block.column([p.clip or 0.0 for p in block.phases], torch.float64)
        self._inverse = block.column((1 / block.grid_steps).tolist(), torch.float64)
        # Whether the first linear layer is given the records themselves.
        first = next(step for step in block.chain.steps if not isinstance(step, nn.Flatten))
        self._raw_first = isinstance(first, nn.Linear)
        often = block.sizes.sum() >= sum(len(job.labels) for job in block.jobs)
        self._norms = self._all_norms() if often else None

    def _all_norms(self) -> Tensor:
        """Squared norms of all records, where that is less work than those of every step."""
        norms = torch.zeros(len(self._records.features), dtype=torch.float64)
        for job, start in zip(self._block.jobs, self._records.starts[:, 0], strict=True):
            some = [job.inputs(part).flatten(1) for part in torch.split(job.features, 1024)]
            norms[start : start + len(job.features)] = torch.cat([*map(squared_norms, some)])
        return norms

    def parts(self) -> Iterator[list[Part]]:
        """The records of every step, in parts of one fixed shape.

        The first parts of many steps are looked up at once; few steps have more.
        """
        places = np.arange(self.width)
        most = self._block.sizes.max(axis=1)
        for begin in range(0, len(most), _STEPS_AHEAD):
            ahead = self._records.look_up(slice(begin, begin + _STEPS_AHEAD), places)
            for step, part in enumerate(zip(*ahead, strict=True), begin):
                own = slice(step, step + 1)
                others = range(self.width, most[step], self.width)
                more = (self._records.look_up(own, places + other) for other in others)
                yield [Part(*part), *(Part(*(x[0] for x in found)) for found in more)]

    def __iter__(self) -> Iterator[Tensor]:
        """One step's sums after the other, as integers (without noise: as they are).

        Where a sum leaves the exact integers, parts are added up in double precision, and only
        their sum is brought to the end of the exact integers. A part cut off on its own would hide
        how its records differ from a neighbour's, and all parts together would then differ by more
        than one record's contribution. Sums that leave the client stay in double precision, and are
        cut off at ``LARGEST_SUM``.
        """
        block = self._block
        totals = self._rooms[0][0]
        cut_off = False
        leaves = block.first.sum_only
        most_held = LARGEST_SUM if block.first.sum_only else _EXACT
        multipliers = [p.noise_multiplier if block.noisy else math.inf for p in block.phases]
        # How large a sum may become in each step.
        largest = (block.sizes / np.array(multipliers)).max(axis=1) * SCALE
        for parts, most in zip(self.parts(), largest, strict=True):
            reach = 0.0
            wide = None  # wide: the sums in double precision
            for number, part in enumerate(parts):
                own, stacks = self._rooms[min(number, 1)]
                self._add_up(part, stacks)
                if block.noisy:
                    own.round_()
                if most >= _EXACT:
                    reach += max(abs(float(end)) for end in torch.aminmax(own))
                if (leaves or reach > _EXACT) and wide is None:
                    wide = totals.double()
                if number:
                    (totals if wide is None else wide).add_(own)
            if wide is not None:
                cut_off |= bool((wide.abs() > most_held).any())
                wide.clamp_(-most_held, most_held)
            yield (
                wide
                if leaves and wide is not None
                else totals
                if wide is None
                else totals.copy_(wide)
            )
        if cut_off:
            warnings.warn(
                f"clipped sums were cut off at {most_held // SCALE} standard deviations of noise; "
                "privacy holds, but use smaller batches (that this happened is private: it must "
                "not leave this machine)",
                RuntimeWarning,
                stacklevel=3,
            )

    def _add_up(self, part: Part, into: list[Stack]) -> None:
        """Write each client's sum of clipped per-record gradients over its grid's step."""
        with torch.no_grad():
            found, parts, broken = self.gradients(part)
            whole = sum(parts[1:], parts[0])
            how = self._block.first.clipping
            named = {str(i): own for i, own in enumerate(parts)}
            factors = layer_factors(named, whole, self._clips, how, len(parts))
            counted = self._inverse * part.counts
            # One factor for all layers is multiplied once.
            each = {id(one): (one * counted).to(torch.float32) for one in factors.values()}
            weights = [each[id(one)] for one in factors.values()]
            found.without(broken).add_up(weights, into)

    def gradients(self, part: Part) -> tuple[Slopes, list[Tensor], Tensor]:
        """What a part's per-record gradients are made of, their squared norms by layer, and the
        broken ones.

        A record counts as zero if it, its gradient or the input of a layer is too large or not
        finite.
        """
        features = self._records.gather(part.rows)
        if self._norms is None:
            squares = squared_norms(features.reshape(*part.rows.shape, -1))
        else:
            squares = self._norms[part.rows].to(self._block.device)
        broken = ~(squares <= LARGEST_NORM**2)
        found = self._slopes(part, features)
        if self._records.has_blanks:
            broken |= ~part.counts
        terms = []
        layers = zip(self._stacks, found.inputs, found.slopes, strict=True)
        for i, (stack, a, d) in enumerate(layers):
            if i > 0 or not self._raw_first:
                squares = squared_norms(a)
                broken |= ~(squares <= LARGEST_INPUT**2)
            terms.append((squares if stack.bias is None else squares + 1.0) * squared_norms(d))
        whole = sum(terms[1:], terms[0])
        return found, terms, broken | ~(whole <= LARGEST_NORM**2)

    def _slopes(self, part: Part, features: Tensor) -> Slopes:
        """Inputs and output gradients of every layer.

        One linear layer under cross-entropy needs no backward: the gradient of its output is
        softmax - one-hot.
        """
        chain = self._block.chain
        shape = part.rows.shape
        task = self._block.task
        if not (chain.one_layer and task.softmax):
            labels = part.labels.flatten(0, 1)
            with torch.enable_grad():
                return backward(chain, self._stacks, features, labels, shape, task)
        x = features.reshape(*shape, -1)
        outputs = layer_outputs(self._stacks[0], x)
        errors = outputs.transpose(1, 2).softmax(dim=1)  # as the product has laid them out
        wanted = part.labels[:, None]
        errors.scatter_add_(1, wanted, errors.new_full(wanted.shape, -1.0))
        return Slopes([x], [errors.transpose(1, 2)])


def step_noise(block: PhaseBlock, numbers: int) -> Iterator[Tensor]:
    """Each client's noise from its own generator, one row per client, step by step.

    ``numbers`` is the size of the model. Noise is made of integers, steps of the client's grid, and
    drawn some steps ahead.
    """
    rngs = [job.rng.child("noise", block.number) for job in block.jobs]
    steps = len(block.sizes)
    ahead = max(1, min(steps, _NOISE_AT_ONCE // numbers))
    room = torch.empty(len(rngs) * ahead * numbers)
    look_ahead(rngs, min(steps * numbers, _NOISE_AHEAD))
    for first in range(0, steps, ahead):
        count = min(ahead, steps - first)
        rows = room[: len(rngs) * count * numbers].view(len(rngs), -1)
        for drawn in fill_grid_noise(rngs, rows).view(len(rngs), count, numbers).unbind(1):
            yield drawn.to(block.device)
