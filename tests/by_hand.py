"""What several tests play by hand: the clients' half of a round, and a network that loses uploads."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from contextlib import closing

from torch import Tensor, nn

import dpfl
from dpfl.engine.base import Engine
from dpfl.privacy.ledger import Ledger
from dpfl.rounds import Agreement, Plan, Run, Uplink, Workshop, charging, client_round
from dpfl.rounds.members import Member
from dpfl.sim.loop import Simulation
from dpfl.sim.result import result_of


def play_clients(
    agreement: Agreement,
    run: Run,
    plan: Plan,
    members: Mapping[str, Member],
    engine: Engine,
    model: nn.Module,
    private: MutableMapping[str, Tensor] | None = None,
) -> list[Uplink]:
    """Charge these members and let them work, as a simulation does."""
    workshop = Workshop(
        agreement=agreement,
        run=run.name,
        engine=engine,
        model=model,
        secret=lambda round_, client: run.secret("client", round_, client),
    )
    admit = charging(agreement, run)
    return client_round(workshop, plan.downloads, members, private, admit=admit)


def train_with_losses(
    model: nn.Module,
    federation: dpfl.Federation,
    strategy: dpfl.Strategy,
    *,
    rounds: int,
    dropout: float,
    seed: int = 0,
) -> dpfl.Result:
    """Do what ``dpfl.train`` does with these arguments, and lose a share of the uploads."""
    public = dpfl.PublicSeed(seed)
    with closing(Ledger.create(":memory:", "memory")) as ledger:
        ledger.register("lossy", seeded=True, title=strategy.name)
        secret, shared = public.child("secret"), public.child("run")
        simulation = Simulation(
            model=copy.deepcopy(model),
            federation=federation,
            strategy=strategy,
            rounds=rounds,
            run=Run(name="lossy", ledger=ledger, seed=secret, public=shared),
            dropout=dropout,
        )
        summary = simulation.play()
    return result_of(simulation, summary, description="", python=True)
