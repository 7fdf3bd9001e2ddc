"""The papers' networks, by name.

All of them treat records apart: normalisation is GroupNorm, never BatchNorm. A network is built
from the shape of a record (channels first for images) or the size of a vocabulary, the number of
classes, and the width of its hidden layers where the paper leaves it open.
"""

import math
from collections.abc import Callable
from itertools import pairwise

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
    first = nn.Linear(math.prod(shape), hidden)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(hidden, classes))


def cnn(shape: Shape, classes: int, hidden: int) -> nn.Module:
    """Robust-HDP's CNN: two 5x5 convolutions, dense; 28,938 parameters on 28 x 28.

    Table 5 of the paper: 16 channels, then 32, a pool after each.
    """
    channels, height, width = shape
    layers = _convolutions(channels, (16, 32), 5, padding=2, pool=2)
    dense = nn.Linear(32 * (height // 4) * (width // 4), classes)
    return nn.Sequential(*layers, nn.Flatten(), dense)


def cnn_small(shape: Shape, classes: int, hidden: int) -> nn.Module:
    """PFA's CNN: convolutions of 8x8 and 4x4, dense 32, dense; 26,010 parameters on 28 x 28."""
    layers = _convolutions(shape[0], (16,), 8, stride=2, padding=3, pool=1)
    layers += _convolutions(16, (32,), 4, stride=2, pool=1)
    return _with_dense(shape, layers, 32, classes)


def cnn_cifar(shape: Shape, classes: int, hidden: int) -> nn.Module:
    """PFA's CNN for CIFAR-10: two 5x5 convolutions, two dense layers; about 10^6 parameters."""
    layers = _convolutions(shape[0], (32, 64), 5, padding=2, pool=2)
    return _with_dense(shape, layers, 256, classes)


def lenet5(shape: Shape, classes: int, hidden: int) -> nn.Module:
    """FedCEO's LeNet-5: conv 32 5x5, conv 64 5x5, dense 512, dense 512, dense."""
    return _with_dense(shape, _convolutions(shape[0], (32, 64), 5, pool=2), 512, 512, classes)


def alexnet(shape: Shape, classes: int, hidden: int) -> nn.Module:
    """AlexNet's five convolutions scaled to 32 x 32, two dense layers of 1,024."""
    layers = _convolutions(shape[0], (64,), 3, stride=2, padding=1, pool=2)
    layers += _convolutions(64, (192,), 3, padding=1, pool=2)
    layers += _convolutions(192, (384, 256), 3, padding=1)
    layers += _convolutions(256, (256,), 3, padding=1, pool=2)
    return _with_dense(shape, layers, 1024, 1024, classes)


def _convolutions(
    inputs: int, sizes: Shape, kernel: int, stride: int = 1, padding: int = 0, pool: int = 0
) -> list[nn.Module]:
    """Rectified convolutions of these sizes, each with a 2 x 2 pool of stride ``pool`` unless 0."""
    layers: list[nn.Module] = []
    for before, outputs in pairwise((inputs, *sizes)):
        layers += [nn.Conv2d(before, outputs, kernel, stride, padding)]
        layers += [nn.MaxPool2d(2, pool)] if pool else []
        layers += [nn.ReLU()]  # behind the pool, where there is less of it: they commute
    return layers


def _with_dense(shape: Shape, layers: list[nn.Module], *sizes: int) -> nn.Module:
    """A body of layers, then dense layers of these sizes with rectifiers between them."""
    body = nn.Sequential(*layers, nn.Flatten())
    with torch.no_grad():
        inputs = int(body(torch.zeros(1, *shape)).shape[1])
    dense: list[nn.Module] = []
    for before, outputs in pairwise((inputs, *sizes)):
        dense += [nn.Linear(before, outputs), nn.ReLU()]
    return nn.Sequential(body, *dense[:-1])


class Residual(nn.Module):
    """Two 3x3 convolutions with GroupNorm beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        first = _normalised(inputs, outputs, 3, stride)
        self.body = nn.Sequential(*first, nn.ReLU(), *_normalised(outputs, outputs, 3, 1))
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*_normalised(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Return ReLU(body(x) + shortcut(x))."""
        return torch.relu(self.body(x) + self.shortcut(x))


def _normalised(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    """A convolution that keeps the size (but for the stride), and GroupNorm."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return [convolution, nn.GroupNorm(32, outputs)]


def resnet18(shape: Shape, classes: int, hidden: int) -> nn.Module:
    """ResNet-18 with GroupNorm for small images; 11.2 million parameters on 32 x 32 x 3."""
    layers = [*_normalised(shape[0], 64, 3, 1), nn.ReLU()]
    for inputs, outputs, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        layers += [Residual(inputs, outputs, stride), Residual(outputs, outputs, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


class Reader(nn.Module):
    """An embedding, LSTM layers, and a dense layer on the last position.

    ``vocabulary`` tokens are embedded in ``embedding`` numbers; each of the ``layers`` has
    ``hidden`` units.
    """

    def __init__(
        self, vocabulary: int, embedding: int, hidden: int, layers: int, classes: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.recurrent = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.dense = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return one row of class scores per text, from the last position's state."""
        states, _ = self.recurrent(self.embedding(tokens))
        scores: Tensor = self.dense(states[:, -1])
        return scores


def lstm(vocabulary: int, classes: int, hidden: int) -> nn.Module:
    """PFA's two-layer LSTM for texts (IMDb), dense on the last word.

    Embedding and layers have ``hidden`` units.
    """
    return Reader(vocabulary, hidden, hidden, 2, classes)


def lstm_shakespeare(vocabulary: int, classes: int, hidden: int) -> nn.Module:
    """DP-Fed-LS's next-character LSTM: embedding of 8, two layers of 256, dense."""
    return Reader(vocabulary, 8, 256, 2, classes)
