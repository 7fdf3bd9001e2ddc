"""Noise alone: sums that are put on the grid and noised, and rows of noise for many clients."""

from __future__ import annotations

from typing import Any

import torch

from bench.gate import Gate, spec
from dpfl.core.grid import Grid
from dpfl.core.random import PublicSeed, SecretRng, fill_grid_noise

NUMBERS = 1_000_000
CLIENTS, LENGTH = 50, 7850


def play(asked: dict[str, Any], gate: Gate) -> None:
    """Draw, taking turns."""
    grid = Grid.of(1.0)
    rng = SecretRng.simulated(PublicSeed(1))
    clients = [SecretRng.simulated(PublicSeed(number)) for number in range(CLIENTS)]
    vector = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(0))
    rows = torch.empty(CLIENTS, LENGTH)
    for _ in range(asked["rounds"]):
        gate.wait()
        for _ in range(4):
            grid.noised(vector, rng)
        for _ in range(10):
            fill_grid_noise(clients, rows)
        gate.end_of_round()
    gate.done(("torch", "dpfl"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    play(spec(), Gate())
