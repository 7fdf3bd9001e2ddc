"""Random projections that both ends make from one public seed, in blocks of rows: never whole,
never stored.

z = U g / sqrt(r) with U an r x d matrix of signs, normals or sparse signs (Achlioptas), so that
E|z|^2 = |g|^2; or a random subset of a cosine transform of randomly signed entries, which takes no
matrix at all.
"""

import math
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dpfl.core.checks import check, one_of, whole_number
from dpfl.core.random import PublicSeed

Projection = Literal["rademacher", "gaussian", "achlioptas", "fourier"]
PROJECTIONS: tuple[Projection, ...] = ("rademacher", "gaussian", "achlioptas", "fourier")
_AT_ONCE = 1 << 22  # entries of U held at once: 16 MiB


def project(
    rows: Tensor,
    seed: PublicSeed,
    numbers: int,
    kind: Projection = "rademacher",
    sparsity: float = 1.0,
) -> Tensor:
    """T g = U g / sqrt(r) for every row g of a matrix (n, d); the same ``seed`` gives the same U at
    both ends.

    >>> row, seed = torch.ones(1, 4), PublicSeed(1)
    >>> there_and_back = lift(project(row, seed, 4, "fourier")[0], seed, 4, "fourier")
    >>> bool(torch.allclose(there_and_back, row[0], atol=1e-5))
    True
    """
    length = rows.shape[1]
    check_projection(kind, numbers, length, sparsity)
    if kind == "fourier":
        from scipy.fft import dct  # a third of a second to read, and the other kinds do without

        signs, chosen = _fourier(seed, length, numbers)
        turned = dct(rows.numpy() * signs, norm="ortho", axis=1)[:, chosen]
        return torch.from_numpy(turned.astype(np.float32) * np.float32(math.sqrt(length / numbers)))
    projected = torch.empty(len(rows), numbers)
    for first, block in _blocks(seed, numbers, length, kind, sparsity):
        projected[:, first : first + len(block)] = rows @ block.T
    return projected.div_(math.sqrt(numbers))


def lift(
    vector: Tensor,
    seed: PublicSeed,
    length: int,
    kind: Projection = "rademacher",
    sparsity: float = 1.0,
) -> Tensor:
    """T^T y = U^T y / sqrt(r): back to d numbers."""
    numbers = len(vector)
    vector = vector.to(torch.float32)
    check_projection(kind, numbers, length, sparsity)
    if kind == "fourier":
        from scipy.fft import idct

        signs, chosen = _fourier(seed, length, numbers)
        spread = np.zeros(length, dtype=np.float32)
        spread[chosen] = vector.numpy() * np.float32(math.sqrt(length / numbers))
        return torch.from_numpy((idct(spread, norm="ortho") * signs).astype(np.float32))
    lifted = torch.zeros(length)
    for first, block in _blocks(seed, numbers, length, kind, sparsity):
        lifted += vector[first : first + len(block)] @ block
    return lifted.div_(math.sqrt(numbers))


def _blocks(
    seed: PublicSeed, numbers: int, length: int, kind: Projection, sparsity: float
) -> Iterator[tuple[int, Tensor]]:
    """U, some rows at a time: never whole."""
    at_once = max(1, _AT_ONCE // length)
    draw: Callable[[np.random.Generator, int], np.ndarray] = {
        "rademacher": _signs,
        "gaussian": lambda rng, count: rng.standard_normal(count, dtype=np.float32),
        "achlioptas": lambda rng, count: _sparse(rng, count, sparsity),
    }[kind]
    for first in range(0, numbers, at_once):
        rows = min(at_once, numbers - first)
        rng = seed.child("rows", first).numpy()
        yield first, torch.from_numpy(draw(rng, rows * length).reshape(rows, length))


def _signs(rng: np.random.Generator, count: int) -> np.ndarray:
    """+1 or -1, eight to a random byte."""
    bits = np.unpackbits(np.frombuffer(rng.bytes((count + 7) // 8), dtype=np.uint8), count=count)
    signs = bits.astype(np.float32)
    signs *= 2.0
    return np.subtract(signs, 1.0, out=signs)


def _sparse(rng: np.random.Generator, count: int, sparsity: float) -> np.ndarray:
    """+ or - sqrt(s), each with probability 1 / 2s, else 0."""
    uniform = rng.random(count, dtype=np.float32)
    size = np.float32(math.sqrt(sparsity))
    half = np.float32(0.5 / sparsity)
    return np.where(uniform < half, size, np.where(uniform < 2 * half, -size, np.float32(0)))


def _fourier(seed: PublicSeed, length: int, numbers: int) -> tuple[np.ndarray, np.ndarray]:
    """Random signs, and which coordinates of the cosine transform are kept."""
    rng = seed.child("fourier").numpy()
    return _signs(rng, length), np.sort(rng.choice(length, numbers, replace=False))


def check_projection(kind: str, numbers: int, length: int, sparsity: float) -> None:
    """Refuse what is no projection."""
    one_of("projection", PROJECTIONS, kind=kind)
    whole_number("projection", "dimension", numbers)
    check(
        numbers <= length,
        "projection",
        f"{numbers} numbers are more than the model's {length}",
        "project onto fewer, or not at all",
    )
    check(1 <= sparsity < math.inf, "projection", f"sparsity = {sparsity}", "give 1 or more")


def smallest_jl_dimension(clients: int, failure: float, distortion: float = 0.5) -> int:
    """r >= (4 + 2 a) / (e^2 / 2 - e^3 / 3) ln n with a = ln(1 / failure) / ln n: (4 ln n + 2 ln(1 /
    failure)) / (...).
    """
    logs = 4 * math.log(max(clients, 1)) + 2 * math.log(1 / failure)
    return math.ceil(logs / (distortion**2 / 2 - distortion**3 / 3))
