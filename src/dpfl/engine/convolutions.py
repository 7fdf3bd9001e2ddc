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

from dpfl.engine import layer_rules as rules
from dpfl.engine.layer_rules import LayerGradient, Piece
from dpfl.numerics.clipping import stacked_product

_WIDE = 64  # columns from which a product with one kernel row is as fast as one with all of them
_IN_CACHE = 1 << 20  # numbers of patches copied at once: beyond, they no longer stay in the cache


def conv2d(layer: nn.Conv2d, a: Tensor, d: Tensor) -> LayerGradient:
    """A convolution: a dense layer on patches, group by group.

    In planes, output positions are the innermost axis of every copy, and a bias is one more input,
    of value 1. Else channels are the innermost axis.
    """
    each, padding = layer.in_channels // layer.groups, layer._reversed_padding_repeated_twice
    if any(padding):
        a = F.pad(a, padding, mode=layer.padding_mode.replace("zeros", "constant"))
    planes = layer.stride[1] == 1 and layer.kernel_size[1] * each < _WIDE
    a = a if planes else a.permute(0, 2, 3, 1)
    slopes = d.permute(0, 2, 3, 1).reshape(len(a), -1, layer.out_channels)
    of_group = _products_of_planes if planes else _products_of_patches
    outputs = layer.out_channels // layer.groups
    groups = zip(
        torch.split(a, each, 1 if planes else 3), torch.split(slopes, outputs, 2), strict=True
    )
    pieces = [of_group(layer, own.contiguous(), mine.contiguous()) for own, mine in groups]
    squares, inputs = rules.added(squares for squares, _ in pieces), layer.weight[0].numel()

    def weighted(factor: Tensor) -> Tensor:
        return torch.cat([of_own(factor) for _, of_own in pieces])

    def of_patches(factor: Tensor) -> Tensor:
        found = weighted(factor).reshape(layer.out_channels, *layer.kernel_size, each)
        return found.permute(0, 3, 1, 2)

    if planes:
        names = ("weight", "bias") if layer.bias is not None else ("weight",)
        return LayerGradient(
            squares,
            lambda factor: dict(zip(names, torch.split(weighted(factor), inputs, 1), strict=True)),
        )
    bias = None if layer.bias is None else rules.rows(slopes.sum(dim=1))
    return LayerGradient.of(weight=(squares, of_patches), bias=bias)


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
    (records, positions, outputs), biased = d.shape, layer.bias is not None
    inputs = layer.weight[0].numel() + biased
    if positions == 1 or not rules.written_out(records, positions, inputs, outputs):
        return rules.products(_planes(layer, a, biased).transpose(1, 2), d)
    gradients, at_once = a.new_empty(records, inputs, outputs), _IN_CACHE // (inputs * positions)
    for some in rules.slices(records, max(1, at_once)):
        stacked_product(_planes(layer, a[some], biased), d[some], out=gradients[some])
    squares, weighted = rules.rows(gradients)
    return squares, lambda factor: weighted(factor).reshape(inputs, outputs).T


def _planes(layer: nn.Conv2d, a: Tensor, biased: bool) -> Tensor:
    """Patches with output positions innermost, and a plane of ones where there is a bias.

    One shifted copy of the image for every entry of the kernel.
    """
    (kh, kw), (sh, _), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
    records, channels, height, width = a.shape
    high, wide = (height - dh * (kh - 1) - 1) // sh + 1, width - dw * (kw - 1)
    shape, inputs = (records, channels, kh, kw, high, wide), channels * kh * kw
    strides = (a.stride(0), a.stride(1), dh * width, dw, sh * width, 1)
    planes = a.new_empty(records, inputs + biased, high * wide)
    planes[:, :inputs].view(shape).copy_(a.as_strided(shape, strides, a.storage_offset()))
    planes[:, inputs:] = 1.0
    return planes


def _products_of_patches(layer: nn.Conv2d, a: Tensor, d: Tensor) -> Piece:
    """One group's products, with channels innermost."""
    return rules.products(_patches(layer, a, *d.shape[1:]), d)


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
    if _in_strips(layer, channels) and not rules.by_gram(positions, kh * wide, outputs):
        strips = a.as_strided((records, height, columns, wide), (rs, hs, sw * ws, 1)).contiguous()
        shape = (records, kh, rows * columns, wide)
        return strips.as_strided(shape, (strips.stride(0), columns * wide, wide, 1))
    strides = (rs, sh * hs, sw * ws, dh * hs, dw * ws, 1)
    view = a.as_strided((records, rows, columns, kh, kw, channels), strides)
    return view.reshape(records, 1, rows * columns, kh * wide)
