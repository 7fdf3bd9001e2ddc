"""Statistics that condition features: their mean, and their second moments as a map.

Every statistic is released once, before round one (:mod:`dpfl.plugs.releases`), and becomes a
buffer of the model (:mod:`dpfl.models.preconditioning`). All vectors are of norm 1, so the bound of
one record's contribution is 1.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfl.core.checks import positive
from dpfl.models.features import unit
from dpfl.plugs.releases import GramMatrix, Mean, Release, Shape


class UnitMean(Mean):
    """The mean of the inputs, each scaled to norm 1."""

    def statistic(self, inputs: Tensor, labels: Tensor, shape: Shape) -> Tensor:
        """Return the inputs, of norm 1."""
        return unit(inputs)


@dataclass(frozen=True, kw_only=True)
class Whitening(GramMatrix):
    """A map under which the second moments become alike, as far as noise leaves them known.

    Of the noisy Gram matrix G = U L U^T, whose noise has the spectral edge e = 2 sqrt(d / 2) std,
    the buffer holds U (L_+ + ``shrinkage`` e)^(-1/2): directions below the edge are not blown up.
    """

    shrinkage: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("whitening", shrinkage=self.shrinkage)

    def result(self, mean: Tensor, shape: Shape, std: float) -> Tensor:
        """Return the whitening matrix, scaled to a largest factor of 1."""
        gram = super().result(mean.double(), shape, std)
        values, vectors = torch.linalg.eigh(gram)
        edge = 2 * math.sqrt(shape[0] / 2) * std
        least = max(self.shrinkage * edge, 1e-6 * float(values.abs().max()), 1e-30)
        scaled: Tensor = vectors * (least / (values.clamp_min(0) + least)).sqrt()
        return scaled


@dataclass(frozen=True, kw_only=True)
class Standardising(Release):
    """A scale for each feature, from its noisy mean square v: (v_+ + ``floor`` / d + 2 std)^(-1/2).

    ``floor`` keeps features that hardly vary from being blown up.
    """

    floor: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("standardising", floor=self.floor)

    def statistic(self, inputs: Tensor, labels: Tensor, shape: Shape) -> Tensor:
        """Return the squares of the inputs; of an input of norm 1 they have a norm of at most 1."""
        return inputs.square()

    def result(self, mean: Tensor, shape: Shape, std: float) -> Tensor:
        """Return the scales, relative to the largest that there can be."""
        least = self.floor / max(1, math.prod(shape)) + 2 * std
        return (least / (mean.double().clamp_min(0) + least)).sqrt().reshape(shape)
