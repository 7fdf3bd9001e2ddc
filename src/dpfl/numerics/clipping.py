"""Norms, clipping and products of stacks of matrices: what several packages share.

Norms and clip factors are computed in double precision, so that a clipped vector stays within its
bound from the smallest float32 number to the largest.
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

# A clipped vector is scaled to this fraction of the bound, so that float32 rounding (about 1e-6 for
# a million terms) can never leave its norm above the sensitivity that is charged.
CLIP_MARGIN = 1.0 - 1e-5

LARGEST_NORM = 1e15
"""Records with a larger norm, or whose gradient has one, count as zero.

Their clip factors would bring products below the smallest normal float32 number, where rounding is
no longer relative.
"""

LARGEST_INPUT = 1e30
"""The same for the input of one layer, where the gradient is a product that is not written out."""


def all_finite(x: Tensor) -> bool:
    """Whether every number is finite; a finite sum is proof enough, and found faster.

    >>> all_finite(torch.tensor([3e38, 3e38])), all_finite(torch.tensor([float("inf"), 1.0]))
    (True, False)
    """
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def clip_factor(norm: Tensor, bound: float | Tensor) -> Tensor:
    """Factor that brings a vector of this norm within ``bound``; zero where the norm is not finite.

    >>> clip_factor(torch.tensor([0.0, 0.5, 2.0, float("nan"), float("inf")]), 1.0)
    tensor([1.0000, 1.0000, 0.5000, 0.0000, 0.0000])
    """
    factor = (bound * CLIP_MARGIN / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp_max_(1.0)
    return factor.nan_to_num_(nan=0.0)  # of an infinite norm it is zero already


NORMALISED = 0.01
"""Added to the norm where gradients are normalised: AUTO-S of Bu, Wang, Zha, Karypis (*Automatic
Clipping*, NeurIPS 2023). It also bounds the factor of a short gradient, which could overflow.
"""


def layer_factors(
    squares: Mapping[str, Tensor], whole: Tensor, bound: float | Tensor, how: str, layers: int
) -> dict[str, Tensor]:
    """Factors by layer that bring the whole gradient of a record within ``bound``.

    ``squares`` are squared norms of its parts by layer, ``whole`` that of all of it, ``layers`` how
    many layers the model has; a layer without a part counts as well.

    *Formal guarantees.* A gradient times its factors has a norm of at most ``bound``. ``"flat"``:
    one factor, at most 1. ``"per_layer"``: each layer's norm is at most bound / sqrt(layers), so
    the sum of their squares is at most bound^2. ``"normalised"``: the norm becomes bound x norm /
    (norm + ``NORMALISED``), which is below ``bound`` for every norm. What is not finite gets zero.

    >>> parts = {"a": torch.tensor(9.0), "b": torch.tensor(0.25)}
    >>> {k: round(float(v), 3) for k, v in layer_factors(parts, sum(parts.values()), 1.0,
    ...                                                  "per_layer", 2).items()}
    {'a': 0.236, 'b': 1.0}
    """
    if how == "per_layer":
        own = bound / math.sqrt(layers)
        return {name: clip_factor(part.sqrt(), own) for name, part in squares.items()}
    norm = whole.sqrt()
    if how == "normalised":
        factor = (bound * CLIP_MARGIN / (norm + NORMALISED)).nan_to_num_(nan=0.0)
    else:
        factor = clip_factor(norm, bound)
    return dict.fromkeys(squares, factor)


def clip(vector: Tensor, bound: float) -> Tensor:
    """Scale a vector (or each row of a matrix) into the ball of radius ``bound``.

    A vector that is within stays as it is; one that is not finite becomes zero.

    >>> clip(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    norm = torch.linalg.vector_norm(vector, dim=-1, keepdim=True, dtype=torch.float64)
    half = torch.finfo(vector.dtype).eps if vector.dtype in (torch.float16, torch.bfloat16) else 0.0
    clipped = vector.to(torch.float64) * clip_factor(norm, bound * (1 - half))
    return torch.where(torch.isfinite(norm), clipped, torch.zeros_like(clipped)).to(vector.dtype)


def within_bounds(features: Tensor) -> Tensor:
    """Which records are finite and not larger than ``LARGEST_NORM``."""
    return squared_norms(features.flatten(1).to(torch.float32)) <= LARGEST_NORM**2


_HOST = torch.device("cpu")


def stacked_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Products of two stacks of matrices, (..., i, k) by (..., k, j), outside of autograd.

    On the CPU by numpy's BLAS, which is faster than torch's on small matrices (``make
    bench-kernels`` measures it).

    >>> stacked_product(torch.ones(2, 1, 3), torch.ones(2, 3, 1)).flatten()
    tensor([3., 3.])
    """
    if a.device != _HOST:
        return torch.matmul(a, b) if out is None else torch.matmul(a, b, out=out)
    with np.errstate(all="ignore"):  # what is not finite is dealt with where it matters
        target = None if out is None else out.numpy()
        return torch.from_numpy(np.matmul(a.numpy(), b.numpy(), out=target))


def each_product(lefts: Iterable[Tensor], rights: Iterable[Tensor], into: Iterable[Tensor]) -> None:
    """Write products of pairs of matrices, each pair of its own shape, as ``stacked_product``."""
    with np.errstate(all="ignore"):
        for a, b, out in zip(lefts, rights, into, strict=True):
            if out.device == _HOST:
                np.matmul(a.numpy(), b.numpy(), out=out.numpy())
            else:
                torch.matmul(a, b, out=out)


_RUN = 256  # squares added up in single precision
_LONG = 512  # numbers from which runs are worth their fixed cost
_SMALL = 1e-18  # below, squares of float32 numbers may have vanished


def squared_norms(x: Tensor) -> Tensor:
    """Squared norm over the last axis, in double precision, nearly as fast as in single.

    In long vectors, runs of 256 squares are added up in float32 (any order: the norm is at most
    8e-6 off, within the margin of :func:`clip_factor`), the runs in double. A vector whose float32
    squares could have under- or overflowed is done in double alone.
    """

    def double(part: Tensor) -> Tensor:
        if part.stride(-1) != 1:  # ``vector_norm`` is several times slower across rows
            return part.to(torch.float64, copy=True).square_().sum(-1)
        norms: Tensor = torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64)
        return norms.square_()

    if x.shape[-1] < _LONG or x.numel() == 0 or x.dtype is not torch.float32:
        return double(x)
    length = x.shape[-1] // _RUN * _RUN
    runs = x[..., :length].reshape(*x.shape[:-1], -1, _RUN)
    squares = double(torch.linalg.vector_norm(runs, dim=-1))
    if length < x.shape[-1]:
        squares += double(x[..., length:])
    least, largest = torch.aminmax(squares)  # not a number wherever one is
    if not (float(least) > _SMALL and float(largest) < torch.inf):
        odd = ~((squares > _SMALL) & (squares < torch.inf))
        squares[odd] = double(x[odd])
    return squares
