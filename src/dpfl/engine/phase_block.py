"""One phase of a block of clients: what they draw, their settings side by side, their records.

Clients of a block share the shape of a phase: its steps, batch size and sampling, and whether there
is a clip, noise or a ball. The values differ, and are held as columns with one row per client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from dpfl.core.grid import Grid
from dpfl.core.types import Phase
from dpfl.engine.base import Batch, Job
from dpfl.engine.stacks import Chain, Stack, backward
from dpfl.plugs.sampling import Draw, PoissonBatches, sampler


@dataclass(frozen=True)
class PhaseBlock:
    """Phase ``number`` of some jobs, which are computed together.

    ``chain`` is their model as a chain of layers. ``draws`` are the records that each job takes,
    step by step. Everything else is derived from these, once.
    """

    chain: Chain
    jobs: Sequence[Job]
    number: int
    device: torch.device
    draws: Sequence[Draw]

    @classmethod
    def drawn(
        cls, chain: Chain, jobs: Sequence[Job], number: int, device: torch.device
    ) -> PhaseBlock:
        """Draw every client's records from its own generator."""
        draws = []
        for job in jobs:
            phase, rng = job.phases[number], job.rng.child("records", number)
            draws.append(sampler(phase, len(job.labels)).draw(rng, phase.steps))
        return cls(chain, jobs, number, device, draws)

    @cached_property
    def phases(self) -> list[Phase]:
        """The clients' phases."""
        return [job.phases[self.number] for job in self.jobs]

    @property
    def noisy(self) -> bool:
        """Whether noise is added to the sums."""
        return self.phases[0].noise_multiplier > 0

    @cached_property
    def sizes(self) -> np.ndarray:
        """Batch sizes, (steps, clients)."""
        return torch.stack([draw.sizes for draw in self.draws], dim=1).numpy()

    def column(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        """One number per client, as a column."""
        return torch.as_tensor(values, dtype=dtype, device=self.device)[:, None]

    @cached_property
    def grid_steps(self) -> np.ndarray:
        """The step of each client's noise grid; 1 where there is no noise."""
        noises = [phase.noise_multiplier * (phase.clip or 0.0) for phase in self.phases]
        return np.array([Grid.of(std).step if self.noisy else 1.0 for std in noises])

    @cached_property
    def rates(self) -> Tensor:
        """What a sum of gradients (in steps of the grid) is multiplied by, (steps, clients, 1).

        The denominator of a clipped Poisson sample is fixed and public. Elsewhere it is the batch's
        own size.
        """
        fixed = [0.0] * len(self.jobs)
        for i, (phase, job) in enumerate(zip(self.phases, self.jobs, strict=True)):
            records = sampler(phase, len(job.labels))
            if phase.clip is not None and isinstance(records, PoissonBatches):
                fixed[i] = records.expected_size
        denominators = np.where(np.array(fixed) > 0, fixed, np.maximum(self.sizes, 1))
        rates = np.array([phase.lr for phase in self.phases]) / denominators * self.grid_steps
        return torch.as_tensor(rates, dtype=torch.float32, device=self.device)[..., None]

    @cached_property
    def decay(self) -> Tensor | None:
        """The share of the weights that weight decay takes off in a step, if it takes any."""
        decay = [phase.weight_decay * phase.lr for phase in self.phases]
        return self.column(decay) if any(phase.weight_decay for phase in self.phases) else None

    @cached_property
    def balls(self) -> Tensor | None:
        """The largest distances from the start, if there are any."""
        radii = [phase.ball or math.inf for phase in self.phases]
        return None if self.phases[0].ball is None else self.column(radii)


class BlockRecords:
    """All clients' records in one tensor, and where the batches of every step lie in it."""

    def __init__(self, block: PhaseBlock) -> None:
        self.features, starts = side_by_side([job.features for job in block.jobs])
        self.labels, label_starts = side_by_side([job.labels for job in block.jobs])
        self.starts = np.array(starts)[:, None]
        self.drawn = torch.cat([draw.records for draw in block.draws]).numpy()
        self._sizes = block.sizes
        self._shift = np.array(label_starts)[:, None] - self.starts
        # Where each client's share of each step begins in ``drawn``, which holds one client after
        # the other.
        before = np.concatenate([[0], np.cumsum(block.sizes.sum(axis=0))[:-1]])
        self._begins = before + np.cumsum(block.sizes, axis=0) - block.sizes

    def look_up(self, steps: slice, places: np.ndarray) -> tuple[Tensor, Tensor, np.ndarray]:
        """Look up some places of the batches of some steps, for all clients at once.

        Returns the rows of the features and of the labels, and which of them count, all (steps,
        clients, places). A place without a record has the client's first one, and does not count.
        """
        counted = places < self._sizes[steps, :, None]
        chosen = np.minimum(self._begins[steps, :, None] + places, max(len(self.drawn) - 1, 0))
        own = np.where(counted, self.drawn[chosen], 0) if len(self.drawn) else chosen * 0
        rows = torch.from_numpy(own + self.starts)
        return rows, rows + torch.from_numpy(self._shift) if self._shift.any() else rows, counted


def side_by_side(tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """One tensor that holds all clients' rows, and each client's first row.

    Nothing is copied where the tensors are stretches of one storage.
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
        return torch.cat(list(tensors)), [0, *accumulate(len(t) for t in tensors[:-1])]
    origin = min(t.storage_offset() for t in tensors)
    starts = [(t.storage_offset() - origin) // row for t in tensors]
    height = max(start + len(t) for start, t in zip(starts, tensors, strict=True))
    return first.as_strided((height, *first.shape[1:]), first.stride(), origin), starts


class PlainSums:
    """Each client's sum of per-record gradients in a step of plain SGD.

    ``stacks`` are the clients' weights; they are read, and moved by the caller.
    """

    def __init__(self, block: PhaseBlock, stacks: list[Stack]) -> None:
        self._block, self._stacks = block, stacks
        self._records = BlockRecords(block)
        self._totals = [stack.like() for stack in stacks]

    def of(self, step: int) -> list[Stack]:
        """The sums of one step: one forward, one backward.

        The stacks returned are written anew at every step.
        """
        places = np.arange(self._block.sizes[step].max())
        rows, label_rows, counted = self._records.look_up(slice(step, step + 1), places)
        if len(places) == 0:
            for tensor in (tensor for total in self._totals for tensor in total.tensors):
                tensor.zero_()
            return self._totals
        batch = self._batch(rows.flatten(), label_rows.flatten())
        counts = torch.from_numpy(counted[0]).to(self._block.device)
        found = backward(self._block.chain, self._stacks, *batch, counts.shape)
        with torch.no_grad():
            # What does not count must not be multiplied by zero if it is not finite.
            broken = ~counts & ~torch.isfinite(found.slopes[-1]).all(dim=-1)
            found = found.without(broken) if bool(broken.any()) else found
            found.add_up(counts.to(torch.float32), self._totals)
        return self._totals

    def _batch(self, rows: Tensor, label_rows: Tensor) -> Batch:
        """Gather records, client after client."""
        device, inputs = self._block.device, self._block.jobs[0].inputs
        features = inputs(self._records.features.index_select(0, rows).to(device))
        return Batch(features, self._records.labels.index_select(0, label_rows).to(device))
