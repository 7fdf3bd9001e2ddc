"""The page for everyone, also where sampling amplifies against everyone.

Left out, whatever the method: names, participation, values of single clients, accuracy and loss
(measured on private records without noise), bytes and seconds (they reveal who took part), the
number of clients where a change of it is what is hidden, and the seed (whoever knows it can
subtract the noise of a seeded run).
"""

import tomli_w

from dpfl.core.types import Plain
from dpfl.privacy.flags import Flag, RaisedFlag
from dpfl.report import words
from dpfl.report.inputs import ReportInput, ReportRun
from dpfl.report.rendering import Page
from dpfl.runs.experiment import Experiment
from dpfl.runs.training import Training

_SHOWN_FLAGS = (Flag.FALSE_CLAIMS, Flag.WEAK_DELTA)  # beside those that are public anyway
_PARTITION = {"kind", "shards_per_client", "classes_per_client", "alpha", "validation"}
_RUN = {"rounds", "sampling", "noise", "engine", "device", "evaluate_every", "dropout"}


def public_page(shown: ReportInput) -> Page:
    """Promises, bounds and settings, and nothing else: not even a figure.

    Everything on it follows from the methods, the experiments and the largest epsilon of all.
    """
    runs = shown.cases[0].first
    values = {
        "methods": [(label, _flags(run), run) for label, run in runs.items()],
        "shown": shown,
        "from_python": any(run.experiment.python for run in runs.values()),
        "promises": words.promises({label: run.result for label, run in runs.items()}),
        "experiments": {
            label: tomli_w.dumps(_public_values(run.experiment)) for label, run in runs.items()
        },
    }
    return Page(title="What this training guarantees", template="public", values=values)


def _flags(run: ReportRun) -> list[tuple[RaisedFlag, str]]:
    """The flags that follow from no record, without their details, which may name clients."""
    flags = dict.fromkeys(raised.flag for raised in run.flags)
    return [(RaisedFlag(flag), "") for flag in flags if flag.public or flag in _SHOWN_FLAGS]


def _public_values(described: Experiment | Training) -> Plain:
    """What may be published of an experiment file, or of a call from Python."""
    if isinstance(described, Training):
        return described.public_values()
    return public_experiment(described)


def public_experiment(experiment: Experiment) -> Plain:
    """The experiment as TOML values, without names, paths, budgets and counts of clients, and seed.

    Only what is known to be public is kept: a field that is added to experiments later stays out
    until it is listed here. A number of clients drawn is left out too, because with the sampling
    rate, which epsilon and noise reveal, it would tell how many clients there are.
    """
    method = {
        name: value
        for name, value in experiment.method.model_dump().items()
        if isinstance(value, int | float | str) and name != "gain_seed"
    }
    if isinstance(experiment.method.settings().get("public"), list):
        method["public"] = "withheld"
    run = experiment.run.model_dump(include=_RUN, exclude_none=True)
    if isinstance(experiment.run.cohort, float):
        run["cohort"] = experiment.run.cohort
    budgets: Plain = {"epsilon": "withheld"}
    if isinstance(experiment.budgets.delta, float):
        budgets["delta"] = experiment.budgets.delta
    name = experiment.data.name
    return {
        "data": {"folder": "withheld"} if name is None else {"name": name},
        "partition": experiment.partition.model_dump(include=_PARTITION, exclude_none=True),
        "budgets": budgets,
        "model": experiment.model.model_dump(exclude_none=True, exclude={"weights"}),
        "method": method,
        "run": run,
    }
