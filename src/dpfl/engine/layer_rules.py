"""What a record contributes to a layer's gradient, from the layer's input and output gradient.

One forward and one backward give, for every layer with parameters, its input ``a`` and the gradient
``d`` of the summed loss with respect to its output. A rule turns the two into per-record squared
norms, and into the weighted sum of per-record gradients once the weights (clipping factors) are
known. Per-record gradients are written out only where that is cheaper than two products; never all
of them at once. What is frozen has no gradient.

| layer | per-record gradient of the weight |
|---|---|
| Linear | sum over positions t of d_t a_t^T |
| Conv1d, Conv2d, Conv3d | the same, with a_t the patch of the input under output position t |
| MultiheadAttention | the same, for each of its projections |
| Embedding | sum over positions of d_t, into the row of the token at t |
| normalisation | sum over positions of d_t times the normalised input |
| LSTM, GRU, RNN | as Linear, on inputs and on hidden states, with d_t the gradient of the gates |

Squares are added up in double precision: their float32 sums under- and overflow where the gradient
itself does not.

*What rounding may add.* Where per-record gradients are written out, the clipped vector is the very
one whose norm was taken; they are added up in single precision ``SUMMANDS`` records at a time and
from there in double. Where they are not (two Gram matrices, embeddings), records and positions are
added up in double precision from the start, because positions may cancel and single precision would
then lose more than the clip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpfl.core.grid import SUMMANDS
from dpfl.numerics.clipping import LARGEST_INPUT, squared_norms, stacked_product

MOST_NUMBERS = 1 << 24  # entries of per-record gradients or patches held at once
_ROUNDING = 5e-7

Weighted = Callable[[Tensor], Tensor]
Piece = tuple[Tensor, Weighted]
"""Squared norms of the per-record gradients of one parameter, and their weighted sum."""


@dataclass(frozen=True)
class LayerGradient:
    """One layer's per-record gradients, without writing them out where that is cheaper.

    ``squares`` are their squared norms. ``weighted`` turns a factor per record into the weighted
    sum of the gradients, by the ``names`` of the layer's parameters.
    """

    names: tuple[str, ...]
    squares: Tensor
    weighted: Callable[[Tensor], dict[str, Tensor]]

    @classmethod
    def of(cls, **pieces: Piece | None) -> LayerGradient:
        """Put a layer's gradient together from those of its parameters (None: there is none)."""
        known = {name: piece for name, piece in pieces.items() if piece is not None}
        squares = added(squares for squares, _ in known.values())
        return cls(
            tuple(known),
            squares,
            lambda factor: {name: sums(factor) for name, (_, sums) in known.items()},
        )


@dataclass(frozen=True)
class Tap:
    """What a layer's rule is asked with: what the layer was ``given``, and gradients of ``wanted``.

    ``rule(*given, *gradients)`` is the layer's gradient.
    """

    rule: Callable[..., LayerGradient]
    given: list[Tensor]
    wanted: list[Tensor]


def learns(parameter: Any) -> bool:
    """Whether a layer has this parameter (not None), and it is not frozen."""
    return isinstance(parameter, Tensor) and parameter.requires_grad


def squared(x: Tensor) -> Tensor:
    """Squared norm of each record, in double precision."""
    return squared_norms(x.flatten(1))


def added(tensors: Iterable[Tensor]) -> Tensor:
    """Add up one tensor or more, from the first to the last."""
    first, *others = tensors
    return sum(others, first)


def slices(count: int, at_once: int) -> list[slice]:
    """Cut so many records into stretches of ``at_once``."""
    return [slice(first, first + at_once) for first in range(0, count, at_once)]


def by_gram(positions: int, inputs: int, outputs: int) -> bool:
    """Whether two Gram matrices of positions cost less than writing out and reading gradients."""
    return positions**2 * (inputs + outputs) < 32 * inputs * outputs


def written_out(records: int, positions: int, inputs: int, outputs: int) -> bool:
    """Whether gradients are written out: it costs less than Gram matrices, and they fit."""
    return not by_gram(positions, inputs, outputs) and records * inputs * outputs <= MOST_NUMBERS


def products(a: Tensor, d: Tensor, of_inputs: Tensor | None = None) -> Piece:
    """Squared norms and weighted sum of sum_t d_t a_t^T, for a (B, T, in) and d (B, T, out).

    ``a`` may come in blocks of columns, (B, blocks, T, in / blocks). With one position the norm
    factors. With few positions and a large weight, norms come from two T x T Gram matrices (nothing
    of the weight's size is written); else per-record gradients are formed once and serve both.
    ``of_inputs`` are the squared norms of a, where they are known.
    """
    (records, positions, outputs), a = d.shape, a if a.ndim == 4 else a[:, None]
    blocks = a.shape[1]
    inputs = a.shape[1] * a.shape[3]
    if positions == 1:
        squares = (squared(a) if of_inputs is None else of_inputs) * squared(d)
        flat = a.flatten(1)

        def outer(factor: Tensor) -> Tensor:
            slopes = (d[:, 0] * factor[:, None]).T
            return _in_parts(lambda some: slopes[:, some] @ flat[some], records)

        return squares, outer
    if not written_out(records, positions, inputs, outputs):
        return _by_gram_matrices(a.transpose(1, 2).flatten(2), d)
    if a.stride(2) == 1:  # positions innermost: the other way round is faster
        found = stacked_product(a.transpose(2, 3), d[:, None])
        return squared(found), lambda factor: weighted_sum(factor, found).view(inputs, outputs).T
    gradients = stacked_product(d.transpose(1, 2)[:, None], a)

    def weighted(factor: Tensor) -> Tensor:
        total = weighted_sum(factor, gradients).view(blocks, outputs, -1)
        return total.transpose(0, 1).reshape(outputs, inputs)

    return squared(gradients), weighted


def _by_gram_matrices(a: Tensor, d: Tensor) -> Piece:
    """The same as :func:`products`, for a (B, T, in), from Gram matrices."""
    (records, positions, inputs), outputs = a.shape, d.shape[2]
    at_once = max(1, MOST_NUMBERS // (2 * positions * (positions + inputs + outputs)))
    parts = slices(records, at_once)

    def product(factor: Tensor, some: slice) -> Tensor:
        weighted = (d[some].double() * factor[some, None, None]).flatten(0, 1)
        return weighted.T @ a[some].double().flatten(0, 1)

    squares = [sum_of_products(gram(a[some]), gram(d[some])) for some in parts]
    return torch.cat(squares), lambda factor: added(product(factor, some) for some in parts)


def _in_parts(product: Callable[[slice], Tensor], records: int) -> Tensor:
    """Add up in double precision what ``product`` gives for ``SUMMANDS`` records at a time."""
    return added(product(some).to(torch.float64) for some in slices(records, SUMMANDS))


def weighted_sum(factor: Tensor, rows: Tensor) -> Tensor:
    """Weighted sum of per-record gradients (B, ...), as one vector in double precision.

    >>> weighted_sum(torch.tensor([1.0, 0.5]), torch.tensor([[1.0, 2.0], [4.0, 6.0]])).tolist()
    [3.0, 5.0]
    """
    rows = rows.flatten(1)
    return _in_parts(lambda some: factor[some] @ rows[some], len(factor))


def rows(gradients: Tensor) -> Piece:
    """Per-record gradients that are written out, (B, ...)."""
    return squared(gradients), lambda factor: weighted_sum(factor, gradients)


def gram(x: Tensor) -> Tensor:
    """Inner products of a record's positions, (B, T, T), in double precision.

    They may cancel almost entirely in the norm.
    """
    x = x.double()
    return torch.bmm(x, x.transpose(1, 2))


def sum_of_products(of_inputs: Tensor, of_slopes: Tensor) -> Tensor:
    """Squared norm of sum_t d_t a_t^T from the Gram matrices of a and d, widened by rounding.

    The clipped sum is formed of terms of norm |a_t| |d_t|. Where those cancel almost entirely, even
    the rounding of d and its clip factor is no longer small against the gradient, and counts as
    part of it.
    """
    norms = (of_inputs * of_slopes).sum(dim=(1, 2)).clamp_min(0.0).sqrt()
    each = of_inputs.diagonal(dim1=1, dim2=2) * of_slopes.diagonal(dim1=1, dim2=2)
    terms = each.clamp_min(0.0).sqrt().sum(dim=1)
    return (norms + _ROUNDING * terms).square()


def linear(layer: nn.Module, a: Tensor, d: Tensor) -> LayerGradient:
    """A dense layer on the last axis; the axes between are positions."""
    d = d.reshape(len(a), -1, d.shape[-1])
    bias = learns(getattr(layer, "bias", None))
    weight = dense_weight(a, d) if learns(layer.weight) else None
    return LayerGradient.of(weight=weight, bias=rows(d.sum(dim=1)) if bias else None)


def dense_weight(a: Tensor, d: Tensor) -> Piece:
    """The gradient of a dense layer's weight."""
    of_inputs = squared(a)
    squares, weighted = products(a.reshape(len(a), -1, a.shape[-1]), d, of_inputs)
    # A record whose input is too large is taken out.
    squares = squares.masked_fill(~(of_inputs <= LARGEST_INPUT**2), math.inf)
    return squares, weighted


def without_padding(layer: nn.Embedding, tokens: Tensor, d: Tensor) -> Tensor:
    """Output gradients of an embedding; those of padding are zero."""
    return d if layer.padding_idx is None else d * (tokens != layer.padding_idx)[..., None]


def embedding(layer: nn.Embedding, a: Tensor, d: Tensor) -> LayerGradient:
    """A table of rows: equal tokens of a record add up before the norm is taken."""
    records = len(a)
    tokens = a.reshape(records, -1)
    d = d.reshape(records, -1, layer.embedding_dim)
    d = without_padding(layer, tokens, d)
    same = (tokens[:, :, None] == tokens[:, None, :]).double()

    def weighted(factor: Tensor) -> Tensor:
        table = d.new_zeros(layer.weight.shape, dtype=torch.float64)
        weighted = (d.double() * factor[:, None, None]).flatten(0, 1)
        return table.index_add_(0, tokens.flatten(), weighted)

    return LayerGradient.of(weight=(sum_of_products(same, gram(d)), weighted))
