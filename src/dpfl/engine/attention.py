"""Multi-head attention, computed so that per-record gradients follow from one backward.

torch's own layer hides its projections. Here queries, keys and values are projected on the same
parameters, each projection a dense layer whose positions are those of the sequence; what is between
them (scores, masks, softmax, dropout) has no parameters.
"""

import math
from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl.engine.layer_rules import LayerGradient, Piece, Tap, added, dense_weight, learns, rows

_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def can_attend(layer: nn.Module) -> bool:
    """Whether :func:`attend` can stand in for the layer.

    Added keys and values (``add_bias_kv``, ``add_zero_attn``) are not covered.
    """
    plain = type(layer) is nn.MultiheadAttention and layer.bias_k is None
    return plain and not layer.add_zero_attn


def attend(
    layer: nn.MultiheadAttention,
    learned: Collection[str],
    given: tuple[Tensor, Tensor, Tensor],
    *,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
) -> tuple[Tensor, Tensor | None, list[Tap]]:
    """Run the layer on ``given``: queries, keys and values.

    ``learned`` are the names of its parameters that are not frozen; the other arguments have
    torch's names and meaning. Returns the output, the attention weights if they are wanted, and a
    tap for the projections before the attention and for the one after it.
    """
    inputs = [x if layer.batch_first else x.transpose(0, 1) for x in given]
    biases = [None] * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    weights = [getattr(layer, name) for name in _SEPARATE]
    if layer.in_proj_weight is not None:
        weights = list(layer.in_proj_weight.chunk(3))
    projected = [F.linear(*parts) for parts in zip(inputs, weights, biases, strict=True)]
    taps = []
    if any(not name.startswith("out_proj") for name in learned):
        projected = [x if x.requires_grad else x.requires_grad_() for x in projected]
        taps.append(Tap(partial(_of_inputs, layer), [x.detach() for x in inputs], projected))
    q, k, v = (x.reshape(*x.shape[:2], layer.num_heads, -1).transpose(1, 2) for x in projected)
    mask = _mask(layer, q, attn_mask, key_padding_mask)
    dropout = layer.dropout if layer.training else 0.0
    found = None
    if need_weights:
        scores = q @ k.transpose(2, 3) / math.sqrt(layer.head_dim)
        found = F.dropout((scores if mask is None else scores + mask).softmax(dim=3), dropout)
        mixed = found @ v
        found = found.mean(dim=1) if average_attn_weights else found
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    mixed = mixed.transpose(1, 2).flatten(2)
    output = F.linear(mixed, layer.out_proj.weight, layer.out_proj.bias)
    if any(name.startswith("out_proj") for name in learned):
        output = output if output.requires_grad else output.requires_grad_()
        taps.append(Tap(partial(_of_output, layer), [mixed.detach()], [output]))
    return output if layer.batch_first else output.transpose(0, 1), found, taps


def _mask(
    layer: nn.MultiheadAttention, q: Tensor, given: Tensor | None, padding: Tensor | None
) -> Tensor | None:
    """Both masks as numbers to be added to the scores, (records, heads, queries, keys)."""
    masks = []
    if given is not None:
        given = _as_numbers(given, q)
        shape = (-1, layer.num_heads, *given.shape[1:])
        masks.append(given if given.ndim == 2 else given.reshape(shape))
    if padding is not None:
        masks.append(_as_numbers(padding, q)[:, None, None])
    return added(masks) if masks else None


def _as_numbers(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)


def _of_inputs(layer: nn.MultiheadAttention, *tensors: Tensor) -> LayerGradient:
    """Queries, keys and values: three dense layers, with one weight of three parts or one each."""
    inputs = tensors[:3]
    slopes = tensors[3:]
    pieces: dict[str, Piece] = {}
    if layer.in_proj_weight is None:
        for name, a, d in zip(_SEPARATE, inputs, slopes, strict=True):
            if learns(getattr(layer, name)):
                pieces[name] = dense_weight(a, d)
    elif learns(layer.in_proj_weight):
        parts = [dense_weight(a, d) for a, d in zip(inputs, slopes, strict=True)]
        pieces["in_proj_weight"] = (
            added(squares for squares, _ in parts),
            lambda factor: torch.cat([weighted(factor) for _, weighted in parts]),
        )
    if learns(layer.in_proj_bias):
        pieces["in_proj_bias"] = rows(torch.cat([d.sum(dim=1) for d in slopes], dim=1))
    return LayerGradient.of(**pieces)


def _of_output(layer: nn.MultiheadAttention, a: Tensor, d: Tensor) -> LayerGradient:
    pieces: dict[str, Piece] = {}
    if learns(layer.out_proj.weight):
        pieces["out_proj.weight"] = dense_weight(a, d)
    if learns(layer.out_proj.bias):
        pieces["out_proj.bias"] = rows(d.sum(dim=1))
    return LayerGradient.of(**pieces)
