"""Clipped per-record gradients of a whole model in one forward and one backward.

Known as ghost clipping: per-record norms and clipped sums follow from the rules of the layers
(:mod:`dpfl.engine.layer_rules`), and per-record gradients are never held all at once.

*Formal guarantees.* The sum returned is over per-record gradients of norm at most ``clip`` each,
provided that the model treats records apart (:func:`dpfl.models.check_model` tries it) and calls
each of its layers once. A layer called twice is noticed and refused, as is one whose output was
changed in place; per-record gradients are then written out. Before a model is computed this way at
all, it is tried on made-up records against the slow path (:func:`agrees`).
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.data.inputs import Inputs
from dpfl.engine.base import Batch, Job
from dpfl.engine.layer_gradient import LayerGradient
from dpfl.engine.layer_rules import RULES, recurrent
from dpfl.engine.one_by_one import OneByOne, batches_of, record_norms, with_buffers
from dpfl.engine.trace import Layers, NotCovered, Trace, channels_last
from dpfl.numerics.clipping import LARGEST_INPUT, LARGEST_NORM, clip_factor

MICRO_BATCH = 256
_AGREEMENT = 1e-2  # deep networks round that differently; a layer left out costs more
_MOST_NUMBERS = 1 << 27  # float32 numbers held for one micro-batch

Shape = tuple[int, ...]


def can_ghost_clip(model: nn.Module) -> bool:
    """Whether every parameter belongs to a layer that has a rule."""
    layers = Layers.of(model).names
    covered = {id(p) for layer in layers for p in layer.parameters(recurse=False)}
    return {id(p) for p in model.parameters()} == covered and not any(
        isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq)
        for layer in layers
    )


def clipped_sum(
    layers: Layers, model: nn.Module, layout: Layout, vector: Tensor, batch: Batch, clip: float
) -> Tensor:
    """Sum in double precision of per-record gradients, each of norm at most ``clip``.

    ``layers`` are those of the model. A record whose gradient is not finite counts as zero.
    """
    if len(batch.labels) == 0:
        return torch.zeros_like(vector, dtype=torch.float64)
    trace = Trace(layers)
    with trace.record(), torch.enable_grad():
        state, features = (
            with_buffers(model, layout.unflatten(vector)),
            channels_last(batch.features),
        )
        logits = functional_call(model, state, (features,), tie_weights=trace.layers.tied)
        loss = F.cross_entropy(logits, batch.labels, reduction="sum")
        slopes = torch.autograd.grad(loss, trace.wanted(), allow_unused=True)
    with torch.no_grad():
        return _combine(layout, trace, slopes, clip, record_norms(batch.features))


def _combine(
    layout: Layout, trace: Trace, slopes: Sequence[Tensor | None], clip: float, of_records: Tensor
) -> Tensor:
    """The clipped sum, from a trace and the gradients of the tensors that it wanted."""
    gradients, squares = _layer_gradients(trace, slopes, torch.zeros_like(of_records) > 0)
    # Whatever is not finite in an input or an output gradient shows in the squares.
    broken = ~(squares <= LARGEST_NORM**2) | ~(of_records <= LARGEST_NORM)
    for _, gradient in gradients:
        if gradient.of_inputs is not None:
            broken |= ~(gradient.of_inputs <= LARGEST_INPUT**2)
    if bool(broken.any()):
        gradients, squares = _layer_gradients(trace, slopes, broken)
    # In units of the clip: products with the factor itself may fall below the smallest normal
    # number where a clip is small or an input large, and their rounding could then exceed the clip.
    factor = (clip_factor(squares.sqrt(), clip) / clip).to(torch.float32)
    total = torch.zeros(layout.size, dtype=torch.float64, device=of_records.device)
    blocks = {block.name: block for block in layout}
    for layer, gradient in gradients:
        for name, summed in gradient.weighted(factor).items():
            total[blocks[f"{layer}.{name}" if layer else name].slice] = summed.reshape(-1)
    return total.mul_(clip)


def _layer_gradients(
    trace: Trace, slopes: Sequence[Tensor | None], broken: Tensor
) -> tuple[list[tuple[str, LayerGradient]], Tensor]:
    """Ask every layer's rule; returns gradients by layer, and squared norms of whole gradients.

    Broken records are taken out first, because zero times infinity is not zero.
    """
    spoilt = bool(broken.any())

    def whole(x: Tensor) -> Tensor:
        return x.masked_fill(broken.reshape(-1, *[1] * (x.ndim - 1)), 0) if spoilt else x

    names, found = trace.layers.names, iter(slopes)
    gradients: list[tuple[str, LayerGradient]] = []
    for module, call in trace.calls.items():
        if (slope := next(found)) is not None:
            rule = RULES[type(module)]
            gradients.append((names[module], rule(module, whole(call.input), whole(slope))))
    for module, tap in ((module, tap) for module, taps in trace.taps.items() for tap in taps):
        each = [next(found) for _ in tap.gates]
        known = [whole(slope) for slope in each if slope is not None]
        if len(known) == len(each):
            given = tap.suffix, whole(tap.inputs), whole(tap.hidden), known
            gradients.append((names[module], recurrent(module, *given)))
    squares = torch.zeros(len(broken), dtype=torch.float64, device=broken.device)
    for _, gradient in gradients:
        squares += gradient.squares
    return gradients, squares


def numbers_per_record(model: nn.Module, features: Tensor) -> int:
    """About how many numbers ghost clipping holds for one record.

    Inputs, outputs and their gradients, and patches of convolutions.
    """
    total = 0

    def count(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        nonlocal total
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor):
            return
        total += 2 * first.numel() + (given[0].numel() if isinstance(given[0], Tensor) else 0)
        if isinstance(module, nn.Conv2d):
            total += first.numel() // module.out_channels * math.prod(module.weight.shape[1:])
        if isinstance(module, nn.RNNBase):
            total += 16 * first.numel() * module.num_layers

    # Dropout must not draw here.
    with ExitStack() as hooks, torch.no_grad(), torch.random.fork_rng(devices=[]):
        for module in model.modules():
            if not list(module.children()):
                hooks.enter_context(module.register_forward_hook(count))
        state = with_buffers(model, dict(model.named_parameters()))
        functional_call(model, state, (features[:1],))
    return max(total, 1)


def agrees(
    model: nn.Module, layout: Layout, inputs: Inputs, shape: Shape, device: torch.device
) -> bool:
    """Try both paths on made-up records of this shape; whatever goes wrong means no.

    The rules of layers cannot see what a model does between them. Two batch sizes, because a
    layer's first axis may have a record's length by chance; a clip that all records exceed, so that
    every norm counts. Dropout is off, since the two paths draw differently.
    """
    modes = {module: module.training for module in model.modules()}
    generator = PublicSeed(0).generator()
    vector, slow = layout.read(model).to(device), OneByOne(str(device), one_at_a_time=True)
    try:
        model.eval()
        for count in (2, 3):
            features = inputs(inputs.made_up(count, shape, generator).to(device))
            batch = Batch(features, torch.arange(count, device=device) % 2)
            exact = slow.clipped_sum(model, layout, vector, batch, 1e-6)
            fast = clipped_sum(Layers.of(model), model, layout, vector, batch, 1e-6)
            if not float((fast - exact).norm()) <= _AGREEMENT * float(exact.norm()):
                return False
        return True
    except Exception:
        return False
    finally:
        for module, mode in modes.items():
            module.training = mode


class GhostClipping(OneByOne):
    """One client after the other, in one pass per step wherever rules cover the model."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        # By the model itself: an address may be another model's tomorrow.
        self._at_once: WeakKeyDictionary[nn.Module, dict[Shape, int]] = WeakKeyDictionary()
        self._agrees: WeakKeyDictionary[nn.Module, dict[Shape, bool]] = WeakKeyDictionary()
        self._layers: WeakKeyDictionary[nn.Module, Layers] = WeakKeyDictionary()

    def run(self, model: nn.Module, layout: Layout, jobs: Sequence[Job]) -> list[Tensor]:
        """Run every job, by ghost clipping if a trial agrees with the slow path."""
        self._layers.pop(model, None)  # it may have changed since
        for job in jobs:
            shape, known = tuple(job.features.shape[1:]), self._agrees.setdefault(model, {})
            if shape not in known and any(phase.clip is not None for phase in job.phases):
                known[shape] = agrees(model, layout, job.inputs, shape, self.device)
            if not known.get(shape, True):
                return OneByOne(str(self.device)).run(model, layout, jobs)
        return super().run(model, layout, jobs)

    def _records_at_once(self, model: nn.Module, features: Tensor) -> int:
        """How many records fit into bounded memory; a function of model and shape alone."""
        shape, known = tuple(features.shape[1:]), self._at_once.setdefault(model, {})
        if shape not in known:
            each = numbers_per_record(model, features.to(next(model.parameters()).device))
            known[shape] = min(MICRO_BATCH, max(1, _MOST_NUMBERS // each))
        return known[shape]

    def _layers_of(self, model: nn.Module) -> Layers:
        return self._layers.get(model) or self._layers.setdefault(model, Layers.of(model))

    def mean_gradient(
        self, model: nn.Module, layout: Layout, vector: Tensor, batch: Batch
    ) -> Tensor:
        """Gradient of the mean loss of a batch, with images in the layout that is fastest."""
        with self._layers_of(model).slopes_channels_last():
            batch = Batch(channels_last(batch.features), batch.labels)
            return super().mean_gradient(model, layout, vector, batch)

    def clipped_sum(
        self, model: nn.Module, layout: Layout, vector: Tensor, batch: Batch, clip: float
    ) -> Tensor:
        """Sum of clipped per-record gradients, in micro-batches of bounded memory."""
        layers, count = self._layers_of(model), len(batch.labels)
        try:
            at_once = self._records_at_once(model, batch.features) if count > 1 else MICRO_BATCH
            if count <= at_once:
                return clipped_sum(layers, model, layout, vector, batch, clip)
            parts = batches_of(batch, at_once)
            empty = torch.zeros_like(vector, dtype=torch.float64)
            return sum((clipped_sum(layers, model, layout, vector, p, clip) for p in parts), empty)
        except NotCovered:
            return super().clipped_sum(model, layout, vector, batch, clip)
