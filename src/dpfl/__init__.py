"""Differentially private federated learning for federations whose members do not agree on how much
privacy they need.

Nothing heavy is imported until it is used. Methods are attributes too, whoever wrote them:
``dpfl.weiavg(lr=0.1, clip=1.0, batch_size=32, local_epochs=1)``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dpfl.core.version import __version__ as __version__

if TYPE_CHECKING:
    from dpfl.core.errors import DpflError as DpflError, NotPrivateWarning as NotPrivateWarning
    from dpfl.core.random import PublicSeed as PublicSeed, SecretRng as SecretRng
    from dpfl.core.types import (
        Adjacency as Adjacency,
        Budget as Budget,
        Claims as Claims,
        ClientSettings as ClientSettings,
        Observer as Observer,
        Unit as Unit,
    )
    from dpfl.data.columns import Column as Column
    from dpfl.data.federation import Federation as Federation
    from dpfl.data.schema import Schema as Schema
    from dpfl.datasets.named import load_dataset as load_dataset
    from dpfl.experiments.planning import describe as describe, plan as plan
    from dpfl.experiments.results import StudyResult as StudyResult
    from dpfl.experiments.studies import compare as compare, sweep as sweep, tune as tune
    from dpfl.plugs.accounted_metric import AccountedMetric as AccountedMetric
    from dpfl.plugs.selection import (
        Everyone as Everyone,
        FixedCohort as FixedCohort,
        PoissonCohort as PoissonCohort,
    )
    from dpfl.privacy.budgets import make_budgets as make_budgets
    from dpfl.privacy.selection import RandomRuns as RandomRuns
    from dpfl.privacy.statement import Statement as Statement
    from dpfl.runs.experiment import Experiment as Experiment
    from dpfl.runs.predictor import Predictor as Predictor, load as load
    from dpfl.sim.accounted import (
        AccountedEvaluation as AccountedEvaluation,
        AccountedSelection as AccountedSelection,
        evaluate as evaluate,
        select as select,
    )
    from dpfl.sim.callbacks import (
        EarlyStopping as EarlyStopping,
        PublicMetric as PublicMetric,
        RoundEnd as RoundEnd,
        UnaccountedScore as UnaccountedScore,
    )
    from dpfl.sim.result import Result as Result
    from dpfl.sim.train import train as train
    from dpfl.strategy import Strategy as Strategy, with_secure_sum as with_secure_sum
    from dpfl.strategy.method import method as method

_HOMES = {
    "core.errors": ("DpflError", "NotPrivateWarning"),
    "core.random": ("PublicSeed", "SecretRng"),
    "core.types": ("Adjacency", "Budget", "Claims", "ClientSettings", "Observer", "Unit"),
    "data.columns": ("Column",),
    "data.federation": ("Federation",),
    "plugs.accounted_metric": ("AccountedMetric",),
    "data.schema": ("Schema",),
    "datasets.named": ("load_dataset",),
    "experiments.planning": ("describe", "plan"),
    "experiments.results": ("StudyResult",),
    "experiments.studies": ("compare", "sweep", "tune"),
    "plugs.selection": ("Everyone", "FixedCohort", "PoissonCohort"),
    "privacy.budgets": ("make_budgets",),
    "privacy.selection": ("RandomRuns",),
    "privacy.statement": ("Statement",),
    "sim.accounted": ("AccountedEvaluation", "AccountedSelection", "evaluate", "select"),
    "runs.experiment": ("Experiment",),
    "runs.predictor": ("Predictor", "load"),
    "sim.callbacks": ("EarlyStopping", "PublicMetric", "RoundEnd", "UnaccountedScore"),
    "sim.result": ("Result",),
    "sim.train": ("train",),
    "strategy": ("Strategy", "with_secure_sum"),
    "strategy.method": ("method",),
}
_NAMES = {name: f"dpfl.{module}" for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name == "__all__":
        return sorted([*_NAMES, *_methods(), "report", "__version__"])
    if name == "report":  # a package that can be called
        return importlib.import_module("dpfl.report")
    if not name.startswith("_") and name in _methods():
        return _methods()[name]
    from dpfl.core.errors import no_attribute

    raise no_attribute("dpfl", name, () if name.startswith("_") else __getattr__("__all__"))


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__")]


def _methods() -> Any:
    return importlib.import_module("dpfl.methods").METHODS
