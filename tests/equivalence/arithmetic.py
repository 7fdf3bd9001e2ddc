"""Which arithmetic is in use: a probe of the kernels that results rest on.

Last bits of a matrix product, an exponential or an eigenvector depend on the kernels that torch and
numpy picked. They pick by processor, by environment variables (``OPENBLAS_CORETYPE``,
``ATEN_CPU_CAPABILITY``, ``NPY_DISABLE_CPU_FEATURES``) and by version, so that no name of a processor
says which. :func:`arithmetic` runs them and condenses the bits they return: two processes with the
same digest give the same bits, and recorded bits are compared exactly where the digest is the one
they were recorded with.
"""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Iterator

import numpy as np
import scipy
import scipy.linalg
import torch
from scipy import fft, special
from threadpoolctl import threadpool_info, threadpool_limits
from torch import Tensor
from torch.nn import functional

# Rows, inner size, columns of the products: remainders of every vector's length, and enough numbers
# for the kernels of large matrices.
PRODUCTS = ((1, 7, 3), (6, 8, 3), (13, 8, 6), (40, 6, 3), (33, 17, 65), (5, 129, 5), (127, 131, 67))
# Records, channels, height, width, filters, size of a filter.
CONVOLUTIONS = ((6, 1, 2, 4, 3, 2), (40, 1, 2, 4, 3, 2), (5, 3, 13, 11, 7, 3), (9, 16, 8, 8, 17, 5))


def numbers(*shape: int, start: int = 0) -> np.ndarray:
    """Numbers between -1 and 1 of exact bits, which need no function of a library."""
    steps = (np.arange(start, start + int(np.prod(shape)), dtype=np.int64) * 7919 + 104729) % 65521
    return (steps / 32768.0 - 1.0).reshape(shape)


def tensor(*shape: int, start: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same numbers as a tensor."""
    return torch.from_numpy(numbers(*shape, start=start)).to(dtype)


def products(dtype: torch.dtype) -> Iterator[Tensor]:
    """Every kind of product that the engine makes."""
    for rows, inner, columns in PRODUCTS:
        left = tensor(rows, inner, dtype=dtype)
        right = tensor(inner, columns, start=11, dtype=dtype)
        bias = tensor(columns, start=5, dtype=dtype)
        yield left @ right
        yield left.T.contiguous().T @ right  # read across
        yield left @ right[:, 0]
        yield torch.addmm(bias, left, right)
        yield functional.linear(left, right.T, bias)
        stacks = tensor(5, rows, inner, start=3, dtype=dtype)
        others = tensor(5, inner, columns, start=7, dtype=dtype)
        yield torch.bmm(stacks, others)
        yield torch.baddbmm(bias.expand(5, rows, columns), stacks, others)
        yield torch.einsum("kri,kic->kc", stacks, others)


def convolutions(dtype: torch.dtype) -> Iterator[Tensor]:
    """Convolutions of images in both layouts of memory, and their gradients."""
    for records, channels, height, width, filters, size in CONVOLUTIONS:
        for layout in (torch.contiguous_format, torch.channels_last):
            images = tensor(records, channels, height, width, dtype=dtype)
            images = images.contiguous(memory_format=layout).requires_grad_()
            weights = tensor(filters, channels, size, size, start=9, dtype=dtype).requires_grad_()
            outputs = functional.conv2d(images, weights)
            (outputs * outputs.detach().cos()).sum().backward()
            assert images.grad is not None and weights.grad is not None
            yield from (outputs.detach(), images.grad, weights.grad)


def functions(dtype: torch.dtype) -> Iterator[Tensor]:
    """What acts number by number, and sums of vectors of several lengths."""
    for size in (3, 13, 100, 4099):
        x = tensor(size, dtype=dtype) * 4
        yield from (x.tanh(), x.exp(), x.sigmoid(), x.sin(), x.abs().log1p(), x.abs().sqrt())
        yield from (functional.gelu(x), functional.softplus(x), torch.erf(x), x.abs().pow(0.3))
        yield from (x.sum(), x.mean(), x.std(), x.norm(), x.dot(x), x.cumsum(0), x.logsumexp(0))
    for classes in (3, 10, 67):
        scores = tensor(41, classes, dtype=dtype) * 4
        yield from (scores.softmax(dim=1), scores.log_softmax(dim=1))
        yield from (scores.sum(dim=0), scores.sum(dim=1), torch.linalg.vector_norm(scores, dim=1))


def decompositions() -> Iterator[Tensor]:
    """Linear algebra in double precision, as numerics calls it."""
    for size in (3, 20, 67):
        tall = tensor(2 * size, size, dtype=torch.float64)
        gram = tall.T @ tall + torch.eye(size, dtype=torch.float64)
        yield from torch.linalg.eigh(gram)
        yield torch.linalg.eigvalsh(gram)
        yield from torch.linalg.qr(tall)
        yield from torch.linalg.svd(tall, full_matrices=False)
        yield from (torch.linalg.cholesky(gram), torch.linalg.inv(gram))
        yield torch.linalg.solve(gram, tall.T)
    waves = torch.fft.rfft(tensor(4, 6, 15), dim=2)
    yield from (torch.view_as_real(waves), torch.fft.irfft(waves, n=15, dim=2))


def of_numpy(dtype: type[np.floating]) -> Iterator[np.ndarray]:
    """Numpy's and scipy's kernels: products, functions, linear algebra, spectra."""
    for rows, inner, columns in PRODUCTS:
        left = numbers(rows, inner).astype(dtype)
        right = numbers(inner, columns, start=11).astype(dtype)
        yield from (left @ right, left @ right[:, 0], left.T @ left)
    for size in (13, 4099):
        x = numbers(size).astype(dtype) * dtype(4)
        yield from (np.exp(x), np.sin(x), np.tanh(x), np.log1p(np.abs(x)), np.abs(x) ** dtype(0.3))
        yield from (np.asarray(x.sum()), np.asarray(x @ x), special.ndtr(x), special.log_ndtr(x))
        yield from (special.log_softmax(x), fft.irfft(fft.rfft(x) ** 2, size))
    for size in (3, 20, 67):
        tall = numbers(2 * size, size).astype(dtype)
        gram = tall.T @ tall + np.eye(size, dtype=dtype)
        yield from np.linalg.eigh(gram)
        yield from np.linalg.qr(tall)
        yield from np.linalg.svd(tall, full_matrices=False)
        yield from (scipy.linalg.cholesky(gram), scipy.linalg.solve(gram, tall.T))


@functools.cache
def arithmetic() -> str:
    """The digest of the bits that the kernels return in one thread."""
    digest = hashlib.sha256()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(limits=1), torch.enable_grad():
            for dtype in (torch.float32, torch.float64):
                for kind in (products, convolutions, functions):
                    for result in kind(dtype):
                        digest.update(result.contiguous().numpy().tobytes())
            for result in decompositions():
                digest.update(result.contiguous().numpy().tobytes())
            for precision in (np.float32, np.float64):
                for array in of_numpy(precision):
                    digest.update(np.ascontiguousarray(array).tobytes())
    finally:
        torch.set_num_threads(threads)
    return digest.hexdigest()[:24]


def described() -> dict[str, str]:
    """What was in use, for people: nothing compares it."""
    kernels = sorted(
        f"{library['prefix']} {library['version']} {library['architecture']}"
        for library in threadpool_info()
        if library["user_api"] == "blas"
    )
    return {
        "machine": platform.machine(),
        "torch": f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}",
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "blas of numpy and scipy": "; ".join(kernels),
    }
