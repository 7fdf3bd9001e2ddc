"""Principal component pursuit: a matrix as low rank plus sparse, by the inexact augmented
Lagrangian method.

Lin, Chen, Ma: *The Augmented Lagrange Multiplier Method for Exact Recovery of Corrupted Low-Rank
Matrices*, 2010.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfl.core.checks import check

GROWTH, RESIDUAL, CHANGE, MOST_ITERATIONS = 1.1, 1e-7, 1e-5, 500
_AT_ONCE = 1 << 17  # numbers of a piece of the matrix, small enough for the cache


@dataclass(frozen=True, kw_only=True)
class PursuitInfo:
    """How a pursuit ended: relative residual, relative change of the sparse part in the last
    iteration, rank found.
    """

    iterations: int
    converged: bool
    residual: float
    change: float
    rank: int


def principal_component_pursuit(matrix: Tensor) -> tuple[Tensor, Tensor, PursuitInfo]:
    """Split a (p, n) matrix into low rank and sparse.

    >>> low_rank, sparse, info = principal_component_pursuit(torch.ones(6, 3))
    >>> info.rank, bool(info.converged), float(sparse.abs().max()) < 1e-6
    (1, True, True)
    """
    if matrix.shape[0] < matrix.shape[1]:
        low_rank, sparse, info = principal_component_pursuit(matrix.T)
        return low_rank.T, sparse.T, info
    whole = matrix.to(torch.float64)
    size = float(torch.linalg.vector_norm(whole))
    check(math.isfinite(size), "pursuit", "the matrix is not finite", "leave such updates out")
    if size == 0:
        done = PursuitInfo(iterations=0, converged=True, residual=0.0, change=0.0, rank=0)
        return torch.zeros_like(matrix), torch.zeros_like(matrix), done
    whole = (whole / size).contiguous()  # so that scaling all updates changes nothing
    low_rank, sparse, info = _pursue(whole)
    return (low_rank * size).to(matrix.dtype), (sparse * size).to(matrix.dtype), info


def _pursue(whole: Tensor) -> tuple[Tensor, Tensor, PursuitInfo]:
    """The inexact augmented Lagrangian method for a tall matrix of Frobenius norm 1.

    With Z = Y / mu after an update, E = M + Y/mu - L gives S = shrink(E) and Z = E - S = clamp(E,
    +- lambda / mu), and the next iteration thresholds X = M - S + Z / growth. So X and S are all
    the state, and one pass over pieces of rows does an iteration: from X and the thresholding V
    f(s) V^T to L, S, Z, the next X, and its Gram matrix.
    """
    rows, columns = whole.shape
    penalty = 1 / math.sqrt(max(rows, columns))
    spectral = float(torch.linalg.eigvalsh(whole.T @ whole)[-1].clamp_min(0).sqrt())
    mu = 1.25 / spectral
    dual = max(spectral, float(whole.abs().max()) / penalty)
    x = whole * (1 + 1 / (dual * mu))
    sparse = torch.zeros_like(whole)
    gram = x.T @ x
    at_once = max(1, _AT_ONCE // columns)
    pieces = [slice(i, i + at_once) for i in range(0, rows, at_once)]
    converged = False
    iterations = 0
    while not converged and iterations < MOST_ITERATIONS:
        iterations += 1
        threshold, rank = _thresholding(gram, 1 / mu)
        bound = penalty / mu
        growth = GROWTH if mu < 1e7 * 1.25 / spectral else 1.0
        gram.zero_()
        left = moved = held = 0.0
        for piece in pieces:
            m = whole[piece]
            s = sparse[piece]
            xs = x[piece]
            with_dual = xs + s  # M + Y / mu
            e = torch.addmm(with_dual, xs, threshold, alpha=-1)
            z = e.clamp(-bound, bound)
            e -= z  # the sparse part
            left += float((with_dual - m - z).square_().sum())  # M - L - S = Z - Y / mu
            moved += float((e - s).square_().sum())
            held += float(e.square().sum())
            s.copy_(e)
            torch.sub(m, e, out=xs)
            xs.add_(z, alpha=1 / growth)
            gram.addmm_(xs.T, xs)
        mu *= growth
        residual = math.sqrt(left)
        change = math.sqrt(moved / held) if held > 0 else 0.0
        converged = residual <= RESIDUAL and change <= CHANGE
    info = PursuitInfo(
        iterations=iterations, converged=converged, residual=residual, change=change, rank=rank
    )
    return whole - sparse, sparse, info


def _thresholding(gram: Tensor, threshold: float) -> tuple[Tensor, int]:
    """The n x n matrix that, applied from the right, shrinks every singular value by ``threshold``;
    and how many survive.
    """
    squares, vectors = torch.linalg.eigh(gram)
    values = squares.clamp_min(0).sqrt()
    kept = values > threshold
    factors = torch.where(kept, 1 - threshold / values.clamp_min(1e-300), torch.zeros_like(values))
    return (vectors * factors) @ vectors.T, int(kept.sum())
