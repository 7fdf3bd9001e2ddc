"""Soft-thresholding of singular values, of a matrix and of a stack of matrices in Fourier space."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpfl.core.errors import ConfigurationError


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
    if not (math.isfinite(threshold) and threshold >= 0):
        raise ConfigurationError(
            "tensor SVT", f"threshold = {threshold}", "give 0 or a positive number"
        )
    clients = stack.shape[2]
    slices = torch.fft.rfft(stack, dim=2).permute(2, 0, 1)
    wide = slices.shape[1] < slices.shape[2]
    smoothed, found = torch.empty_like(slices), []
    for number, piece in enumerate(slices):
        tall = piece.mH if wide else piece
        if number == 0 or 2 * number == clients:  # their own mirror images: real
            tall = tall.real
        kept, values = thresholded(tall, threshold)
        smoothed[number] = kept.mH if wide else kept
        found.append(values)
    return torch.fft.irfft(smoothed.permute(1, 2, 0), n=clients, dim=2).to(
        stack.dtype
    ), torch.stack(found)


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
    real, imaginary = tall.real.to(torch.float64), tall.imag.to(torch.float64)
    both = torch.cat([real, imaginary])
    crossed = real.T @ imaginary
    return torch.complex(both.T @ both, crossed - crossed.T)
