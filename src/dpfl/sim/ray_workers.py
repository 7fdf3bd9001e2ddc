"""Blocks of clients over the workers of a Ray cluster, each running the stacked engine; the same
bits as one process.

Which clients make a block is a function of the cohort alone, and every client's noise is named by
(round, client), so that neither the number of workers nor a retry changes a result. In a run with
system noise, the driver draws one secret of 128 bits for the run and workers derive from it: a
block whose worker was lost is computed again with the same noise, and nothing of the lost attempt
was released. The cluster is one domain of trust: it holds the simulated clients' records anyway.
"""

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dpfl.core.errors import ConfigurationError, PeerError
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.sim.workers import Block, Done, Worker, Workers

RETRIES = 3
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def run_secret(seed: PublicSeed | None) -> PublicSeed:
    """The root of all clients' noise in a run: its seed, else a secret drawn for the run."""
    return seed or SecretRng.from_system().secret_seed().child("secret")


class _RayWorker(Worker):
    """One process of the cluster. It keeps nothing that one that replaces it would lack."""

    def __init__(self, worker: Worker) -> None:
        torch.set_num_threads(1)
        super().__init__(*worker.arguments)


class RayWorkers(Workers):
    """Workers of a Ray cluster.

    ``count`` processes are started on this machine, or as many as the cluster has processors where
    ``RAY_ADDRESS`` names one.
    """

    def __init__(self, worker: Worker, count: int) -> None:
        super().__init__(worker)
        try:
            ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise ConfigurationError(
                "engine 'ray'", "Ray is not installed", "run: pip install 'dpfl[ray]'"
            ) from error
        self.ray = ray
        self._started = not ray.is_initialized()
        if self._started:
            self._connect(count)
        number = count if count > 1 else max(1, int(ray.cluster_resources().get("CPU", 1)))
        # A worker that is lost is started again, and its blocks with it.
        kind = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=RETRIES)(_RayWorker)
        self._shared = ray.put(worker)  # held for as long as a worker may have to be made again
        self.workers = [kind.remote(self._shared) for _ in range(number)]

    def _connect(self, count: int) -> None:
        """Start Ray on this machine, or reach the cluster that ``RAY_ADDRESS`` names."""
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        address = os.environ.get("RAY_ADDRESS")
        local = {} if address else {"num_cpus": max(count, 1), "include_dashboard": False}
        try:
            self.ray.init(address=address, log_to_driver=False, logging_level="error", **local)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise PeerError(
                f"Ray at {address or 'this machine'}",
                f"cannot be reached ({error})",
                "check RAY_ADDRESS, or unset it",
            ) from error

    def compute(self, downloads: Mapping[str, bytes], blocks: Sequence[Block]) -> list[Done]:
        """Share the blocks out among the workers of the cluster."""
        messages = self.ray.put(downloads)  # once a round, whatever the number of workers
        asked = [
            self.workers[number % len(self.workers)].block.remote(messages, block)
            for number, block in enumerate(blocks)
        ]
        try:
            found: list[Done] = self.ray.get(asked)
        except self.ray.exceptions.RayActorError as error:
            raise PeerError(
                "Ray",
                f"a worker was lost {RETRIES + 1} times ({str(error)[:200]})",
                "check the cluster's memory, and resume",
            ) from error
        return found

    def __exit__(self, *raised: object) -> None:
        """End the workers, and Ray itself if it was started here."""
        for worker in self.workers:
            self.ray.kill(worker)
        if self._started:
            self.ray.shutdown()
