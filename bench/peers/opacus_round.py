"""Federated rounds of clients that train with Opacus, one after the other in one process."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch

from bench.gate import Gate, spec
from bench.networks import flat, learned, load, network
from bench.peers.opacus_client import train
from bench.workloads import CHECK_RECORDS, check_data, read_data, workload

PACKAGES = ("torch", "opacus")


def check(asked: dict) -> None:
    """Take a few full-batch steps without noise and hand over the update."""
    work = workload(asked["workload"], asked["small"])
    features, labels = (torch.from_numpy(a) for a in check_data(asked["data"]))
    model = network(work)
    load(model, asked["start"])
    before = flat(model)
    train(
        model,
        features,
        labels,
        batch_size=CHECK_RECORDS,
        steps=asked["steps"],
        lr=work.lr,
        clip=asked["clip"],
        noise_multiplier=0.0,
    )
    np.save(asked["update"], flat(model) - before)


def rounds(asked: dict, gate: Gate) -> None:
    """Average clients' models, round after round."""
    work = workload(asked["workload"], asked["small"])
    features, labels = (torch.from_numpy(a) for a in read_data(asked["data"]))
    server = network(work)
    load(server, asked["start"])
    assert work.clip is not None
    for _ in range(asked["rounds"]):
        gate.wait()
        total = [torch.zeros_like(p) for p in learned(server)]
        for client in range(work.clients):
            batch = work.batch_size(client)
            mine = train(
                copy.deepcopy(server),
                features[client],
                labels[client],
                batch_size=batch,
                steps=work.steps or (work.epochs or 0) * math.ceil(work.records / batch),
                lr=work.lr,
                clip=work.clip,
                noise_multiplier=1.0,
            )
            for into, parameter in zip(total, learned(mine), strict=True):
                into.add_(parameter.detach(), alpha=1 / work.clients)
        with torch.no_grad():
            for parameter, mean in zip(learned(server), total, strict=True):
                parameter.copy_(mean)
        gate.end_of_round()


def main() -> None:
    """Do what the specification asks."""
    gate, asked = Gate(), spec()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if asked["mode"] == "check":
        check(asked)
    else:
        rounds(asked, gate)
    gate.done(PACKAGES)


if __name__ == "__main__":
    main()
