"""The rule of convolutions: a dense layer on patches, whichever way of forming patches costs least.

| way | where | what is copied |
|---|---|---|
| planes | few channels, no column skipped | the shifted image for every entry of the kernel |
| strips | many channels, nothing skipped | patches of one row of the kernel; other rows are views |
| full | the rest | every patch |

A convolution of one axis is one of two axes with a height of 1. In three axes every patch is
copied.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from dpfl.engine import layer_rules as rules
from dpfl.engine.layer_rules import LayerGradient, Piece
from dpfl.numerics.clipping import stacked_product

_WIDE = 64  # columns from which a product with one kernel row is as fast as one with all of them
_IN_CACHE = 1 << 20  # numbers of patches copied at once: beyond, they no longer stay in the cache


@dataclass(frozen=True)
class Kernel:
    """How a convolution of two axes reads its input.

    ``inputs`` are the numbers of a patch, ``each`` the input channels of a group; ``biased`` says
    that the layer learns a bias.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    each: int
    biased: bool

    @property
    def inputs(self) -> int:
        """How many numbers a patch has."""
        return self.each * math.prod(self.size)


def convolution(layer: _ConvNd, a: Tensor, d: Tensor) -> LayerGradient:
    """A convolution of any number of axes: a dense layer on patches, group by group."""
    biased = rules.learns(layer.bias)
    if not rules.learns(layer.weight):
        return LayerGradient.of(bias=rules.rows(d.flatten(2).sum(dim=2)) if biased else None)
    padding = layer._reversed_padding_repeated_twice
    if any(padding):
        a = F.pad(a, padding, mode=layer.padding_mode.replace("zeros", "constant"))
    first = (1,) if len(layer.kernel_size) == 1 else ()  # of a convolution of one axis, a height
    if first:
        a = a[:, :, None]
        d = d[:, :, None]
    kernel = Kernel(
        size=first + layer.kernel_size,
        stride=first + layer.stride,
        dilation=first + layer.dilation,
        each=layer.in_channels // layer.groups,
        biased=biased,
    )
    return _of_groups(layer, kernel, a, d)


def _of_groups(layer: _ConvNd, kernel: Kernel, a: Tensor, d: Tensor) -> LayerGradient:
    """The gradient from padded inputs.

    In planes, output positions are the innermost axis of every copy, and a bias is one more input,
    of value 1. Else channels are the innermost axis.
    """
    each = kernel.each
    outputs = layer.out_channels // layer.groups
    planes = a.ndim == 4 and kernel.stride[1] == 1 and kernel.size[1] * each < _WIDE
    a = a if planes else a.movedim(1, -1)
    slopes = d.movedim(1, -1).reshape(len(a), -1, layer.out_channels)
    of_group = _products_of_planes if planes else _products_of_patches
    groups = zip(
        torch.split(a, each, 1 if planes else -1), torch.split(slopes, outputs, 2), strict=True
    )
    pieces = [of_group(kernel, own.contiguous(), mine.contiguous()) for own, mine in groups]
    squares = rules.added(squares for squares, _ in pieces)

    def weighted(factor: Tensor) -> Tensor:
        return torch.cat([of_own(factor) for _, of_own in pieces])

    def of_patches(factor: Tensor) -> Tensor:
        return weighted(factor).reshape(layer.out_channels, *kernel.size, each).movedim(-1, 1)

    if planes:
        names = ("weight", "bias") if kernel.biased else ("weight",)
        return LayerGradient(
            names,
            squares,
            lambda factor: dict(
                zip(names, torch.split(weighted(factor), kernel.inputs, 1), strict=True)
            ),
        )
    bias = rules.rows(slopes.sum(dim=1)) if kernel.biased else None
    return LayerGradient.of(weight=(squares, of_patches), bias=bias)


def _in_strips(kernel: Kernel) -> bool:
    """Whether patches of one row of the kernel serve all of its rows.

    That is so for many channels, where nothing is skipped but columns.
    """
    (kh, kw) = kernel.size
    tall = kh > 1 and kernel.stride[0] == 1
    return tall and kernel.dilation == (1, 1) and kw * kernel.each >= _WIDE


def _products_of_planes(kernel: Kernel, a: Tensor, d: Tensor) -> Piece:
    """One group's products.

    Where they are written out, planes of a few records at a time stay in the cache.
    """
    (records, positions, outputs), inputs = d.shape, kernel.inputs + kernel.biased
    if positions == 1 or not rules.written_out(records, positions, inputs, outputs):
        return rules.products(_planes(kernel, a).transpose(1, 2), d)
    gradients = a.new_empty(records, inputs, outputs)
    at_once = _IN_CACHE // (inputs * positions)
    for some in rules.slices(records, max(1, at_once)):
        stacked_product(_planes(kernel, a[some]), d[some], out=gradients[some])
    squares, weighted = rules.rows(gradients)
    return squares, lambda factor: weighted(factor).reshape(inputs, outputs).T


def _planes(kernel: Kernel, a: Tensor) -> Tensor:
    """Patches with output positions innermost, and a plane of ones where there is a bias.

    One shifted copy of the image for every entry of the kernel.
    """
    (kh, kw), (sh, _), (dh, dw) = kernel.size, kernel.stride, kernel.dilation
    records, channels, height, width = a.shape
    high = (height - dh * (kh - 1) - 1) // sh + 1
    wide = width - dw * (kw - 1)
    shape = (records, channels, kh, kw, high, wide)
    inputs = channels * kh * kw
    strides = (a.stride(0), a.stride(1), dh * width, dw, sh * width, 1)
    planes = a.new_empty(records, inputs + kernel.biased, high * wide)
    planes[:, :inputs].view(shape).copy_(a.as_strided(shape, strides, a.storage_offset()))
    planes[:, inputs:] = 1.0
    return planes


def _products_of_patches(kernel: Kernel, a: Tensor, d: Tensor) -> Piece:
    """One group's products, with channels innermost."""
    if a.ndim == 4:
        return rules.products(_patches(kernel, a, *d.shape[1:]), d)
    for axis in range(3):  # one window after the other; its numbers become the last axis
        reach = kernel.dilation[axis] * (kernel.size[axis] - 1) + 1
        a = a.unfold(axis + 1, reach, kernel.stride[axis])[..., :: kernel.dilation[axis]]
    patches = a.movedim(4, -1)  # channels after the numbers of the window
    return rules.products(patches.reshape(*d.shape[:2], kernel.inputs), d)


def _patches(kernel: Kernel, a: Tensor, positions: int, outputs: int) -> Tensor:
    """Copy the patch under every output position: faster than ``F.unfold``.

    Returns (records, blocks, positions, numbers). Patches of neighbouring output rows share all but
    one row of the kernel. Where nothing skips, patches of one kernel row are copied once and every
    row of the kernel is a view of them: a fifth of the copying for a 5 x 5 kernel.
    """
    (kh, kw), (sh, sw), (dh, dw) = kernel.size, kernel.stride, kernel.dilation
    records, height, width, channels = a.shape
    rows = (height - dh * (kh - 1) - 1) // sh + 1
    columns = (width - dw * (kw - 1) - 1) // sw + 1
    rs, hs, ws, _ = a.stride()
    wide = kw * channels
    if _in_strips(kernel) and not rules.by_gram(positions, kh * wide, outputs):
        strips = a.as_strided((records, height, columns, wide), (rs, hs, sw * ws, 1)).contiguous()
        shape = (records, kh, rows * columns, wide)
        return strips.as_strided(shape, (strips.stride(0), columns * wide, wide, 1))
    strides = (rs, sh * hs, sw * ws, dh * hs, dw * ws, 1)
    view = a.as_strided((records, rows, columns, kh, kw, channels), strides)
    return view.reshape(records, 1, rows * columns, kh * wide)
