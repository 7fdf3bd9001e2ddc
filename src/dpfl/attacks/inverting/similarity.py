"""How alike originals and reconstructions are: PSNR, SSIM, and which belongs to which."""

import math

import numpy as np
import torch
from scipy.ndimage import gaussian_filter
from scipy.optimize import linear_sum_assignment
from torch import Tensor

_SIGMA, _REACH = 1.5, 3.5  # of the Gaussian window, which is cut off at so many sigmas
_K1, _K2 = 0.01, 0.03


def psnr(original: Tensor, found: Tensor, span: float = 1.0) -> float:
    """Peak signal-to-noise ratio in dB: 10 log10(span^2 / mean squared error).

    ``span`` is the difference between the largest and the smallest value that there can be.

    >>> round(psnr(torch.zeros(4), torch.full((4,), 0.1)), 3)
    20.0
    """
    error = float((original.double() - found.double()).square().mean())
    return math.inf if error == 0 else 10 * math.log10(span**2 / error)


def ssim(original: Tensor, found: Tensor, span: float = 1.0) -> float:
    """Structural similarity of two images of shape (channels, height, width), at most 1.

    Means, variances and the covariance are taken in a Gaussian window of sigma 1.5 (Wang, Bovik,
    Sheikh, Simoncelli, 2004); the mean over all pixels and channels is returned.

    >>> image = torch.rand(1, 16, 16, generator=torch.Generator().manual_seed(0))
    >>> ssim(image, image), ssim(image, 1 - image) < 0
    (1.0, True)
    """
    values = []
    for x, y in zip(original.double().numpy(), found.double().numpy(), strict=True):
        mean_x = _window(x)
        mean_y = _window(y)
        var_x = _window(x * x) - mean_x**2
        var_y = _window(y * y) - mean_y**2
        both = _window(x * y) - mean_x * mean_y
        low = (_K1 * span) ** 2
        high = (_K2 * span) ** 2
        top = (2 * mean_x * mean_y + low) * (2 * both + high)
        values.append(top / ((mean_x**2 + mean_y**2 + low) * (var_x + var_y + high)))
    return float(np.mean(values))


def _window(image: np.ndarray) -> np.ndarray:
    return np.asarray(gaussian_filter(image, _SIGMA, truncate=_REACH))


def matched(originals: Tensor, found: Tensor) -> list[int]:
    """For each original the reconstruction that is nearest to it, each taken once.

    There may be more reconstructions than originals.

    >>> matched(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.9], [5.0], [0.1]]))
    [2, 0]
    """
    distances = torch.cdist(originals.flatten(1).double(), found.flatten(1).double())
    _, columns = linear_sum_assignment(distances.square().numpy())
    return [int(column) for column in columns]
