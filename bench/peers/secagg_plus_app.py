"""SecAgg+ over a real SuperLink, as Flower's documentation shows it: the apps that Flower runs.

Flower starts a process for every message: nothing is imported here that it can do without.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import Parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp

from bench.phases import Task

PHASES = ("keys", "shares", "masked input", "unmasking")
WEIGHT = 1000  # of each client, and the largest that the workflow allows for


class OneSum(FedAvg):
    """Takes the sum as it is: federated averaging would read it once for each client."""

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """Return what all results hold alike."""
        return results[0][1].parameters, {}


class Timed(SecAggPlusWorkflow):
    """Writes down how long each stage takes."""

    def __init__(self, *sizes: float, out: Path) -> None:
        super().__init__(*sizes, max_weight=float(WEIGHT))
        self.out = out

    def __call__(self, grid: Grid, context: Context) -> None:
        """Run one sum."""
        names = ("setup", "share_keys", "collect_masked_vectors", "unmask")
        seconds: dict[str, float] = {}
        for phase, name in zip(PHASES, names, strict=True):
            setattr(self, f"{name}_stage", self._timed(seconds, phase, f"{name}_stage"))
        began = time.perf_counter()
        super().__call__(grid, context)
        whole = {"phases": seconds, "seconds": time.perf_counter() - began}
        with self.out.open("a") as stream:
            stream.write(json.dumps(whole) + "\n")
        for name in names:
            delattr(self, f"{name}_stage")

    def _timed(self, seconds: dict[str, float], phase: str, name: str) -> Any:
        stage = getattr(super(), name)

        def timed(*arguments: Any) -> bool:
            began = time.perf_counter()
            going_on: bool = stage(*arguments)
            seconds[phase] = time.perf_counter() - began
            return going_on

        return timed


class Member(NumPyClient):
    """Sends its vector."""

    def __init__(self, task: Task, number: int) -> None:
        self.task, self.number = task, number

    def fit(self, parameters: Any, config: Any) -> Any:
        """Return the vector, and its weight."""
        return [self.task.vector(self.number)], WEIGHT, {}


def _task(context: Context) -> Task:
    sizes = {name: int(context.run_config[name]) for name in ("members", "parameters")}
    return Task(**sizes, dropouts=0)


site = ClientApp(
    lambda context: Member(_task(context), int(context.node_config["partition-id"])).to_client(),
    mods=[secaggplus_mod],
)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Add up so many times as asked, with all members."""
    task = _task(context)
    everyone = {"min_fit_clients": task.members, "min_available_clients": task.members}
    strategy = OneSum(
        fraction_fit=1.0,
        fraction_evaluate=0.0,
        initial_parameters=Parameters([], "numpy.ndarray"),
        **everyone,
    )
    rounds = ServerConfig(num_rounds=int(context.run_config["rounds"]))
    out = Path(str(context.run_config["out"]))
    add = Timed(1.0, task.threshold / task.members, out=out)
    DefaultWorkflow(fit_workflow=add)(grid, LegacyContext(context, rounds, strategy))
