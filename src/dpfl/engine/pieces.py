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

Gradients = dict[str, Tensor]
Weighted = Callable[[Tensor], Tensor]


@dataclass
class Piece:
    """What one layer keeps between its squared norms and its weighted sum.

    ``of_inputs``, where a layer gives it, are the squared norms of its input: a record with too
    large a one is taken out.
    """

    squares: Tensor
    weighted: Callable[[Tensor], Gradients]
    of_inputs: Tensor | None = None


def squared(x: Tensor) -> Tensor:
    """Squared norm of each record, in double precision."""
    return squared_norms(x.flatten(1))


def by_gram(positions: int, inputs: int, outputs: int) -> bool:
    """Whether two T x T Gram matrices are cheaper than writing out and reading again what has the
    weight's size.
    """
    return positions**2 * (inputs + outputs) < 32 * inputs * outputs


def written_out(records: int, positions: int, inputs: int, outputs: int) -> bool:
    """Whether per-record gradients are formed: cheaper than Gram matrices, and they fit into
    memory.
    """
    return not by_gram(positions, inputs, outputs) and records * inputs * outputs <= MOST_NUMBERS


def products(a: Tensor, d: Tensor, of_inputs: Tensor | None = None) -> tuple[Tensor, Weighted]:
    """Squared norms and weighted sum of sum_t d_t a_t^T, for a (B, T, in) and d (B, T, out).

    ``a`` may come in blocks of columns, (B, blocks, T, in / blocks). With one position the norm
    factors. With few positions and a large weight, norms come from two T x T Gram matrices (nothing
    of the weight's size is written); else per-record gradients are formed once and serve both.
    ``of_inputs`` are the squared norms of a, where they are known.
    """
    (records, positions, outputs), a = d.shape, a if a.ndim == 4 else a[:, None]
    blocks, inputs = a.shape[1], a.shape[1] * a.shape[3]
    if positions == 1:
        return (squared(a) if of_inputs is None else of_inputs) * squared(d), _outer_products(
            a.reshape(records, -1), d[:, 0]
        )
    if not written_out(records, positions, inputs, outputs):
        return _by_gram_matrices(a, d)
    if a.stride(2) == 1:  # positions innermost: the other way round is faster
        found = stacked_product(a.transpose(2, 3), d[:, None])
        return squared(found), lambda factor: weighted_sum(factor, found).view(inputs, outputs).T
    gradients = stacked_product(d.transpose(1, 2)[:, None], a)
    return (
        squared(gradients),
        lambda factor: (
            weighted_sum(factor, gradients)
            .view(blocks, outputs, -1)
            .transpose(0, 1)
            .reshape(outputs, inputs)
        ),
    )


def added(tensors: Iterable[Tensor]) -> Tensor:
    """Add up one tensor or more."""
    first, *others = tensors
    return sum(others, first)


def _outer_products(a: Tensor, d: Tensor) -> Weighted:
    """Weighted sum of d a^T over records, for a (B, in) and d (B, out)."""

    def outer(factor: Tensor) -> Tensor:
        slopes = (d * factor[:, None]).T
        return in_parts(lambda some: slopes[:, some] @ a[some], len(factor))

    return outer


def _by_gram_matrices(a: Tensor, d: Tensor) -> tuple[Tensor, Weighted]:
    records, blocks, positions, width = a.shape
    outputs = d.shape[2]
    at_once = max(1, MOST_NUMBERS // (2 * positions * (positions + blocks * width + outputs)))
    squares = torch.zeros(records, dtype=torch.float64, device=d.device)
    for first in range(0, records, at_once):
        some = slice(first, first + at_once)
        squares[some] = sum_of_products(
            added(gram(part) for part in a[some].unbind(1)), gram(d[some])
        )

    def summed(factor: Tensor) -> Tensor:
        total = torch.zeros(outputs, blocks * width, dtype=torch.float64, device=d.device)
        for first in range(0, records, at_once):
            some = slice(first, first + at_once)
            weighted = (d[some].double() * factor[some, None, None]).flatten(0, 1).T
            total += torch.cat(
                [weighted @ part.double().flatten(0, 1) for part in a[some].unbind(1)], dim=1
            )
        return total

    return squares, summed


def in_parts(product: Callable[[slice], Tensor], records: int) -> Tensor:
    """Add up in double precision what ``product`` gives for ``SUMMANDS`` records at a time."""
    total = product(slice(0, SUMMANDS)).to(torch.float64)
    for first in range(SUMMANDS, records, SUMMANDS):
        total += product(slice(first, first + SUMMANDS))
    return total


def weighted_sum(factor: Tensor, rows: Tensor) -> Tensor:
    """Weighted sum of per-record gradients, as one vector in double precision."""
    rows = rows.flatten(1)
    return in_parts(lambda some: factor[some] @ rows[some], len(factor))


def gram(x: Tensor) -> Tensor:
    """Inner products of a record's positions, in double precision: they may cancel almost entirely
    in the norm.
    """
    x = x.double()
    return torch.bmm(x, x.transpose(1, 2))


_ROUNDING = 5e-7


def sum_of_products(of_inputs: Tensor, of_slopes: Tensor) -> Tensor:
    """Squared norm of sum_t d_t a_t^T from the two Gram matrices, made larger by what float32 may
    add to that sum itself.

    The clipped sum is formed of terms of norm |a_t| |d_t|. Where those cancel almost entirely, even
    the rounding of d and its clip factor is no longer small against the gradient, and counts as
    part of it.
    """
    norms = (of_inputs * of_slopes).sum(dim=(1, 2)).clamp_min(0.0).sqrt()
    terms = (
        (of_inputs.diagonal(dim1=1, dim2=2) * of_slopes.diagonal(dim1=1, dim2=2))
        .clamp_min(0.0)
        .sqrt()
        .sum(dim=1)
    )
    return (norms + _ROUNDING * terms).square()


def of_weight_and_bias(
    squares: Tensor, weight: Weighted, bias: Tensor | None, shape: torch.Size
) -> Piece:
    """A layer's piece from its weight's, and the per-record gradient of its bias (B, out) if it has
    one.
    """
    if bias is not None:
        squares = squares + squared(bias)

    def weighted(factor: Tensor) -> Gradients:
        found = {"weight": weight(factor).reshape(shape)}
        return found if bias is None else {**found, "bias": weighted_sum(factor, bias)}

    return Piece(squares, weighted)
