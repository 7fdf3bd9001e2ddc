"""A federation and a model of a user's own, which train in a fraction of a second."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import dpfl

ROUNDS = 5


def federation(shift: float = 0.0, **budgets: float) -> dpfl.Federation:
    """Four clients with budgets of their own, two classes that a line separates."""
    random = np.random.default_rng(7)
    clients, given = {}, {"a": 1.0, "b": 2.0, "c": 4.0, "d": 8.0} | budgets
    for name in given:
        x = random.normal(size=(60, 3)).astype(np.float32) + shift
        clients[name] = (x, (x @ np.array([1.0, -2.0, 0.5]) > 0).astype(np.int64))
    own = {name: dpfl.Budget(epsilon=epsilon, delta=1e-3) for name, epsilon in given.items()}
    return dpfl.Federation.from_arrays(clients, budgets=own)


def strategy(**changes: Any) -> dpfl.Strategy:
    settings: dict[str, Any] = {"lr": 0.5, "clip": 1.0, "batch_size": 16, "local_steps": 2}
    return dpfl.weiavg(**settings | changes)


def model(width: int = 3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(width, 2)


def run(**more: Any) -> dpfl.Result:
    arguments: dict[str, Any] = {"rounds": ROUNDS, "seed": 3, "progress": False}
    return dpfl.train(model(), federation(), strategy(), **arguments | more)


def bits(result: dpfl.Result) -> list[Any]:
    """Everything about a result that a resumed run must share."""
    told = [line.to_dict() for line in result.history], result.summary.to_dict()
    for name in ("seconds", "run"):  # the name of a run is drawn at random
        told[1].pop(name)
    return [*(p.detach().numpy().tobytes() for p in result.model.parameters()), *told]


if __name__ == "__main__":  # a process that a test kills
    import time

    def slowly(end: dpfl.RoundEnd) -> None:
        print(end.round, flush=True)
        time.sleep(0.05)

    run(folder=Path(sys.argv[1]), resume=True, callbacks=[slowly], rounds=12)
