"""Compare methods over paired seeds, sweep a field, tune settings, run a study.

All four run the same thing, a :class:`~dpfl.experiments.study.Sweep`: every method meets the same
federations, the same seeds and the same first models. Runs are kept by content in a
:class:`~dpfl.experiments.tuning.RunStore` and never repeated.

``base`` is always an experiment as plain values (``Experiment.to_dict()`` or a file read in), whose
method may be left out; settings that a method does not have are left out for it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpfl.core.checks import check, one_of
from dpfl.core.errors import (
    ConfigurationError,
    DataError,
    DpflError,
    did_you_mean,
    unknown_name,
)
from dpfl.core.layout import Layout
from dpfl.datasets.named import DATASETS
from dpfl.experiments.pool import Task
from dpfl.experiments.results import CellResult, RunScore, StudyResult
from dpfl.experiments.scoring import result_of, score_of
from dpfl.experiments.study import Sweep, Values, set_fields
from dpfl.experiments.tuning import RunStore, choose, remark
from dpfl.methods import find
from dpfl.runs.experiment import Experiment, for_method
from dpfl.runs.folder import RunFolder
from dpfl.runs.for_method import settings_of
from dpfl.sim.train import rehearse

GRID: Mapping[str, list[Any]] = {"method.lr": [0.03, 0.1, 0.3, 1.0], "method.clip": [0.3, 1.0, 3.0]}
"""What a search tries of every method, unless it is told otherwise."""

TUNING_SEED = 1000
"""The first seed of a search; final runs have seeds from 0."""


def compare(
    base: Values,
    methods: Sequence[str],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    settings: Mapping[str, Values] | None = None,
    store: RunStore,
) -> StudyResult:
    """Run ``methods`` of ``base`` on the same federations, over paired ``seeds``.

    ``settings`` are those of single methods, by name, for instance from
    :meth:`~dpfl.experiments.results.StudyResult.settings` of a search. ``store`` is where runs are
    kept.

    ::

        result = compare(values, ["fedavg_dp", "weiavg"], store=RunStore(workers=2))
        for one in standings(result.cells):
            print(one.label, one.mean, one.gap, one.p_value)
    """
    own = {name: (settings or {}).get(name, {}) for name in methods}
    title = f"{len(methods)} methods compared"
    return _run(base, {"title": title, "methods": own, "seeds": list(seeds)}, store)


def sweep(
    base: Values,
    over: Mapping[str, list[Any]],
    methods: Sequence[str],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    store: RunStore,
) -> StudyResult:
    """Vary dotted fields of ``base`` and run ``methods`` and ``seeds`` in every combination.

    ``store`` is where runs are kept. ``over`` lists the values of each field, such as
    ``{"budgets.scale": [0.5, 1, 2]}``.
    """
    values = {"title": f"score over {', '.join(over)}", "vary": dict(over)}
    named = {"methods": {name: {} for name in methods}, "seeds": list(seeds)}
    return _run(base, values | named, store)


def tune(
    base: Values,
    methods: Sequence[str],
    *,
    over: Mapping[str, list[Any]] | None = None,
    search: str = "grid",
    on: Values | None = None,
    seeds: int = 1,
    store: RunStore,
) -> StudyResult:
    """Choose the settings of ``methods`` for ``base`` by the same search, on records that are
    neither trained nor tested on.

    ``store`` is where runs are kept. ``over`` lists values of settings, such as ``method.lr``; left
    out, it is :data:`GRID` and what each method declares as its own. ``search`` is "grid" or
    "halving". ``on`` is the data section of public or proxy data to tune on instead. ``seeds``
    counts the seeds of each candidate.
    """
    one_of("tuning", ("grid", "halving"), search=search)
    remedy = "tune method.lr, method.clip, ...; sweep the rest"
    for field in over or ():
        check(
            field.startswith("method."), "tuning", f"'{field}' is not a setting of a method", remedy
        )
    check(
        not _same_data(on or {}, base.get("data", {})),
        "tuning data",
        "names the federation's own records",
        "name public or proxy data",
    )
    tuning = {
        "over": dict(over or GRID),
        "own": {} if over else own_searches(base, methods, store.data_folder),
        "search": search,
        "seeds": [TUNING_SEED + number for number in range(seeds)],
        "on": on,
    }
    values = {"title": f"{len(methods)} methods tuned by {search}", "seeds": [0], "tune": tuning}
    return tune_study(_study(base, {**values, "methods": {name: {} for name in methods}}), store)


def tune_study(study: Sweep, store: RunStore) -> StudyResult:
    """Tune every method by the rule of a ``study`` in a ``store``, and run nothing else."""
    return _result(study, choose(study, store))


def run_study(study: Sweep, store: RunStore) -> StudyResult:
    """Tune every method by the rule of a ``study``, then run the final seeds in a ``store``.

    ::

        result = run_study(Sweep.from_file(Path("study.toml")), RunStore(kept=Path("runs/study")))
        result.write(Path("study.json"))
    """
    asked = choose(study, store)
    tasks = []
    for cell in asked:
        runs = [study.experiment(cell.case, cell.label, cell.chosen, n) for n in study.seeds]
        tasks.append([store.task(run) for run in runs])
    store.run("final runs", [task for own in tasks for task in own])
    scores = [tuple(_score(task, study.metrics) for task in own) for own in tasks]
    cells = [replace(cell, runs=own) for cell, own in zip(asked, scores, strict=True)]
    return _result(study, cells)


def fitting(
    base: Values,
    names: Iterable[str],
    *,
    settings: Mapping[str, Values] | None = None,
    data_folder: Path | None = None,
) -> tuple[list[str], dict[str, DpflError]]:
    """Sort methods into those that can run this experiment, and why the others cannot.

    ``base`` is the experiment, ``names`` are the methods to try, ``settings`` what single methods
    have of their own; ``data_folder`` is where data sets lie. Every method is rehearsed as a run
    would be. Data that cannot be read are not its fault, and raised.
    """
    dataset = base.get("data", {}).get("name")
    if dataset is not None and dataset not in DATASETS:
        raise unknown_name("data", "data set", str(dataset), DATASETS)
    fit = []
    refused = {}
    for name in names:
        own = {f"method.{key}": value for key, value in (settings or {}).get(name, {}).items()}
        try:
            rehearse(Experiment.from_options(for_method(set_fields(base, own), name)), data_folder)
            fit.append(name)
        except DataError:
            raise
        except DpflError as error:
            refused[name] = error
    return fit, refused


def own_searches(
    base: Values, methods: Iterable[str], data_folder: Path | None = None
) -> dict[str, dict[str, list[Any]]]:
    """What each of the ``methods`` declares as its own to search, unless ``base`` fixes it.

    ``data_folder`` is where data sets lie. A fraction for a whole-number setting is a share of the
    model's parameters.
    """
    found = {}
    for name in methods:
        method = find(name)
        for key in [key for key in method.search if key not in base.get("method", {})][:1]:
            values: list[Any] = list(method.search[key])
            shares = [one for one in values if isinstance(one, float) and one < 1]
            if shares and method.settings[key].annotation is int:
                experiment = Experiment.from_options(for_method(base, name))
                model = experiment.build_model(experiment.federation(data_folder))
                size = Layout.of_module(model).size
                values = sorted({max(1, round(share * size)) for share in shares})
            found[name] = {f"method.{key}": values}
    return found


def check_settings(fields: Iterable[str], methods: Iterable[str]) -> None:
    """Refuse a method setting among dotted ``fields`` that none of the ``methods`` has."""
    known = {f"method.{name}" for name in settings_of(methods)}
    for field in fields:
        if field.startswith("method.") and field not in known:
            raise ConfigurationError(
                "settings", f"none of the methods has '{field}'", did_you_mean(field, known)
            )


# -- what the four have in common ------------------------------------------------------------------


def _study(base: Values, values: Values) -> Sweep:
    """Build the study; a varied setting that none of its methods has is refused."""
    tuned = values.get("tune", {}).get("over")
    check_settings(tuned or values.get("vary", {}), values["methods"])
    return Sweep.from_dict({"base": dict(base), **values})


def _run(base: Values, values: Values, store: RunStore) -> StudyResult:
    """Refuse what cannot be run before anything is, then run it."""
    study = _study(base, values)
    for case, label in study.cells():
        rehearse(study.experiment(case, label, {}, study.seeds[0]), store.data_folder)
    return run_study(study, store)


def _result(study: Sweep, found: Iterable[CellResult]) -> StudyResult:
    return result_of(study.title, found, study=study.to_dict(), tuning=remark(study))


def _score(task: Task, metrics: Sequence[str]) -> RunScore:
    return score_of(RunFolder(task.folder), task.experiment.run.seed, metrics)


def _same_data(one: Values, other: Values) -> bool:
    """Whether two data sections name the same records."""
    if "folder" in one and "folder" in other:
        return Path(one["folder"]).resolve() == Path(other["folder"]).resolve()
    return one.get("name") is not None and one.get("name") == other.get("name")
