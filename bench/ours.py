"""dpfl's side: whole rounds through ``dpfl.train``, so that ledger, messages and aggregation count
against us.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import dpfl
from bench.gate import Gate, peak_mib, spec
from bench.networks import exact_update, freeze_body, lora
from bench.workloads import (
    CHECK_RECORDS,
    CHECK_STEPS,
    SCALE,
    SEED,
    TEST_RECORDS,
    Workload,
    check_data,
    read_data,
    workload,
)
from dpfl.core.layout import Layout
from dpfl.core.types import Phase
from dpfl.engine import make_engine
from dpfl.engine.base import Job
from dpfl.models import make_model
from dpfl.plugs.local_work import Sgd
from dpfl.plugs.stages import Clip

PACKAGES = ("torch", "dpfl")
DELTA = 1e-5
EPSILONS = (0.5, 1.0, 2.0, 8.0)


def model_of(work: Workload) -> nn.Module:
    """Build the workload's network by its name."""
    if work.model == "lora":
        return lora(work)
    if work.tokens is None:
        model = make_model(work.model, work.shape, work.classes, dpfl.PublicSeed(SEED))
        return freeze_body(model) if work.head_only else model
    from dpfl.data.inputs import Tokens

    return make_model(
        work.model,
        work.shape,
        work.classes,
        dpfl.PublicSeed(SEED),
        inputs=Tokens(vocabulary=work.tokens),
    )


# -- numerical check -------------------------------------------------------------------------------


def check(asked: dict[str, Any], gate: Gate) -> None:
    """Write the start of the network, take a few full-batch steps without noise, and say what the
    peer is to repeat.
    """
    work = workload(asked["workload"], asked["small"])
    model = model_of(work)
    layout = Layout.of_module(model)
    start = layout.read(model)
    np.savez(
        asked["start"], **{f"{i:04d}": p.detach().numpy() for i, p in enumerate(model.parameters())}
    )
    features, labels = (torch.from_numpy(a) for a in check_data(asked["data"]))

    def update(phase: Phase) -> np.ndarray:
        rng = dpfl.SecretRng.simulated(dpfl.PublicSeed(SEED))
        job = Job(
            client="0", start=start, phases=(phase,), features=features, labels=labels, rng=rng
        )
        found: np.ndarray = (make_engine("stacked").run(model, layout, [job])[0] - start).numpy()
        return found

    cases: list[dict[str, Any]] = []
    if work.clip is not None:
        steps = 1 if work.deep else CHECK_STEPS
        cases.append({"steps": steps, "clip": _middle_norm(model, features, labels)})
    else:
        one = Phase(steps=1, batch_size=CHECK_RECORDS, sampling="shuffle", lr=work.lr)
        cases.append({"steps": CHECK_STEPS, "ball": 1e6})
        cases.append({"steps": 1, "ball": 0.5 * float(np.linalg.norm(update(one)))})
    for number, case in enumerate(cases):
        sampling = "poisson" if work.clip is not None else "shuffle"
        phase = Phase(
            steps=case["steps"], batch_size=CHECK_RECORDS, sampling=sampling, lr=work.lr, clip=case.get("clip"),
            ball=case.get("ball"),
        )  # fmt: skip
        np.save(f"{asked['update']}.{number}.npy", update(phase))
        if work.deep:
            exact = exact_update(
                model, features, labels, steps=case["steps"], lr=work.lr, clip=case["clip"]
            )
            np.save(f"{asked['update']}.{number}.exact.npy", exact)
    gate.done(PACKAGES, cases=cases, parameters=layout.size)


def _middle_norm(model: nn.Module, features: torch.Tensor, labels: torch.Tensor) -> float:
    """Median norm of per-record gradients: with it as clip, half of the records are clipped and
    half are not.
    """
    norms = []
    for feature, label in zip(features, labels, strict=True):
        loss = F.cross_entropy(model(feature[None]), label[None])
        gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
        norms.append(float(torch.cat([g.reshape(-1) for g in gradients]).norm()))
    return float(np.median(norms))


# -- rounds ----------------------------------------------------------------------------------------


def federation_of(work: Workload, path: str) -> dpfl.Federation:
    """All records train; a few more are made up for the one evaluation at the end."""
    features, labels = read_data(path)
    clients = {
        f"client-{i:04d}": (
            features[i],
            labels[i],
            features[i, :TEST_RECORDS],
            labels[i, :TEST_RECORDS],
        )
        for i in range(work.clients)
    }
    tokens = {} if work.tokens is None else {"tokens": work.tokens}
    return dpfl.Federation.from_arrays(
        clients,
        classes=work.classes,
        budgets={
            name: dpfl.Budget(epsilon=EPSILONS[i % 4] if work.cohort is None else 1e4, delta=DELTA)
            for i, name in enumerate(clients)
        },
        client_settings={
            name: dpfl.ClientSettings(batch_size=work.batch_size(i))
            for i, name in enumerate(clients)
        },
        **tokens,
    )


def strategy_of(work: Workload, variant: str) -> dpfl.Strategy:
    """DP-SGD, plain SGD, or plain SGD within a ball with the update clipped once more."""
    habits = {
        "lr": work.lr,
        "batch_size": work.batch_sizes[0],
        "local_steps": work.steps,
        "local_epochs": work.epochs,
    }
    if variant == "plain":
        return dpfl.fedavg(**habits)
    if work.clip is not None:
        return dpfl.fedavg_dp(clip=work.clip, **habits)
    assert work.ball is not None
    if work.cohort is not None:
        drawn = dpfl.PoissonCohort(sampling_rate=work.cohort / work.clients)
        return dpfl.dp_fed(clip=work.ball, noise_multiplier=1.0, selection=drawn, **habits)
    return dpfl.Strategy(
        name="sgd-in-a-ball",
        unit=dpfl.Unit.CLIENT,
        observer=dpfl.Observer.NOBODY,
        adjacency=dpfl.Adjacency.ZERO_OUT,
        local=Sgd(client_settings=dpfl.ClientSettings(**habits), ball=work.ball),
        stages=(Clip(clip=work.ball),),
    )


def rounds(asked: dict[str, Any], gate: Gate) -> None:
    """Train, taking turns."""
    work = workload(asked["workload"], asked["small"])
    federation = federation_of(work, asked["data"])

    def take_turns(done: int, planned: int, line: dict[str, Any]) -> None:
        gate.end_of_round()
        if done < planned:
            gate.wait()

    gate.wait()
    dpfl.train(
        model_of(work),
        federation,
        strategy_of(work, asked["variant"]),
        rounds=asked["rounds"],
        workers=work.workers,
        evaluate_every=asked["rounds"],
        progress=take_turns,
    )
    gate.done(PACKAGES)


# -- scale -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WatchedCohort(dpfl.FixedCohort):
    """A fixed cohort that says when the first round begins: nothing is drawn before."""

    begun: list[float]

    def order(self, candidates: Any, seed: dpfl.PublicSeed) -> list[str]:
        """Draw as ever."""
        if not self.begun:
            self.begun.append(time.perf_counter())
        return super().order(candidates, seed)


def scale(asked: dict[str, Any], gate: Gate) -> None:
    """Build a large population and play a few rounds with a small cohort."""
    population = asked["population"]
    generator = np.random.default_rng(SEED)
    count = SCALE.records + 1
    features = generator.standard_normal((population, count, SCALE.features), dtype=np.float32)
    labels = generator.integers(0, SCALE.classes, (population, count))
    gate.say("data", peak_mib=peak_mib())
    began = time.perf_counter()
    names = [f"client-{i:06d}" for i in range(population)]
    federation = dpfl.Federation.from_arrays(
        {c: (x[1:], y[1:], x[:1], y[:1]) for c, x, y in zip(names, features, labels, strict=True)},
        classes=SCALE.classes,
        budgets={c: dpfl.Budget(epsilon=EPSILONS[i % 4], delta=DELTA) for i, c in enumerate(names)},
    )
    del features, labels
    built = time.perf_counter()
    gate.say("built", seconds=built - began)
    begun: list[float] = []
    stamps: list[float] = []

    def stamp(done: int, planned: int, line: dict[str, Any]) -> None:
        if not stamps:
            gate.say("started", seconds=begun[0] - built)
        stamps.append(time.perf_counter())
        gate.say("round", seconds=stamps[-1] - (stamps[-2] if len(stamps) > 1 else begun[0]))

    dpfl.train(
        make_model("logistic", (SCALE.features,), SCALE.classes, dpfl.PublicSeed(SEED)),
        federation,
        dpfl.weiavg(
            lr=SCALE.lr, clip=SCALE.clip, batch_size=SCALE.batch_size, local_epochs=1,
            selection=WatchedCohort(size=SCALE.cohort, begun=begun),
        ),
        rounds=asked["rounds"],
        evaluate_every=asked["rounds"],
        progress=stamp,
    )  # fmt: skip
    gate.say("ended", seconds=time.perf_counter() - stamps[-1])
    gate.done(PACKAGES)


def main() -> None:
    """Do what the specification asks."""
    gate, asked = Gate(), spec()
    torch.set_num_threads(1)
    {"check": check, "time": rounds, "scale": scale}[asked["mode"]](asked, gate)


if __name__ == "__main__":
    main()
