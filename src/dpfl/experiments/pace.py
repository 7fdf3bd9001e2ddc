"""How long a run would take on this machine: two rounds of a few clients with made-up records of
the right sizes.
"""

import statistics
from dataclasses import replace
from pathlib import Path

import torch

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
    strategy = experiment.strategy(len(federation.ids))
    few = _blank(federation, SAMPLE)
    result = train(
        experiment.build_model(federation),
        few,
        replace(strategy, selection=Everyone()),
        rounds=ROUNDS,
        seed=0,
        evaluate_every=ROUNDS,
    )
    warm = result.timings[1:]  # the first round plans noise and warms caches
    if not warm:
        raise PrivacyRefusal(
            "timing", "nobody can afford a round", "raise the budgets, or plan less"
        )
    heard = strategy.selection.rate(len(federation.ids)) * len(federation.ids)
    stages = {
        name: statistics.mean(line[name] for line in warm) for name in ("open", "clients", "close")
    }
    per_client = (stages["clients"] / experiment.run.workers + stages["close"]) / len(few.ids)
    return experiment.run.rounds * (stages["open"] + per_client * heard)


def _blank(federation: Federation, count: int) -> Federation:
    """A few clients from the smallest to the largest budget, with as many records as they have, all
    of them empty.
    """
    ids = sorted(
        federation.ids,
        key=lambda c: (federation.budgets[c].epsilon if c in federation.budgets else 0.0, c),
    )
    step = max(1, (len(ids) - 1) // max(1, count - 1))
    chosen = list(dict.fromkeys([*ids[::step][: count - 1], ids[-1]]))
    shards = {}
    for client in chosen:
        shard = federation.shards[client]
        shards[client] = Shard.of(
            torch.zeros_like(shard.features),
            torch.zeros_like(shard.labels),
            torch.zeros_like(shard.test_features[:1]),
            torch.zeros_like(shard.test_labels[:1]),
        )
    return replace(
        federation,
        shards=shards,
        budgets={
            client: budget for client, budget in federation.budgets.items() if client in shards
        },
        client_settings={
            client: client_settings
            for client, client_settings in federation.client_settings.items()
            if client in shards
        },
    )
