"""Training over a network that loses uploads, which only the simulator can arrange."""

from __future__ import annotations

import copy
from contextlib import closing

import dpfl
from dpfl.data.federation import Federation
from dpfl.privacy.ledger import Ledger
from dpfl.rounds import Run
from dpfl.sim.loop import Simulation
from dpfl.sim.train import Result
from torch import nn


def train_with_losses(
    model: nn.Module,
    federation: Federation,
    strategy: dpfl.Strategy,
    *,
    rounds: int,
    dropout: float,
    seed: int = 0,
) -> Result:
    """Do what ``dpfl.train`` does with these arguments, and lose a share of the uploads."""
    public = dpfl.PublicSeed(seed)
    with closing(Ledger.create(":memory:", "memory")) as ledger:
        ledger.register("lossy", seeded=True, title=strategy.name)
        simulation = Simulation(
            model=copy.deepcopy(model),
            federation=federation,
            strategy=strategy,
            rounds=rounds,
            run=Run(
                name="lossy",
                ledger=ledger,
                seed=public.child("secret"),
                public=public.child("run"),
            ),
            dropout=dropout,
        )
        outcome = simulation.run(simulation.start(), [])
    assert outcome.summary is not None
    simulation.layout.write(outcome.state.model, simulation.model)
    return Result(
        model=simulation.model,
        history=outcome.history,
        summary=outcome.summary,
        timings=simulation.timings,
    )
