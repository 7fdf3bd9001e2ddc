"""Blocks of clients over the workers of a Ray cluster, each running the stacked engine; the same
bits as one process.

Which clients make a block is a function of the cohort alone, and every client's noise is named by
(round, client), so that neither the number of workers nor a retry changes a result. In a run with
system noise, the driver draws one secret of 128 bits for the run and workers derive from it: a
block whose worker was lost is computed again with the same noise, and nothing of the lost attempt
was released. The cluster is one domain of trust: it holds the simulated clients' records anyway.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from dpfl.core.errors import ConfigurationError, PeerError
from dpfl.core.random import SecretRng
from dpfl.engine import make_engine
from dpfl.engine.base import Engine
from dpfl.rounds import Uplink
from dpfl.sim.workers import WorkerContext, collected

RETRIES = 3
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


class _Worker:
    """One process of the cluster: works on blocks. It keeps nothing that a new one would lack."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.engine: Engine | None = None

    def block(
        self,
        context: WorkerContext,
        common: Sequence[bytes],
        which: Mapping[str, int],
        ids: Sequence[str],
        private: dict[str, Tensor],
    ) -> tuple[list[Uplink], dict[str, Tensor]]:
        """Work for one block."""
        self.engine = self.engine or make_engine(context.engine, context.device)
        downloads = {client: common[which[client]] for client in ids}
        return context.block(self.engine, downloads, ids, private)

    def process(self) -> int:
        """Which process this is."""
        return os.getpid()


class RayWorkers:
    """Looks like :class:`dpfl.sim.workers.Workers` to the simulation.

    ``count`` processes are started on this machine, or as many as the cluster has processors where
    ``RAY_ADDRESS`` names one.
    """

    def __init__(self, context: WorkerContext, count: int) -> None:
        try:
            ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise ConfigurationError(
                "engine 'ray'", "Ray is not installed", "run: pip install 'dpfl[ray]'"
            ) from error
        self.ray = ray
        own = replace(
            context,
            engine="stacked",
            seed=context.seed or SecretRng.from_system().secret_seed().child("secret"),
        )
        self.engine = make_engine("stacked", context.device)
        self._started = not ray.is_initialized()
        if self._started:
            for name, value in _QUIET.items():
                os.environ.setdefault(name, value)
            address = os.environ.get("RAY_ADDRESS")
            local = {} if address else {"num_cpus": max(count, 1), "include_dashboard": False}
            try:
                ray.init(address=address, log_to_driver=False, logging_level="error", **local)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise PeerError(
                    f"Ray at {address or 'this machine'}",
                    f"cannot be reached ({error})",
                    "check RAY_ADDRESS, or unset it",
                ) from error
        number = count if count > 1 else max(1, int(ray.cluster_resources().get("CPU", 1)))
        # A worker that is lost is started again, and its blocks with it.
        kind = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=RETRIES)(_Worker)
        self._context = ray.put(own)
        self.workers = [kind.remote() for _ in range(number)]

    def run(
        self,
        downloads: Mapping[str, bytes],
        blocks: Sequence[Sequence[str]],
        private: dict[str, Tensor],
    ) -> list[Uplink]:
        """Work for all blocks; results come back in canonical order. ``private`` parts are read,
        and replaced.
        """
        distinct = list({id(payload): payload for payload in downloads.values()}.values())
        place = {id(payload): number for number, payload in enumerate(distinct)}
        common = self.ray.put(distinct)  # once a round, whatever the number of workers
        asked = []
        for number, ids in enumerate(blocks):
            own = {client: private[client] for client in ids if client in private}
            which = {client: place[id(downloads[client])] for client in ids}
            worker = self.workers[number % len(self.workers)]
            asked.append(worker.block.remote(self._context, common, which, ids, own))
        try:
            found = self.ray.get(asked)
        except self.ray.exceptions.RayActorError as error:
            raise PeerError(
                "Ray",
                f"a worker was lost {RETRIES + 1} times ({str(error)[:200]})",
                "check the cluster's memory, and resume",
            ) from error
        return collected(found, private)

    def __enter__(self) -> RayWorkers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self.workers:
            self.ray.kill(worker)
        if self._started:
            self.ray.shutdown()
