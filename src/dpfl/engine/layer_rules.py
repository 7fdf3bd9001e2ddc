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
    added,
    gram,
    products,
    squared,
    sum_of_products,
    weight_and_bias,
    weighted_sum,
)


def linear(layer: nn.Linear, a: Tensor, d: Tensor) -> LayerGradient:
    """A dense layer on the last axis; the axes between are positions."""
    records, of_inputs = len(a), squared(a)
    a, d = a.reshape(records, -1, layer.in_features), d.reshape(records, -1, layer.out_features)
    bias = None if layer.bias is None else d.sum(dim=1)
    return weight_and_bias(*products(a, d, of_inputs), bias, of_inputs)


def embedding(layer: nn.Embedding, a: Tensor, d: Tensor) -> LayerGradient:
    """A table of rows: equal tokens of a record add up before the norm is taken."""
    records = len(a)
    tokens, d = a.reshape(records, -1), d.reshape(records, -1, layer.embedding_dim)
    if layer.padding_idx is not None:
        d = d * (tokens != layer.padding_idx)[..., None]
    same = (tokens[:, :, None] == tokens[:, None, :]).double()

    def weighted(factor: Tensor) -> dict[str, Tensor]:
        table = d.new_zeros(layer.weight.shape, dtype=torch.float64)
        weighted = (d.double() * factor[:, None, None]).flatten(0, 1)
        return {"weight": table.index_add_(0, tokens.flatten(), weighted)}

    return LayerGradient(sum_of_products(same, gram(d)), weighted)


def group_norm(layer: nn.GroupNorm, a: Tensor, d: Tensor) -> LayerGradient:
    """Scale and shift per channel."""
    normalised = F.group_norm(a, layer.num_groups, eps=layer.eps)
    scale, shift = (d * normalised).flatten(2).sum(dim=2), d.flatten(2).sum(dim=2)
    return weight_and_bias(squared(scale), lambda factor: weighted_sum(factor, scale), shift)


def layer_norm(layer: nn.LayerNorm, a: Tensor, d: Tensor) -> LayerGradient:
    """Scale and shift per entry of the normalised shape; leading axes are positions."""
    normalised = F.layer_norm(a, layer.normalized_shape, eps=layer.eps)
    shape = (len(a), -1, math.prod(layer.normalized_shape))
    scale = (d * normalised).reshape(shape).sum(dim=1)
    shift = None if layer.bias is None else d.reshape(shape).sum(dim=1)
    return weight_and_bias(squared(scale), lambda factor: weighted_sum(factor, scale), shift)


def recurrent(
    layer: nn.Module, suffix: str, x: Tensor, hidden: Tensor, slopes: list[Tensor]
) -> LayerGradient:
    """One direction of one recurrent layer: two dense layers whose positions are the steps.

    ``suffix`` ends the names of its parameters. ``slopes`` are the gradients of the gates: one
    where inputs and hidden states share them, else one for each.
    """
    weights = {"weight_ih": products(x, slopes[0]), "weight_hh": products(hidden, slopes[-1])}
    biases = {"bias_ih": slopes[0].sum(dim=1), "bias_hh": slopes[-1].sum(dim=1)}
    biases = biases if hasattr(layer, f"bias_ih{suffix}") else {}

    def weighted(factor: Tensor) -> dict[str, Tensor]:
        found = {name: weight(factor) for name, (_, weight) in weights.items()}
        found |= {name: weighted_sum(factor, bias) for name, bias in biases.items()}
        return {f"{name}{suffix}": gradient for name, gradient in found.items()}

    squares = [squares for squares, _ in weights.values()]
    return LayerGradient(added([*squares, *map(squared, biases.values())]), weighted)


RULES: dict[type[nn.Module], Callable[..., LayerGradient]] = {
    nn.Linear: linear,
    nn.Conv2d: conv2d,
    nn.Embedding: embedding,
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
}
"""The rule of each kind of layer: ``rule(layer, a, d)``."""
