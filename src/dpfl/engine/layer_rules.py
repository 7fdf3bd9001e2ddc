"""What a record contributes to a layer's gradient, from the layer's input and the gradient of its
output alone.

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

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl.engine.convolutions import conv2d
from dpfl.engine.pieces import (
    Gradients,
    Piece,
    gram,
    of_weight_and_bias,
    products,
    squared,
    sum_of_products,
    weighted_sum,
)


def linear(layer: nn.Linear, a: Tensor, d: Tensor) -> Piece:
    """A dense layer on the last axis; the axes between are positions."""
    records, of_inputs = len(a), squared(a)
    a, d = a.reshape(records, -1, layer.in_features), d.reshape(records, -1, layer.out_features)
    squares, weight = products(a, d, of_inputs)
    piece = of_weight_and_bias(
        squares, weight, None if layer.bias is None else d.sum(dim=1), layer.weight.shape
    )
    return Piece(piece.squares, piece.weighted, of_inputs)


def embedding(layer: nn.Embedding, a: Tensor, d: Tensor) -> Piece:
    """A table of rows: positions with the same token add up within a record before the norm is
    taken.
    """
    records = len(a)
    tokens, d = a.reshape(records, -1), d.reshape(records, -1, layer.embedding_dim)
    if layer.padding_idx is not None:
        d = d * (tokens != layer.padding_idx)[..., None]
    same = (tokens[:, :, None] == tokens[:, None, :]).double()
    squares = sum_of_products(same, gram(d))

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


def _scale_and_shift(
    product: Tensor, shift: Tensor | None, shape: torch.Size | None = None
) -> Piece:
    squares = squared(product) + (0.0 if shift is None else squared(shift))

    def weighted(factor: Tensor) -> Gradients:
        found = {"weight": weighted_sum(factor, product)} | (
            {} if shift is None else {"bias": weighted_sum(factor, shift)}
        )
        return (
            found
            if shape is None
            else {name: tensor.reshape(shape) for name, tensor in found.items()}
        )

    return Piece(squares, weighted)


def recurrent(
    layer: nn.Module, suffix: str, x: Tensor, hidden: Tensor, slopes: list[Tensor]
) -> Piece:
    """One direction of one recurrent layer: two dense layers whose positions are the steps, and two
    biases.
    """
    of_inputs, of_hidden = slopes[0], slopes[-1]
    squares, weight = products(x, of_inputs)
    more, recurrent_weight = products(hidden, of_hidden)
    squares = squares + more
    biased = hasattr(layer, f"bias_ih{suffix}")
    biases = {"bias_ih": of_inputs.sum(dim=1), "bias_hh": of_hidden.sum(dim=1)} if biased else {}
    for bias in biases.values():
        squares = squares + squared(bias)

    def weighted(factor: Tensor) -> Gradients:
        found = {"weight_ih": weight(factor), "weight_hh": recurrent_weight(factor)}
        found |= {name: weighted_sum(factor, bias) for name, bias in biases.items()}
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
