"""What a record contributes to a layer's gradient, from the layer's input and output gradient.

One forward and one backward give, for every layer with parameters, its input ``a`` and the gradient
``d`` of the summed loss with respect to its output. A rule turns the two into per-record squared
norms, and into the weighted sum of per-record gradients once the weights (clipping factors) are
known. Per-record gradients are written out only where that is cheaper than two products; never all
of them at once.

| layer | per-record gradient of the weight |
|---|---|
| Linear | sum over positions t of d_t a_t^T |
| Conv2d | the same, with a_t the patch of the input under output position t |
| Embedding | sum over positions of d_t, into the row of the token at t |
| GroupNorm, LayerNorm | sum over positions of d_t times the normalised input |
| LSTM, GRU, RNN | as Linear, on inputs and on hidden states, with d_t the gradient of the gates |
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl.engine.convolutions import conv2d
from dpfl.engine.layer_gradient import (
    LayerGradient,
    gram,
    products,
    rows,
    squared,
    sum_of_products,
)
from dpfl.numerics.clipping import LARGEST_INPUT


def linear(layer: nn.Linear, a: Tensor, d: Tensor) -> LayerGradient:
    """A dense layer on the last axis; the axes between are positions."""
    records, of_inputs = len(a), squared(a)
    a, d = a.reshape(records, -1, layer.in_features), d.reshape(records, -1, layer.out_features)
    squares, weighted = products(a, d, of_inputs)
    # A record whose input is too large is taken out.
    squares = squares.masked_fill(~(of_inputs <= LARGEST_INPUT**2), math.inf)
    bias = None if layer.bias is None else rows(d.sum(dim=1))
    return LayerGradient.of(weight=(squares, weighted), bias=bias)


def embedding(layer: nn.Embedding, a: Tensor, d: Tensor) -> LayerGradient:
    """A table of rows: equal tokens of a record add up before the norm is taken."""
    records = len(a)
    tokens, d = a.reshape(records, -1), d.reshape(records, -1, layer.embedding_dim)
    if layer.padding_idx is not None:
        d = d * (tokens != layer.padding_idx)[..., None]
    same = (tokens[:, :, None] == tokens[:, None, :]).double()

    def weighted(factor: Tensor) -> Tensor:
        table = d.new_zeros(layer.weight.shape, dtype=torch.float64)
        weighted = (d.double() * factor[:, None, None]).flatten(0, 1)
        return table.index_add_(0, tokens.flatten(), weighted)

    return LayerGradient.of(weight=(sum_of_products(same, gram(d)), weighted))


def group_norm(layer: nn.GroupNorm, a: Tensor, d: Tensor) -> LayerGradient:
    """Scale and shift per channel."""
    normalised = F.group_norm(a, layer.num_groups, eps=layer.eps)
    scale, shift = (d * normalised).flatten(2).sum(dim=2), d.flatten(2).sum(dim=2)
    return LayerGradient.of(weight=rows(scale), bias=rows(shift))


def layer_norm(layer: nn.LayerNorm, a: Tensor, d: Tensor) -> LayerGradient:
    """Scale and shift per entry of the normalised shape; leading axes are positions."""
    normalised = F.layer_norm(a, layer.normalized_shape, eps=layer.eps)
    shape = (len(a), -1, math.prod(layer.normalized_shape))
    scale = (d * normalised).reshape(shape).sum(dim=1)
    shift = None if layer.bias is None else rows(d.reshape(shape).sum(dim=1))
    return LayerGradient.of(weight=rows(scale), bias=shift)


RULES: dict[type[nn.Module], Callable[..., LayerGradient]] = {
    nn.Linear: linear,
    nn.Conv2d: conv2d,
    nn.Embedding: embedding,
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
}
"""The rule of each kind of layer: ``rule(layer, a, d)``."""
