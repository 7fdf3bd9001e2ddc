"""One sum by Flower's SecAgg+: its own workflow and its own client mod, without a network.

The four stages of ``SecAggPlusWorkflow`` run as they are. Its grid hands each message to
``secaggplus_mod`` in this process, and measures every client on its own. What a message weighs is
the length of Flower's protobuf; the time to write and to read that is not counted.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import (
    Code,
    FitRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays as to_arrays,
)
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.compat.common import recorddict_compat as compat
from flwr.server import LegacyContext, ServerConfig, SimpleClientManager
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState

from bench.peers.secagg_plus_app import PHASES, WEIGHT, OneSum
from bench.phases import Meter, Task
from dpfl.deploy.in_process_grid import FAILED, InProcessGrid


class MeasuredGrid(InProcessGrid):
    """Nodes in this process that keep their state and fall silent where they are asked to."""

    def __init__(self, task: Task, meter: Meter) -> None:
        super().__init__({})
        self.task, self.meter = task, meter
        self.phase = ""
        self.contexts = {
            node: Context(node, node, {}, RecordDict(), {}) for node in range(1, task.members + 1)
        }

    def push_messages(self, messages: Any) -> list[str]:
        """Let every node answer, off the server's clock."""
        with self.meter.paused():
            found = super().push_messages(messages)
            self.asked.clear()
            return found

    def _reply(self, message: Message, node: int) -> Message:
        packed = message_to_proto(message)
        down, received = packed.ByteSize(), message_from_proto(packed)
        if self.phase == "masked input" and node <= self.task.dropouts:
            return Message(Error(code=FAILED, reason="dropped out"), reply_to=message)
        with self.meter.client(self.phase) as measured:
            reply = secaggplus_mod(received, self.contexts[node], self._trained)
        measured.update(down=down, up=message_to_proto(reply).ByteSize())
        return reply

    def _trained(self, message: Message, context: Context) -> Message:
        """Answer with the client's vector; making it is not counted."""
        with self.meter.paused():
            vector = ndarrays_to_parameters([self.task.vector(context.node_id - 1)])
            result = FitRes(Status(Code.OK, ""), vector, WEIGHT, {})
            return Message(compat.fitres_to_recorddict(result, keep_input=True), reply_to=message)


def run(task: Task) -> dict[str, Any]:
    """Add up, and return seconds and bytes by phase, and the largest error of the mean."""
    meter = Meter()
    grid = MeasuredGrid(task, meter)
    manager = SimpleClientManager()
    for node in grid.contexts:
        manager.register(GridClientProxy(node, grid, 1))
    state = RecordDict(
        {
            MAIN_CONFIGS_RECORD: ConfigRecord({Key.CURRENT_ROUND: 1}),
            MAIN_PARAMS_RECORD: compat.parameters_to_arrayrecord(Parameters([], "numpy"), True),
        }
    )
    everyone = {"min_fit_clients": task.members, "min_available_clients": task.members}
    context = LegacyContext(
        Context(1, 1, {}, state, {}),
        ServerConfig(num_rounds=1),
        OneSum(fraction_fit=1.0, **everyone),
        manager,
    )
    workflow = SecAggPlusWorkflow(
        1.0, task.threshold / task.members, max_weight=float(WEIGHT), modulus_range=1 << 32
    )
    stages = (
        workflow.setup_stage,
        workflow.share_keys_stage,
        workflow.collect_masked_vectors_stage,
        workflow.unmask_stage,
    )
    progress = WorkflowState()
    random.seed(0)
    for grid.phase, stage in zip(PHASES, stages, strict=True):
        with meter.server(grid.phase):
            going_on = stage(grid, context, progress)
        assert going_on, f"SecAgg+ stopped in the phase '{grid.phase}'"
    record = context.state.array_records[MAIN_PARAMS_RECORD]
    (mean,) = to_arrays(compat.arrayrecord_to_parameters(record, keep_input=True))
    error = np.abs(mean - task.survivors_sum() / task.survivors).max()
    return {**meter.result(), "error": float(error)}
