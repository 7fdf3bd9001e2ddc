"""Compare, sweep and tune from Python.

An ``experiment`` is an :class:`~dpfl.runs.experiment.Experiment`, the path of a TOML file, or a
dict of its sections. A comparison also takes a federation and a model of the caller's own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from dpfl.core.checks import check
from dpfl.core.errors import FolderError
from dpfl.core.types import Plain
from dpfl.data.federation import Federation
from dpfl.experiments import compare as studies
from dpfl.experiments.own import Build, OwnComparison
from dpfl.experiments.results import StudyResult
from dpfl.experiments.sources import Source, method_list, path_of, seed_list, values_of
from dpfl.experiments.tuning import RunStore
from dpfl.methods import with_baselines
from dpfl.runs.progress import progress_bar
from dpfl.strategy import Strategy


def compare(
    experiment: Source | None = None,
    methods: Sequence[str] = (),
    *,
    federation: Federation | None = None,
    model: nn.Module | Build | None = None,
    strategies: Mapping[str, Strategy] | None = None,
    rounds: int | None = None,
    seeds: int | Sequence[int] = 3,
    baselines: bool = False,
    settings: Mapping[str, Plain] | None = None,
    folder: Path | str | None = None,
    data: Path | str | None = None,
    workers: int = 1,
    progress: bool = True,
) -> StudyResult:
    """Compare methods over paired seeds: on an experiment, or on a federation of your own.

    Every method meets the same federation, seeds and first models. Only methods that promise the
    same are ranked. Runs are seeded, so that they can be paired, and protect nobody.

    Args:
        experiment: The experiment; its method may be left out, and settings that a method does not
            have are left out for it.
        methods: The names of the methods to run on the experiment.
        federation: Instead of an experiment: clients with their records and budgets.
        model: For a federation: the first model of every run, or a function that builds one from a
            seed.
        strategies: For a federation: the methods, by label.
        rounds: For a federation: how many rounds each run has.
        seeds: How many seeds (0, 1, ...), or which.
        baselines: For an experiment: add the baselines of the methods' family, for reference.
        settings: For an experiment: settings of single methods, by name, for instance
            ``tune(...).settings()``.
        folder: Where the runs and ``results.json`` are kept: a repeated call runs only what is
            missing, and ``dpfl report`` reads it. Without one nothing is kept.
        data: Where data sets lie that do not ship with dpfl.
        workers: Processes: runs at a time for an experiment, of local work for a federation.
        progress: Show a bar on stderr, if that is a terminal or a notebook.
    """
    own = {"federation": federation, "model": model, "strategies": strategies, "rounds": rounds}
    given = [name for name, value in own.items() if value is not None]
    if experiment is not None:
        check(
            not given,
            "compare",
            f"was given an experiment and {', '.join(given)}",
            "give an experiment, or a federation of your own",
        )
        values = values_of(experiment)
        numbers = seed_list(seeds)
        names = method_list("compare", methods)
        names = with_baselines(names) if baselines else names
        with _store("compare", values, folder, data, workers, progress) as store:
            more: Any = {"seeds": numbers, "settings": settings, "store": store}
            return _written(studies.compare(values, names, **more), store, folder)
    lacking = [name for name in own if name not in given]
    check(
        not lacking,
        "compare",
        f"lacks {', '.join(lacking)}",
        "give an experiment and methods, or federation, model, strategies and rounds",
    )
    arguments: Any = own
    comparison = OwnComparison(**arguments, seeds=seed_list(seeds), workers=workers)
    with _store("compare", comparison.base, folder, None, workers, progress) as store:
        return _written(comparison.run(store), store, folder)


def sweep(
    experiment: Source,
    over: Mapping[str, list[Any]],
    methods: Sequence[str],
    *,
    seeds: int | Sequence[int] = 3,
    folder: Path | str | None = None,
    data: Path | str | None = None,
    workers: int = 1,
    progress: bool = True,
) -> StudyResult:
    """Vary fields of an experiment, and run every method in every combination.

    Args:
        experiment: The experiment whose fields vary.
        over: The values of each dotted field, such as ``{"budgets.scale": [0.5, 1, 2]}``.
        methods: The names of the methods.
        seeds: How many seeds (0, 1, ...), or which.
        folder: Where the runs and ``results.json`` are kept; without one nothing is kept.
        data: Where data sets lie that do not ship with dpfl.
        workers: How many runs go on at a time, one process each.
        progress: Show a bar on stderr, if that is a terminal or a notebook.
    """
    values = values_of(experiment)
    names = method_list("sweep", methods)
    with _store("sweep", values, folder, data, workers, progress) as store:
        found = studies.sweep(values, over, names, seeds=seed_list(seeds), store=store)
        return _written(found, store, folder)


def tune(
    experiment: Source,
    methods: Sequence[str],
    *,
    over: Mapping[str, list[Any]] | None = None,
    search: str = "grid",
    on: Plain | None = None,
    seeds: int = 1,
    folder: Path | str | None = None,
    data: Path | str | None = None,
    workers: int = 1,
    progress: bool = True,
) -> StudyResult:
    """Choose the settings of every method by the same search, never on test records.

    Args:
        experiment: The experiment to tune for.
        methods: The names of the methods.
        over: The values of settings, such as ``{"method.lr": [0.1, 0.3]}``; by default a grid of
            learning rates and clips, and what each method declares as its own.
        search: "grid" tries every candidate to the end, "halving" drops the worse half twice.
        on: The data section of public or proxy data to tune on, such as ``{"name": "digits"}``.
            Without it the clients' own records decide, which no epsilon covers.
        seeds: How many seeds each candidate has.
        folder: Where the runs and ``results.json`` are kept; without one nothing is kept.
        data: Where data sets lie that do not ship with dpfl.
        workers: How many runs go on at a time, one process each.
        progress: Show a bar on stderr, if that is a terminal or a notebook.
    """
    values = values_of(experiment)
    names = method_list("tune", methods)
    more: Any = {"over": over, "search": search, "on": on, "seeds": seeds}
    with _store("tune", values, folder, data, workers, progress) as store:
        return _written(studies.tune(values, names, **more, store=store), store, folder)


# -- what they have in common ----------------------------------------------------------------------


@contextmanager
def _store(
    title: str,
    base: Plain,
    folder: Path | str | None,
    data: Path | str | None,
    workers: int,
    progress: bool,
) -> Iterator[RunStore]:
    """Yield where runs are kept, behind a progress bar; a folder of another study is refused."""
    with ExitStack() as stack:
        if folder is None:
            kept = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            kept = Path(folder) / "kept"
            if (Path(folder) / "results.json").exists():
                check(
                    StudyResult.read(Path(folder)).study.get("base") == base,
                    str(folder),
                    "holds the results of another experiment",
                    "give another folder",
                    FolderError,
                )
        update = stack.enter_context(progress_bar(title, "", None, quiet=not progress))
        yield RunStore(
            kept=kept,
            data_folder=path_of(data),
            workers=workers,
            progress=lambda stage, done, total: update(completed=done, total=total, note=stage),
        )


def _written(result: StudyResult, store: RunStore, folder: Path | str | None) -> StudyResult:
    """Write the results into their folder, if there is one."""
    if folder is None:
        return result
    kept = replace(result, kept=str(store.kept.absolute()))
    kept.write(Path(folder) / "results.json")
    return kept
