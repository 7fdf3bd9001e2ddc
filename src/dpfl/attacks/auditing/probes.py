"""Models whose gradients an auditor chooses, and the federations of canaries that they train on.

With the loss -w x the gradient of a record is -x, whatever the weights are: a record R e_j is
clipped to the longest gradient there can be, in direction j, in every step, and a record of zeros
contributes nothing at all. Methods that bring their own model train a linear head on features that
are the records themselves; there a canary is e_j, and what is not a number contributes nothing.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpfl.core.types import Budget
from dpfl.data.federation import Federation
from dpfl.models.preconditioning import linear_head
from dpfl.rounds import write_buffers
from dpfl.tasks import Classification, CustomTask, Task

Floats = NDArray[np.float64]
Probe = Literal["linear", "layered", "split", "head"]
"""One layer; a layer under a head that may stay at clients; parallel layers; a head on features."""

LONG = 100.0
"""How long a canary is before it is clipped."""

PARTS = 16
"""How many parallel layers a split model has: clipped one by one, they are four times too long."""


class Split(nn.Module):
    """Parallel linear layers, each on its own part of a record, added up."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(size // PARTS, 1, bias=False) for _ in range(PARTS))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of all layers."""
        pieces = zip(self.parts, x.chunk(PARTS, dim=1), strict=True)
        return torch.stack([layer(piece) for layer, piece in pieces]).sum(dim=0)


def build_probe(kind: Probe, size: int) -> nn.Module:
    """Build a model for records of ``size`` numbers, which starts at zero."""
    if kind == "head":
        return linear_head(nn.Flatten(), 2, size=size, kind="images")
    model: nn.Module = Split(size)
    if kind != "split":
        head = [nn.Linear(1, 1, bias=False)] if kind == "layered" else []
        model = nn.Sequential(nn.Linear(size, 1, bias=False), *head)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if name == "1.weight" else 0.0)
    return model


def coordinates(kind: Probe, vector: Tensor, buffers: Mapping[str, Tensor]) -> Floats:
    """One number a direction, from a flat vector of a probe's parameters.

    ``buffers`` are what was released before round one: the features of a canary follow from them,
    and so does its direction among the parameters of a head.
    """
    numbers = vector.double()
    if kind == "head":  # the gradient of one class is that of the other, negated
        first, second = numbers.view(2, -1)
        numbers = _directions(len(first), buffers) @ (first - second) / math.sqrt(2)
    elif kind == "split":  # a canary is as long in every part
        numbers = numbers.sum().expand(len(numbers)) / math.sqrt(len(numbers))
    elif kind == "layered":
        numbers = numbers[:-1]
    found: Floats = numbers.numpy()
    return found


def _directions(size: int, buffers: Mapping[str, Tensor]) -> Tensor:
    """What the layers below the head make of e_1, e_2, ..., one a row."""
    below = nn.Sequential(OrderedDict([*build_probe("head", size).named_children()][1:-1]))
    write_buffers(below, buffers)
    with torch.no_grad():
        found: Tensor = below(torch.eye(size)).double()
    return found


def task_of(kind: Probe) -> Task:
    """What a probe learns."""
    if kind == "head":
        return Classification(classes=2)
    return CustomTask(loss=_minus, outputs_per_record=1)


def _minus(outputs: Tensor, targets: Tensor) -> Tensor:
    return -outputs[:, 0]


def canary_federation(
    kind: Probe, marks: Floats, directions: NDArray[np.int64], size: int, budget: Budget, **how: int
) -> Federation:
    """Clients with canaries, ``marks`` a row a client, and clients without any.

    A mark of 1 or -1 is a canary in its direction, or the opposite one; 0 is nothing, as under
    zero-out adjacency. ``directions`` has one for each canary, in order. ``how`` says how many
    ``fillers`` there are: clients with half as much again of the ``budget``.
    """
    clients, records = marks.shape
    values = np.zeros((marks.size, size), np.float32)
    if kind == "split":
        values[:] = marks.reshape(-1, 1)
    else:
        values[np.arange(marks.size), directions] = marks.reshape(-1)
    values *= 1.0 if kind == "head" else LONG
    values = np.concatenate([values, np.zeros((how["fillers"] * records, size), np.float32)])
    labels = np.zeros(records, np.int64 if kind == "head" else np.float32)
    tests = np.zeros((1, size), np.float32), labels[:1]
    names = [f"c{number:05}" for number in range(clients)]
    others = [f"f{number:05}" for number in range(how["fillers"])]
    own = values.reshape(-1, records, size)
    larger = replace(budget, epsilon=1.5 * budget.epsilon)
    federation = Federation.from_arrays(
        {name: (one, labels, *tests) for name, one in zip([*names, *others], own, strict=True)},
        task=task_of(kind),
        budgets={**dict.fromkeys(names, budget), **dict.fromkeys(others, larger)},
    )
    if kind == "head":  # zeros have a gradient there
        stored = next(iter(federation.shards.values())).train.features
        stored[(stored == 0).all(dim=1)] = torch.nan
    return federation
