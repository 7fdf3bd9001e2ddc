"""Compare methods over paired seeds, sweep a field, tune settings, run a study.

All four run the same thing, a :class:`~dpfl.experiments.study.Sweep`: every method meets the same
federations, the same seeds and the same first models. Runs are kept by content in a
:class:`~dpfl.experiments.tuning.RunStore` and never repeated.

``base`` is always an experiment as plain values (``Experiment.to_dict()`` or a file read in), whose
method may be left out; settings that a method does not have are left out for it.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpfl.core.checks import check, one_of
from dpfl.core.errors import DataError, DpflError, did_you_mean
from dpfl.core.layout import Layout
from dpfl.experiments.results import CellResult, RunScore, StudyResult, surroundings
from dpfl.experiments.study import Cell, Sweep, Values, cells, set_fields
from dpfl.experiments.tuning import Choice, RunStore, choose, key_of, remark
from dpfl.methods import find
from dpfl.runs.experiment import Experiment, for_method
from dpfl.runs.folder import RunFolder
from dpfl.sim.train import rehearse

GRID: Mapping[str, list[Any]] = {
    "method.lr": [0.03, 0.1, 0.3, 1.0],
    "method.clip": [0.3, 1.0, 3.0],
}
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
    """Run methods on the same federations, over paired seeds.

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
    """Vary dotted fields of the experiment and run every method in every combination.

    ``over`` lists the values of each field, such as ``{"budgets.scale": [0.5, 1, 2]}``.
    """
    values = {"title": f"accuracy over {', '.join(over)}", "vary": dict(over)}
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
    """Choose the settings of every method by the same search, on records that are neither trained
    nor tested on.

    ``over`` lists values of settings, such as ``method.lr``; left out, it is :data:`GRID` and what
    each method declares as its own. ``search`` is "grid" or "halving". ``on`` is the data section
    of public or proxy data to tune on instead. ``seeds`` counts the seeds of each candidate.
    """
    one_of("tuning", ("grid", "halving"), search=search)
    for field in over or ():
        problem = f"'{field}' is not a setting of a method"
        remedy = "tune method.lr, method.clip, ...; sweep the rest"
        check(field.startswith("method."), "tuning", problem, remedy)
    problem = "names the federation's own records"
    remedy = "name other data: public ones, or a proxy; or leave it out"
    check(not _same_data(on or {}, base.get("data", {})), "tuning data", problem, remedy)
    tuning = {
        "over": dict(over or GRID),
        "own": {} if over else own_searches(base, methods, store.data_folder),
        "search": search,
        "seeds": [TUNING_SEED + number for number in range(seeds)],
        **({"on": on} if on else {}),
    }
    title = f"{len(methods)} methods tuned by {search}"
    own: dict[str, Values] = {name: {} for name in methods}
    study = _study(base, {"title": title, "methods": own, "seeds": [0], "tune": tuning})
    return tune_study(study, store)


def tune_study(study: Sweep, store: RunStore) -> StudyResult:
    """Tune every method by the study's rule, and run nothing else."""
    chosen = choose(study, store)
    return _result(
        study, [_cell(study, cell, chosen[key_of(study, cell)]) for cell in cells(study)]
    )


def run_study(study: Sweep, store: RunStore) -> StudyResult:
    """Tune every method by the study's rule, then run the final seeds.

    ::

        result = run_study(Sweep.from_file(Path("study.toml")), RunStore(kept=Path("runs/study")))
        result.write(Path("study.json"))
    """
    chosen = choose(study, store)
    asked = [(cell, chosen[key_of(study, cell)]) for cell in cells(study)]
    tasks = [
        [store.task(study.experiment(c.case, c.label, own.chosen, seed)) for seed in study.seeds]
        for c, own in asked
    ]
    store.run("final runs", [task for own in tasks for task in own])
    found = []
    for (cell, choice), own in zip(asked, tasks, strict=True):
        runs = [
            _score(RunFolder(task.folder), seed, study.metrics)
            for task, seed in zip(own, study.seeds, strict=True)
        ]
        found.append(_cell(study, cell, choice, runs))
    return _result(study, found)


def fitting(
    base: Values,
    names: Iterable[str],
    *,
    settings: Mapping[str, Values] | None = None,
    data_folder: Path | None = None,
) -> tuple[list[str], dict[str, DpflError]]:
    """Sort methods into those that can run this experiment, and why the others cannot.

    ``names`` are the methods to try, ``settings`` what single methods have of their own. Every
    method is rehearsed as a run would be: enrolment, noise and budgets. Data that cannot be read
    are not a method's fault, and raised.
    """
    fit, refused = [], {}
    for name in names:
        own = {f"method.{key}": value for key, value in (settings or {}).get(name, {}).items()}
        try:
            values = for_method(set_fields(base, own), name)
            rehearse(Experiment.from_dict(values), data_folder)
            fit.append(name)
        except DataError:
            raise
        except DpflError as error:
            refused[name] = error
    return fit, refused


def own_searches(
    base: Values, methods: Iterable[str], data_folder: Path | None = None
) -> dict[str, dict[str, list[Any]]]:
    """What each method declares as its own to search, unless ``base`` fixes it.

    A fraction for a whole-number setting is a share of the model's parameters.
    """
    found = {}
    fixed = base.get("method", {})
    for name in methods:
        method = find(name)
        open_ = [(key, own) for key, own in method.search.items() if key not in fixed]
        for key, choices in open_[:1]:
            values: list[Any] = list(choices)
            shares = [one for one in values if isinstance(one, float) and one < 1]
            if shares and method.settings[key].annotation is int:
                size = _parameters(for_method(base, name), data_folder)
                values = sorted({max(1, round(share * size)) for share in shares})
            found[name] = {f"method.{key}": values}
    return found


def check_settings(base: Values, methods: Iterable[str]) -> None:
    """Refuse a setting that none of the methods has."""
    known = {name for method in methods for name in find(method).settings} | {"name"}
    for setting in base.get("method", {}):
        problem = f"none of the methods has '{setting}'"
        check(setting in known, "settings", problem, did_you_mean(setting, known))


# -- what the four have in common ------------------------------------------------------------------


def _study(base: Values, values: Values) -> Sweep:
    """Build the study; a varied setting that none of its methods has is refused."""
    tuned = values.get("tune", {}).get("over")
    varied = set_fields({} if tuned else base, dict.fromkeys(tuned or values.get("vary", {})))
    check_settings(varied, values["methods"])
    return Sweep.from_dict({"base": dict(base), **values})


def _run(base: Values, values: Values, store: RunStore) -> StudyResult:
    """Refuse what cannot be run before anything is, then run it."""
    study = _study(base, values)
    for cell in cells(study):
        rehearse(study.experiment(cell.case, cell.label, {}, study.seeds[0]), store.data_folder)
    return run_study(study, store)


def _result(study: Sweep, found: Iterable[CellResult]) -> StudyResult:
    """Put cells together with the study, its remark and where they were computed."""
    return StudyResult(
        title=study.title,
        cells=tuple(found),
        study=study.model_dump(exclude_none=True),
        tuning=remark(study),
        **surroundings(),
    )


def _cell(study: Sweep, cell: Cell, choice: Choice, runs: Sequence[RunScore] = ()) -> CellResult:
    """Put together what is known of one method in one case."""
    return CellResult(
        case=cell.case,
        label=cell.label,
        method=study.method(cell.label),
        chosen=choice.chosen,
        tried=choice.tried,
        runs=tuple(runs),
    )


def _score(folder: RunFolder, seed: int, metrics: Sequence[str]) -> RunScore:
    """Condense a run that has ended, with the metrics that a study asks for."""
    history, numbers = folder.read_rounds(), {}
    truths = [line.true_noise for line in history if line.true_noise]
    ratios = [one.ratio for one in truths if one.ratio is not None]
    if ratios:
        mean = statistics.mean(ratios)
        numbers["noise_over_least"] = {"mean": mean, "largest": max(ratios)}
    for name in metrics:
        values = [_number_at(line.to_dict(), name) for line in history]
        known = [value for value in values if value is not None]
        if known:
            numbers[name] = {"mean": statistics.mean(known), "last": known[-1]}
    return RunScore.of(
        folder.read_summary(),
        seed=seed,
        folder=folder.path.name,
        curve=tuple(round(line.scores.accuracy, 4) for line in history if line.scores),
        metrics=numbers,
    )


def _number_at(line: Mapping[str, Any], path: str) -> float | None:
    """Follow a dotted path, such as ``clean_metrics.rank``; None where there is no number."""
    here: Any = line
    for name in path.split("."):
        here = here.get(name) if isinstance(here, Mapping) else None
    return float(here) if isinstance(here, int | float) else None


def _parameters(values: Values, data_folder: Path | None) -> int:
    """Count the parameters of an experiment's model."""
    experiment = Experiment.from_dict(values)
    return Layout.of_module(experiment.build_model(experiment.federation(data_folder))).size


def _same_data(one: Values, other: Values) -> bool:
    """Whether two data sections name the same records."""
    if "folder" in one and "folder" in other:
        return Path(one["folder"]).resolve() == Path(other["folder"]).resolve()
    return one.get("name") is not None and one.get("name") == other.get("name")
