"""How long a run would take on this machine: two rounds of a few clients with made-up records of
the right sizes.
"""

import statistics
from dataclasses import replace
from pathlib import Path

import torch

from dpfl.core.checks import check
from dpfl.core.errors import PrivacyRefusal
from dpfl.data.federation import Federation
from dpfl.data.records import Shard
from dpfl.plugs.selection import Everyone
from dpfl.runs.experiment import Experiment
from dpfl.sim.train import train

SAMPLE = 4
ROUNDS = 3


def seconds_in_all(experiment: Experiment, data_folder: Path | None = None) -> float:
    """Estimate the seconds that a whole run takes on this machine.

    No record is used and nothing is charged: only sizes matter. A few clients stand for all, from
    the smallest to the largest budget; files and evaluation are not counted.
    """
    federation = experiment.federation(data_folder)
    strategy, few = experiment.strategy(len(federation.ids)), _blank(federation, SAMPLE)
    model, everyone = experiment.build_model(federation), replace(strategy, selection=Everyone())
    result = train(model, few, everyone, rounds=ROUNDS, seed=0, evaluate_every=ROUNDS)
    warm = result.timings[1:]  # the first round plans noise and warms caches
    remedy = "raise the budgets, or plan less"
    check(bool(warm), "timing", "nobody can afford a round", remedy, PrivacyRefusal)
    stages = ("open", "clients", "close")
    opened, clients, closed = (statistics.mean(line[name] for line in warm) for name in stages)
    heard = strategy.selection.rate(len(federation.ids)) * len(federation.ids)
    per_client = (clients / experiment.run.workers + closed) / len(few.ids)
    return experiment.run.rounds * (opened + per_client * heard)


def _blank(federation: Federation, count: int) -> Federation:
    """A few clients from the smallest to the largest budget, with as many records as they have, all
    of them empty.
    """

    def epsilon(client: str) -> float:
        return federation.budgets[client].epsilon if client in federation.budgets else 0.0

    ids = sorted(federation.ids, key=epsilon)
    step = max(1, (len(ids) - 1) // max(1, count - 1))
    shards = {}
    for client in [*ids[::step][: count - 1], ids[-1]]:
        own = federation.shards[client]
        tested = own.test_features[:1], own.test_labels[:1]
        shards[client] = Shard.of(*map(torch.zeros_like, (own.features, own.labels, *tested)))
    budgets = {c: own for c, own in federation.budgets.items() if c in shards}
    settings = {c: own for c, own in federation.client_settings.items() if c in shards}
    return replace(federation, shards=shards, budgets=budgets, client_settings=settings)
