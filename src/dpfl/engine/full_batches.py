"""Full batches: clipped gradients of all of a client's records, added up in double precision.

A model whose only trainable layer is a last linear one, behind public maps, needs no
differentiation: with a the layer's input and d the gradient of its output (softmax - one-hot), a
record's gradient is the outer product d a^T, of norm |d| |a|, and the clipped sum is one product of
two matrices. The inputs of that layer change only when the maps do, and are kept between rounds.
Any other model is differentiated record by record.

*Formal guarantees.* Clip factors and the sum are in double precision, where a product of numbers of
single precision is exact or rounded once: the sum differs from the exact one by no more than what
:class:`dpfl.plugs.sampling.FullBatches` charges. It is rounded onto the grid once.
"""

import hashlib
from dataclasses import replace

import torch
from torch import Tensor, nn

from dpfl.core.layout import Layout, trainable
from dpfl.core.phases import Clipping
from dpfl.data.inputs import NUMBERS
from dpfl.engine.base import Batch, Job, clips_records, mixing_of
from dpfl.engine.one_by_one import OneByOne
from dpfl.models.checks import in_mode
from dpfl.models.outputs import outputs_of
from dpfl.models.separation import structure
from dpfl.numerics.clipping import (
    LARGEST_INPUT,
    LARGEST_NORM,
    clip_factor,
    layer_factors,
    squared_norms,
)

_AT_ONCE = 2048  # records that pass through the public maps together
_MOST_KEPT = 1 << 29  # numbers of inputs that are kept between rounds


class FullBatches(OneByOne):
    """Runs phases that take all records in every step, fast where a last linear layer learns."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self._kept: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def _run_phase(
        self, model: nn.Module, layout: Layout, job: Job, number: int, start: Tensor
    ) -> Tensor:
        """Run a phase; the inputs of a last layer that learns alone stand for the records."""
        maps = public_maps(model, layout)
        apart = not clips_records(job) or mixing_of(model, [job]) is None
        if apart and maps is not None and job.task.softmax and job.task.plain:
            assert isinstance(model, nn.Sequential)
            job = replace(job, features=self._inputs(maps, job), inputs=NUMBERS)
            model = model[-1]
        return super()._run_phase(model, layout, job, number, start)

    def _inputs(self, maps: nn.Module, job: Job) -> Tensor:
        """The last layer's inputs of all records, computed once for these records and maps."""
        place = job.features.untyped_storage().data_ptr(), job.features.storage_offset()
        key = (*place, tuple(job.features.shape), repr(job.inputs), _digest(maps))
        if key not in self._kept:
            if sum(kept.numel() for _, kept in self._kept.values()) > _MOST_KEPT:
                self._kept.clear()
            parts = torch.split(job.features, _AT_ONCE)
            with torch.no_grad(), in_mode(maps, training=False):
                found = [outputs_of(maps, {}, job.inputs(part.to(self.device))) for part in parts]
            # The records are held, too: another storage must not come to have this address.
            self._kept[key] = job.features, torch.cat(found)
        return self._kept[key][1]

    def clipped_sum(
        self,
        model: nn.Module,
        layout: Layout,
        vector: Tensor,
        batch: Batch,
        clip: float,
        clipping: Clipping = "flat",
    ) -> Tensor:
        """Sum in double precision of per-record gradients, each of norm at most ``clip``."""
        if not _is_head(model, batch):
            return super().clipped_sum(model, layout, vector, batch, clip, clipping)
        inputs, slopes, squares = _outer_products(layout, vector, batch)
        factors = layer_factors({"": squares}, squares, clip, clipping, 1)[""]
        return _added_up(slopes * factors[:, None], inputs, len(layout.blocks) > 1)

    def clipped_mean(
        self, model: nn.Module, layout: Layout, vector: Tensor, batch: Batch, clip: float
    ) -> Tensor:
        """Mean gradient of all records in double precision, of norm at most ``clip``."""
        if not _is_head(model, batch):
            return super().clipped_mean(model, layout, vector, batch, clip)
        inputs, slopes, _ = _outer_products(layout, vector, batch)
        mean = _added_up(slopes, inputs, len(layout.blocks) > 1) / max(1, len(batch.labels))
        return mean * clip_factor(torch.linalg.vector_norm(mean), clip)


def public_maps(model: nn.Module, layout: Layout) -> nn.Module | None:
    """What comes before a last linear layer that learns alone; None for any other model."""
    if not isinstance(model, nn.Sequential) or type(model[-1]) is not nn.Linear:
        return None
    *maps, last = model
    learned = {id(one) for one in trainable(model).values()}
    alone = learned == {id(one) for one in last.parameters()} and len(layout.layers) == 1
    return nn.Sequential(*maps) if alone else None


def _is_head(model: nn.Module, batch: Batch) -> bool:
    """Whether gradients are outer products of inputs and softmax - one-hot."""
    plain = type(model) is nn.Linear and batch.task.softmax and batch.task.plain
    return plain and structure(model, batch.task, NUMBERS) is None


def _digest(maps: nn.Module) -> bytes:
    """Name maps by their constants, which releases before round one change."""
    digest = hashlib.blake2b(repr(maps).encode())
    for tensor in (*maps.buffers(), *maps.parameters()):
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.digest()


def _outer_products(layout: Layout, vector: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and output gradients (in double precision) of every record, and the squared norms of
    their outer products; a blank counts as zero, and so does a record that is not finite, or too
    large.
    """
    inputs, weight, *bias = (batch.features, *layout.unflatten(vector).values())
    outputs = nn.functional.linear(inputs, weight, *bias)
    slopes = outputs.softmax(dim=1)
    slopes -= nn.functional.one_hot(batch.labels, slopes.shape[1])
    squares = squared_norms(inputs) + len(bias)
    whole = squares * squared_norms(slopes)
    good = (squares <= LARGEST_INPUT**2) & (whole <= LARGEST_NORM**2)  # False for NaN
    good = good if batch.live is None else good & batch.live
    if not bool(good.all()):
        inputs, slopes = (torch.where(good[:, None], x, 0.0) for x in (inputs, slopes))
        whole = torch.where(good, whole, 0.0)
    return inputs, slopes.double(), whole


def _added_up(slopes: Tensor, inputs: Tensor, bias: bool) -> Tensor:
    """The sum of the records' outer products as a flat vector, behind it that of the slopes."""
    total = (slopes.T @ inputs.double()).flatten()
    return torch.cat([total, slopes.sum(dim=0)]) if bias else total
