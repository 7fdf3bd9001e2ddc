"""Condense runs that have ended into the cells of a study."""

import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dpfl.core.types import Plain
from dpfl.core.version import __version__
from dpfl.experiments.results import CellResult, RunScore, StudyResult
from dpfl.runs.folder import RunFolder


def result_of(
    title: str, cells: Iterable[CellResult], *, study: Plain, tuning: str = ""
) -> StudyResult:
    """Put ``cells`` together with the ``study`` that repeats them, and where they were computed.

    ``title`` heads the result, and ``tuning`` says on whose records settings were chosen.
    """
    python = platform.python_version()
    return StudyResult(
        title=title,
        cells=tuple(cells),
        study=study,
        tuning=tuning,
        versions={"dpfl": __version__, "torch": torch.__version__, "python": python},
        machine={"cpus": os.cpu_count(), "architecture": platform.machine()},
    )


def score_of(folder: RunFolder, seed: int, metrics: Sequence[str] = ()) -> RunScore:
    """Condense the run of a ``seed`` that has ended in a ``folder``.

    ``metrics`` are dotted names of a round's record that a study asks for.
    """
    history = folder.read_rounds()
    numbers = {}
    ratios = [one.ratio for line in history if (one := line.true_noise) and one.ratio is not None]
    if ratios:
        numbers["noise_over_least"] = {"mean": statistics.mean(ratios), "largest": max(ratios)}
    for name in metrics:
        values = [_number_at(line.to_dict(), name) for line in history]
        if known := [value for value in values if value is not None]:
            numbers[name] = {"mean": statistics.mean(known), "last": known[-1]}
    curve = tuple(round(line.scores.value, 4) for line in history if line.scores)
    more: Any = {"folder": folder.path.name, "curve": curve, "metrics": numbers}
    return RunScore.of(folder.read_summary(), seed=seed, **more)


def _number_at(line: Mapping[str, Any], path: str) -> float | None:
    """Follow a dotted path, such as ``clean_metrics.rank``; None where there is no number."""
    here: Any = line
    for name in path.split("."):
        here = here.get(name) if isinstance(here, Mapping) else None
    return float(here) if isinstance(here, int | float) else None
