"""Run a study: tune every method by the same rule, then the final seeds; runs are kept by content and never repeated."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dpfl
from dpfl.runs.folder import RunFolder
from dpfl.runs.study import Cell, Study, Values, cells
from dpfl.sim.compare import Task, run_all

RESULTS_FORMAT = "dpfl-study-1"
Told = Callable[[str, int, int], None]
"""Told the stage, the rounds done and the rounds in all."""


def run_study(study: Study, folder: Path, data_folder: Path | None, workers: int, told: Told) -> dict[str, Any]:
    """Tune, run, and return the results as one document."""
    chosen = _tuned(study, folder, data_folder, workers, told)
    wanted = [(cell, seed) for cell in cells(study) for seed in study.seeds]
    tasks = [
        _task(study, cell.case, cell.label, chosen[_key(study, cell)]["chosen"], seed, folder, data_folder)
        for cell, seed in wanted
    ]
    _run("final runs", tasks, workers, told)
    results = []
    for cell in cells(study):
        own = [t.folder for (c, _), t in zip(wanted, tasks, strict=True) if c == cell]
        runs = [_run_of(study, RunFolder(path), seed) for path, seed in zip(own, study.seeds, strict=True)]
        results.append(
            {"case": cell.case, "label": cell.label, "method": study.method(cell.label)}
            | chosen[_key(study, cell)]
            | {"runs": runs}
        )
    return {
        "format": RESULTS_FORMAT,
        "title": study.title,
        "study": study.model_dump(exclude_none=True),
        "versions": {"dpfl": dpfl.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {"cpus": os.cpu_count(), "architecture": platform.machine()},
        "cells": results,
    }


def _tuned(study: Study, folder: Path, data_folder: Path | None, workers: int, told: Told) -> dict[str, dict[str, Any]]:
    """Choose each method's values, by key of the case it is tuned in."""
    asked: dict[str, tuple[Values, str]] = {}
    for cell in cells(study):
        asked.setdefault(_key(study, cell), (study.tuned_in(cell.case), cell.label))
    if study.tune is None:
        return {key: {"chosen": {}, "tried": []} for key in asked}
    wanted = [
        (key, candidate, seed)
        for key, (_, label) in asked.items()
        for candidate in study.tunable(label)
        for seed in study.tune.seeds
        if len(study.tunable(label)) > 1
    ]
    tasks = [
        _task(study, *asked[key], candidate, seed, folder, data_folder, validation=True)
        for key, candidate, seed in wanted
    ]
    summaries = _run("tuning", tasks, workers, told)
    accuracies: dict[tuple[str, int], list[float]] = {}
    for (key, candidate, _), summary in zip(wanted, summaries, strict=True):
        place = study.tunable(asked[key][1]).index(candidate)
        accuracies.setdefault((key, place), []).append(summary["accuracy"])
    chosen: dict[str, dict[str, Any]] = {}
    for key, (_, label) in asked.items():
        if len(study.tunable(label)) == 1:  # nothing to choose from
            chosen[key] = {"chosen": study.tunable(label)[0], "tried": []}
            continue
        tried = [
            {"values": candidate, "validation_accuracy": statistics.mean(accuracies[key, place])}
            for place, candidate in enumerate(study.tunable(label))
        ]
        best = max(tried, key=lambda one: (one["validation_accuracy"], [-v for v in _numbers(one["values"])]))
        chosen[key] = {"chosen": best["values"], "tried": tried}
    return chosen


def _numbers(values: Any) -> list[float]:
    return [float(value) for value in values.values() if isinstance(value, int | float)]


def _key(study: Study, cell: Cell) -> str:
    return repr((sorted(study.tuned_in(cell.case).items(), key=lambda pair: pair[0]), cell.label))


def _task(
    study: Study,
    case: Values,
    label: str,
    tuned: Values,
    seed: int,
    folder: Path,
    data_folder: Path | None,
    *,
    validation: bool = False,
) -> Task:
    experiment = study.experiment(case, label, tuned, seed, validation=validation)
    return Task(experiment=experiment, folder=folder / experiment.digest()[:24], data_folder=data_folder)


def _run(stage: str, tasks: list[Task], workers: int, told: Told) -> list[dict[str, Any]]:
    """Run each distinct task once: two cells may ask for the same run."""
    if not tasks:
        return []
    distinct = list({task.folder: task for task in tasks}.values())
    total = sum(task.rounds for task in distinct)
    summaries = run_all(distinct, workers, lambda done: told(stage, done, total))
    by_folder = {task.folder: summary for task, summary in zip(distinct, summaries, strict=True)}
    return [by_folder[task.folder] for task in tasks]


def _run_of(study: Study, place: RunFolder, seed: int) -> dict[str, Any]:
    summary, history = place.read_summary(), place.read_lines(place.rounds)
    truths = [line["simulated_truth"] for line in history if "simulated_truth" in line]
    ratios = [
        t["aggregate_noise_variance"] / t["least_noise_variance"] for t in truths if "aggregate_noise_variance" in t
    ]
    found: dict[str, Any] = {
        "seed": seed,
        "accuracy": summary["accuracy"],
        "loss": summary["loss"],
        "curve": [round(line["accuracy"], 4) for line in history if "accuracy" in line],
        "rounds": summary["rounds"],
        "bytes_up": summary["bytes_up"],
        "bytes_down": summary["bytes_down"],
        "clients_left": len(summary["clients_left"]),
        "epsilon": summary["epsilon"] | {name: summary[name] for name in ("unit", "adjacency", "observer")},
    }
    if ratios:
        found["noise_over_least"] = {"mean": statistics.mean(ratios), "largest": max(ratios)}
    for name in study.metrics:
        values = [value for line in history if (value := _number_at(line, name)) is not None]
        if values:
            found[name] = {"mean": statistics.mean(values), "last": values[-1]}
    return found


def _number_at(line: dict[str, Any], path: str) -> float | None:
    """Follow a dotted path, such as ``clean_metrics.rank``; what is no number is left out."""
    here: Any = line
    for name in path.split("."):
        here = here.get(name) if isinstance(here, dict) else None
    return float(here) if isinstance(here, int | float) else None
