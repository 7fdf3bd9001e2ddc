"""The rule of convolutions: a dense layer on patches, whichever way of forming patches costs least.

| way | where | what is copied |
|---|---|---|
| one convolution | few outputs, channels in eights, rows skipped | nothing: a record is a group of
a convolution | | planes | few channels, no column skipped | one shifted copy of the image for every
entry of the kernel | | strips | many channels, nothing skipped | patches of one row of the kernel,
and the other rows are views of them | | full | the rest | every patch |
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl.engine.pieces import (
    Gradients,
    Piece,
    Weighted,
    added,
    by_gram,
    of_weight_and_bias,
    products,
    squared,
    weighted_sum,
    written_out,
)
from dpfl.numerics.clipping import stacked_product

_WIDE = (
    64  # columns from which a product with one row of the kernel is as fast as one with all of it
)
_IN_CACHE = 1 << 20  # numbers of patches copied at once: beyond, they no longer stay in the cache
_NARROW = 32  # outputs up to which a convolution is faster than products of matrices


def conv2d(layer: nn.Conv2d, a: Tensor, d: Tensor) -> Piece:
    """A convolution: a dense layer on patches, group by group. Channels are the innermost axis of
    every copy.
    """
    records, groups = len(a), layer.groups
    each, outputs = layer.in_channels // groups, layer.out_channels // groups
    if _in_one_convolution(layer, a, d):
        return _one_convolution(layer, a, d)
    if _in_planes(layer, each):
        return _by_planes(layer, a, d)
    a = _padded(layer, a).permute(0, 2, 3, 1).contiguous()
    slopes = d.permute(0, 2, 3, 1).reshape(records, -1, layer.out_channels)
    pairs = []
    for g in range(groups):
        own = a if groups == 1 else a[..., g * each : (g + 1) * each].contiguous()
        mine = slopes[..., g * outputs : (g + 1) * outputs].contiguous()
        pairs.append(products(_patches(layer, own, mine.shape[1], outputs), mine))

    def weight(factor: Tensor) -> Tensor:
        found = torch.cat([w(factor) for _, w in pairs])
        return found.reshape(layer.out_channels, *layer.kernel_size, each).permute(0, 3, 1, 2)

    bias = None if layer.bias is None else slopes.sum(dim=1)
    return of_weight_and_bias(added(s for s, _ in pairs), weight, bias, layer.weight.shape)


@cache
def _has_fast_groups() -> bool:
    """Whether this machine's convolutions of many groups have a kernel of their own (oneDNN on
    x86).
    """
    return torch._C._has_mkldnn and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def _in_one_convolution(layer: nn.Conv2d, a: Tensor, d: Tensor) -> bool:
    each, outputs = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    (kh, kw), positions = layer.kernel_size, d.shape[2] * d.shape[3]
    return (
        a.device.type == "cpu"
        and a.dtype is torch.float32
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and kh * kw > 1
        and not _in_strips(layer, each)
        and each % 8 == 0
        and outputs % 16 == 0
        and outputs <= _NARROW
        and positions > 1
        and written_out(len(a), positions, kh * kw * each, outputs)
        and _has_fast_groups()
    )


def _one_convolution(layer: nn.Conv2d, a: Tensor, d: Tensor) -> Piece:
    """Per-record gradients as the weight's gradient of one convolution that has a group (or
    several) for every record.
    """
    records, biased = len(a), layer.bias is not None
    channels = records * layer.out_channels
    shape_only = layer.weight.new_empty(1).expand(channels, *layer.weight.shape[1:])
    _, weight, bias = torch.ops.aten.convolution_backward(
        d.reshape(1, channels, *d.shape[2:]), a.reshape(1, -1, *a.shape[2:]), shape_only, [channels] if biased else None,
        layer.stride, layer.padding, layer.dilation, False, [0, 0], records * layer.groups, [False, True, biased],
    )  # fmt: skip
    weight = weight.view(records, -1)
    return of_weight_and_bias(
        squared(weight),
        lambda factor: weighted_sum(factor, weight),
        bias.view(records, -1) if biased else None,
        layer.weight.shape,
    )


def _padded(layer: nn.Conv2d, a: Tensor) -> Tensor:
    """Padded as the layer pads."""
    if layer.padding_mode != "zeros":
        return F.pad(a, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
    if layer.padding == "valid" or not any(layer._reversed_padding_repeated_twice):
        return a
    return F.pad(a, layer._reversed_padding_repeated_twice)


def _in_planes(layer: nn.Conv2d, channels: int) -> bool:
    """Whether whole rows of the image are the longest stretches to copy: few channels, and no
    column skipped.
    """
    return layer.stride[1] == 1 and layer.kernel_size[1] * channels < _WIDE


def _in_strips(layer: nn.Conv2d, channels: int) -> bool:
    """Whether patches of one row of the kernel serve all of its rows: many channels, and nothing
    skipped but columns.
    """
    (kh, kw) = layer.kernel_size
    return kh > 1 and layer.stride[0] == 1 and layer.dilation == (1, 1) and kw * channels >= _WIDE


def _by_planes(layer: nn.Conv2d, a: Tensor, d: Tensor) -> Piece:
    """Output positions are the innermost axis of every copy; a bias is one more input, of value
    1.
    """
    groups, biased = layer.groups, layer.bias is not None
    each, outputs = layer.in_channels // groups, layer.out_channels // groups
    a = _padded(layer, a)
    slopes = d.permute(0, 2, 3, 1).reshape(len(a), -1, layer.out_channels)
    pairs = []
    for g in range(groups):
        own = a[:, g * each : (g + 1) * each].contiguous()
        mine = slopes[..., g * outputs : (g + 1) * outputs].contiguous()
        pairs.append(_products_of_planes(layer, own, mine))

    def weighted(factor: Tensor) -> Gradients:
        found = pairs[0][1](factor) if groups == 1 else torch.cat([w(factor) for _, w in pairs])
        inputs = layer.weight[0].numel()
        weight = {"weight": found[:, :inputs].reshape(layer.weight.shape)}
        return {**weight, "bias": found[:, inputs]} if biased else weight

    return Piece(added(s for s, _ in pairs), weighted)


def _products_of_planes(layer: nn.Conv2d, a: Tensor, d: Tensor) -> tuple[Tensor, Weighted]:
    """One group's products; where they are written out, planes of a few records at a time stay in
    the cache.
    """
    records, positions, outputs = d.shape
    inputs = layer.weight[0].numel() + (layer.bias is not None)
    if positions == 1 or not written_out(records, positions, inputs, outputs):
        planes = _planes(layer, a, a.new_empty(records, inputs, positions))
        return products(planes.transpose(1, 2), d)
    at_once = min(records, max(1, _IN_CACHE // (inputs * positions)))
    room, gradients = a.new_empty(at_once, inputs, positions), a.new_empty(records, inputs, outputs)
    for first in range(0, records, at_once):
        some = slice(first, first + at_once)
        stacked_product(
            _planes(layer, a[some], room[: records - first]), d[some], out=gradients[some]
        )
    return squared(
        gradients
    ), lambda factor: weighted_sum(factor, gradients).reshape(inputs, outputs).T


def _planes(layer: nn.Conv2d, a: Tensor, room: Tensor) -> Tensor:
    """Patches with output positions innermost: one shifted copy of the image for every entry of the
    kernel.
    """
    (kh, kw), (sh, _), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
    records, channels, height, width = a.shape
    rows, columns = (height - dh * (kh - 1) - 1) // sh + 1, width - dw * (kw - 1)
    shape, strides = (
        (records, channels, kh, kw, rows, columns),
        (a.stride(0), a.stride(1), dh * width, dw, sh * width, 1),
    )
    inputs = channels * kh * kw
    room[:, :inputs].view(shape).copy_(a.as_strided(shape, strides, a.storage_offset()))
    if room.shape[1] > inputs:
        room[:, inputs] = 1.0
    return room


def _patches(layer: nn.Conv2d, a: Tensor, positions: int, outputs: int) -> Tensor:
    """Copy the patch under every output position, (records, blocks, positions, numbers): faster
    than ``F.unfold``.

    Patches of neighbouring output rows share all but one row of the kernel. Where nothing skips,
    patches of one kernel row are copied once and every row of the kernel is a view of them: a fifth
    of the copying for a 5 x 5 kernel.
    """
    (kh, kw), (sh, sw), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
    records, height, width, channels = a.shape
    rows, columns = (height - dh * (kh - 1) - 1) // sh + 1, (width - dw * (kw - 1) - 1) // sw + 1
    rs, hs, ws, _ = a.stride()
    wide = kw * channels
    if _in_strips(layer, channels) and not by_gram(positions, kh * wide, outputs):
        strips = a.as_strided((records, height, columns, wide), (rs, hs, sw * ws, 1)).contiguous()
        shape, strides = (
            (records, kh, rows * columns, wide),
            (strips.stride(0), columns * wide, wide, 1),
        )
        return strips.as_strided(shape, strides)
    view = a.as_strided(
        (records, rows, columns, kh, kw, channels), (rs, sh * hs, sw * ws, dh * hs, dw * ws, 1)
    )
    return view.reshape(records, 1, rows * columns, kh * wide)
