"""The networks as a peer's user would write them; torch only. Parameters come in the same order as
dpfl's own.
"""

from __future__ import annotations

import copy
import math
import re

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.workloads import Workload


class Block(nn.Module):
    """ResNet's basic block with GroupNorm; no activation works in place, and each is a module of
    its own.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(32, outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(32, outputs)
        self.down = None
        if stride != 1 or inputs != outputs:
            self.down = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(32, outputs)
            )
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Convolve twice and add the input."""
        beside = x if self.down is None else self.down(x)
        return self.relu2(self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x))))) + beside)


class TextClassifier(nn.Module):
    """Embedding, LSTM layers of the kind given, dense on the last word."""

    def __init__(
        self, lstm: nn.Module, vocabulary: int, width: int, hidden: int, classes: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = lstm
        self.dense = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score each text."""
        states, _ = self.lstm(self.embedding(tokens))
        return self.dense(states[:, -1])


def _resnet18(channels: int, classes: int) -> nn.Module:
    blocks: list[nn.Module] = []
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
        inputs = outputs
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)]
    return nn.Sequential(
        nn.Conv2d(channels, 64, 3, 1, 1, bias=False),
        nn.GroupNorm(32, 64),
        nn.ReLU(),
        *blocks,
        *head,
    )


def _cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), classes),
    )


class Logits(nn.Module):
    """A Hugging Face model whose output is its scores."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        """Score each text."""
        scores: Tensor = self.inner(tokens).logits
        return scores


def lora(work: Workload) -> nn.Module:
    """A small BERT without dropout, with PEFT's adapters of rank 8 and a head to be learned."""
    import peft
    import transformers

    config = transformers.BertConfig(
        vocab_size=work.tokens, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512,
        max_position_embeddings=work.shape[0], num_labels=work.classes, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        inner = transformers.BertForSequenceClassification(config)
        return Logits(peft.get_peft_model(inner, peft.LoraConfig(r=8, task_type="SEQ_CLS")))


def freeze_body(model: nn.Module) -> nn.Module:
    """Freeze everything but the last layer."""
    for parameter in list(model.parameters())[:-2]:
        parameter.requires_grad_(False)
    return model


def network(work: Workload) -> nn.Module:
    """Build a workload's network."""
    model = _network(work)
    return freeze_body(model) if work.head_only else model


def _network(work: Workload) -> nn.Module:
    if work.model == "lora":
        return lora(work)
    if work.model == "cnn":
        return _cnn(work.shape, work.classes)
    if work.model == "resnet18":
        return _resnet18(work.shape[0], work.classes)
    if work.model == "lstm":
        from opacus.layers import DPLSTM  # nn.LSTM gives no per-record gradients there

        assert work.tokens is not None
        return TextClassifier(
            DPLSTM(64, 64, num_layers=2, batch_first=True), work.tokens, 64, 64, work.classes
        )
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(work.shape), work.classes))


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters in torch's own order; Opacus lists those of a recurrent layer in another one."""
    named = list(model.named_parameters())
    kinds = [re.search(r"(weight|bias)_(ih|hh)_l(\d+)$", name) for name, _ in named]
    places = [i for i, kind in enumerate(kinds) if kind]
    order = sorted(
        places, key=lambda i: (int(kinds[i][3]), kinds[i][1] == "bias", kinds[i][2] == "hh")
    )
    moved = dict(zip(places, order, strict=True))
    return [named[moved.get(i, i)][1] for i in range(len(named))]


def load(model: nn.Module, path: str) -> None:
    """Give the model the start that dpfl's own has; another shape or number of parameters is an
    error.
    """
    with np.load(path) as found:
        start = [torch.from_numpy(found[name]) for name in found.files]
    parameters = _parameters(model)
    here, there = [tuple(p.shape) for p in parameters], [tuple(t.shape) for t in start]
    if here != there:
        raise SystemExit(f"the two networks differ: parameters {here} here, {there} there")
    with torch.no_grad():
        for parameter, tensor in zip(parameters, start, strict=True):
            parameter.copy_(tensor)


def learned(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen."""
    return [p for p in _parameters(model) if p.requires_grad]


def flat(model: nn.Module) -> np.ndarray:
    """Return all parameters that are learned as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in learned(model)]).numpy().copy()


def exact_update(
    model: nn.Module, features: Tensor, labels: Tensor, *, steps: int, lr: float, clip: float
) -> np.ndarray:
    """Take full-batch steps of clipped gradients, record by record, in double precision."""
    model = copy.deepcopy(model).double()
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = flat(model)
    for _ in range(steps):
        total = [torch.zeros_like(p) for p in parameters]
        for feature, label in zip(features.double(), labels, strict=True):
            gradients = torch.autograd.grad(
                F.cross_entropy(model(feature[None]), label[None]), parameters
            )
            norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
            for into, gradient in zip(total, gradients, strict=True):
                into.add_(gradient, alpha=min(1.0, clip / norm))
        with torch.no_grad():
            for parameter, gradient in zip(parameters, total, strict=True):
                parameter.sub_(gradient, alpha=lr / len(labels))
    return flat(model) - before
