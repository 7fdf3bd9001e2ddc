"""Describe and plan from Python, before anything is trained."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import nn

from dpfl.core.checks import MOST_ROUNDS, check, whole_number
from dpfl.core.random import PublicSeed
from dpfl.data.federation import Federation
from dpfl.experiments.describe import Description, describe as describe_experiment, description_of
from dpfl.experiments.plan import Plan, plan as plan_experiments
from dpfl.experiments.sources import Source, method_list, path_of, values_of
from dpfl.privacy.ledger import Ledger
from dpfl.rounds import Run
from dpfl.runs.experiment import Experiment, for_method
from dpfl.sim.loop import Simulation
from dpfl.strategy import Strategy


def plan(
    experiment: Source,
    methods: Sequence[str] = (),
    *,
    data: Path | str | None = None,
    timing: bool = True,
) -> Plan:
    """Say what methods would cost and leave of the signal, without training.

    Args:
        experiment: The experiment to plan.
        methods: The names of the methods; by default the experiment's own.
        data: Where data sets lie that do not ship with dpfl.
        timing: Estimate the time of each method by a few rounds on made-up records.
    """
    values = values_of(experiment)
    own = values.get("method", {}).get("name")
    names = method_list("plan", methods or ([own] if own else ()))
    found = [Experiment.from_options(for_method(values, name)) for name in names]
    return plan_experiments(found, data_folder=path_of(data), timing=timing)


def describe(
    experiment: Source | None = None,
    *,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    strategy: Strategy | None = None,
    rounds: int | None = None,
    data: Path | str | None = None,
) -> Description:
    """Plan a training, charge nothing and run nothing: pipeline, promise, costs, noise and bytes.

    Args:
        experiment: The experiment to describe.
        federation: Instead of an experiment: clients with their records and budgets.
        model: For a federation: the model to train.
        strategy: For a federation: the method.
        rounds: For a federation: how many rounds to train.
        data: Where data sets lie that do not ship with dpfl.
    """
    own = {"federation": federation, "model": model, "strategy": strategy, "rounds": rounds}
    given = [name for name, value in own.items() if value is not None]
    if experiment is not None:
        check(
            not given,
            "describe",
            f"was given an experiment and {', '.join(given)}",
            "give an experiment, or a federation of your own",
        )
        return describe_experiment(Experiment.from_options(values_of(experiment)), path_of(data))
    lacking = [name for name in own if name not in given]
    check(
        not lacking,
        "describe",
        f"lacks {', '.join(lacking)}",
        "give an experiment, or federation, model, strategy and rounds",
    )
    whole_number("describe", "rounds", rounds, most=MOST_ROUNDS)
    arguments: Any = {**own, "model": copy.deepcopy(model)}
    with closing(Ledger.create(":memory:", "plan")) as ledger:
        run = Run(name="plan", ledger=ledger, seed=None, public=PublicSeed(0))
        return description_of(Simulation(**arguments, run=run), PublicSeed(0))
