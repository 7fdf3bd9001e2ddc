"""Clipped per-record gradients of a whole model in one forward and one backward, by the rules of its layers.

*Formal guarantees.* The sum returned is over per-record gradients of norm at most ``clip`` each, provided that the model
treats records apart (:func:`dpfl.models.check_model` tries it) and calls each of its layers once. A layer called twice is
noticed and refused here; the caller then writes per-record gradients out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from dpfl.core.layout import Layout
from dpfl.core.linalg import clip_factor
from dpfl.engine.one_by_one import OneByOne
from dpfl.engine.rules import RULES, Piece

MICRO_BATCH = 256


class NotBookable(Exception):
    """The model does something that the layers' rules do not cover."""


def bookable(model: nn.Module) -> bool:
    """Whether every parameter belongs to a layer that has a rule."""
    covered = {id(p) for m in model.modules() if type(m) in RULES for p in m.parameters(recurse=False)}
    return {id(p) for p in model.parameters()} == covered and not any(
        isinstance(m, nn.Embedding) and (m.max_norm is not None or m.scale_grad_by_freq) for m in model.modules()
    )


def clipped_sum(
    model: nn.Module, layout: Layout, vector: Tensor, features: Tensor, labels: Tensor, clip: float
) -> Tensor:
    """Sum of per-record gradients, each within ``clip``; a non-finite one counts as zero."""
    if len(labels) == 0:
        return torch.zeros_like(vector)
    names = {module: name for name, module in model.named_modules() if type(module) in RULES}
    inputs: dict[nn.Module, Tensor] = {}
    outputs: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if module in inputs:
            raise NotBookable(f"layer '{names[module]}' is called twice")
        inputs[module] = arguments[0].detach()
        outputs[module] = output if output.requires_grad else output.requires_grad_()
        return output.clone()  # so that an activation may work in place on what follows

    hooks = [module.register_forward_hook(keep) for module in names]
    try:
        parameters = {name: _fast_layout(tensor) for name, tensor in layout.unflatten(vector).items()}
        features = _fast_layout(features)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with torch.enable_grad():
            logits = functional_call(model, {**parameters, **buffers}, (features,))
            loss = F.cross_entropy(logits, labels, reduction="sum")
        used = list(outputs)
        slopes = torch.autograd.grad(loss, [outputs[module] for module in used], allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    with torch.no_grad():
        return _combined(layout, names, used, inputs, slopes, clip, len(labels))


def _fast_layout(tensor: Tensor) -> Tensor:
    """Channels last for images and kernels: pooling and convolution are several times faster that way on a CPU."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _combined(
    layout: Layout,
    names: dict[nn.Module, str],
    used: list[nn.Module],
    inputs: dict[nn.Module, Tensor],
    slopes: tuple[Tensor | None, ...],
    clip: float,
    records: int,
) -> Tensor:
    pairs = [(module, inputs[module], d) for module, d in zip(used, slopes, strict=True) if d is not None]
    pieces, squares = _pieces(pairs, torch.zeros(records, dtype=torch.bool))
    broken = ~torch.isfinite(squares)  # whatever is not finite in a or d shows here, and so does their product
    if bool(broken.any()):
        pieces, squares = _pieces(pairs, broken)
    factor = clip_factor(squares.sqrt(), clip).to(torch.float32)
    total = torch.zeros(layout.size)
    blocks = {block.name: block for block in layout}
    for module, piece in pieces.items():
        prefix = f"{names[module]}." if names[module] else ""
        for name, gradient in piece.weighted(factor).items():
            total[blocks[prefix + name].slice] = gradient.reshape(-1)
    return total


def _pieces(pairs: list[tuple[nn.Module, Tensor, Tensor]], broken: Tensor) -> tuple[dict[nn.Module, Piece], Tensor]:
    """Ask every layer's rule; broken records are taken out first, because zero times infinity is not zero."""
    pieces: dict[nn.Module, Piece] = {}
    squares = torch.zeros(len(broken), dtype=torch.float64)
    spoilt = bool(broken.any())
    for module, a, d in pairs:
        if spoilt:
            d = d.masked_fill(broken.reshape(-1, *[1] * (d.ndim - 1)), 0.0)
            a = a.masked_fill(broken.reshape(-1, *[1] * (a.ndim - 1)), 0)
        pieces[module] = RULES[type(module)](module, a, d)
        squares += pieces[module].squares
    return pieces, squares


class Booked(OneByOne):
    """One client after the other, in one pass per step wherever the layers' rules cover the model."""

    def clipped_sum(
        self, model: nn.Module, layout: Layout, vector: Tensor, features: Tensor, labels: Tensor, clip: float
    ) -> Tensor:
        """Sum of clipped per-record gradients, in micro-batches of bounded memory."""
        try:
            parts = zip(torch.split(features, MICRO_BATCH), torch.split(labels, MICRO_BATCH), strict=True)
            return sum((clipped_sum(model, layout, vector, x, y, clip) for x, y in parts), torch.zeros_like(vector))
        except NotBookable:
            return super().clipped_sum(model, layout, vector, features, labels, clip)
