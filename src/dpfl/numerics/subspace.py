"""Top singular subspaces of a few long rows, through their Gram matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfl.core.errors import ConfigurationError

_CLEAR = 3e-2  # singular values above this fraction of the largest are right to 1e-4 from float32 products
_RANK = 1e-6  # singular values below this fraction of the largest are rounding
_AT_ONCE = 1 << 17  # numbers turned into doubles at once, small enough for the cache


def public_subspace(rows: Tensor, weights: Tensor, k: int) -> Tensor:
    """Return an orthonormal basis (d, at most k) of what the public updates (m, d) have in common.

    >>> public_subspace(torch.tensor([[3.0, 4.0]]), torch.ones(1), 1).T
    tensor([[0.6000, 0.8000]])
    """
    if k < 1:
        raise ConfigurationError("public subspace", f"k = {k}", "give at least one dimension")
    if k == 1:
        mean = weights.to(torch.float64) @ rows.to(torch.float64)
        size = torch.linalg.vector_norm(mean)
        return ((mean / size)[:, None] if float(size) > 0 else mean[:, None][:, :0]).to(rows.dtype)
    roots = weights.to(torch.float64).sqrt()[:, None]
    values, vectors = spectrum(rows, roots, torch.float32)
    if float(values[min(k, len(values)) - 1]) < _CLEAR * float(
        values[0]
    ):  # too small for float32 products to tell
        values, vectors = spectrum(rows, roots, torch.float64)
    rank = int((values > _RANK * values[0]).sum()) if float(values[0]) > 0 else 0
    kept = min(k, rank)
    combine = (roots * vectors[:, :kept] / values[:kept]).to(rows.dtype)
    basis: Tensor = (combine.T @ rows).T
    if kept > 1 and float(values[kept - 1]) < 1e-3 * float(
        values[0]
    ):  # a small one is not orthogonal to the digits
        basis = torch.linalg.qr(basis)[0]
    return basis


def spectrum(rows: Tensor, roots: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Singular values and (right) vectors of the scaled rows, largest first, through pieces of
    their Gram matrix.
    """
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for piece in torch.split(rows, max(1, _AT_ONCE // max(len(rows), 1)), dim=1):
        exact = piece.to(kind)
        gram += exact @ exact.T
    squares, vectors = torch.linalg.eigh(roots * gram * roots.T)
    return squares.clamp_min(0).sqrt().flip(0), vectors.flip(1)
