"""Feature maps of images: histograms of oriented gradients, random convolutions, pooled pixels.

Parts take a batch of images (records, channels, height, width) and treat each on its own. All
constants are fixed and public. A map scales each part to norm 1, weighs and joins them.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl.core.random import PublicSeed
from dpfl.data.inputs import Pixels
from dpfl.models.feature_map import ImageMap, join

_CONTRAST = 1e-4  # added to the energy of a neighbourhood, for images between 0 and 1
_FILTER, _STRIDE = 6, 2  # of random convolutions, in pixels
# Of the prior: correlation of colours, how far pixels are correlated, variance of white noise.
_CORRELATION, _DISTANCE, _WHITE = 0.93, 6.0, 0.3
_PATCH_CONTRAST, _THRESHOLD, _POOLED = 0.3, 0.7, 3
_PRIOR_PATCHES = 4000  # by which filters are scaled
_AT_ONCE = 64  # images whose responses stay in the cache
_SEED = PublicSeed(0).child("random convolutions")


def gradient_histograms(
    images: Tensor, cell: int = 4, orientations: int = 8, signed: bool = False
) -> Tensor:
    """Histograms of oriented gradients (Dalal and Triggs, 2005): (n, orientations, rows, columns).

    ``images`` have one channel, with values between 0 and 1. A pixel's gradient counts by its
    length, in the two orientations next to its own, in each window of 2 x 2 cells that holds it; a
    window is centred on a ``cell``. ``orientations`` divide a half turn, or a whole turn if
    ``signed``. Each window is divided by the energy around it.

    >>> edge = torch.zeros(1, 1, 8, 8)
    >>> edge[..., 4:] = 1.0  # dark, then light: the gradient points to the right
    >>> gradient_histograms(edge, orientations=4).sum((2, 3)).round()
    tensor([[4., 0., 0., 0.]])
    """
    padded = F.pad(images, (1, 1, 1, 1), mode="replicate")[:, 0]
    across = padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2]
    down = padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]
    turn = 2 * math.pi if signed else math.pi
    angle = torch.remainder(torch.atan2(down, across), turn) * (orientations / turn)
    length = torch.hypot(across, down)
    windows = []
    for centre in range(orientations + 1):  # one at a time: small enough for the cache
        near = (1 - (angle - centre).abs()).clamp(min=0) * length
        windows.append(F.avg_pool2d(F.pad(near[:, None], (cell // 2,) * 4), 2 * cell, cell))
    windows[0] += windows.pop()  # a whole turn is no turn
    found = torch.cat(windows, 1)
    energy = F.avg_pool2d(F.pad(found.square().sum(1, keepdim=True), (1, 1, 1, 1)), 3, 1)
    return (found / (energy + _CONTRAST).sqrt()).clamp(max=1.0)


def opponent_histograms(images: Tensor, cells: int = 4) -> Tensor:
    """Gradient histograms of red - green and yellow - blue, averaged over ``cells`` x ``cells``.

    >>> opponent_histograms(torch.rand(5, 3, 32, 32)).shape
    torch.Size([5, 16, 4, 4])
    """
    red, green, blue = images.chunk(3, 1)
    pairs = (red - green, (red + green) / 2 - blue)
    both = torch.cat([gradient_histograms(pair) for pair in pairs], 1)
    return F.adaptive_avg_pool2d(both, cells)


def random_filters(channels: int, count: int) -> Tensor:
    """Draw filters (count, channels, 6, 6) that are random directions of whitened patches.

    Patches are whitened by a public prior: the covariance of two pixels falls with their distance
    as exp(-distance / 6), is 0.93 between colours, and white noise of variance 0.3 is added. The
    filters have mean 0, and respond to patches of the prior, scaled to norm 1, with deviation 1.
    The seed is fixed.
    """
    generator = _SEED.child(channels).generator()
    numbers = channels * _FILTER**2
    places = torch.cartesian_prod(*[torch.arange(_FILTER, dtype=torch.float64)] * 2)
    colours = torch.full((channels, channels), _CORRELATION, dtype=torch.float64)
    colours.fill_diagonal_(1.0)
    prior = torch.kron(colours, torch.exp(-torch.cdist(places, places) / _DISTANCE))
    root = torch.linalg.cholesky(prior + _WHITE * torch.eye(numbers))

    def normals(columns: int) -> Tensor:  # public constants, not noise that protects anyone
        uniform = torch.rand(numbers, columns, generator=generator, dtype=torch.float64)
        drawn: Tensor = torch.special.ndtri(uniform)
        return drawn

    filters = torch.linalg.solve_triangular(root.T, normals(count), upper=True).T
    filters = filters - filters.mean(1, keepdim=True)
    patches = (root @ normals(_PRIOR_PATCHES)).T
    patches = F.normalize(patches - patches.mean(1, keepdim=True))
    scaled: Tensor = filters / (patches @ filters.T).std(0)[:, None]
    return scaled.to(torch.float32).view(count, channels, _FILTER, _FILTER)


class RandomConvolutions(nn.Module):
    """Responses of random filters to patches of even contrast, thresholded and averaged 3 x 3.

    ``filters`` are drawn by :func:`random_filters` for ``channels`` channels. A filter gives two
    numbers at each of nine places: how far responses exceed 0.7, and how far they fall below -0.7.

    >>> RandomConvolutions(channels=1, filters=64)(torch.rand(5, 1, 28, 28)).shape
    torch.Size([5, 128, 3, 3])
    """

    filters: Tensor

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.register_buffer("filters", random_filters(channels, filters), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return (n, 2 x filters, 3, 3) for images with values between 0 and 1."""
        return torch.cat([self._few(some) for some in torch.split(images, _AT_ONCE)])

    def _few(self, images: Tensor) -> Tensor:
        moments = torch.cat([images.mean(1, True), images.square().mean(1, True)], 1)
        mean, square = F.avg_pool2d(moments, _FILTER, _STRIDE).chunk(2, 1)
        energy = (square - mean.square()).clamp_(min=0) * self.filters[0].numel()
        found = F.conv2d(images, self.filters, stride=_STRIDE)
        found = found / (energy + _PATCH_CONTRAST).sqrt_()
        both = torch.cat([F.relu(found - _THRESHOLD), F.relu(-found - _THRESHOLD)], 1)
        return F.adaptive_avg_pool2d(both, _POOLED)


class Hog(ImageMap):
    """Grey images: gradient histograms of 8 orientations in cells of 4 x 4, and pooled pixels.

    For little data or small budgets: 441 numbers for 28 x 28 pixels.
    """

    def image_features(self, images: Tensor) -> Tensor:
        """Return histograms, and means of 4 x 4 pixels at half weight."""
        return join((1.0, gradient_histograms(images)), (0.5, F.avg_pool2d(images, 4)))


class FineHog(ImageMap):
    """Grey images: signed gradient histograms of 16 orientations, and pixels at half resolution.

    Cells are of 4 x 4 pixels: 980 numbers for 28 x 28 pixels.
    """

    def image_features(self, images: Tensor) -> Tensor:
        """Return signed histograms, and means of 2 x 2 pixels at weight 0.7."""
        histograms = gradient_histograms(images, orientations=16, signed=True)
        return join((1.0, histograms), (0.7, F.avg_pool2d(images, 2)))


class SmallHog(ImageMap):
    """Small grey images (digits): gradient histograms at four times the size, and pooled pixels.

    There are 8 orientations, in cells of one pixel that are averaged over 2 x 2 of them: 144
    numbers for 8 x 8 pixels.
    """

    multiple = 2

    def image_features(self, images: Tensor) -> Tensor:
        """Return histograms, and means of 2 x 2 pixels at weight 0.8."""
        large = F.interpolate(images, scale_factor=4, mode="bilinear")
        histograms = F.avg_pool2d(gradient_histograms(large), 2)
        return join((1.0, histograms), (0.8, F.avg_pool2d(images, 2)))


class FineHogConvolutions(FineHog):
    """Grey images: signed gradient histograms, pixels, and 64 random convolutions.

    For much data and large budgets: 2,132 numbers for 28 x 28 pixels.
    """

    smallest = 12

    def add_parts(self) -> None:
        """Draw the 64 filters of the convolutions, the same in every build."""
        self.convolutions = RandomConvolutions(channels=1, filters=64)

    def image_features(self, images: Tensor) -> Tensor:
        """Return convolutions and gradients at equal weight."""
        return join((1.0, self.convolutions(images)), (1.0, super().image_features(images)))


class ColourHog(ImageMap):
    """Colour images: gradient histograms of grey and of opponent colours, and pooled colours.

    816 numbers for 32 x 32 pixels.
    """

    channels, smallest = 3, 16
    mean: Tensor
    deviation: Tensor

    def add_parts(self) -> None:
        """Keep the constants by which bytes were scaled."""
        if isinstance(self.inputs, Pixels):
            for name, values in vars(self.inputs).items():
                constants = torch.tensor(values)[:, None, None]
                self.register_buffer(name, constants, persistent=False)

    def scaled(self, images: Tensor) -> Tensor:
        """Return bytes / 255; numbers of unknown scale by the image's own range."""
        if isinstance(self.inputs, Pixels):
            return (images * self.deviation + self.mean).clamp_(0, 1)
        return super().scaled(images)

    def image_features(self, images: Tensor) -> Tensor:
        """Return grey histograms, and the colours at half weight: 4 x 4 histograms and means."""
        grey = gradient_histograms(images.mean(1, keepdim=True))
        colours = F.adaptive_avg_pool2d(images - 0.5, 4)
        return join((1.0, grey), (0.5, opponent_histograms(images)), (0.5, colours))


class ColourHogConvolutions(ColourHog):
    """Colour images: gradient histograms, pooled colours, and 96 random convolutions.

    2,544 numbers for 32 x 32 pixels.
    """

    def add_parts(self) -> None:
        """Keep the constants, and draw the filters."""
        super().add_parts()
        self.convolutions = RandomConvolutions(channels=3, filters=96)

    def image_features(self, images: Tensor) -> Tensor:
        """Return convolutions and the other features at equal weight."""
        return join((1.0, self.convolutions(images)), (1.0, super().image_features(images)))
