"""Rounds of Flower's simulation (Ray, one core a client) whose clients train with Opacus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from bench.gate import Gate, spec
from bench.networks import flat, load, network
from bench.peers.flower_client import work_of_client
from bench.workloads import CHECK_RECORDS, workload

PACKAGES = ("torch", "opacus", "flwr", "ray")


class AllOrNothing(FedAvg):
    """Federated averaging that does not go on without a client: a round of fewer would be measured
    as a fast one.
    """

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average, if all have answered."""
        arrived = list(replies)
        failed = [reply for reply in arrived if reply.has_error()]
        if failed or len(arrived) < self.min_train_nodes:
            raise RuntimeError(
                f"{len(arrived) - len(failed)} of {self.min_train_nodes} clients have answered"
            )
        return super().aggregate_train(server_round, arrived)


def simulate(
    asked: dict[str, Any], gate: Gate, *, nodes: int, rounds: int, config: dict[str, Any]
) -> np.ndarray:
    """Run so many rounds, taking turns, and return the change of the model."""
    work = workload(asked["workload"], asked["small"])
    model = network(work)
    load(model, asked["start"])
    before = flat(model)
    server, client = ServerApp(), ClientApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        def take_turns(round_: int, arrays: ArrayRecord) -> None:
            if round_ > 0:
                gate.end_of_round()
            if round_ < rounds:
                gate.wait()

        strategy = AllOrNothing(
            fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=nodes, min_evaluate_nodes=0,
            min_available_nodes=nodes,
        )  # fmt: skip
        everything = {
            "workload": work.key,
            "small": asked["small"],
            "data": asked["data"],
            **config,
        }
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(model.state_dict()),
            num_rounds=rounds,
            train_config=ConfigRecord(everything),
            evaluate_fn=take_turns,
        )
        model.load_state_dict(result.arrays.to_torch_state_dict())

    client.train()(work_of_client)
    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=nodes,
        backend_config={
            "init_args": {"num_cpus": work.workers, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    return flat(model) - before


def main() -> None:
    """Do what the specification asks."""
    gate, asked = Gate(), spec()
    work = workload(asked["workload"], asked["small"])
    if asked["mode"] == "check":
        config = {
            "records": CHECK_RECORDS,
            "batch_size": CHECK_RECORDS,
            "steps": asked["steps"],
            "clip": asked["clip"],
        }
        update = simulate(
            asked, gate, nodes=1, rounds=1, config={**config, "noise_multiplier": 0.0}
        )
        np.save(asked["update"], update)
    else:
        config = {
            "records": work.records,
            "batch_size": work.batch_sizes[0],
            "steps": work.steps,
            "clip": work.clip,
        }
        simulate(
            asked,
            gate,
            nodes=work.clients,
            rounds=asked["rounds"],
            config={**config, "noise_multiplier": 1.0},
        )
    gate.done(PACKAGES)


if __name__ == "__main__":
    main()
