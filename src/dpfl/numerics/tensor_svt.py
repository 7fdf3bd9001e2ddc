"""Soft-thresholding of singular values, of a matrix and of a stack of matrices in Fourier space."""

import torch
from torch import Tensor

from dpfl.core.checks import not_negative
from dpfl.core.types import Metrics


def tensor_svt(stack: Tensor, threshold: float) -> Tensor:
    """Soft-threshold the singular values of a (rest, out, clients) stack in Fourier space along the
    clients.

    >>> stack = torch.ones(4, 3, 2)
    >>> bool(torch.allclose(tensor_svt(stack, 0.0), stack))
    True
    >>> float(tensor_svt(stack, 100.0).abs().max())
    0.0
    """
    return svt_with_values(stack, threshold)[0]


def svt_with_values(stack: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The same, with the singular values of the slices of half the spectrum (slices, min(rest,
    out)), largest first.
    """
    not_negative("tensor SVT", threshold=threshold)
    clients = stack.shape[2]
    slices = torch.fft.rfft(stack, dim=2).permute(2, 0, 1)
    wide = slices.shape[1] < slices.shape[2]
    smoothed = torch.empty_like(slices)
    found = []
    for number, piece in enumerate(slices):
        tall = piece.mH if wide else piece
        if number == 0 or 2 * number == clients:  # their own mirror images: real
            tall = tall.real
        kept, values = thresholded(tall, threshold)
        smoothed[number] = kept.mH if wide else kept
        found.append(values)
    back = torch.fft.irfft(smoothed.permute(1, 2, 0), n=clients, dim=2)
    return back.to(stack.dtype), torch.stack(found)


def thresholded(tall: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Soft-threshold the singular values of a tall matrix (a, b) through its b x b Gram matrix, in
    double precision.
    """
    squares, vectors = torch.linalg.eigh(_gram(tall))
    values = squares.clamp_min(0).sqrt()
    if threshold == 0:
        return tall, values.flip(-1)
    kept = values > threshold
    factors = 1 - threshold / values[kept]
    thresholding = (vectors[:, kept] * factors.to(vectors.dtype)) @ vectors[:, kept].mH
    return tall @ thresholding.to(tall.dtype), values.flip(-1)


def _gram(tall: Tensor) -> Tensor:
    """X^H X in double precision; of complex numbers by real products, a quarter fewer than complex
    ones.
    """
    if not tall.is_complex():
        double = tall.to(torch.float64)
        return double.T @ double
    real = tall.real.to(torch.float64)
    imaginary = tall.imag.to(torch.float64)
    both = torch.cat([real, imaginary])
    crossed = real.T @ imaginary
    return torch.complex(both.T @ both, crossed - crossed.T)


def smoothness(stack: Tensor) -> Tensor:
    """How far a client's (rest, out, clients) weights of each class are from the others': (out,
    clients), small is smooth.

    Figure 1's Laplacian regularisation along the clients, on the complete graph: mean_j |w_ci -
    w_cj|^2.
    """
    double = stack.to(torch.float64)
    centred = double - double.mean(dim=2, keepdim=True)
    own = centred.square().sum(dim=0)
    return own + own.mean(dim=1, keepdim=True)


_REPORTED = 10  # singular values of a slice


def spectrum_metrics(name: str, values: Tensor, level: float) -> Metrics:
    """Largest singular values of each slice, one slice after the other, how many survived, and what
    they had to exceed.
    """
    return {
        f"{name}/threshold": level,
        f"{name}/singular_values": [round(v, 6) for v in values[:, :_REPORTED].flatten().tolist()],
        f"{name}/survived": (values > level).sum(dim=-1, dtype=torch.float64).tolist(),
        f"{name}/slices": len(values),
    }


def smoothness_metrics(before: Tensor, after: Tensor) -> Metrics:
    """How far clients' models are from each other before and after smoothing; class by class where
    that makes a picture.
    """
    old = smoothness(before)
    new = smoothness(after)
    found: Metrics = {"smoothness_before": float(old.mean()), "smoothness_after": float(new.mean())}
    if old.numel() <= 1000:  # a picture, class by class
        found |= {"smoothness_map_before": rounded(old), "smoothness_map_after": rounded(new)}
    return found


def rounded(values: Tensor) -> list[float]:
    """Five digits of each number, for a report."""
    return [float(f"{value:.5g}") for value in values.flatten().tolist()]
