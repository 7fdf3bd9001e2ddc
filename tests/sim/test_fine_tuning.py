"""Whole runs with frozen, shared and adapted parameters: what is frozen never moves, and only what
is learned is noised and sent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dpfl
from dpfl.core.errors import ConfigurationError
from dpfl.core.layout import Layout

pytestmark = pytest.mark.xdist_group("transformers")

SETTINGS = {"lr": 0.5, "clip": 1.0, "batch_size": 10, "local_steps": 3}
TOKENS, LENGTH = 12, 6


def texts() -> dpfl.Federation:
    """Which half of the vocabulary a text is from."""
    rng = np.random.default_rng(0)
    arrays = {}
    for client in ("a", "b", "c"):
        labels = rng.integers(0, 2, 60)
        tokens = rng.integers(1, TOKENS // 2, (60, LENGTH)) + labels[:, None] * (TOKENS // 2)
        arrays[client] = (tokens, labels)
    budgets = {client: dpfl.Budget(epsilon=8.0, delta=1e-3) for client in arrays}
    return dpfl.Federation.from_arrays(arrays, budgets=budgets, tokens=TOKENS, classes=2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(TOKENS, 8), nn.Linear(8, 8)
        self.output = nn.Linear(8, TOKENS)
        self.output.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(torch.tanh(self.body(self.table(tokens))).mean(dim=1))


class Backbone(nn.Module):
    """A frozen transformer with BatchNorm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, 8)
        self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.requires_grad_(False).norm.eval()
        self.head.requires_grad_(True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.table(tokens)).mean(dim=1)))


def lora() -> nn.Module:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=TOKENS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=LENGTH, num_labels=2,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).train()
    return peft.get_peft_model(model, peft.LoraConfig(r=2, lora_dropout=0.1, task_type="SEQ_CLS"))


def made(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()


@pytest.mark.parametrize("build", [Backbone, lora, Tied])
def test_only_what_is_learned_moves_and_is_sent(build: Callable[[], nn.Module]) -> None:
    model = made(build)
    learned = {name for name, own in model.named_parameters() if own.requires_grad}
    size = sum(own.numel() for own in model.parameters() if own.requires_grad)
    before = copy.deepcopy(model.state_dict())
    result = dpfl.train(model, texts(), dpfl.weiavg(**SETTINGS), rounds=2, seed=0)
    after, layout = result.model.state_dict(), Layout.of_module(result.model)
    assert layout.size == size
    assert {block.name for block in layout} == learned
    assert result.history[0].payload_bytes_up == 3 * 4 * size
    if build is Tied:
        learned.add("output.weight")
    for name, value in before.items():
        assert torch.equal(after[name], value) != (name in learned), name
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    if build is Tied:
        assert result.model.output.weight is result.model.table.weight


def test_a_head_on_a_frozen_backbone_learns() -> None:
    model = made(Backbone)
    result = dpfl.train(model, texts(), dpfl.weiavg(**SETTINGS), rounds=12, seed=0)
    assert result.accuracy > 0.8


def test_workers_and_engines_agree_on_a_frozen_backbone() -> None:
    model = made(Backbone).eval()
    strategy = dpfl.weiavg(**SETTINGS)
    one, two, slow = (
        dpfl.train(model, texts(), strategy, rounds=2, seed=0, **options).model.head.weight.detach()
        for options in ({}, {"workers": 2}, {"engine": "one_by_one"})
    )
    assert torch.equal(one, two)
    torch.testing.assert_close(one, slow, rtol=1e-3, atol=1e-5)


def test_an_adapter_whose_base_is_trainable_is_refused() -> None:
    model = made(lora)
    name, base = next(
        (name, own.base_layer) for name, own in model.named_modules() if hasattr(own, "base_layer")
    )
    base.weight.requires_grad_(True)
    with pytest.raises(ConfigurationError, match="adapter whose base is trainable") as caught:
        dpfl.train(model, texts(), dpfl.weiavg(**SETTINGS), rounds=1, seed=0)
    assert name in str(caught.value)
