"""What a feature map is, the maps of tables and texts, and what maps of images have in common.

A map is fixed and public: it has nothing to learn and no statistics, so it costs no privacy.
"""

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl.data.inputs import NUMBERS, Inputs, Numbers, Tokens

Kind = Literal["images", "tables", "text"]
Shape = tuple[int, ...]

_BELOW_ONE = 1 - 2.0**-23  # rounding to float32 then leaves no norm above 1
FOLDED = 1024
_UNCOUNTED = 2  # tokens that stand for no word: padding, and an empty text


def unit(rows: Tensor) -> Tensor:
    """Divide each row by its norm, which is then never above 1, not by rounding either.

    A row of zeros stays as it is; one with a number that is not finite becomes zeros. ``rows`` is a
    matrix, of float32 if very small and very large numbers are to count.

    >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-40, 0.0], [float("nan"), 1.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000],
            [1.0000, 0.0000],
            [0.0000, 0.0000]])
    """
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)
    good = norms.isfinite() & (norms > 0)
    scaled = rows * torch.where(good, _BELOW_ONE / norms, 0.0)  # in double precision
    return torch.where(good, scaled, 0.0).to(rows.dtype)


def join(*parts: tuple[float, Tensor]) -> Tensor:
    """Scale each part of a batch's features to norm 1, then by its weight, and join them."""
    return torch.cat([weight * unit(part.flatten(1)) for weight, part in parts], 1)


class FeatureMap(nn.Module):
    """A fixed, public map from a record to ``size`` numbers, whose norm is at most ``bound``.

    ``shape`` is that of a record and ``inputs`` says how records are read; the map takes them as a
    model does, after ``inputs``. It has no parameters. ``kind`` says which rules a planner uses.
    A map of your own gives ``fits``, ``size`` and ``features``.
    """

    bound: ClassVar[float] = 1.0
    kind: ClassVar[Kind]
    size: int

    def __init__(self, shape: Shape, inputs: Inputs = NUMBERS) -> None:
        super().__init__()
        self.shape = shape
        self.inputs = inputs

    @classmethod
    def fits(cls, shape: Shape, inputs: Inputs) -> bool:
        """Whether the map takes records of this shape that are read so."""
        return not isinstance(inputs, Tokens)

    def features(self, records: Tensor) -> Tensor:
        """Return (records, size) numbers, of any norm; each row from its own record alone."""
        raise NotImplementedError

    def forward(self, records: Tensor) -> Tensor:
        """Return a row of norm 1 per record; of norm 0 where all its features are 0."""
        return unit(self.features(records))


class Table(FeatureMap):
    """Numbers of a table as they are, scaled to norm 1."""

    kind: ClassVar[Kind] = "tables"

    def __init__(self, shape: Shape, inputs: Inputs = NUMBERS) -> None:
        super().__init__(shape, inputs)
        self.size = math.prod(shape)

    def features(self, records: Tensor) -> Tensor:
        """Return the records, flat."""
        return records.reshape(len(records), self.size).to(torch.float32)


class PlainPixels(Table):
    """Pixels as they are, scaled to norm 1."""

    kind: ClassVar[Kind] = "images"


class Words(FeatureMap):
    """Which tokens a text holds, one number per token of the vocabulary.

    Tokens 0 and 1, which stand for padding and an empty text, count only in a vocabulary of two.
    """

    kind: ClassVar[Kind] = "text"

    def __init__(self, shape: Shape, inputs: Inputs) -> None:
        super().__init__(shape, inputs)
        self.vocabulary = self.size = inputs.vocabulary if isinstance(inputs, Tokens) else 0

    @classmethod
    def fits(cls, shape: Shape, inputs: Inputs) -> bool:
        """Whether records are tokens."""
        return isinstance(inputs, Tokens)

    def features(self, records: Tensor) -> Tensor:
        """Return 1 for each token that a text holds, in whatever place and however often."""
        found = torch.zeros(len(records), self.vocabulary, device=records.device)
        found.scatter_(1, records.flatten(1), 1.0)
        if self.vocabulary > _UNCOUNTED:
            found[:, :_UNCOUNTED] = 0.0
        return found


class FoldedWords(Words):
    """Which tokens a text holds, folded to 1,024 numbers: for little data or small budgets.

    Tokens that are equal modulo 1,024 share a number, which counts them.
    """

    def __init__(self, shape: Shape, inputs: Inputs) -> None:
        super().__init__(shape, inputs)
        self.size = min(self.vocabulary, FOLDED)

    def features(self, records: Tensor) -> Tensor:
        """Return how many of the tokens that share a number a text holds."""
        missing = -self.vocabulary % self.size
        found = F.pad(super().features(records), (0, missing))
        return found.view(len(records), (self.vocabulary + missing) // self.size, self.size).sum(1)


def picture_of(shape: Shape, inputs: Inputs) -> Shape:
    """Return the shape of a record as an image, channels first; empty where it is not known.

    ``shape`` is that of a record as it is stored, ``inputs`` says how it is read.

    >>> picture_of((64,), Numbers(picture=(1, 8, 8))), picture_of((64,), NUMBERS)
    ((1, 8, 8), ())
    """
    if isinstance(inputs, Numbers) and len(shape) == 1:
        return inputs.picture if math.prod(inputs.picture) == shape[0] else ()
    return shape if len(shape) == 3 else ()


def zero_to_one(images: Tensor) -> Tensor:
    """Scale each image by its own smallest and largest value: to 0 and 1.

    Brightness and contrast drop out. An image of one value becomes 0.

    >>> zero_to_one(torch.tensor([[[[-4.0, -2.0, 0.0]]], [[[7.0, 7.0, 7.0]]]])).flatten(1)
    tensor([[0.0000, 0.5000, 1.0000],
            [0.0000, 0.0000, 0.0000]])
    """
    images = images / _or_one(images.abs().amax((1, 2, 3), keepdim=True))  # so that none overflows
    images = images - images.amin((1, 2, 3), keepdim=True)
    return images / _or_one(images.amax((1, 2, 3), keepdim=True))


def _or_one(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)


class ImageMap(FeatureMap):
    """A map of images with ``channels`` channels, whose sides are multiples of ``multiple``.

    A flat record is an image where its ``inputs`` say in which shape.
    """

    kind: ClassVar[Kind] = "images"
    channels: ClassVar[int] = 1
    multiple: ClassVar[int] = 4
    smallest: ClassVar[int] = 4

    def __init__(self, shape: Shape, inputs: Inputs = NUMBERS) -> None:
        super().__init__(shape, inputs)
        self.picture = picture_of(shape, inputs)
        self.add_parts()
        self.size = self.features(torch.zeros(1, *shape)).shape[1]

    @classmethod
    def fits(cls, shape: Shape, inputs: Inputs) -> bool:
        """Whether a record is an image with the right channels and sides."""
        channels, *sides = picture_of(shape, inputs) or (0,)
        good = (side >= cls.smallest and side % cls.multiple == 0 for side in sides)
        return channels == cls.channels and len(sides) == 2 and all(good)

    def add_parts(self) -> None:
        """Make the parts that hold constants; none do here."""

    def scaled(self, images: Tensor) -> Tensor:
        """Return the images with values between 0 and 1."""
        return zero_to_one(images)

    def features(self, records: Tensor) -> Tensor:
        """Return the images' features, joined."""
        images = records.reshape(len(records), *self.picture).to(torch.float32)
        return self.image_features(self.scaled(images))

    def image_features(self, images: Tensor) -> Tensor:
        """Return (n, size) numbers for images with values between 0 and 1."""
        raise NotImplementedError
