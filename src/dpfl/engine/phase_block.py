"""One phase of a block of clients: what they draw, their settings side by side, their records.

Clients of a block share the shape of a phase: its steps, batch size and sampling, and whether there
is a clip, noise or a ball. The values differ, and are held as columns with one row per client.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpfl.core.grid import Grid
from dpfl.engine.base import Job
from dpfl.engine.stacks import Chain, backward
from dpfl.plugs.sampling import Draw, PoissonBatches, sampler


class PhaseBlock:
    """Phase ``number`` of some jobs, which are computed together.

    ``chain`` is their model as a chain of layers. ``draws`` are the records that each job takes,
    step by step; drawn from the jobs' own generators unless given.

    ``sizes`` are batch sizes, (steps, clients). ``grid_steps`` are the steps of the clients' noise
    grids (1 where there is no noise), and ``rates`` what a sum of gradients in steps of the grid is
    multiplied by, (steps, clients, 1). ``decay`` is the share of the weights that weight decay
    takes off in a step, ``pull`` that of the way from the start that the proximal term takes off,
    ``momentum`` how much of the last step is taken again, and ``balls`` the largest distances from
    the start; None if there are none.
    ``moving`` are the columns of the clients' vectors that the phase moves.
    """

    def __init__(
        self,
        chain: Chain,
        jobs: Sequence[Job],
        number: int,
        device: torch.device,
        draws: Sequence[Draw] | None = None,
    ) -> None:
        self.chain = chain
        self.jobs = jobs
        self.number = number
        self.device = device
        self.phases = [job.phases[number] for job in jobs]
        self.task = jobs[0].task
        records = [sampler(p, len(job.labels)) for p, job in zip(self.phases, jobs, strict=True)]
        self.first = first = self.phases[0]
        rngs = (job.rng.child("records", number) for job in jobs)
        self.draws = draws or [
            r.draw(own, first.steps) for r, own in zip(records, rngs, strict=True)
        ]
        self.sizes = torch.stack([draw.sizes for draw in self.draws], dim=1).numpy()
        self.noisy = first.noise_multiplier > 0
        noises = [phase.noise_multiplier * (phase.clip or 0.0) for phase in self.phases]
        self.grid_steps = np.array([Grid.of(std).step if self.noisy else 1.0 for std in noises])
        denominators = np.maximum(self.sizes, 1).astype(np.float64)
        for i, batches in enumerate(records):
            # That of a clipped Poisson sample is fixed and public.
            if first.clip is not None and isinstance(batches, PoissonBatches):
                denominators[:, i] = batches.expected_size
        rates = np.array([phase.lr for phase in self.phases]) / denominators * self.grid_steps
        self.rates = torch.as_tensor(rates, dtype=torch.float32, device=device)[..., None]
        decay = [phase.weight_decay * phase.lr for phase in self.phases]
        self.decay = self.column(decay) if any(decay) else None
        pull = [phase.proximal * phase.lr for phase in self.phases]
        self.pull = self.column(pull) if any(pull) else None
        momentum = [phase.momentum for phase in self.phases]
        self.momentum = self.column(momentum) if any(momentum) else None
        radii = [phase.ball or math.inf for phase in self.phases]
        self.balls = None if first.ball is None else self.column(radii)
        head = chain.layout.head
        self.moving = {"all": slice(None), "head": head, "body": slice(head.start)}[first.part]

    def column(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        """One number per client, as a column."""
        return torch.as_tensor(values, dtype=dtype, device=self.device)[:, None]


class Part(NamedTuple):
    """Some records of every client, in a table of (clients, width) places.

    ``rows`` says where the features lie, and ``counts`` which places hold a record. The same parts
    of several steps have one more axis in front.
    """

    rows: Tensor
    labels: Tensor
    counts: Tensor


class BlockRecords:
    """All clients' records in one tensor, and where the batches of every step lie in it."""

    def __init__(self, block: PhaseBlock) -> None:
        self._block = block
        self.features, starts = side_by_side([job.features for job in block.jobs])
        self._labels, label_starts = side_by_side([job.labels for job in block.jobs])
        self._live = _live_records(block.jobs)
        self.starts = np.array(starts)[:, None]
        self._label_starts = np.array(label_starts)[:, None]
        # A record more, so that there is one where nothing was drawn.
        self._drawn = torch.cat([*(draw.records for draw in block.draws), torch.zeros(1).long()])
        # Where each client's share of each step begins in what was drawn, which holds one client
        # after the other.
        before = np.concatenate([[0], np.cumsum(block.sizes.sum(axis=0))[:-1]])
        self._begins = before + np.cumsum(block.sizes, axis=0) - block.sizes

    @property
    def has_blanks(self) -> bool:
        """Whether some records do not count."""
        return self._live is not None

    def look_up(self, steps: slice, places: np.ndarray) -> Part:
        """Look up some places of the batches of some steps, for all clients at once.

        A place without a record has the client's first one, and does not count; nor does a blank.
        """
        counted = places < self._block.sizes[steps, :, None]
        chosen = np.where(counted, self._begins[steps, :, None] + places, 0)
        own = np.where(counted, self._drawn.numpy()[chosen], 0)
        if self._live is not None:
            counted = counted & self._live[np.arange(len(self._live))[:, None], own]
        labels = self._labels[torch.from_numpy(own + self._label_starts)]
        rows = torch.from_numpy(own + self.starts)
        device = self._block.device
        return Part(rows, labels.to(device), torch.from_numpy(counted).to(device))

    def gather(self, rows: Tensor) -> Tensor:
        """Gather features as the model takes them, client after client."""
        found = self.features.index_select(0, rows.flatten()).to(self._block.device)
        return self._block.jobs[0].inputs(found)


def _live_records(jobs: Sequence[Job]) -> np.ndarray | None:
    """Which records of each job count, (jobs, records of the largest); None where all do."""
    if all(job.live is None for job in jobs):
        return None
    live = np.ones((len(jobs), max(len(job.labels) for job in jobs)), dtype=bool)
    for row, job in zip(live, jobs, strict=True):
        if job.live is not None:
            row[: len(job.live)] = job.live.numpy()
    return live


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


def plain_sums(block: PhaseBlock, vectors: Tensor) -> Iterator[Tensor]:
    """Each client's sum of per-record gradients, step by step of plain SGD.

    ``vectors`` are the clients' weights; they are read, and moved by the caller. The sums are
    written anew at every step.
    """
    records = BlockRecords(block)
    totals = torch.empty_like(vectors)
    stacks = block.chain.stacks(vectors)
    into = block.chain.stacks(totals)
    for step, width in enumerate(block.sizes.max(axis=1)):
        rows, labels, counts = (
            x[0] for x in records.look_up(slice(step, step + 1), np.arange(width))
        )
        if width == 0:
            totals.zero_()
        else:
            given = records.gather(rows), labels.flatten(0, 1), rows.shape
            found = backward(block.chain, stacks, *given, block.task)
            with torch.no_grad():
                # What does not count must not be multiplied by zero if it is not finite.
                broken = ~counts & ~torch.isfinite(found.slopes[-1]).all(dim=-1)
                broken = ~counts if records.has_blanks else broken
                found.without(broken).add_up([counts.to(torch.float32)] * len(into), into)
        yield totals
