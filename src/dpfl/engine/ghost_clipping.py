"""Clipped per-record gradients of a whole model in one forward and one backward.

Known as ghost clipping: per-record norms and clipped sums follow from the rules of the layers
(:mod:`dpfl.engine.layer_rules`), and per-record gradients are never held all at once.

*Formal guarantees.* The sum returned is over per-record gradients of norm at most ``clip`` each,
provided that the model keeps records apart: the engine asks :mod:`dpfl.models.separation`, and
computes any other model record by record. The uses of a shared parameter count as one gradient.
What the rules do not cover is noticed and refused (most layers called twice, an output changed in
place); per-record gradients are then written out. Before a model is computed this way at all, it is
tried on made-up records against the slow path (:func:`records_at_once`).
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from dpfl.core.layout import Layout
from dpfl.core.phases import Clipping
from dpfl.core.random import PublicSeed
from dpfl.engine.base import Batch, Job, batches_of
from dpfl.engine.coverage import learned
from dpfl.engine.layer_rules import LayerGradient, added
from dpfl.engine.one_by_one import OneByOne
from dpfl.engine.trace import NotCovered, Trace, TracedLayers, channels_last
from dpfl.models.checks import in_mode, outputs_of
from dpfl.numerics.clipping import LARGEST_NORM, layer_factors

MICRO_BATCH = 256
_AGREEMENT = 3e-2  # deep networks round that differently; a use left out of a tensor costs more
_NOTHING = 1e-5  # of a record's clip: gradients that are zero but for rounding
_SMALL_CLIP = 1e-6
_MOST_NUMBERS = 1 << 27  # float32 numbers held for one micro-batch

Shape = tuple[int, ...]


def clipped_sum(
    model: nn.Module,
    layout: Layout,
    vector: Tensor,
    batch: Batch,
    clip: float,
    clipping: Clipping = "flat",
    layers: TracedLayers | None = None,
) -> Tensor:
    """Sum in double precision of per-record gradients, each of norm at most ``clip``.

    A record whose gradient is not finite counts as zero. ``layers`` are those of the model, where
    they are known.
    """
    total = torch.zeros_like(vector, dtype=torch.float64)
    if len(batch.labels) == 0:
        return total
    trace = Trace(layers or TracedLayers(model), len(batch.labels))
    with trace.record(), torch.enable_grad():
        laid_out = batch._replace(features=channels_last(batch.features))
        weights = {name: channels_last(one) for name, one in layout.unflatten(vector).items()}
        loss = laid_out.losses(model, weights).sum()
        slopes = torch.autograd.grad(loss, trace.wanted(), allow_unused=True)
    with torch.no_grad():
        gradients, squares = trace.gradients(slopes)
        # Whatever is not finite in an input or an output gradient shows in the squares.
        broken = ~((squares <= LARGEST_NORM**2) & batch.counted())
        if bool(broken.any()):
            gradients, squares = trace.gradients(slopes, broken)
        parts: dict[str, Tensor] = {}
        clipped_as = [_layer_of(names, gradient, clipping) for names, gradient in gradients]
        for layer, (_, gradient) in zip(clipped_as, gradients, strict=True):
            parts[layer] = parts.get(layer, 0.0) + gradient.squares
        factors = layer_factors(parts, squares, clip, clipping, len(layout.layers))
        blocks = {block.name: block for block in layout}
        for layer, (names, gradient) in zip(clipped_as, gradients, strict=True):
            # In units of the clip: products with the factor itself may fall below the smallest
            # normal number where a clip is small or an input large, and their rounding could then
            # exceed the clip.
            factor = (factors[layer] / clip).to(torch.float32)
            for name, summed in gradient.weighted(factor).items():
                total[blocks[names[name]].slice] = summed.reshape(-1)
        return total.mul_(clip)


def _layer_of(names: Mapping[str, str], gradient: LayerGradient, clipping: Clipping) -> str:
    """The layer of the layout that a gradient belongs to."""
    layers = {names[name].rpartition(".")[0] for name in gradient.names}
    if clipping == "per_layer" and len(layers) > 1:
        raise NotCovered(f"a layer has parameters of {', '.join(sorted(layers))}")
    return min(layers)


def numbers_per_record(model: nn.Module, features: Tensor) -> int:
    """About how many numbers ghost clipping holds for one record.

    Inputs, outputs and their gradients, and patches of convolutions. ``features`` are one record.
    Nothing is held of what comes before the first layer that learns.
    """
    total = 0
    passing = 0
    started = False

    def count(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        nonlocal total, passing, started
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor):
            return
        inputs = given[0].numel() if given and isinstance(given[0], Tensor) else 0
        started = started or bool(learned(module))
        if not started:
            passing = max(passing, first.numel() + inputs)
            return
        total += 2 * first.numel() + inputs
        if isinstance(module, _ConvNd) and module.weight.requires_grad:
            total += first.numel() // module.out_channels * math.prod(module.weight.shape[1:])
        if isinstance(module, nn.RNNBase):
            total += 16 * first.numel() * module.num_layers
        if isinstance(module, nn.MultiheadAttention):
            scores = module.num_heads * first.numel() * first.shape[1] // module.embed_dim
            total += 16 * first.numel() + 4 * scores

    with ExitStack() as hooks, torch.no_grad():
        for module in model.modules():
            if not list(module.children()) or isinstance(module, nn.MultiheadAttention):
                hooks.enter_context(module.register_forward_hook(count))
        outputs_of(model, {}, features)
    return max(total + passing, 1)


def records_at_once(model: nn.Module, layout: Layout, job: Job, device: torch.device) -> int:
    """How many records of a job fit into bounded memory; 0 if ghost clipping would be wrong.

    The rules of layers cannot see what a model does between them, so both paths are tried on
    made-up records; whatever goes wrong means no. Two batch sizes, because a layer's first axis may
    have a record's length by chance; a clip that all records exceed, so that every norm counts.
    Every tensor must agree, so that a use of a small one is not missed; weights are moved a little,
    because a use that starts at zero shows nothing. Dropout is off, since the two paths draw
    differently.
    """
    generator = PublicSeed(0).generator()
    inputs = job.inputs
    shape = job.features.shape[1:]
    vector = _moved(model, layout).to(device)
    slow = OneByOne(str(device), one_at_a_time=True)
    try:
        with in_mode(model, training=False):
            for count in (2, 3):
                features = inputs(inputs.made_up(count, tuple(shape), generator).to(device))
                targets = job.task.made_up(count, tuple(job.labels.shape[1:]), generator)
                batch = Batch(features, targets.to(device), job.task)
                exact = slow.clipped_sum(model, layout, vector, batch, _SMALL_CLIP)
                fast = clipped_sum(model, layout, vector, batch, _SMALL_CLIP)
                if not _agree(layout, fast, exact, count * _NOTHING * _SMALL_CLIP):
                    return 0
            each = numbers_per_record(model, features[:1].to(next(model.parameters()).device))
        return min(MICRO_BATCH, max(1, _MOST_NUMBERS // each))
    except Exception:
        return 0


def _moved(model: nn.Module, layout: Layout) -> Tensor:
    """The model's weights, each tensor moved by about a tenth of its size."""
    vector = layout.read(model).cpu()
    generator = PublicSeed(1).generator()
    for block in layout:
        own = vector[block.slice]
        size = float(own.square().mean().sqrt()) or 1.0
        own += 0.2 * size * (2 * torch.rand(block.size, generator=generator) - 1)
    return vector


def _agree(layout: Layout, fast: Tensor, exact: Tensor, nothing: float) -> bool:
    """Whether two sums are the same, tensor by tensor, but for what counts as nothing."""
    parts = ((fast[block.slice], exact[block.slice]) for block in layout)
    return all(
        float((one - other).norm()) <= _AGREEMENT * float(other.norm()) + nothing
        for one, other in parts
    )


class GhostClipping(OneByOne):
    """One client after the other, in one pass per step wherever rules cover the model.

    The model must be known to keep records apart (:mod:`dpfl.models.separation`).
    """

    watched = False

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        # By the model itself: an address may be another model's tomorrow.
        self._at_once: WeakKeyDictionary[nn.Module, dict[Shape, int]] = WeakKeyDictionary()
        self._layers: TracedLayers | None = None  # of the model that is run

    def run(self, model: nn.Module, layout: Layout, jobs: Sequence[Job]) -> list[Tensor]:
        """Run every job, by ghost clipping if a trial agrees with the slow path."""
        known = self._at_once.setdefault(model, {})
        for job in jobs:
            shape = tuple(job.features.shape[1:])
            if shape not in known and any(phase.clip is not None for phase in job.phases):
                known[shape] = records_at_once(model, layout, job, self.device)
            if known.get(shape) == 0:
                return OneByOne(str(self.device)).run(model, layout, jobs)
        self._layers = TracedLayers(model)
        try:
            return super().run(model, layout, jobs)
        finally:
            self._layers = None  # what is frozen may change between runs

    def mean_gradient(
        self, model: nn.Module, layout: Layout, vector: Tensor, batch: Batch
    ) -> Tensor:
        """Gradient of the mean loss of a batch, with images in the layout that is fastest."""
        with (self._layers or TracedLayers(model)).slopes_channels_last():
            batch = batch._replace(features=channels_last(batch.features))
            return super().mean_gradient(model, layout, vector, batch)

    def clipped_sum(
        self,
        model: nn.Module,
        layout: Layout,
        vector: Tensor,
        batch: Batch,
        clip: float,
        clipping: Clipping = "flat",
    ) -> Tensor:
        """Sum of clipped per-record gradients, in micro-batches of bounded memory."""
        at_once = self._at_once.get(model, {}).get(tuple(batch.features.shape[1:]), MICRO_BATCH)
        parts = batches_of(batch, at_once) or [batch]
        try:
            layers = self._layers
            return added(
                clipped_sum(model, layout, vector, part, clip, clipping, layers) for part in parts
            )
        except NotCovered:
            return super().clipped_sum(model, layout, vector, batch, clip, clipping)
