"""A client that trains with Opacus as its users do: ``make_private``, then a loop over the loader
it returns.
"""

from __future__ import annotations

import warnings

import torch
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings(
    "ignore"
)  # about its random numbers and its backward hooks; they change no number here


def train(
    model: nn.Module,
    features: Tensor,
    labels: Tensor,
    *,
    batch_size: int,
    steps: int,
    lr: float,
    clip: float,
    noise_multiplier: float,
) -> nn.Module:
    """Train this model in place with DP-SGD for so many steps, and return it."""
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    loader = DataLoader(TensorDataset(features, labels), batch_size=batch_size)
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=noise_multiplier,
        max_grad_norm=clip,
    )
    done = 0
    while done < steps:
        for batch, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(private(batch), targets).backward()
            optimizer.step()
            done += 1
            if done == steps:
                break
    return model
