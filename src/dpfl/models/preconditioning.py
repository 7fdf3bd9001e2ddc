"""Linear heads on public features, behind maps that private statistics make better conditioned.

::

    images        features -> centre -> whiten -> linear
    tables, text  features -> centre -> standardise -> constant -> linear

The constants of the maps are buffers, which releases before round one write
(:mod:`dpfl.plugs.preconditioning`). Every map ends on the unit sphere, so that the gradient of a
record is as long as its error. Until something is released the maps change nothing but lengths.
"""

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn

from dpfl.core.checks import check, one_of, whole_number
from dpfl.core.errors import ConfigurationError
from dpfl.models.features import FeatureMap, Kind, unit
from dpfl.tasks import Task

CENTRE, WHITEN, STANDARDISE = "centre.mean", "whiten.matrix", "standardise.scale"
"""The buffers that are released: a mean, a whitening matrix, or a scale for each feature."""

CONSTANTS: dict[Kind, float] = {"tables": 0.5, "text": 0.2}
"""The constant that stands for a bias, beside features of norm 1."""


class Centre(nn.Module):
    """x <- unit(unit(x) - mean)."""

    mean: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return centred features of norm 1."""
        return unit(unit(x) - self.mean)


class Whiten(nn.Module):
    """x <- unit(x matrix)."""

    matrix: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.eye(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return whitened features of norm 1."""
        return unit(x @ self.matrix)


class Standardise(nn.Module):
    """x <- unit(x scale), feature by feature."""

    scale: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return scaled features of norm 1."""
        return unit(x * self.scale)


class Constant(nn.Module):
    """Append a constant that stands for a bias, and keep the norm at 1.

    >>> Constant(0.5)(torch.tensor([[1.0]]))
    tensor([[0.8944, 0.4472]])
    """

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        """Return features with one more coordinate."""
        constant = x.new_full((len(x), 1), self.value)
        return torch.cat([x, constant], dim=1) / math.sqrt(1 + self.value**2)

    def extra_repr(self) -> str:
        """Show the constant."""
        return f"{self.value}"


class OnFeatures(nn.Sequential):
    """Public features, and a model of them.

    The first module is called ``features`` and learns nothing: what it makes of a record is
    computed once, and not in every round.
    """

    def __init__(self, modules: "OrderedDict[str, nn.Module]") -> None:
        super().__init__(modules)
        first = next(iter(modules), "")
        check(first == "features", "model", f"begins with '{first}'", "begin with 'features'")
        self.features.requires_grad_(False)


def split_features(model: nn.Module, task: Task) -> tuple[nn.Module | None, nn.Module]:
    """Return the features of a model and the rest of it; None and the model where it has none.

    Parameters and buffers have the same names in the rest as in the model, and are the same. A
    model whose ``task`` takes several records of a person at once stays whole.
    """
    if not (isinstance(model, OnFeatures) and task.plain):
        return None, model
    (_, features), *rest = model.named_children()
    return features, nn.Sequential(OrderedDict(rest))


def linear_head(
    features: nn.Module, classes: int, *, size: int | None = None, kind: Kind | None = None
) -> OnFeatures:
    """Build a linear classifier of so many ``classes`` on public features, which starts at zero.

    ``features`` maps a batch of records to one row of ``size`` numbers each: a
    :class:`~dpfl.models.features.FeatureMap`, which knows its ``size`` and ``kind``, or any frozen
    network, such as a pretrained backbone. ``kind`` says by which rules it is conditioned and
    trained: "images", "tables" or "text".

    >>> from dpfl.models.features import make_features
    >>> [name for name, _ in linear_head(make_features("table", (3,)), 2).named_children()]
    ['features', 'centre', 'standardise', 'constant', 'linear']
    """
    if isinstance(features, FeatureMap):
        size = size or features.size
        kind = kind or features.kind
    if size is None or kind is None:
        raise ConfigurationError(
            "linear head",
            "features without a size or a kind",
            "give size and kind, as for linear_head(backbone, 10, size=512, kind='images')",
        )
    whole_number("linear head", "size", size)
    whole_number("linear head", "classes", classes, least=2)
    one_of("linear head", ("images", "tables", "text"), kind=kind)
    layers: OrderedDict[str, nn.Module] = OrderedDict(features=features, centre=Centre(size))
    if kind == "images":
        layers["whiten"] = Whiten(size)
    else:
        layers["standardise"] = Standardise(size)
        layers["constant"] = Constant(CONSTANTS[kind])
        size += 1
    layers["linear"] = nn.Linear(size, classes, bias=False)
    nn.init.zeros_(layers["linear"].weight)  # type: ignore[arg-type]
    return OnFeatures(layers)
