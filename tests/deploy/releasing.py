"""Studies that begin with a release, for tests."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from dpfl.plugs.releases import Mean
from dpfl.runs.deployment import Offer
from dpfl.runs.model_card import ModelCard
from dpfl.strategy import Strategy
from tests.deploy.federation import FEATURES

RELEASE = Mean(into="0.mean", share=0.2, bound=FEATURES**0.5)


class Centre(nn.Module):
    """Subtracts a public mean."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.mean


def begin_with_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every study begin with a release of the mean of the records."""
    real = Offer.strategy

    def strategy(self: Offer) -> Strategy:
        return replace(real(self), releases=(RELEASE,))

    def build_model(self: Offer) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Centre(), nn.Linear(FEATURES, 2))

    monkeypatch.setattr(Offer, "strategy", strategy)
    monkeypatch.setattr(Offer, "build_model", build_model)
    monkeypatch.setattr(ModelCard, "make_model", lambda card, task: build_model(card))
