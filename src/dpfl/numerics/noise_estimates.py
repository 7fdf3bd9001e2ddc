"""How noisy each of a few long rows is, from the rows alone."""

import torch
from torch import Tensor

from dpfl.core.types import Metrics
from dpfl.numerics.pursuit import principal_component_pursuit

BLOCK_ROWS = 200_000
"""Coordinates that are decomposed together."""


def noise_estimates(
    rows: Tensor, *, block_rows: int = BLOCK_ROWS, blocks: int | None = None
) -> tuple[Tensor, Metrics]:
    """Noise of each client's update (n, p), as its squared norm in the sparse part, averaged over
    blocks of coordinates.

    Blocks are consecutive; the last one is the last ``block_rows`` coordinates. ``blocks`` takes
    only the first so many.
    """
    length = rows.shape[1]
    starts = list(range(0, max(length - block_rows, 0) + 1, block_rows))
    if starts[-1] + block_rows < length:
        starts.append(length - block_rows)
    chosen = starts[: blocks or len(starts)]
    total = torch.zeros(len(rows), dtype=torch.float64)
    infos = []
    for start in chosen:
        _, sparse, info = principal_component_pursuit(rows[:, start : start + block_rows].T)
        total += torch.linalg.vector_norm(sparse, dim=0, dtype=torch.float64).square()
        infos.append(info)
    worst = max(infos, key=lambda info: (not info.converged, info.residual))
    metrics: Metrics = {
        "rank": max(info.rank for info in infos),
        "residual": worst.residual,
        "iterations": max(info.iterations for info in infos),
        "converged": "yes" if all(info.converged for info in infos) else "no",
    }
    return total / len(chosen), metrics


def moment_estimates(rows: Tensor) -> Tensor:
    """|u_i|^2 - median_j <u_i, u_j>: the common signal taken off by inner products; one Gram
    matrix.
    """
    gram = rows.to(torch.float64) @ rows.to(torch.float64).T
    others = gram[~torch.eye(len(rows), dtype=torch.bool)].reshape(len(rows), -1)
    return (gram.diagonal() - others.median(dim=1).values).clamp_min(0.0)


def capped(weights: Tensor, largest: float) -> Tensor:
    """Hand what is above the cap to the others, in proportion, until nobody is above it."""
    largest = max(largest, 1 / len(weights))
    full = torch.zeros_like(weights, dtype=torch.bool)
    shares = weights
    while bool((~full & (shares > largest)).any()):
        full = full | (shares > largest)
        left = 1 - largest * int(full.sum())
        rest = weights[~full]
        even = torch.full_like(rest, 1 / max(len(rest), 1))
        shares = torch.full_like(weights, largest)
        shares[~full] = max(left, 0.0) * (rest / rest.sum() if float(rest.sum()) > 0 else even)
    return shares / shares.sum()
