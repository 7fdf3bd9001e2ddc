"""What a record contributes to a layer's gradient, from the layer's input and the gradient of its output alone.

One forward and one backward give, for every layer with parameters, its input ``a`` and the gradient ``d`` of the summed
loss with respect to its output. A rule turns the two into per-record squared norms, and into the weighted sum of
per-record gradients once the weights (clipping factors) are known. Per-record gradients are written out only where that
is cheaper than two products; never all of them at once.

| layer | per-record gradient of the weight |
|---|---|
| Linear | sum over positions t of d_t a_t^T |
| Conv2d | the same, with a_t the patch of the input under output position t |
| Embedding | sum over positions of d_t, into the row of the token at t |
| GroupNorm, LayerNorm | sum over positions of d_t times the normalised input |
| LSTM, GRU, RNN | as Linear, on inputs and on hidden states, with d_t the gradient of the gates |

Squares are added up in double precision: their float32 sums under- and overflow where the gradient itself does not.

*What rounding may add.* Where per-record gradients are written out, the clipped vector is the very one whose norm was
taken; they are added up in single precision ``SUMMANDS`` records at a time and from there in double. Where they are not
(two Gram matrices, embeddings), records and positions are added up in double precision from the start, because
positions may cancel and single precision would then lose more than the clip.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl.core.grid import SUMMANDS
from dpfl.core.linalg import squared_norms

_MOST_NUMBERS = 1 << 24  # entries of per-record gradients or patches held at once

Gradients = dict[str, Tensor]


@dataclass
class Piece:
    """What one layer keeps between its squared norms and its weighted sum."""

    squares: Tensor
    weighted: Callable[[Tensor], Gradients]


def _squared(x: Tensor) -> Tensor:
    """Squared norm of each record, in double precision."""
    return squared_norms(x.flatten(1))


def _by_gram(positions: int, inputs: int, outputs: int) -> bool:
    """Whether two T x T Gram matrices are cheaper than writing out and reading again what has the weight's size."""
    return positions**2 * (inputs + outputs) < 32 * inputs * outputs


def _products(blocks: list[Tensor], d: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Squared norms and weighted sum of sum_t d_t a_t^T, for d (B, T, out) and a (B, T, in) in blocks of columns.

    With one position the norm factors. With few positions and a large weight, norms come from two T x T Gram matrices
    (nothing of the weight's size is written); else per-record gradients are formed once and serve both.
    """
    records, positions, outputs = d.shape
    inputs = sum(a.shape[2] for a in blocks)
    if positions == 1:
        squares = torch.stack([_squared(a) for a in blocks]).sum(dim=0) * _squared(d)
        slopes, rows = d[:, 0], torch.cat([a[:, 0] for a in blocks], dim=1)

        def outer(factor: Tensor) -> Tensor:
            return _in_parts(lambda some: (slopes[some] * factor[some, None]).T @ rows[some], factor)

        return squares, outer
    if _by_gram(positions, inputs, outputs) or records * inputs * outputs > _MOST_NUMBERS:
        at_once = max(1, _MOST_NUMBERS // (2 * positions * (positions + inputs + outputs)))
        squares = torch.zeros(records, dtype=torch.float64, device=d.device)
        for first in range(0, records, at_once):
            some = slice(first, first + at_once)
            of_inputs = torch.stack([_gram(a[some]) for a in blocks]).sum(dim=0)
            squares[some] = _sum_of_products(of_inputs, _gram(d[some]))

        def summed(factor: Tensor) -> Tensor:
            total = torch.zeros(outputs, inputs, dtype=torch.float64, device=d.device)
            for first in range(0, records, at_once):
                some = slice(first, first + at_once)
                weighted = (d[some].double() * factor[some, None, None]).flatten(0, 1).T
                total += torch.cat([weighted @ a[some].double().flatten(0, 1) for a in blocks], dim=1)
            return total

        return squares, summed
    if len(blocks) == 1 and blocks[0].stride(1) == 1:  # positions innermost: the other way round is faster
        transposed = torch.bmm(blocks[0].transpose(1, 2), d)
        return _squared(transposed), lambda factor: _weighted(factor, transposed).reshape(inputs, outputs).T
    gradients = [torch.bmm(d.transpose(1, 2), a) for a in blocks]
    squares = torch.stack([_squared(g) for g in gradients]).sum(dim=0)
    return squares, lambda factor: torch.cat([_weighted(factor, g).reshape(outputs, -1) for g in gradients], dim=1)


def _in_parts(product: Callable[[slice], Tensor], factor: Tensor) -> Tensor:
    """Add up in double precision what ``product`` gives for ``SUMMANDS`` records at a time."""
    total = product(slice(0, SUMMANDS)).to(torch.float64)
    for first in range(SUMMANDS, len(factor), SUMMANDS):
        total += product(slice(first, first + SUMMANDS))
    return total


def _weighted(factor: Tensor, rows: Tensor) -> Tensor:
    """Weighted sum of per-record gradients, as one vector in double precision."""
    rows = rows.flatten(1)
    return _in_parts(lambda some: factor[some] @ rows[some], factor)


def _gram(x: Tensor) -> Tensor:
    """Inner products of a record's positions, in double precision: they may cancel almost entirely in the norm."""
    x = x.double()
    return torch.bmm(x, x.transpose(1, 2))


_ROUNDING = 5e-7


def _sum_of_products(of_inputs: Tensor, of_slopes: Tensor) -> Tensor:
    """Squared norm of sum_t d_t a_t^T from the two Gram matrices, made larger by what float32 may add to that sum itself.

    The clipped sum is formed of terms of norm |a_t| |d_t|. Where those cancel almost entirely, even the rounding of d and
    its clip factor is no longer small against the gradient, and counts as part of it.
    """
    norms = (of_inputs * of_slopes).sum(dim=(1, 2)).clamp_min(0.0).sqrt()
    terms = (of_inputs.diagonal(dim1=1, dim2=2) * of_slopes.diagonal(dim1=1, dim2=2)).clamp_min(0.0).sqrt().sum(dim=1)
    return (norms + _ROUNDING * terms).square()


def _bias(d: Tensor) -> Tensor:
    """Per-record gradient of a bias: d summed over positions, (B, out)."""
    return d.sum(dim=1)


def _with_bias(squares: Tensor, weight: Callable[[Tensor], Tensor], bias: Tensor | None, shape: torch.Size) -> Piece:
    if bias is not None:
        squares = squares + _squared(bias)

    def weighted(factor: Tensor) -> Gradients:
        found = {"weight": weight(factor).reshape(shape)}
        return found if bias is None else {**found, "bias": _weighted(factor, bias)}

    return Piece(squares, weighted)


def linear(layer: nn.Linear, a: Tensor, d: Tensor) -> Piece:
    """A dense layer on the last axis; the axes between are positions."""
    records = len(a)
    a, d = a.reshape(records, -1, layer.in_features), d.reshape(records, -1, layer.out_features)
    squares, weight = _products([a], d)
    return _with_bias(squares, weight, None if layer.bias is None else _bias(d), layer.weight.shape)


def conv2d(layer: nn.Conv2d, a: Tensor, d: Tensor) -> Piece:
    """A convolution: a dense layer on patches, group by group. Channels are the innermost axis of every copy."""
    records, groups = len(a), layer.groups
    a = _padded(layer, a)
    slopes = d.permute(0, 2, 3, 1).reshape(records, -1, layer.out_channels)
    each, outputs = layer.in_channels // groups, layer.out_channels // groups
    pairs = []
    for g in range(groups):
        own = a if groups == 1 else a[..., g * each : (g + 1) * each].contiguous()
        mine = slopes[..., g * outputs : (g + 1) * outputs].contiguous()
        planes = _in_planes(layer, each)
        blocks = _planes(layer, own) if planes else _patches(layer, own, mine.shape[1], outputs)
        pairs.append(_products(blocks, mine))
    squares = torch.stack([s for s, _ in pairs]).sum(dim=0)
    kernel = layer.kernel_size

    def weight(factor: Tensor) -> Tensor:
        found = torch.cat([w(factor) for _, w in pairs])
        if planes:
            return found.reshape(layer.out_channels, each, *kernel)
        return found.reshape(layer.out_channels, *kernel, each).permute(0, 3, 1, 2)

    return _with_bias(squares, weight, None if layer.bias is None else _bias(slopes), layer.weight.shape)


def _padded(layer: nn.Conv2d, a: Tensor) -> Tensor:
    """Channels last, and padded as the layer pads."""
    if layer.padding_mode != "zeros":
        a = F.pad(a, layer._reversed_padding_repeated_twice, mode=layer.padding_mode).permute(0, 2, 3, 1)
    elif layer.padding == "valid" or not any(layer._reversed_padding_repeated_twice):
        a = a.permute(0, 2, 3, 1)
    else:
        a = F.pad(a.permute(0, 2, 3, 1), (0, 0, *layer._reversed_padding_repeated_twice))
    return a.contiguous()


_WIDE = 64  # columns from which a product with one row of the kernel is as fast as one with all of it


def _in_planes(layer: nn.Conv2d, channels: int) -> bool:
    """Whether whole rows of the image are the longest stretches to copy: few channels, and no column skipped."""
    return layer.stride[1] == 1 and layer.kernel_size[1] * channels < _WIDE


def _planes(layer: nn.Conv2d, a: Tensor) -> list[Tensor]:
    """Patches with output positions innermost: one shifted copy of the image for every entry of the kernel."""
    (kh, kw), (sh, _), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
    records, height, width, channels = a.shape
    rows, columns = (height - dh * (kh - 1) - 1) // sh + 1, width - dw * (kw - 1)
    a = a.permute(0, 3, 1, 2).contiguous()
    shape, strides = (
        (records, channels, kh, kw, rows, columns),
        (a.stride(0), a.stride(1), dh * width, dw, sh * width, 1),
    )
    return [a.as_strided(shape, strides).reshape(records, -1, rows * columns).transpose(1, 2)]


def _patches(layer: nn.Conv2d, a: Tensor, positions: int, outputs: int) -> list[Tensor]:
    """Copy the patch under every output position, by strides: several times faster than ``F.unfold``.

    Patches of neighbouring output rows share all but one row of the kernel. Where nothing skips, patches of one kernel
    row are copied once and every row of the kernel is a view of them: a fifth of the copying for a 5 x 5 kernel.
    """
    (kh, kw), (sh, sw), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
    records, height, width, channels = a.shape
    rows, columns = (height - dh * (kh - 1) - 1) // sh + 1, (width - dw * (kw - 1) - 1) // sw + 1
    rs, hs, ws, _ = a.stride()
    wide = kw * channels
    if sh == dh == dw == 1 and kh > 1 and wide >= _WIDE and not _by_gram(positions, kh * wide, outputs):
        strips = a.as_strided((records, height, columns, wide), (rs, hs, sw * ws, 1)).contiguous()
        return [strips[:, i : i + rows].flatten(1, 2) for i in range(kh)]
    view = a.as_strided((records, rows, columns, kh, kw, channels), (rs, sh * hs, sw * ws, dh * hs, dw * ws, 1))
    return [view.reshape(records, rows * columns, kh * wide)]


def embedding(layer: nn.Embedding, a: Tensor, d: Tensor) -> Piece:
    """A table of rows: positions with the same token add up within a record before the norm is taken."""
    records = len(a)
    tokens, d = a.reshape(records, -1), d.reshape(records, -1, layer.embedding_dim)
    if layer.padding_idx is not None:
        d = d * (tokens != layer.padding_idx)[..., None]
    same = (tokens[:, :, None] == tokens[:, None, :]).double()
    squares = _sum_of_products(same, _gram(d))

    def weighted(factor: Tensor) -> Gradients:
        table = d.new_zeros(layer.weight.shape, dtype=torch.float64)
        weighted = (d.double() * factor[:, None, None]).flatten(0, 1)
        return {"weight": table.index_add_(0, tokens.flatten(), weighted)}

    return Piece(squares, weighted)


def group_norm(layer: nn.GroupNorm, a: Tensor, d: Tensor) -> Piece:
    """Scale and shift per channel."""
    normalised = F.group_norm(a, layer.num_groups, eps=layer.eps)
    product, shift = (d * normalised).flatten(2).sum(dim=2), d.flatten(2).sum(dim=2)
    return _scale_and_shift(product, shift)


def layer_norm(layer: nn.LayerNorm, a: Tensor, d: Tensor) -> Piece:
    """Scale and shift per entry of the normalised shape; leading axes are positions."""
    normalised = F.layer_norm(a, layer.normalized_shape, eps=layer.eps)
    size = math.prod(layer.normalized_shape)
    product = (d * normalised).reshape(len(a), -1, size).sum(dim=1)
    shift = None if layer.bias is None else d.reshape(len(a), -1, size).sum(dim=1)
    return _scale_and_shift(product, shift, layer.weight.shape)


def _scale_and_shift(product: Tensor, shift: Tensor | None, shape: torch.Size | None = None) -> Piece:
    squares = _squared(product) + (0.0 if shift is None else _squared(shift))

    def weighted(factor: Tensor) -> Gradients:
        found = {"weight": _weighted(factor, product)} | ({} if shift is None else {"bias": _weighted(factor, shift)})
        return found if shape is None else {name: tensor.reshape(shape) for name, tensor in found.items()}

    return Piece(squares, weighted)


def recurrent(layer: nn.Module, suffix: str, x: Tensor, hidden: Tensor, slopes: list[Tensor]) -> Piece:
    """One direction of one recurrent layer: two dense layers whose positions are the steps, and two biases."""
    of_inputs, of_hidden = slopes[0], slopes[-1]
    squares, weight = _products([x], of_inputs)
    more, recurrent_weight = _products([hidden], of_hidden)
    squares = squares + more
    biased = hasattr(layer, f"bias_ih{suffix}")
    biases = {"bias_ih": _bias(of_inputs), "bias_hh": _bias(of_hidden)} if biased else {}
    for bias in biases.values():
        squares = squares + _squared(bias)

    def weighted(factor: Tensor) -> Gradients:
        found = {"weight_ih": weight(factor), "weight_hh": recurrent_weight(factor)}
        found |= {name: _weighted(factor, bias) for name, bias in biases.items()}
        return {f"{name}{suffix}": gradient for name, gradient in found.items()}

    return Piece(squares, weighted)


Rule = Callable[..., Piece]
RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv2d: conv2d,
    nn.Embedding: embedding,
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
}
