"""Top singular subspaces of a few long rows, through their Gram matrix."""

import warnings

import torch
from torch import Tensor

from dpfl.core.checks import whole_number
from dpfl.core.layout import Layout
from dpfl.core.types import Metrics
from dpfl.numerics.tensor_svt import rounded

_CLEAR = 3e-2  # of the largest singular value: above, float32 products are right to 1e-4
_RANK = 1e-6  # singular values below this fraction of the largest are rounding
_REPORTED = 10  # singular values
_AT_ONCE = 1 << 17  # numbers turned into doubles at once, small enough for the cache


def public_subspace(rows: Tensor, weights: Tensor, k: int) -> Tensor:
    """Return an orthonormal basis (d, at most k) of what the public updates (m, d) have in common.

    >>> public_subspace(torch.tensor([[3.0, 4.0]]), torch.ones(1), 1).T
    tensor([[0.6000, 0.8000]])
    """
    whole_number("public subspace", "k", k)
    if k == 1:
        mean = weights.to(torch.float64) @ rows.to(torch.float64)
        size = torch.linalg.vector_norm(mean)
        return ((mean / size)[:, None] if float(size) > 0 else mean[:, None][:, :0]).to(rows.dtype)
    roots = weights.to(torch.float64).sqrt()[:, None]
    values, vectors = spectrum(rows, roots, torch.float32)
    # Too small for float32 products to tell
    if float(values[min(k, len(values)) - 1]) < _CLEAR * float(values[0]):
        values, vectors = spectrum(rows, roots, torch.float64)
    kept = min(k, int((values > _RANK * values[0]).sum()))
    combine = (roots * vectors[:, :kept] / values[:kept]).to(rows.dtype)
    basis: Tensor = (combine.T @ rows).T
    # A small one is not orthogonal to the digits.
    if kept > 1 and float(values[kept - 1]) < 1e-3 * float(values[0]):
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


def project(rows: Tensor, basis: Tensor) -> Tensor:
    """V V^T row, for every row."""
    return (rows @ basis) @ basis.T


def bases(rows: Tensor, weights: Tensor, layout: Layout, k: int) -> list[Tensor]:
    """One basis a tensor of what weighted rows (m, d) have in common; none if there are no rows."""
    if not len(rows):
        return []
    found = [public_subspace(rows[:, block.slice], weights, k) for block in layout]
    sizes = zip(found, layout, strict=True)
    if any(0 < basis.shape[1] < min(k, block.size) for basis, block in sizes):
        said = f"k = {k} is above the rank of the public updates of a round, and was clamped"
        warnings.warn(said, RuntimeWarning, stacklevel=2)
    return found


def spectra(rows: Tensor, weights: Tensor, layout: Layout) -> Metrics:
    """Singular values of weighted rows, tensor by tensor, as shares of the largest."""
    found: Metrics = {}
    for block in layout:
        values, _ = spectrum(rows[:, block.slice], weights.sqrt()[:, None], torch.float32)
        if float(values[0]) > 0:
            found[f"{block.name}/spectrum"] = rounded(values[:_REPORTED] / values[0])
    return found


def energy(part: Tensor, whole: Tensor) -> float:
    """The share of the squared norm that a part holds."""
    total = float(whole.to(torch.float64).square().sum())
    return float(part.to(torch.float64).square().sum()) / total if total > 0 else 0.0
