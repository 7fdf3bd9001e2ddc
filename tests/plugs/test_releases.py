"""Releases before round one: bounded, noised as they are charged, within every budget, and public."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dpfl
from dpfl import testing
from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Adjacency, Budget, Claims, ClientSettings
from dpfl.data.records import Shard
from dpfl.plugs.base import Participant
from dpfl.plugs.release_costs import release_exposure, release_history, release_noise
from dpfl.plugs.releases import GramMatrix, Histogram, Mean, Quantile, Release
from dpfl.plugs.secure_sum import SecureSum
from dpfl.privacy.accountant import spend
from dpfl.rounds import enrol
from dpfl.rounds.members import Member
from dpfl.rounds.release import buffer_shapes, release_answer

BUDGET = Budget(epsilon=2.0, delta=1e-5)


class Centre(nn.Module):
    """Subtracts a public mean; a Gram matrix, a histogram and quantiles lie beside it."""

    mean: Tensor

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("gram", torch.zeros(inputs, inputs))
        self.register_buffer("histogram", torch.zeros(inputs, 5))
        self.register_buffer("quantiles", torch.zeros(inputs, 2))
        self.register_buffer("classes", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.mean


def network(inputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Centre(inputs), nn.Linear(inputs, 3))


RELEASES: dict[str, tuple[Release, tuple[int, ...]]] = {
    "mean": (Mean(into="0.mean", share=0.1), (4,)),
    "gram": (GramMatrix(into="0.gram", share=0.1), (4, 4)),
    "histogram": (Histogram(into="0.histogram", share=0.1, low=-1, high=1), (4, 5)),
    "classes": (Histogram(into="0.classes", share=0.1, of="labels"), (3,)),
    "quantiles": (
        Quantile(into="0.quantiles", share=0.1, low=-1, high=1, levels=(0.25, 0.75)),
        (4, 2),
    ),
}


@pytest.mark.parametrize("name", sorted(RELEASES))
def test_the_releases_that_ship_pass_the_laws(name: str) -> None:
    release, shape = RELEASES[name]
    testing.check_release(release, 4, shape)


def test_the_law_catches_a_release_that_mixes_records() -> None:
    class Mixed(Mean):
        def statistic(self, inputs: Tensor, labels: Tensor, shape: tuple[int, ...]) -> Tensor:
            return inputs - inputs.mean(dim=0)

    with pytest.raises(AssertionError, match="mixes"):
        testing.check_release(Mixed(into="0.mean", share=0.1), 4, (4,))


# ---- cost ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [((0.3, 10),), ((0.1, 5), (0.2, 1000)), ((0.5, 3), (0.49, 3))])
def test_shares_of_a_budget_add_up_to_it(shares: tuple[tuple[float, int], ...]) -> None:
    """Unsampled Gaussians compose exactly: the sum of 1 / z^2 is the sum of the shares of the whole."""
    noise = release_noise(shares, BUDGET, BUDGET.epsilon, 500)
    events = release_history(shares, noise, 500)
    whole = release_noise(((1.0, 5),), BUDGET, BUDGET.epsilon, 500)
    (one,) = release_history(((1.0, 5),), whole, 500)
    total = sum(event.noise_multiplier**-2 for event in events)
    wanted = sum(part for part, _ in shares) * one.noise_multiplier**-2
    assert total <= wanted * (1 + 1e-9)
    assert total >= wanted * 0.985  # the ladder of multipliers has steps of half a percent
    spent = spend(events, BUDGET.delta, adjacency=Adjacency.ZERO_OUT).epsilon
    assert spent <= BUDGET.epsilon


def member(records: Tensor, labels: Tensor | None = None) -> Member:
    known = torch.arange(len(records)) % 3 if labels is None else labels
    shard = Shard.of(records, known, records[:1], known[:1])
    claims = Claims(epsilon=BUDGET.epsilon, delta=BUDGET.delta, examples=len(records))
    return Member(id="a", shard=shard, budget=BUDGET, claims=claims)


def agreement_for(release: Release, inputs: int = 4) -> Any:
    strategy = replace(
        dpfl.fedavg_dp(lr=0.1, clip=1.0, batch_size=8, local_steps=1), releases=(release,)
    )
    claims = {"a": Claims(epsilon=BUDGET.epsilon, delta=BUDGET.delta, examples=50)}
    model = network(inputs)
    layout = dpfl.core.layout.Layout.of_module(model)
    return enrol(strategy, claims, 2, layout, buffer_shapes(model, (release,))), model


@pytest.mark.parametrize("bound", [1.0, 0.2])
def test_the_noise_is_what_is_charged_and_three_percent_less_would_be_seen(bound: float) -> None:
    release = GramMatrix(into="0.gram", share=0.2, bound=bound)
    agreement, model = agreement_for(release, inputs=32)
    one = member(torch.zeros(50, 32))
    (cost,) = agreement.plan(dpfl.Observer.SERVER, one.participant).of_releases
    (event,) = cost.events
    answers = torch.stack(
        [
            release_answer(agreement, -1, one, model, SecretRng.simulated(PublicSeed(i)))
            for i in range(80)
        ]
    )
    ratio = float(answers.double().std()) / bound / event.noise_multiplier
    assert 0.985 < ratio < 1.015  # 42,240 numbers: a standard error of 0.35 %


@pytest.mark.parametrize("name", sorted(RELEASES))
@pytest.mark.parametrize("odd", [1e30, float("nan"), float("inf"), 0.3])
def test_one_record_moves_an_answer_by_at_most_the_bound(name: str, odd: float) -> None:
    release, _ = RELEASES[name]
    agreement, model = agreement_for(release)
    records = torch.linspace(-1, 1, 200).reshape(50, 4)
    records[7] = odd
    seed = PublicSeed(3)
    noise = agreement.release_noise(-1, member(records).participant)

    def answer(rows: Tensor) -> Tensor:
        shard = replace(member(rows).shard)
        one = replace(member(records), shard=shard)
        return release_answer(agreement, -1, one, model, SecretRng.simulated(seed)).double()

    rest = torch.cat([records[:7], records[8:]])
    labels = torch.cat([torch.arange(7) % 3, (torch.arange(8, 50)) % 3])
    without = release_answer(
        agreement,
        -1,
        replace(member(records), shard=member(rest, labels).shard),
        model,
        SecretRng.simulated(seed),
    ).double()
    moved = float(torch.linalg.vector_norm(answer(records) - without))
    assert math.isfinite(moved)
    assert moved <= release.bound * (1 + 1e-4) + 1e-5 * noise


def test_the_exposure_counts_grid_and_summation() -> None:
    exact = release_exposure(3.0, 0, 1)
    assert exact.noise / exact.bound == pytest.approx(3.0)
    assert release_exposure(3.0, 10_000, 1000).bound > 1.0
    assert release_exposure(3.0, 0, 10**6).bound > 1 + 1e-4


# ---- whole runs ----------------------------------------------------------------------------------


def federation() -> dpfl.Federation:
    rng = np.random.default_rng(0)
    centre = np.array([0.5, 0.2, 0.0, -0.3])
    clients = {
        f"s{i}": (
            rng.normal(size=(300 + 50 * i, 4)) * 0.1 + centre,
            rng.integers(0, 3, 300 + 50 * i),
        )
        for i in range(4)
    }
    budgets = {
        c: dpfl.Budget(epsilon=e, delta=1e-5) for c, e in zip(clients, (1, 2, 4, 8), strict=True)
    }
    return dpfl.Federation.from_arrays(clients, budgets=budgets)


def strategy(*releases: Release) -> dpfl.Strategy:
    base = dpfl.weiavg(lr=0.05, clip=1.0, batch_size=64, local_epochs=1)
    made: dpfl.Strategy = replace(base, releases=releases)
    return made


@pytest.mark.parametrize("rule", ["allotments", "renyi"])
def test_releases_and_rounds_together_stay_within_every_budget_and_use_it(
    rule: Any, tmp_path: Any
) -> None:
    result = dpfl.train(
        network(),
        federation(),
        strategy(RELEASES["mean"][0], RELEASES["gram"][0]),
        rounds=3,
        seed=1,
        ledger=tmp_path / "ledger.sqlite",
        new_ledger=True,
        filter=rule,
    )
    for line in result.spent.values():
        assert line.budget is not None
        assert 0.97 * line.budget <= line.epsilon <= line.budget
    assert [record.round for record in result.history] == [-2, -1, 0, 1, 2]
    assert all(record.scores is None for record in result.history[:2])
    centre = result.model.get_buffer("0.mean")
    assert torch.allclose(centre, torch.tensor([0.5, 0.2, 0.0, -0.3]), atol=0.05)
    gram = result.model.get_buffer("0.gram")
    assert torch.allclose(gram, gram.T)
    assert float(gram[0, 0]) == pytest.approx(0.26, abs=0.05)


def test_a_release_costs_the_rounds_some_noise() -> None:
    plain, with_release = (
        enrol(
            one,
            {"a": Claims(epsilon=2.0, delta=1e-5, examples=300)},
            5,
            dpfl.core.layout.Layout.of_module(network()),
            buffer_shapes(network(), one.releases),
        )
        for one in (strategy(), strategy(RELEASES["mean"][0]))
    )
    who = Participant(examples=300, client_settings=ClientSettings(), budget=BUDGET)
    (before,), (after,) = plain.phases(who), with_release.phases(who)
    assert after.noise_multiplier > before.noise_multiplier


def test_histogram_and_quantiles_find_what_was_planted() -> None:
    rng = np.random.default_rng(1)
    x = rng.uniform(-1, 1, size=(4000, 4))
    y = (rng.random(4000) < 0.2).astype(int) * 2
    fed = dpfl.Federation.from_arrays(
        {"a": (x, y)}, classes=3, budgets={"a": dpfl.Budget(epsilon=8.0, delta=1e-5)}
    )
    releases = (RELEASES["histogram"][0], RELEASES["quantiles"][0], RELEASES["classes"][0])
    model = dpfl.train(network(), fed, strategy(*releases), rounds=1, seed=1).model
    assert torch.allclose(model.get_buffer("0.histogram"), torch.full((4, 5), 0.2), atol=0.05)
    quantiles = model.get_buffer("0.quantiles")
    assert torch.allclose(quantiles, torch.tensor([-0.5, 0.5]).expand(4, 2), atol=0.1)
    assert float(model.get_buffer("0.classes")[2]) == pytest.approx(0.2, abs=0.05)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"0\.nothing"):
        dpfl.train(
            network(), federation(), strategy(Mean(into="0.nothing", share=0.1)), rounds=1, seed=1
        )
    with pytest.raises(PrivacyRefusal, match="nothing for the rounds"):
        strategy(Mean(into="0.mean", share=0.6), GramMatrix(into="0.gram", share=0.5))
    for share in (0.0, -0.1, 1.5, float("nan")):
        with pytest.raises(ConfigurationError):
            Mean(into="0.mean", share=share)
    client_level = dpfl.udp_fedavg(lr=0.1, clip=1.0, batch_size=8, local_steps=1)
    with pytest.raises(PrivacyRefusal, match="records"):
        replace(client_level, releases=(RELEASES["mean"][0],))
    with pytest.raises((PrivacyRefusal, ConfigurationError)):
        replace(strategy(RELEASES["mean"][0]), channel=SecureSum())


# ---- the support of what is released -------------------------------------------------------------


def sixteen_inputs() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Centre(16), nn.Linear(16, 8, bias=False))


def test_nothing_is_released_but_noisy_integers() -> None:
    releases = [replace(one, share=0.05) for one, _ in RELEASES.values()]
    releases = [one for one in releases if one.into != "0.classes"]
    testing.check_releases(strategy(*releases), model=sixteen_inputs())


def test_the_law_catches_releases_with_noise_in_floating_point() -> None:
    with testing.float_noise(), pytest.raises(AssertionError):
        testing.check_releases(strategy(RELEASES["mean"][0]), model=sixteen_inputs())


class _Remembers(nn.Module):
    """Adds up its inputs in a buffer, in evaluation mode as well."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.sum(dim=0)
        return x - self.mean


def test_an_answer_leaves_no_record_in_a_buffer_of_the_model() -> None:
    model = nn.Sequential(_Remembers(), _Remembers(), nn.Linear(4, 3))
    release = Mean(into="1.mean", share=0.2)
    agreement, _ = agreement_for(RELEASES["mean"][0])
    shapes, layout = buffer_shapes(model, (release,)), dpfl.core.layout.Layout.of_module(model)
    strategy = replace(agreement.strategy, releases=(release,))
    agreement = enrol(strategy, dict(agreement.claims), 2, layout, shapes)
    one, rng = member(torch.ones(50, 4)), SecretRng.simulated(PublicSeed(0))
    release_answer(agreement, -1, one, model, rng)
    assert torch.equal(model[0].seen, torch.zeros(4))
