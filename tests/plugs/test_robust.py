"""Robust aggregation: what its papers state, naive references, and where it is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import dpfl
from dpfl import testing
from dpfl.core.errors import ConfigurationError, DpflError, PrivacyRefusal
from dpfl.core.types import Rows
from dpfl.data.partition import Partition
from dpfl.data.records import Shard
from dpfl.datasets.named import load_dataset
from dpfl.models import make_model
from dpfl.plugs.robust import (
    AGGREGATIONS,
    GeometricMedianWeights,
    KrumWeights,
    Median,
    TrimmedMean,
    geometric_median_weights,
    krum_weights,
    trimmed_mean,
)
from dpfl.plugs.secure_sum import SecureSum
from dpfl.plugs.weights import UniformWeights
from dpfl.runs.experiment import Experiment
from dpfl.strategy.robust import with_aggregation
from dpfl.testing.fixtures import LAYOUT, cohort

WORK: dict[str, Any] = {"lr": 0.5, "clip": 1.0, "batch_size": 16, "local_steps": 5}
SEEDS = st.integers(0, 2**32 - 1)
FAST = settings(max_examples=40, deadline=None, derandomize=True)


def some_rows(seed: int, count: int, size: int = LAYOUT.size) -> Tensor:
    return torch.randn(count, size, generator=dpfl.PublicSeed(seed).generator())


def aggregated(name: str, rows: Tensor, **given: Any) -> Tensor:
    """What the server's slots make of rows, as a round does."""
    plug = AGGREGATIONS[name](**given)
    cohort_ = cohort(len(rows))
    received = Rows(matrix=rows, origin=torch.zeros(rows.shape[1]), cohort=cohort_, layout=LAYOUT)
    if isinstance(plug, TrimmedMean | Median):
        clean = plug({}, received, 0)[0]
        return UniformWeights()({}, received, 0)[0] @ clean
    return plug({}, received, 0)[0] @ rows  # type: ignore[operator,call-arg,arg-type]


def plain(name: str, byzantine: int) -> dict[str, int]:
    return {"byzantine": byzantine} if name in ("krum", "trimmed_mean") else {}


@pytest.mark.parametrize("weights", [KrumWeights(), KrumWeights(byzantine=1, selected=3),
                                     GeometricMedianWeights()], ids=repr)  # fmt: skip
def test_weights_keep_the_laws(weights: KrumWeights) -> None:
    testing.check_weights(weights)


@pytest.mark.parametrize("clean", [TrimmedMean(byzantine=1), TrimmedMean(byzantine=0), Median()])
def test_row_stages_keep_the_laws(clean: TrimmedMean) -> None:
    testing.check_row_denoiser(clean)


# ---- naive references ----------------------------------------------------------------------------


@FAST
@given(SEEDS, st.integers(5, 11), st.integers(0, 3), st.integers(1, 4))
def test_krum_is_the_papers_double_loop(seed: int, count: int, byzantine: int, chosen: int) -> None:
    byzantine = min(byzantine, (count - 3) // 2)
    rows = some_rows(seed, count).double().numpy()
    scores = []
    for i in range(count):
        others = sorted(((rows[i] - rows[j]) ** 2).sum() for j in range(count) if j != i)
        scores.append(sum(others[: count - byzantine - 2]))
    best = set(np.argsort(scores, kind="stable")[:chosen].tolist())
    found = krum_weights(torch.tensor(rows), byzantine, chosen)
    picked = set(torch.nonzero(found).flatten().tolist())
    assert best <= picked
    assert all(scores[i] <= max(scores[j] for j in best) * (1 + 1e-9) for i in picked)
    assert torch.allclose(found[found > 0], torch.tensor(1 / len(picked)))


@FAST
@given(SEEDS, st.integers(1, 9), st.integers(0, 4))
def test_the_trimmed_mean_is_scipys_and_the_median_numpys(seed: int, count: int, cut: int) -> None:
    from scipy.stats import trim_mean

    rows = some_rows(seed, count)
    cut = min(cut, (count - 1) // 2)
    theirs = trim_mean(rows.double().numpy(), cut / count + 1e-9, axis=0)
    assert np.allclose(trimmed_mean(rows, cut).numpy(), theirs, atol=1e-6)
    assert np.allclose(
        trimmed_mean(rows, count).numpy(), np.median(rows.numpy(), axis=0), atol=1e-6
    )
    if count % 2:
        assert torch.equal(trimmed_mean(rows, count), rows.median(dim=0).values)


@FAST
@given(SEEDS, st.integers(3, 9))
def test_the_geometric_median_meets_its_optimality_condition(seed: int, count: int) -> None:
    """The unit vectors towards the rows cancel, unless the median is one of the rows."""
    rows = some_rows(seed, count).double()
    middle = geometric_median_weights(rows).double() @ rows
    apart = middle - rows
    distances = torch.linalg.vector_norm(apart, dim=1)
    assert float(distances.min()) > 1e-3  # in general position
    assert float(torch.linalg.vector_norm((apart / distances[:, None]).sum(0))) < 1e-4
    total = float(distances.sum())
    for other in (rows.mean(0), rows.median(0).values, middle + 0.01):
        assert total <= float(torch.linalg.vector_norm(other - rows, dim=1).sum()) + 1e-9


# ---- breakdown -----------------------------------------------------------------------------------


@FAST
@given(SEEDS, st.integers(1, 3), st.sampled_from([1e3, 1e12, 1e30, -1e30]), st.booleans())
def test_a_minority_of_arbitrary_rows_cannot_move_the_result_far(
    seed: int, byzantine: int, size: float, together: bool
) -> None:
    """Yin's and Blanchard's statements: within the honest rows' range, or their radius."""
    count = 2 * byzantine + 3
    honest = some_rows(seed, count - byzantine)
    attack = some_rows(seed + 1, byzantine)
    attack = torch.full_like(attack, size) if together else attack * size
    rows = torch.cat([honest, attack])[torch.randperm(count, generator=torch.manual_seed(seed))]
    low, high = honest.min(0).values, honest.max(0).values
    radius = torch.linalg.vector_norm(honest - honest.mean(0), dim=1).max()
    for name in AGGREGATIONS:
        found = aggregated(name, rows, **plain(name, byzantine))
        away = torch.linalg.vector_norm(found - honest.mean(0))
        # RFA: at most 2 (n - f) / (n - 2 f) times the radius away.
        assert away <= radius * 2 * (count - byzantine) / (count - 2 * byzantine), name
        if name != "geometric_median":
            assert bool(((found >= low - 1e-5) & (found <= high + 1e-5)).all()), name
    moved = torch.linalg.vector_norm(rows.double().mean(0) - honest.double().mean(0))
    assert moved > 3 * radius  # the plain mean is anywhere


def test_krum_selects_an_honest_row_whatever_one_attacker_sends() -> None:
    honest = some_rows(3, 4)
    for victim, other in combinations(range(4), 2):
        attack = 10 * honest[victim] - 9 * honest[other]
        assert float(krum_weights(torch.cat([honest, attack[None]]), 1)[-1]) == 0


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_the_order_of_clients_does_not_matter(name: str) -> None:
    rows = some_rows(5, 7)
    turned = rows[torch.randperm(7, generator=torch.manual_seed(1))]
    assert torch.allclose(aggregated(name, rows), aggregated(name, turned), atol=1e-5)


# ---- in training ---------------------------------------------------------------------------------


def poisoned(attackers: int) -> dpfl.Federation:
    """Digits at nine clients, of whom some learn wrong labels, in steps a thousand times as long."""
    seed = dpfl.PublicSeed(0)
    plain_ = dpfl.Federation.from_dataset(load_dataset("digits"), Partition(), 9, seed)
    budgets = dpfl.make_budgets(20.0, 1e-3, plain_.ids, seed)
    shards = dict(plain_.shards)
    for client in plain_.ids[:attackers]:
        own = shards[client]
        tested = own.test_features, own.test_labels
        shards[client] = Shard.of(own.features, (own.labels + 1) % 10, *tested)
    settings_ = {c: dpfl.ClientSettings(lr=500.0) for c in plain_.ids[:attackers]}
    return replace(plain_.with_budgets(budgets), shards=shards, client_settings=settings_)


def test_clients_that_blow_up_their_updates_ruin_the_mean_and_no_robust_aggregation() -> None:
    found = {}
    for name in ("fedavg_dp", "krum", "trimmed_mean", "median", "geometric_median"):
        strategy = getattr(dpfl, name)(**WORK, **plain(name, 2))
        model = make_model("logistic", (64,), 10, dpfl.PublicSeed(0))
        result = dpfl.train(model, poisoned(2), strategy, rounds=10, seed=0, evaluate_every=10)
        found[name] = result.accuracy
    assert found.pop("fedavg_dp") < 0.3
    assert min(found.values()) > 0.5, found


# ---- for any method, and where it is refused -----------------------------------------------------


def experiment(method: str, server: dict[str, Any], **more: Any) -> Experiment:
    return Experiment.from_dict(
        {
            "data": {"name": "digits"},
            "partition": {"clients": 9},
            "budgets": {"epsilon": 4.0, "delta": 1e-3},
            "method": {"name": method, **WORK, **more},
            "server": server,
            "run": {"rounds": 2},
        }
    )


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_the_section_gives_any_record_level_method_the_aggregation_of_that_name(name: str) -> None:
    given_ = plain(name, 2)
    built = experiment("weiavg", {"aggregation": name, "lr": 0.5, **given_}).strategy(9)
    same = getattr(dpfl, name)(**WORK, **given_)
    assert (built.clean, built.weights) == (same.clean, same.weights)
    assert built.step.lr.rate == 0.5  # type: ignore[attr-defined]
    assert "aggregation" in experiment("weiavg", {"aggregation": name}).to_dict()["server"]


@pytest.mark.parametrize(
    ("method", "server", "kind", "words"),
    [
        ("weiavg", {"aggregation": "krumm"}, ConfigurationError, "krum"),
        ("weiavg", {"aggregation": "median", "byzantine": 2}, ConfigurationError, "byzantine"),
        ("weiavg", {"byzantine": 2}, ConfigurationError, "byzantine"),
        ("weiavg", {"aggregation": "krum", "byzantine": -1}, ConfigurationError, "byzantine"),
        ("weiavg", {"aggregation": "krum", "selected": 0}, ConfigurationError, "selected"),
        ("pfa", {"aggregation": "median"}, ConfigurationError, "pfa"),
        ("dp_fed", {"aggregation": "median"}, PrivacyRefusal, "noise in a sum"),
        ("dp_fed", {"aggregation": "krum"}, PrivacyRefusal, "noise in a sum"),
        ("udp_fedavg", {"aggregation": "krum"}, PrivacyRefusal, "noise in a sum"),
    ],
)
def test_what_makes_no_sense_or_is_not_private_is_refused_by_name(
    method: str, server: dict[str, Any], kind: type[DpflError], words: str
) -> None:
    with pytest.raises(kind, match=words) as refused:
        experiment(method, server).check()
    assert refused.value.exit_code == (4 if kind is PrivacyRefusal else 2)


def test_where_clients_add_all_of_the_noise_rows_are_private_and_may_be_compared() -> None:
    built = experiment("udp_fedavg", {"aggregation": "median"}, noise="local").strategy(9)
    assert built.clean == Median()


def test_sums_have_no_rows() -> None:
    strategy = replace(dpfl.fedavg_dp(**WORK), channel=SecureSum())
    with pytest.raises(ConfigurationError, match="sum"):
        with_aggregation(strategy, "krum")
    air = dpfl.airsgd(lr=0.1, clip=1.0)
    with pytest.raises(DpflError, match="sum"):
        with_aggregation(air, "median")


def test_a_cohort_that_is_too_small_is_refused_before_the_first_round() -> None:
    federation = poisoned(0)
    model = make_model("logistic", (64,), 10, dpfl.PublicSeed(0))
    strategy = dpfl.krum(**WORK, byzantine=4)
    with pytest.raises(ConfigurationError, match="byzantine = 4 needs 11 clients"):
        dpfl.train(model, federation, strategy, rounds=1)
