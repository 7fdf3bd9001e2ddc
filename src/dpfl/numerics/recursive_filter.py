"""Laplacian smoothing by a recursive filter forth and back, exactly periodic."""

import math

import numpy as np
import torch
from torch import Tensor

from dpfl.core.checks import check

SMALLEST = 3
"""Entries below which a tensor is left alone: the cyclic Laplacian of two entries is another one.
"""

SMOOTHINGS = (1e-9, 1e8)
"""Beyond these nothing is smoothed, or nothing is left but the mean, and rounding would show."""


def laplacian_smoothing(vector: Tensor, smoothing: float) -> Tensor:
    """Solve (I + smoothing x Lap) u = vector for one tensor, read row by row; the sum stays what it
    was.

    >>> laplacian_smoothing(torch.tensor([1.0, 0.0, 0.0, 0.0]), 1.0)
    tensor([0.4667, 0.2000, 0.1333, 0.2000])
    """
    check_smoothing(smoothing)
    length = vector.numel()
    if smoothing == 0 or length < SMALLEST:
        return vector.clone()
    ratio = _ratio(smoothing)
    entries = vector.detach().reshape(-1).to("cpu", torch.float64).numpy()
    forth = _recursion(entries, ratio)
    back = _recursion(forth[::-1], ratio)[::-1]
    solved = torch.from_numpy(back * (ratio / smoothing))
    return solved.to(device=vector.device, dtype=vector.dtype).reshape(vector.shape)


def _ratio(smoothing: float) -> float:
    """The root r < 1 of  smoothing (r + 1/r) = 1 + 2 smoothing."""
    half = 1 / (2 * smoothing)
    # 1 + half - sqrt(...), without cancellation
    return 1 / (1 + half + math.sqrt(1 / smoothing + half * half))


def _recursion(x: np.ndarray, ratio: float) -> np.ndarray:
    """y_i = x_i + ratio y_(i-1), where y before the first entry is y after the last one."""
    # What lies further back has died away.
    tail = min(len(x), math.ceil(math.log(1e-18) / math.log(ratio)))
    end = float(np.dot(x[-tail:], ratio ** np.arange(tail - 1, -1, -1.0)))
    before = end / -math.expm1(len(x) * math.log(ratio)) if tail == len(x) else end
    from scipy.signal import lfilter  # reading it takes over a second, and most methods do without

    return np.asarray(lfilter([1.0], [1.0, -ratio], x, zi=[ratio * before])[0])


def noise_gain(length: int, smoothing: float) -> float:
    """By how much smoothing multiplies the variance of white noise: the mean of the squared symbol,
    for any length.

    For long vectors (1 + 2 s) / (1 + 4 s)^(3/2).

    >>> round(noise_gain(1000, 1.0), 3)
    0.268
    """
    check_smoothing(smoothing)
    if length < SMALLEST or smoothing == 0:
        return 1.0
    if length * math.log(_ratio(smoothing)) < -60:  # so long that the circle does not show
        return float((1 + 2 * smoothing) / (1 + 4 * smoothing) ** 1.5)
    angles = 2 * np.pi * np.arange(length) / length
    return float(np.mean((1 + 2 * smoothing * (1 - np.cos(angles))) ** -2.0))


def check_smoothing(smoothing: float) -> None:
    """Refuse a smoothing at which rounding would show."""
    least, most = SMOOTHINGS
    check(
        smoothing == 0 or least <= smoothing <= most,
        "smoothing",
        f"smoothing = {smoothing}",
        f"give 0, or {least:g} to {most:g}",
    )
