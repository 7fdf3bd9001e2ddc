"""The server's kernels against what one would write with numpy and scipy. ``make bench-kernels`` starts it.

Both sides of a line work on the same matrix in one run, one thread each, taking turns; the results are compared first.
"""

from __future__ import annotations

import math
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy and torch are loaded
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy.sparse.linalg import svds

from dpfl.algorithms.pfa import public_subspace
from dpfl.algorithms.robust_hdp import principal_component_pursuit

LATEST = Path(__file__).resolve().parent / "results" / "latest.json"
REPEATS = 3


def pursuit_by_svd(matrix: np.ndarray) -> np.ndarray:
    """The same iteration to the same residual, with numpy's full SVD of the tall matrix; returns the sparse part."""
    size = np.linalg.norm(matrix)
    m = matrix / size
    penalty, spectral = 1 / math.sqrt(max(m.shape)), np.linalg.norm(m, 2)
    mu, y, s = 1.25 / spectral, m / max(spectral, np.abs(m).max() / penalty), np.zeros_like(m)
    for _ in range(500):
        u, values, v = np.linalg.svd(m - s + y / mu, full_matrices=False)
        low = (u * np.maximum(values - 1 / mu, 0)) @ v
        e = m - low + y / mu
        before, s = s, np.sign(e) * np.maximum(np.abs(e) - penalty / mu, 0)
        left = m - low - s
        y += mu * left
        mu *= 1.1
        if np.linalg.norm(left) <= 1e-7 and np.linalg.norm(s - before) <= 1e-5 * np.linalg.norm(s):
            break
    return s * size


def in_turns(ours: Callable[[], Any], theirs: Callable[[], Any]) -> tuple[float, float]:
    """Median seconds of both, measured alternately."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(REPEATS):
        for side, work in enumerate((ours, theirs)):
            began = time.perf_counter()
            work()
            seconds[side].append(time.perf_counter() - began)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def pursuit(rows: int = 200_000, columns: int = 20) -> dict[str, Any]:
    """Robust-HDP's pursuit."""
    generator = np.random.default_rng(0)
    stds = np.tile([1.0, 3.0, 10.0], columns)[:columns]
    matrix = (
        generator.standard_normal((rows, 1)) @ np.ones((1, columns)) + generator.standard_normal((rows, columns)) * stds
    )
    tensor = torch.from_numpy(matrix)
    sparse, expected = principal_component_pursuit(tensor)[1].numpy(), pursuit_by_svd(matrix)
    error = float(np.linalg.norm(sparse - expected) / np.linalg.norm(expected))
    ours, theirs = in_turns(lambda: principal_component_pursuit(tensor), lambda: pursuit_by_svd(matrix))
    return {
        "name": f"pursuit {rows:,} x {columns}",
        "peer": "numpy SVD",
        "ours": ours,
        "theirs": theirs,
        "error": error,
    }


def subspace(rows: int = 1_000_000, columns: int = 50, k: int = 10) -> dict[str, Any]:
    """PFA's public subspace."""
    generator = np.random.default_rng(0)
    decay = (0.8 ** np.arange(columns))[:, None]
    matrix = decay * generator.standard_normal((columns, rows)) + 0.01 * generator.standard_normal((columns, rows))
    updates = torch.from_numpy(matrix.astype(np.float32))
    weights = torch.full((columns,), 1 / columns)
    tall = np.ascontiguousarray(matrix.astype(np.float32).T) * np.float32(math.sqrt(1 / columns))
    basis = public_subspace(updates, weights, k).numpy().astype(np.float64)
    expected = svds(tall, k=k)[0].astype(np.float64)
    cosines = np.linalg.svd(expected.T @ basis, compute_uv=False)
    ours, theirs = in_turns(lambda: public_subspace(updates, weights, k), lambda: svds(tall, k=k))
    name = f"subspace {rows:,} x {columns}, k = {k}"
    return {"name": name, "peer": "scipy svds", "ours": ours, "theirs": theirs, "error": float(1 - cosines.min())}


def main() -> int:
    """Measure, print, keep."""
    torch.set_num_threads(1)
    small = "--quick" in sys.argv
    lines = [pursuit(20_000) if small else pursuit(), subspace(50_000) if small else subspace()]
    table = Table(title="Seconds of a kernel (median)", title_justify="left", box=None)
    for name in ("kernel", "peer", "ours s", "peer s", "ratio", "goal", "difference"):
        table.add_column(name, justify="left" if name in ("kernel", "peer") else "right")
    for line in lines:
        line["ratio"] = line["theirs"] / line["ours"]
        verdict = "reached" if line["ratio"] >= 3 else "missed"
        table.add_row(
            line["name"], line["peer"], f"{line['ours']:.3g}", f"{line['theirs']:.3g}", f"{line['ratio']:.2f}",
            f">= 3, {verdict}", f"{line['error']:.1e}",
        )  # fmt: skip
    Console(width=100, highlight=False).print(table)
    if not small:
        before = json.loads(LATEST.read_text()) if LATEST.exists() else {}
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        LATEST.write_text(json.dumps({**before, "kernels": {"date": date, "lines": lines}}, indent=1) + "\n")
    return 0 if all(line["error"] < 1e-5 for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
