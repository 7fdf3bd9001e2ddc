"""What a Flower client does: train the model it receives with Opacus. A module of its own, so that
Ray finds it by name.
"""

from __future__ import annotations

import functools

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

from bench.networks import network
from bench.peers.opacus_client import train
from bench.workloads import read_data, workload


@functools.cache
def _data(path: str) -> tuple[Tensor, Tensor]:
    """Read the data once in every process that Ray keeps."""
    features, labels = read_data(path)
    return torch.from_numpy(features), torch.from_numpy(labels)


def work_of_client(message: Message, context: Context) -> Message:
    """Train the model received on the records of this node."""
    torch.set_num_threads(1)
    config = message.content["config"]
    work = workload(str(config["workload"]), bool(config["small"]))
    model = network(work)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    node = int(context.node_config["partition-id"])
    features, labels = _data(str(config["data"]))
    count = int(config["records"])
    train(
        model,
        features[node, :count],
        labels[node, :count],
        batch_size=int(config["batch_size"]),
        steps=int(config["steps"]),
        lr=work.lr,
        clip=float(config["clip"]),
        noise_multiplier=float(config["noise_multiplier"]),
    )
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(labels[node])}),
        }
    )
    return Message(content=content, reply_to=message)
