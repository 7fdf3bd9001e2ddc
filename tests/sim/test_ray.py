"""Ray: the same bits as one process, whatever the number of workers, and also where a worker is
lost.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dpfl.core.errors import ConfigurationError, PeerError
from dpfl.runs.experiment import Experiment
from dpfl.sim import ray_workers
from dpfl.sim.ray_workers import RayWorkers
from dpfl.sim.train import run_experiment

ray: Any = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two workers on this machine, for all tests of this file."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def experiment(engine: str, **run: Any) -> Experiment:
    return Experiment.from_dict(
        {
            "data": {"name": "digits"},
            "partition": {"kind": "iid", "clients": 6},
            "budgets": {"epsilon": 4.0, "delta": 1e-3},
            "model": {"name": "mlp", "hidden": 16},
            # PPSGD: parts of the model stay at clients and must find their way through the workers,
            # too.
            "method": {"name": "ppsgd", "lr": 0.1, "clip": 1.0, "batch_size": 16, "local_steps": 2},
            "run": {"rounds": 3, "engine": engine, "workers": 2, **run},
        }
    )


def test_a_cluster_gives_the_bits_of_one_process_also_where_it_loses_a_worker(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    real = RayWorkers.run

    rounds: list[int] = []

    def losing(self: RayWorkers, *arguments: Any) -> Any:
        rounds.append(len(rounds))
        if rounds[-1] == 1:
            killed.append(ray.get(self.workers[0].__ray_call__.remote(lambda worker: os.getpid())))
            os.kill(killed[0], signal.SIGKILL)
        return real(self, *arguments)

    run_experiment(experiment("stacked", workers=1), tmp_path / "one")
    monkeypatch.setattr(RayWorkers, "run", losing)
    run_experiment(experiment("ray"), tmp_path / "ray")
    assert killed
    for name in ("model.safetensors", "rounds.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "ray" / name).read_bytes()


def test_system_noise_is_drawn_once_per_client_and_round_whoever_computes_it(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[list[bytes | None]] = []
    real = RayWorkers.run

    def twice(self: RayWorkers, downloads: Any, blocks: Any, private: Any) -> Any:
        first = real(self, downloads, blocks, dict(private))
        # As after a loss: the same blocks, computed once more.
        again = real(self, downloads, blocks, private)
        sent.append([uplink.payload for uplink in first])
        assert [uplink.payload for uplink in again] == sent[-1]
        return again

    monkeypatch.setattr(RayWorkers, "run", twice)
    run_experiment(experiment("ray", noise="system", rounds=1), tmp_path / "a")
    run_experiment(experiment("stacked", noise="system", rounds=1, workers=1), tmp_path / "b")
    model, other = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert any(
        not torch.equal(model[name], other[name]) for name in model
    )  # another run draws its own


def instead_of_ray(monkeypatch: pytest.MonkeyPatch, make: Callable[[str], Any]) -> None:
    real = importlib.import_module
    monkeypatch.setattr(
        ray_workers.importlib,
        "import_module",
        lambda name, *rest: make(name) if name == "ray" else real(name, *rest),
    )


def test_without_ray_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    instead_of_ray(monkeypatch, missing)
    with pytest.raises(ConfigurationError, match=r"dpfl\[ray\]"):
        run_experiment(experiment("ray"), tmp_path / "r")


def test_a_cluster_that_is_not_there_gets_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nobody:
        def is_initialized(self) -> bool:
            return False

        def init(self, **settings: Any) -> None:
            raise ConnectionError(f"nobody at {settings['address']}")

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    instead_of_ray(monkeypatch, lambda name: Nobody())
    with pytest.raises(PeerError, match=r"127\.0\.0\.1:1.*cannot be reached"):
        run_experiment(experiment("ray"), tmp_path / "r")
