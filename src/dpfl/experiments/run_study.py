"""Run a study: tune every method by the same rule, then the final seeds; runs are kept by content
and never repeated.
"""

from __future__ import annotations

import os
import platform
import statistics
from pathlib import Path
from typing import Any

import torch

from dpfl.core.version import __version__
from dpfl.experiments.study import Study, cells
from dpfl.experiments.tuning import Place, Told, choose, key_of, remark
from dpfl.runs.folder import RESULTS_FORMAT, RunFolder


def run_study(
    study: Study, kept: Path, data_folder: Path | None, workers: int, told: Told
) -> dict[str, Any]:
    """Tune, run, and return the results as one document."""
    place = Place(kept=kept, data_folder=data_folder, workers=workers, told=told)
    chosen = choose(study, place)
    wanted = [(cell, seed) for cell in cells(study) for seed in study.seeds]
    tasks = [
        place.task(
            study.experiment(cell.case, cell.label, chosen[key_of(study, cell)]["chosen"], seed)
        )
        for cell, seed in wanted
    ]
    place.run("final runs", tasks)
    results = []
    for cell in cells(study):
        own = [t.folder for (c, _), t in zip(wanted, tasks, strict=True) if c == cell]
        runs = [
            _run_of(study, RunFolder(path), seed)
            for path, seed in zip(own, study.seeds, strict=True)
        ]
        results.append(
            {"case": cell.case, "label": cell.label, "method": study.method(cell.label)}
            | chosen[key_of(study, cell)]
            | {"runs": runs}
        )
    return document(study, results)


def tune_study(
    study: Study, kept: Path, data_folder: Path | None, workers: int, told: Told
) -> dict[str, Any]:
    """Tune only: what was tried and chosen, without final runs."""
    place = Place(kept=kept, data_folder=data_folder, workers=workers, told=told)
    chosen = choose(study, place)
    results = [
        {
            "case": cell.case,
            "label": cell.label,
            "method": study.method(cell.label),
            **chosen[key_of(study, cell)],
        }
        for cell in cells(study)
    ]
    return document(study, [{**cell, "runs": []} for cell in results])


def document(study: Study, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything one needs to understand and repeat the results."""
    return {
        "format": RESULTS_FORMAT,
        "title": study.title,
        "study": study.model_dump(exclude_none=True),
        **({"tuning": remark(study)} if study.tune else {}),
        "versions": {
            "dpfl": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": {"cpus": os.cpu_count(), "architecture": platform.machine()},
        "cells": results,
    }


def _run_of(study: Study, place: RunFolder, seed: int) -> dict[str, Any]:
    summary, history = place.read_summary().to_dict(), place.read_lines(place.rounds)
    truths = [line["simulated_truth"] for line in history if "simulated_truth" in line]
    ratios = [
        t["aggregate_noise_variance"] / t["least_noise_variance"]
        for t in truths
        if "aggregate_noise_variance" in t
    ]
    found: dict[str, Any] = {
        "seed": seed,
        "folder": place.path.name,
        "accuracy": summary["accuracy"],
        "loss": summary["loss"],
        "curve": [round(line["accuracy"], 4) for line in history if "accuracy" in line],
        "rounds": summary["rounds"],
        "clients": summary["clients"],
        "clients_left": len(summary["clients_left"]),
        "bytes_up": summary["bytes_up"],
        "bytes_down": summary["bytes_down"],
        "stamps": [flag["text"] for flag in summary["flags"]],
        "tested": summary["tested"],
        "epsilon_by_observer": summary["epsilon_by_observer"],
        "epsilon": summary["epsilon"]
        | {name: summary[name] for name in ("unit", "adjacency", "observer")},
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
