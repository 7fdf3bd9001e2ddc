"""The papers' networks, by name. All of them treat records apart: normalisation is GroupNorm, never
BatchNorm.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]
Build = Callable[[Shape, int, int], nn.Module]
BuildText = Callable[[int, int, int], nn.Module]


def logistic(shape: Shape, classes: int, hidden: int) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def mlp(shape: Shape, classes: int, hidden: int) -> nn.Module:
    """One hidden layer of ``hidden`` rectified units."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.ReLU(), nn.Linear(hidden, classes)
    )


def cnn(shape: Shape, classes: int, hidden: int) -> nn.Module:
    """Robust-HDP, Table 5: conv 16 5x5, pool, conv 32 5x5, pool, dense; 28,938 parameters on 28 x
    28.
    """
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * (height // 4) * (width // 4), classes),
    )  # fmt: skip


def cnn_small(shape: Shape, classes: int, hidden: int) -> nn.Module:
    """PFA's two-layer CNN: conv 16 8x8 stride 2, conv 32 4x4 stride 2, dense 32, dense; 26,010
    parameters on 28 x 28.
    """
    body = nn.Sequential(
        nn.Conv2d(shape[0], 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten(),
    )  # fmt: skip
    return nn.Sequential(body, nn.Linear(_size(body, shape), 32), nn.ReLU(), nn.Linear(32, classes))


def cnn_cifar(shape: Shape, classes: int, hidden: int) -> nn.Module:
    """PFA's four-layer CNN for CIFAR-10: two 5x5 convolutions, two dense layers; about 10^6
    parameters.
    """
    body = nn.Sequential(
        nn.Conv2d(shape[0], 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    )  # fmt: skip
    return nn.Sequential(
        body, nn.Linear(_size(body, shape), 256), nn.ReLU(), nn.Linear(256, classes)
    )


def lenet5(shape: Shape, classes: int, hidden: int) -> nn.Module:
    """FedCEO's LeNet-5: conv 32 5x5, conv 64 5x5, dense 512, dense 512, dense."""
    body = nn.Sequential(
        nn.Conv2d(shape[0], 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    )  # fmt: skip
    return nn.Sequential(
        body,
        nn.Linear(_size(body, shape), 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, classes),
    )


def alexnet(shape: Shape, classes: int, hidden: int) -> nn.Module:
    """AlexNet's five convolutions scaled to 32 x 32, two dense layers of 1,024."""
    body = nn.Sequential(
        nn.Conv2d(shape[0], 64, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 192, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    )  # fmt: skip
    return nn.Sequential(
        body,
        nn.Linear(_size(body, shape), 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, classes),
    )


class Residual(nn.Module):
    """Two 3x3 convolutions with GroupNorm beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(32, outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(32, outputs),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(32, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Add the two."""
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18(shape: Shape, classes: int, hidden: int) -> nn.Module:
    """ResNet-18 with GroupNorm for small images; 11.2 million parameters on 32 x 32 x 3."""
    layers: list[nn.Module] = [
        nn.Conv2d(shape[0], 64, 3, 1, 1, bias=False),
        nn.GroupNorm(32, 64),
        nn.ReLU(),
    ]
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Residual(inputs, outputs, stride), Residual(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


class Reader(nn.Module):
    """An embedding, recurrent layers, and a dense layer on the last position."""

    def __init__(
        self, vocabulary: int, embedding: int, hidden: int, layers: int, classes: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.recurrent = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.dense = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score each text."""
        states, _ = self.recurrent(self.embedding(tokens))
        scores: Tensor = self.dense(states[:, -1])
        return scores


def lstm(vocabulary: int, classes: int, hidden: int) -> nn.Module:
    """PFA's two-layer LSTM for texts (IMDb): embedding and layers of ``hidden`` units, dense on the
    last word.
    """
    return Reader(vocabulary, hidden, hidden, 2, classes)


def lstm_shakespeare(vocabulary: int, classes: int, hidden: int) -> nn.Module:
    """DP-Fed-LS's next-character LSTM: embedding of 8, two layers of 256, dense."""
    return Reader(vocabulary, 8, 256, 2, classes)


def _size(body: nn.Module, shape: Shape) -> int:
    with torch.no_grad():
        return int(body(torch.zeros(1, *shape)).shape[1])
