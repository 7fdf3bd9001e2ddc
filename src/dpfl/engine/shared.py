"""The gradient of one weight that several layers use, or one layer several times.

It is the sum over all uses, clipped once. A dense layer gives a sum over its positions of d_t a_t^T
and an embedding one of e_s d_s^T, with e_s the unit vector of the token at s. All of them are outer
products u v^T, so the squared norm of the sum follows from two Gram matrices over all positions of
all uses. Between a dense layer and an embedding, u_t . e_s is the entry of d_t at the token:
nothing of the size of a vocabulary is written for a record.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dpfl.engine import layer_rules as rules
from dpfl.numerics.clipping import LARGEST_INPUT

SHARES = (nn.Linear, nn.Embedding)
"""Layers that may share a weight; others are computed the slow way."""


class Factors(NamedTuple):
    """One use of a weight: for a dense layer its outer factors, else tokens and their factors.

    ``left`` is (records, positions, rows of the weight), or tokens (records, positions); ``right``
    is (records, positions, columns of the weight).
    """

    left: Tensor
    right: Tensor

    @classmethod
    def of(cls, layer: nn.Module, a: Tensor, d: Tensor) -> "Factors":
        """The use of its weight by a layer with input ``a`` and output gradient ``d``."""
        d = d.reshape(len(a), -1, d.shape[-1])
        if isinstance(layer, nn.Embedding):
            tokens = a.reshape(len(a), -1)
            return cls(tokens, rules.without_padding(layer, tokens, d))
        return cls(d, a.reshape(len(a), -1, a.shape[-1]))

    def weighted(self, factor: Tensor, into: Tensor) -> None:
        """Add the weighted sum over records."""
        right = (self.right.double() * factor[:, None, None]).flatten(0, 1)
        if self.left.ndim == 2:
            into.index_add_(0, self.left.flatten(), right)
        else:
            into.add_(self.left.double().flatten(0, 1).T @ right)


def shared_weight(weight: Tensor, uses: list[Factors]) -> rules.Piece:
    """Squared norms and weighted sum of the gradient of a weight with these uses."""
    records = len(uses[0].left)
    positions = sum(use.right.shape[1] for use in uses)
    numbers = positions * (2 * positions + sum(weight.shape))
    parts = rules.slices(records, max(1, rules.MOST_NUMBERS // max(1, 2 * numbers)))

    def squares(some: slice) -> Tensor:
        own = [Factors(use.left[some], use.right[some]) for use in uses]
        left = torch.cat([torch.cat([_across(a, b) for b in own], dim=2) for a in own], dim=1)
        return rules.sum_of_products(rules.gram(torch.cat([use.right for use in own], dim=1)), left)

    def weighted(factor: Tensor) -> Tensor:
        total = torch.zeros(weight.shape, dtype=torch.float64, device=factor.device)
        for use in uses:
            for some in parts:
                Factors(use.left[some], use.right[some]).weighted(factor[some], total)
        return total

    # A record whose input is too large is taken out.
    large = [~(rules.squared(use.right) <= LARGEST_INPUT**2) for use in uses]
    found = torch.cat([squares(some) for some in parts])
    return found.masked_fill(torch.stack(large).any(dim=0), torch.inf), weighted


def _across(one: Factors, other: Factors) -> Tensor:
    """Inner products of the left factors of two uses, (records, positions, positions)."""
    a = one.left
    b = other.left
    if a.ndim == 2 and b.ndim == 2:
        return (a[:, :, None] == b[:, None, :]).double()
    if a.ndim == 2:
        return _across(other, one).transpose(1, 2)
    if b.ndim == 2:
        return a.gather(2, b[:, None].expand(-1, a.shape[1], -1)).double()
    return a.double() @ b.double().transpose(1, 2)


class Use(NamedTuple):
    """One use of a layer: its input ``a`` and the gradient ``d`` of its output.

    ``names`` are those of its learned parameters in the layout.
    """

    layer: nn.Module
    names: Mapping[str, str]
    a: Tensor
    d: Tensor


def shared_gradients(uses: list[Use]) -> list[rules.LayerGradient]:
    """The gradients of parameters that dense layers and embeddings share, by names in the layout.

    One for each parameter.
    """
    weights: dict[str, tuple[Tensor, list[Factors]]] = {}
    biases: dict[str, list[Tensor]] = {}
    for layer, names, a, d in uses:
        if "weight" in names:
            weight = layer.get_parameter("weight")
            weights.setdefault(names["weight"], (weight, []))[1].append(Factors.of(layer, a, d))
        if "bias" in names:
            sums = d.reshape(len(a), -1, d.shape[-1]).sum(dim=1)
            biases.setdefault(names["bias"], []).append(sums)
    pieces = {name: shared_weight(*own) for name, own in weights.items()}
    pieces |= {name: rules.rows(rules.added(own)) for name, own in biases.items()}
    return [rules.LayerGradient.of(**{name: piece}) for name, piece in pieces.items()]
