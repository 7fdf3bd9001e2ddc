"""The rule of convolutions: a dense layer on patches, whichever way of forming patches costs least.

| way | where | what is copied |
|---|---|---|
| planes | few channels, no column skipped | the shifted image for every entry of the kernel |
| strips | many channels, nothing skipped | patches of one row of the kernel; other rows are views |
| full | the rest | every patch |
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl.engine.layer_rules import (
    LayerGradient,
    Piece,
    added,
    by_gram,
    products,
    rows,
    squared,
    weighted_sum,
    written_out,
)
from dpfl.numerics.clipping import stacked_product

_WIDE = 64  # columns from which a product with one kernel row is as fast as one with all of them
_IN_CACHE = 1 << 20  # numbers of patches copied at once: beyond, they no longer stay in the cache


def conv2d(layer: nn.Conv2d, a: Tensor, d: Tensor) -> LayerGradient:
    """A convolution: a dense layer on patches, group by group.

    In planes, output positions are the innermost axis of every copy, and a bias is one more input,
    of value 1. Else channels are the innermost axis.
    """
    each, outputs = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    planes = layer.stride[1] == 1 and layer.kernel_size[1] * each < _WIDE
    a = _padded(layer, a) if planes else _padded(layer, a).permute(0, 2, 3, 1).contiguous()
    slopes = d.permute(0, 2, 3, 1).reshape(len(a), -1, layer.out_channels)
    pairs = []
    owns = torch.split(a, each, 1 if planes else 3)
    for own, mine in zip(owns, torch.split(slopes, outputs, 2), strict=True):
        own, mine = own.contiguous(), mine.contiguous()
        if planes:
            pairs.append(_products_of_planes(layer, own, mine))
        else:
            pairs.append(products(_patches(layer, own, mine.shape[1], outputs), mine))
    squares, inputs = added(squares for squares, _ in pairs), layer.weight[0].numel()

    def of_planes(factor: Tensor) -> dict[str, Tensor]:
        found = torch.cat([weighted(factor) for _, weighted in pairs])
        weight = {"weight": found[:, :inputs]}
        return weight if layer.bias is None else {**weight, "bias": found[:, inputs]}

    def of_patches(factor: Tensor) -> Tensor:
        found = torch.cat([weighted(factor) for _, weighted in pairs])
        return found.reshape(layer.out_channels, *layer.kernel_size, each).permute(0, 3, 1, 2)

    if planes:
        return LayerGradient(squares, of_planes)
    bias = None if layer.bias is None else rows(slopes.sum(dim=1))
    return LayerGradient.of(weight=(squares, of_patches), bias=bias)


def _padded(layer: nn.Conv2d, a: Tensor) -> Tensor:
    """Pad the input as the layer pads it."""
    if layer.padding_mode != "zeros":
        return F.pad(a, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
    if layer.padding == "valid" or not any(layer._reversed_padding_repeated_twice):
        return a
    return F.pad(a, layer._reversed_padding_repeated_twice)


def _in_strips(layer: nn.Conv2d, channels: int) -> bool:
    """Whether patches of one row of the kernel serve all of its rows.

    That is so for many channels, where nothing is skipped but columns.
    """
    (kh, kw) = layer.kernel_size
    return kh > 1 and layer.stride[0] == 1 and layer.dilation == (1, 1) and kw * channels >= _WIDE


def _products_of_planes(layer: nn.Conv2d, a: Tensor, d: Tensor) -> Piece:
    """One group's products.

    Where they are written out, planes of a few records at a time stay in the cache.
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
        planes = _planes(layer, a[some], room[: records - first])
        stacked_product(planes, d[some], out=gradients[some])

    def weighted(factor: Tensor) -> Tensor:
        return weighted_sum(factor, gradients).reshape(inputs, outputs).T

    return squared(gradients), weighted


def _planes(layer: nn.Conv2d, a: Tensor, room: Tensor) -> Tensor:
    """Patches with output positions innermost, written into ``room``.

    One shifted copy of the image for every entry of the kernel.
    """
    (kh, kw), (sh, _), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
    records, channels, height, width = a.shape
    rows, columns = (height - dh * (kh - 1) - 1) // sh + 1, width - dw * (kw - 1)
    shape = (records, channels, kh, kw, rows, columns)
    strides = (a.stride(0), a.stride(1), dh * width, dw, sh * width, 1)
    inputs = channels * kh * kw
    room[:, :inputs].view(shape).copy_(a.as_strided(shape, strides, a.storage_offset()))
    if room.shape[1] > inputs:
        room[:, inputs] = 1.0
    return room


def _patches(layer: nn.Conv2d, a: Tensor, positions: int, outputs: int) -> Tensor:
    """Copy the patch under every output position: faster than ``F.unfold``.

    Returns (records, blocks, positions, numbers). Patches of neighbouring output rows share all but
    one row of the kernel. Where nothing skips, patches of one kernel row are copied once and every
    row of the kernel is a view of them: a fifth of the copying for a 5 x 5 kernel.
    """
    (kh, kw), (sh, sw), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
    records, height, width, channels = a.shape
    rows, columns = (height - dh * (kh - 1) - 1) // sh + 1, (width - dw * (kw - 1) - 1) // sw + 1
    rs, hs, ws, _ = a.stride()
    wide = kw * channels
    if _in_strips(layer, channels) and not by_gram(positions, kh * wide, outputs):
        strips = a.as_strided((records, height, columns, wide), (rs, hs, sw * ws, 1)).contiguous()
        shape = (records, kh, rows * columns, wide)
        return strips.as_strided(shape, (strips.stride(0), columns * wide, wide, 1))
    strides = (rs, sh * hs, sw * ws, dh * hs, dw * ws, 1)
    view = a.as_strided((records, rows, columns, kh, kw, channels), strides)
    return view.reshape(records, 1, rows * columns, kh * wide)
