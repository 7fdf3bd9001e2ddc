"""What the rules of layers are made of: squared norms and weighted sums of per-record gradients.

Squares are added up in double precision: their float32 sums under- and overflow where the gradient
itself does not.

*What rounding may add.* Where per-record gradients are written out, the clipped vector is the very
one whose norm was taken; they are added up in single precision ``SUMMANDS`` records at a time and
from there in double. Where they are not (two Gram matrices, embeddings), records and positions are
added up in double precision from the start, because positions may cancel and single precision would
then lose more than the clip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfl.core.grid import SUMMANDS
from dpfl.numerics.clipping import squared_norms, stacked_product

MOST_NUMBERS = 1 << 24  # entries of per-record gradients or patches held at once
_ROUNDING = 5e-7

Weighted = Callable[[Tensor], Tensor]
Piece = tuple[Tensor, Weighted]
"""Squared norms of the per-record gradients of one parameter, and their weighted sum."""


@dataclass(frozen=True)
class LayerGradient:
    """One layer's per-record gradients, without writing them out where that is cheaper.

    ``squares`` are their squared norms. ``weighted`` turns a factor per record into the weighted
    sum of the gradients, by the names of the layer's parameters.
    """

    squares: Tensor
    weighted: Callable[[Tensor], dict[str, Tensor]]

    @classmethod
    def of(cls, **pieces: Piece | None) -> LayerGradient:
        """Put a layer's gradient together from those of its parameters (None: there is none)."""
        known = {name: piece for name, piece in pieces.items() if piece is not None}
        squares = added(squares for squares, _ in known.values())
        return cls(
            squares, lambda factor: {name: sums(factor) for name, (_, sums) in known.items()}
        )


def squared(x: Tensor) -> Tensor:
    """Squared norm of each record, in double precision."""
    return squared_norms(x.flatten(1))


def added(tensors: Iterable[Tensor]) -> Tensor:
    """Add up one tensor or more, from the first to the last."""
    first, *others = tensors
    return sum(others, first)


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
    blocks, inputs = a.shape[1], a.shape[1] * a.shape[3]
    if positions == 1:
        squares = (squared(a) if of_inputs is None else of_inputs) * squared(d)
        return squares, _outer_products(a.reshape(records, -1), d[:, 0])
    if not written_out(records, positions, inputs, outputs):
        return _by_gram_matrices(a, d)
    if a.stride(2) == 1:  # positions innermost: the other way round is faster
        found = stacked_product(a.transpose(2, 3), d[:, None])
        return squared(found), lambda factor: weighted_sum(factor, found).view(inputs, outputs).T
    gradients = stacked_product(d.transpose(1, 2)[:, None], a)

    def weighted(factor: Tensor) -> Tensor:
        total = weighted_sum(factor, gradients).view(blocks, outputs, -1)
        return total.transpose(0, 1).reshape(outputs, inputs)

    return squared(gradients), weighted


def _outer_products(a: Tensor, d: Tensor) -> Weighted:
    """Weighted sum of d a^T over records, for a (B, in) and d (B, out)."""

    def outer(factor: Tensor) -> Tensor:
        slopes = (d * factor[:, None]).T
        return _in_parts(lambda some: slopes[:, some] @ a[some], len(factor))

    return outer


def _by_gram_matrices(a: Tensor, d: Tensor) -> Piece:
    """The same as :func:`products`, for a (B, blocks, T, in / blocks), from Gram matrices."""
    records, blocks, positions, width = a.shape
    outputs = d.shape[2]
    at_once = max(1, MOST_NUMBERS // (2 * positions * (positions + blocks * width + outputs)))
    parts = [slice(first, first + at_once) for first in range(0, records, at_once)]
    squares = torch.zeros(records, dtype=torch.float64, device=d.device)
    for some in parts:
        of_inputs = added(gram(part) for part in a[some].unbind(1))
        squares[some] = sum_of_products(of_inputs, gram(d[some]))

    def summed(factor: Tensor) -> Tensor:
        total = torch.zeros(outputs, blocks * width, dtype=torch.float64, device=d.device)
        for some in parts:
            weighted = (d[some].double() * factor[some, None, None]).flatten(0, 1).T
            columns = [weighted @ part.double().flatten(0, 1) for part in a[some].unbind(1)]
            total += torch.cat(columns, dim=1)
        return total

    return squares, summed


def _in_parts(product: Callable[[slice], Tensor], records: int) -> Tensor:
    """Add up in double precision what ``product`` gives for ``SUMMANDS`` records at a time."""
    total = product(slice(0, SUMMANDS)).to(torch.float64)
    for first in range(SUMMANDS, records, SUMMANDS):
        total += product(slice(first, first + SUMMANDS))
    return total


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
