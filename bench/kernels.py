"""The server's kernels against what one would write with numpy and scipy. ``make bench-kernels``
starts it.

Both sides of a line work on the same matrix in one run, one thread each, taking turns; the results
are compared first.
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

import dpfl
from dpfl.core.grid_noise import SCALE
from dpfl.core.random import SecretRng, fill_grid_noise
from dpfl.methods.robust_hdp import inverse_weights
from dpfl.models import make_model
from dpfl.numerics.clipping import stacked_product
from dpfl.numerics.noise_estimates import noise_estimates
from dpfl.numerics.projections import project
from dpfl.numerics.pursuit import principal_component_pursuit
from dpfl.numerics.recursive_filter import laplacian_smoothing
from dpfl.numerics.subspace import public_subspace
from dpfl.numerics.tensor_svt import tensor_svt

LATEST = Path(__file__).resolve().parent / "results" / "latest.json"
REPEATS = 3


def pursuit_by_svd(matrix: np.ndarray) -> np.ndarray:
    """The same iteration to the same residual, with numpy's full SVD of the tall matrix; returns
    the sparse part.
    """
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
        generator.standard_normal((rows, 1)) @ np.ones((1, columns))
        + generator.standard_normal((rows, columns)) * stds
    )
    tensor = torch.from_numpy(matrix)
    sparse, expected = principal_component_pursuit(tensor)[1].numpy(), pursuit_by_svd(matrix)
    error = float(np.linalg.norm(sparse - expected) / np.linalg.norm(expected))
    ours, theirs = in_turns(
        lambda: principal_component_pursuit(tensor), lambda: pursuit_by_svd(matrix)
    )
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
    matrix = decay * generator.standard_normal((columns, rows)) + 0.01 * generator.standard_normal(
        (columns, rows)
    )
    updates = torch.from_numpy(matrix.astype(np.float32))
    weights = torch.full((columns,), 1 / columns)
    tall = np.ascontiguousarray(matrix.astype(np.float32).T) * np.float32(math.sqrt(1 / columns))
    basis = public_subspace(updates, weights, k).numpy().astype(np.float64)
    expected = svds(tall, k=k)[0].astype(np.float64)
    cosines = np.linalg.svd(expected.T @ basis, compute_uv=False)
    ours, theirs = in_turns(lambda: public_subspace(updates, weights, k), lambda: svds(tall, k=k))
    name = f"subspace {rows:,} x {columns}, k = {k}"
    return {
        "name": name,
        "peer": "scipy svds",
        "ours": ours,
        "theirs": theirs,
        "error": float(1 - cosines.min()),
    }


def smoothing(length: int = 11_000_000, factor: float = 1.0) -> dict[str, Any]:
    """DP-Fed-LS's Laplacian smoothing of one long tensor."""
    vector = torch.from_numpy(np.random.default_rng(0).standard_normal(length).astype(np.float32))

    def by_fft() -> np.ndarray:
        spectrum = np.fft.rfft(vector.numpy().astype(np.float64))
        angles = 2 * np.pi * np.arange(len(spectrum)) / length
        return np.fft.irfft(spectrum / (1 + 2 * factor * (1 - np.cos(angles))), length)

    expected = by_fft()
    error = float(
        np.linalg.norm(laplacian_smoothing(vector, factor).numpy() - expected)
        / np.linalg.norm(expected)
    )
    ours, theirs = in_turns(lambda: laplacian_smoothing(vector, factor), by_fft)
    name = f"smoothing of {length:,}"
    return {
        "name": name,
        "peer": "numpy FFT, double",
        "ours": ours,
        "theirs": theirs,
        "error": error,
    }


def low_rank(rest: int = 1600, out: int = 512, clients: int = 10) -> dict[str, Any]:
    """FedCEO's tensor SVT."""
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(rest, out, clients, generator=generator)
    threshold = (
        0.5 * math.sqrt(clients) * (math.sqrt(rest) + math.sqrt(out))
    )  # about half of the values survive

    def by_svd() -> torch.Tensor:
        slices = torch.fft.fft(stack, dim=2).permute(2, 0, 1)
        u, values, v = torch.linalg.svd(slices, full_matrices=False)
        kept = (u * (values - threshold).clamp_min(0)[:, None, :].to(u.dtype)) @ v
        return torch.fft.ifft(kept.permute(1, 2, 0), dim=2).real

    expected = by_svd()
    error = float(
        torch.linalg.vector_norm(tensor_svt(stack, threshold) - expected)
        / torch.linalg.vector_norm(expected)
    )
    ours, theirs = in_turns(lambda: tensor_svt(stack, threshold), by_svd)
    name = f"tensor SVT ({rest}, {out}, {clients})"
    return {
        "name": name,
        "peer": "torch SVD",
        "ours": ours,
        "theirs": theirs,
        "error": error,
        "goal": 2,
    }


def projection(clients: int = 1000, length: int = 10_000, numbers: int = 1000) -> dict[str, Any]:
    """DPRP's projection of all clients' gradients, the matrix made on the way, against one product
    with a matrix at hand.
    """
    rows = torch.randn(clients, length, generator=torch.Generator().manual_seed(0))
    seed = dpfl.PublicSeed(0)
    matrix = project(torch.eye(length), seed, numbers).T.contiguous()
    error = float(torch.linalg.vector_norm(project(rows, seed, numbers) - rows @ matrix.T))
    error /= float(torch.linalg.vector_norm(rows))
    ours, theirs = in_turns(lambda: project(rows, seed, numbers), lambda: rows @ matrix.T)
    name = f"projection {clients:,} x {length:,} -> {numbers:,}"
    return {
        "name": name,
        "peer": "dense product",
        "ours": ours,
        "theirs": theirs,
        "error": error,
        "goal": 0.667,
    }


def noise(clients: int = 50, numbers: int = 157_000) -> dict[str, Any]:
    """The noise of W2, a fifth of its steps: integers on a grid from a cipher, against a ziggurat
    rounded to float32.
    """
    rngs = [SecretRng.from_system() for _ in range(clients)]
    out, block = torch.empty(clients, numbers), np.empty(1 << 14)
    ziggurat = np.random.Generator(np.random.SFC64())

    def rounded() -> None:
        flat = out.view(-1)
        for first in range(0, flat.numel(), len(block)):
            part = block[: min(len(block), flat.numel() - first)]
            ziggurat.standard_normal(out=part)
            flat[first : first + len(part)] = torch.from_numpy(part)

    ours, theirs = in_turns(lambda: fill_grid_noise(rngs, out), rounded)
    error = abs(
        float(fill_grid_noise(rngs, out).double().std()) / SCALE - 1
    )  # of the scale, from a sample
    name, allowed = (
        f"noise, {clients} clients x {numbers:,} numbers",
        5 / math.sqrt(2 * out.numel()),
    )
    line = {
        "name": name,
        "peer": "SFC64 ziggurat",
        "ours": ours,
        "theirs": theirs,
        "error": error,
        "goal": 2,
    }
    return {**line, "allowed": allowed}


def products(
    clients: int = 25, width: int = 16, features: int = 784, classes: int = 10
) -> dict[str, Any]:
    """A hundred outputs of W2's stacked layers: numpy's BLAS against torch's."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(clients, classes, features, generator=generator)
    records = torch.randn(clients, width, features, generator=generator).transpose(1, 2)

    def hundred(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return [product(weights, records) for _ in range(100)][-1]

    apart = hundred(stacked_product) - hundred(torch.bmm)
    error = float(
        torch.linalg.vector_norm(apart) / torch.linalg.vector_norm(torch.bmm(weights, records))
    )
    ours, theirs = in_turns(lambda: hundred(stacked_product), lambda: hundred(torch.bmm))
    name = f"products {clients} x ({classes} x {features}) x ({features} x {width})"
    return {
        "name": name,
        "peer": "torch.bmm",
        "ours": ours,
        "theirs": theirs,
        "error": error,
        "goal": 1,
    }


def server_step(records: int = 2400) -> dict[str, float]:
    """Robust-HDP's whole server step as a share of our own round: 20 clients, the CNN of 28,938
    parameters, one core.
    """
    generator = np.random.default_rng(0)
    ids = [f"client-{i:02d}" for i in range(20)]
    arrays = {
        client: (
            generator.standard_normal((records, 1, 28, 28), dtype=np.float32),
            generator.integers(0, 10, records),
            generator.standard_normal((2, 1, 28, 28), dtype=np.float32),
            generator.integers(0, 10, 2),
        )
        for client in ids
    }
    federation = dpfl.Federation.from_arrays(
        arrays,
        classes=10,
        budgets={
            c: dpfl.Budget(epsilon=(0.5, 1.0, 2.0, 8.0)[i % 4], delta=1e-5)
            for i, c in enumerate(ids)
        },
        client_settings={
            c: dpfl.ClientSettings(batch_size=(16, 32, 64, 128)[i % 4]) for i, c in enumerate(ids)
        },
    )
    model = make_model("cnn", (1, 28, 28), 10, dpfl.PublicSeed(0))
    method = dpfl.robust_hdp(lr=0.1, clip=1.0, batch_size=64, local_epochs=1)
    timings = dpfl.train(model, federation, method, rounds=3).timings[1:]
    close, whole = (
        statistics.median(line[name] for line in timings) for name in ("close", "seconds")
    )
    return {"server_step": close, "round": whole, "share": close / whole}


def large_model(parameters: int = 11_173_962, clients: int = 20) -> dict[str, float]:
    """Robust-HDP's estimates for a ResNet-18's updates, through row blocks: seconds, and memory
    beside the updates.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(clients, parameters, generator=generator)
    rows *= torch.tensor([1.0, 3.0, 10.0]).repeat(clients)[:clients, None]
    before = _peak_mib()
    began = time.perf_counter()
    weights = inverse_weights(noise_estimates(rows)[0])
    seconds = time.perf_counter() - began
    best = inverse_weights(
        torch.tensor([1.0, 9.0, 100.0], dtype=torch.float64).repeat(clients)[:clients]
    )
    return {
        "parameters": parameters,
        "seconds": seconds,
        "mib_beside_updates": _peak_mib() - before,
        "mib_of_updates": rows.numel() * 4 / 2**20,
        "largest_weight_error": float((weights / best - 1).abs().max()),
    }


def _peak_mib() -> float:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def main() -> int:
    """Measure, print, keep."""
    torch.set_num_threads(1)
    small = "--quick" in sys.argv
    big = (
        large_model(400_000, 6) if small else large_model()
    )  # first: memory's peak is a process's own
    lines = (
        [
            pursuit(20_000),
            subspace(50_000),
            smoothing(100_000),
            low_rank(160, 64),
            projection(20, 500, 50),
            noise(2),
            products(2),
        ]
        if small
        else [pursuit(), subspace(), smoothing(), low_rank(), projection(), noise(), products()]
    )
    step = server_step(60 if small else 2400)
    table = Table(title="Seconds of a kernel (median)", title_justify="left", box=None)
    for name in ("kernel", "peer", "ours s", "peer s", "ratio", "goal", "difference"):
        table.add_column(name, justify="left" if name in ("kernel", "peer") else "right")
    for line in lines:
        line["ratio"] = line["theirs"] / line["ours"]
        goal = line.setdefault("goal", 3)
        verdict = "reached" if line["ratio"] >= goal else "missed"
        table.add_row(
            line["name"], line["peer"], f"{line['ours']:.3g}", f"{line['theirs']:.3g}", f"{line['ratio']:.2f}",
            f">= {goal}, {verdict}", f"{line['error']:.1e}",
        )  # fmt: skip
    console = Console(width=100, highlight=False)
    console.print(table)
    console.print(
        f"Robust-HDP's server step: {step['server_step']:.2f} s of a round of {step['round']:.1f} s, "
        f"{100 * step['share']:.1f} % (goal: below 8 %)"
    )
    console.print(
        f"Robust-HDP on {big['parameters']:,} parameters: {big['seconds']:.0f} s, {big['mib_beside_updates']:.0f} MiB beside "
        f"{big['mib_of_updates']:.0f} MiB of updates"
    )
    if not small:
        before = json.loads(LATEST.read_text()) if LATEST.exists() else {}
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        kernels = {"date": date, "lines": lines, "server_step": step, "large_model": big}
        LATEST.write_text(json.dumps({**before, "kernels": kernels}, indent=1) + "\n")
    return 0 if all(line["error"] < line.get("allowed", 1e-5) for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
