"""What the PFA paper says of its baselines, run with honest accounting on the embedded data."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch

import dpfl
from dpfl.data.partition import Partition
from dpfl.datasets.named import load_dataset
from dpfl.models import make_model
from dpfl.privacy import epsilon

SETTINGS = {"lr": 0.5, "clip": 1.0, "batch_size": 16, "local_steps": 10}


def _federation(seed: int, budgets: object = "mixgauss1") -> dpfl.Federation:
    root = dpfl.PublicSeed(seed)
    federation = dpfl.Federation.from_dataset(load_dataset("digits"), Partition(), 20, root)
    return federation.with_budgets(
        dpfl.make_budgets(budgets, 1e-3, federation.ids, root.child("budgets"))
    )  # type: ignore[arg-type]


def _accuracy(strategy: dpfl.Strategy, seeds: range, budgets: object = "mixgauss1") -> float:
    found = []
    for seed in seeds:
        federation = _federation(seed, budgets)
        model = make_model("logistic", (64,), 10, dpfl.PublicSeed(seed))
        found.append(
            dpfl.train(
                model, federation, strategy, rounds=30, seed=seed, evaluate_every=30
            ).accuracy
        )
    return statistics.mean(found)


def test_uneven_noise_ruins_plain_averaging_and_weiavg_recovers_much_of_it() -> None:
    """Figures of an independent sketch: 92 %, 14 %, 14 %, 69 %."""
    seeds = range(3)
    plain = _accuracy(dpfl.fedavg(lr=0.5, batch_size=16, local_steps=10), seeds)
    minimum = _accuracy(dpfl.minimum(**SETTINGS), seeds)
    uneven = _accuracy(dpfl.fedavg_dp(**SETTINGS), seeds)
    weighed = _accuracy(dpfl.weiavg(**SETTINGS), seeds)
    assert plain > 0.9
    assert minimum < 0.35
    assert uneven < 0.35
    assert 0.55 < weighed < 0.9


def test_with_equal_budgets_weiavg_is_fedavg_bit_for_bit() -> None:
    results = []
    for strategy in (dpfl.weiavg(**SETTINGS), dpfl.fedavg_dp(**SETTINGS)):
        model = make_model("logistic", (64,), 10, dpfl.PublicSeed(0))
        results.append(
            dpfl.train(model, _federation(0, 3.0), strategy, rounds=3, seed=0).model[1].weight
        )
    assert torch.equal(results[0], results[1])


def test_with_equal_records_dpfedavg_is_fedavg_dp() -> None:
    results = []
    for strategy in (dpfl.dpfedavg(**SETTINGS), dpfl.fedavg_dp(**SETTINGS)):
        model = make_model("logistic", (64,), 10, dpfl.PublicSeed(0))
        results.append(
            dpfl.train(model, _federation(0, 3.0), strategy, rounds=3, seed=0).model[1].weight
        )
    assert torch.allclose(results[0], results[1], atol=1e-6)


def test_an_independent_dp_sgd_gives_the_same_noise_and_the_same_accuracy() -> None:
    """The demo's WeiAvg again, in numpy, from the paper's equations and one number of ours: the
    noise multiplier.
    """
    seed = 0
    federation = _federation(seed)
    generator = np.random.default_rng(1)
    weights, bias = np.zeros((10, 64)), np.zeros(10)
    epsilons = {c: b.epsilon for c, b in federation.budgets.items()}
    noise = {c: _multiplier(e, 16 / federation.shards[c].examples) for c, e in epsilons.items()}
    for _ in range(30):
        total_w, total_b = np.zeros_like(weights), np.zeros_like(bias)
        for client, shard in federation.shards.items():
            w, b = weights.copy(), bias.copy()
            x, y = shard.features.numpy(), np.eye(10)[shard.labels.numpy()]
            for _ in range(10):
                chosen = generator.random(len(x)) < 16 / len(x)
                logits = x[chosen] @ w.T + b
                p = np.exp(logits - logits.max(1, keepdims=True))
                d = p / p.sum(1, keepdims=True) - y[chosen]
                norm = np.sqrt((d**2).sum(1) * ((x[chosen] ** 2).sum(1) + 1))
                d = d / np.maximum(1, norm)[:, None]
                gw = d.T @ x[chosen] + noise[client] * generator.normal(size=w.shape)
                gb = d.sum(0) + noise[client] * generator.normal(size=b.shape)
                w, b = w - 0.5 * gw / 16, b - 0.5 * gb / 16
            share = epsilons[client] / sum(epsilons.values())
            total_w, total_b = total_w + share * (w - weights), total_b + share * (b - bias)
        weights, bias = weights + total_w, bias + total_b
    features, labels = federation.test_set()
    independent = ((features.numpy() @ weights.T + bias).argmax(1) == labels.numpy()).mean()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    torch.nn.init.zeros_(model[1].weight)
    torch.nn.init.zeros_(model[1].bias)
    ours = statistics.mean(
        dpfl.train(
            model, federation, dpfl.weiavg(**SETTINGS), rounds=30, seed=s, evaluate_every=30
        ).accuracy
        for s in range(3)
    )
    assert independent == pytest.approx(ours, abs=0.12)


def _multiplier(target: float, rate: float) -> float:
    """Bisection on the public epsilon function: independent of our calibration."""
    low, high = 0.3, 500.0
    while high / low > 1.003:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if epsilon(middle, rate, 300, 1e-3) <= target else (middle, high)
    return high
