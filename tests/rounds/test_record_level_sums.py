"""Record-level methods over a secure sum: noise in the sum, releases, measurements, what is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.by_hand import play_clients
from torch import Tensor, nn

import dpfl
from dpfl.core.errors import PeerError, PrivacyRefusal
from dpfl.core.grid_noise import SCALE
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.core.types import Observer
from dpfl.deploy.messages import read_header, terms_from_dict, terms_to_dict, write_header
from dpfl.engine import make_engine
from dpfl.plugs.releases import GramMatrix, Histogram, Mean, Quantile, Release
from dpfl.plugs.secure_sum import SecureSum
from dpfl.privacy.accountant import spend
from dpfl.privacy.ledger import Ledger
from dpfl.rounds import (
    Plan,
    Run,
    SumOfUploads,
    Uplink,
    buffer_shapes,
    close_round,
    enrol,
    first_state,
    open_round,
)
from dpfl.rounds.codec import decode_integers
from dpfl.rounds.members import honest_members
from dpfl.strategy import Strategy, with_secure_sum

WORK = {"lr": 0.5, "batch_size": 10, "local_steps": 1, "clip": 1.0}
RELEASES: tuple[Release, ...] = (
    Mean(into="0.mean", share=0.1),
    GramMatrix(into="0.gram", share=0.1),
    Histogram(into="0.histogram", share=0.1, low=-1, high=1),
    Quantile(into="0.quantiles", share=0.1, low=-1, high=1, levels=(0.25, 0.75)),
)


class Statistics(nn.Module):
    """Buffers for releases, beside a model that does not use them."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        shapes = {"mean": (), "gram": (inputs,), "histogram": (5,), "quantiles": (2,)}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(inputs, *shape))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Federation:
    """Clients whose records are zero, unless they are given: what they send is noise."""

    def __init__(
        self,
        strategy: Strategy,
        *,
        clients: int = 6,
        inputs: int = 4,
        epsilons: Sequence[float] = (2.0,),
        records: np.ndarray | None = None,
        rounds: int = 4,
    ) -> None:
        x = np.zeros((40, inputs), np.float32) if records is None else records
        names = [f"c{i:02d}" for i in range(clients)]
        budgets = {
            name: dpfl.Budget(epsilon=epsilons[i % len(epsilons)], delta=1e-5)
            for i, name in enumerate(names)
        }
        arrays = {name: (x, np.arange(len(x)) % 3) for name in names}
        self.federation = dpfl.Federation.from_arrays(arrays, budgets=budgets, classes=3)
        self.members = honest_members(self.federation)
        self.records = self.members["c00"].shard.examples
        torch.manual_seed(0)
        self.model = nn.Sequential(Statistics(inputs), nn.Linear(inputs, 3, bias=False))
        self.layout = Layout.of_module(self.model)
        claims = {client: own.claims for client, own in self.members.items()}
        shapes = buffer_shapes(self.model, strategy.releases)
        self.agreement = enrol(strategy, claims, rounds, self.layout, shapes)
        ledger = Ledger.create(":memory:", "test")
        ledger.register("run", seeded=True, title="test")
        ledger.set_budgets(
            {c: own.budget for c, own in self.members.items() if own.budget},
            unit=strategy.unit,
            observer=strategy.observer,
        )
        self.run = Run(name="run", ledger=ledger, seed=PublicSeed(3), public=PublicSeed(5))
        self.state = first_state(self.agreement, self.layout.read(self.model))

    def played(self, engine: str = "stacked") -> tuple[Plan, list[Uplink]]:
        plan = open_round(self.agreement, self.state, self.run, lambda client: True)
        members = {client: self.members[client] for client in plan.cohort.ids}
        asked = self.agreement, self.run, plan, members, make_engine(engine), self.model
        return plan, play_clients(*asked)

    def integers(self, uplinks: Sequence[Uplink]) -> dict[str, np.ndarray]:
        return {
            one.client: decode_integers(
                one.payload or b"", None, "run", self.state.round, one.client
            )
            for one in uplinks
        }

    def close(self, plan: Plan, uplinks: Sequence[Uplink], total: SumOfUploads | None = None):  # type: ignore[no-untyped-def]
        return close_round(self.agreement, self.state, plan, uplinks, self.run, total=total)


def over(strategy: Strategy) -> Strategy:
    return with_secure_sum(strategy, tolerated_dropouts=1, colluders=1)


def has_std(values: np.ndarray, std: float) -> bool:
    """Whether numbers may have this standard deviation, to five standard errors."""
    return abs(float(values.std()) / std - 1) < 5 / math.sqrt(2 * values.size)


def test_any_honest_shares_carry_the_noise_that_is_charged() -> None:
    """Of 6 clients 1 may drop out and 1 may collude: 4 shares carry all of it, 3 or 5 do not."""
    fed = Federation(over(dpfl.weiavg(**WORK)), inputs=2000, epsilons=(1.0, 4.0))
    _, uplinks = fed.played()
    sent, terms = fed.integers(uplinks), fed.agreement.terms
    sigma = (terms.noise_multiplier or 0.0) * 1.0
    step = fed.agreement.sum_plan(0, 6).step
    sums = {h: step * sum(list(sent.values())[1 : 1 + h]) for h in (3, 4, 5)}
    assert has_std(sums[4], sigma)
    assert not has_std(sums[3], sigma)
    assert not has_std(sums[5], sigma)
    # What is charged is that noise over the client's own bound, w lr clip / b.
    for client, weight in terms.weights:
        (event,) = fed.agreement.cost(Observer.SERVER, fed.members[client].participant).events
        bound = weight * 0.5 * 1.0 / 10
        assert 0.99 * sigma / bound < event.noise_multiplier <= sigma / bound
        assert event.sampling_rate == 10 / fed.records


@pytest.mark.parametrize("steps", [1, 3])
def test_a_sum_of_integers_is_what_is_decoded(steps: int) -> None:
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    fed = Federation(over(dpfl.dpfedavg(**{**WORK, "local_steps": steps})), records=x)
    plan, uplinks = fed.played()
    sent = fed.integers(uplinks)
    for dropped in ((), ("c03",)):
        here = [one for one in uplinks if one.client not in dropped]
        ids = tuple(one.client for one in here)
        total = SumOfUploads(integers=sum(sent[client] for client in ids), ids=ids)
        added, told = fed.close(plan, here)
        summed, _ = fed.close(plan, (), total)
        assert told.published
        assert torch.equal(added.model, summed.model)
        moved = torch.from_numpy(total.integers * fed.agreement.sum_plan(0, 6).step).float()
        assert torch.equal(added.model, fed.state.model + moved)
        assert told.weights == pytest.approx(dict.fromkeys(ids, 1 / 6))
    left, told = fed.close(plan, uplinks[:4])
    assert not told.published
    assert torch.equal(left.model, fed.state.model)


def test_engines_give_the_same_round() -> None:
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    fed = Federation(over(dpfl.weiavg(**WORK)), records=x)
    fast, slow = (fed.integers(fed.played(engine)[1]) for engine in ("stacked", "one_by_one"))
    for client, own in fast.items():
        assert np.linalg.norm(own - slow[client]) < 1e-3 * SCALE


def test_several_steps_add_up_to_what_the_method_has_without_a_sum() -> None:
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    plain = dpfl.weiavg(**{**WORK, "local_steps": 3})
    models = []
    for strategy in (plain, over(plain)):
        fed = Federation(strategy, records=x, epsilons=(1.0, 4.0))
        models.append(fed.close(*fed.played())[0].model)
    assert torch.allclose(*models, atol=6 * 2.0**-24)


def test_the_mean_carries_the_noise_of_one_client_instead_of_everyones() -> None:
    """20 clients with equal budgets: sqrt(h) = sqrt(19) = 4.36 times less noise in the mean."""
    stds = []
    for strategy in (dpfl.fedavg_dp(**WORK), with_secure_sum(dpfl.fedavg_dp(**WORK))):
        fed = Federation(strategy, clients=20, inputs=2000)
        state, _ = fed.close(*fed.played())
        stds.append(float((state.model - fed.state.model).std()))
    assert stds[0] / stds[1] == pytest.approx(math.sqrt(19), rel=0.05)


def test_a_cohort_of_some_is_scaled_up() -> None:
    strategy = over(dpfl.fedavg_dp(**WORK, selection=dpfl.FixedCohort(size=6)))
    fed = Federation(strategy, clients=12)
    plan, uplinks = fed.played()
    total = sum(fed.integers(uplinks).values()) * fed.agreement.sum_plan(0, 6).step
    state, record = fed.close(plan, uplinks)
    moved = (state.model - fed.state.model).double()
    assert torch.allclose(moved, 2 * torch.from_numpy(total), atol=1e-6)
    assert record.weights == pytest.approx(dict.fromkeys(plan.cohort.ids, 1 / 6))


def test_who_cannot_afford_the_common_noise_takes_fewer_rounds() -> None:
    arrays = {f"c{i}": (np.zeros((40, 4), np.float32), np.arange(40) % 3) for i in range(6)}
    budgets = {name: dpfl.Budget(epsilon=2.0, delta=1e-5) for name in arrays}
    budgets["c5"] = dpfl.Budget(epsilon=1.0, delta=1e-5)
    fed = dpfl.Federation.from_arrays(arrays, budgets=budgets, classes=3)
    with pytest.warns(dpfl.NotPrivateWarning):
        result = dpfl.train(
            nn.Linear(4, 3),
            fed,
            over(dpfl.fedavg_dp(**WORK)),
            rounds=8,
            seed=0,
            misreports={"c5": 2.0},
        )
    sizes = [len(one.arrived) for one in result.history]
    assert sizes[0] == 6
    assert sizes[-1] == 5
    spent = {client: one.epsilon for client, one in result.spent.items()}
    assert spent["c5"] <= 1.0
    assert all(epsilon <= 2.0 for epsilon in spent.values())


# -- releases and measurements ---------------------------------------------------------------------


def test_releases_share_one_noise_on_one_grid() -> None:
    strategy = over(replace(dpfl.fedavg_dp(**WORK), releases=RELEASES[:1]))
    fed = Federation(strategy, inputs=2000, epsilons=(1.0, 4.0))
    plan, uplinks = fed.played()
    (noise,) = fed.agreement.terms.release_noise
    step = fed.agreement.sum_plan(-1, 6).step
    sent = list(fed.integers(uplinks).values())
    sums = {h: step * sum(sent[:h]) for h in (3, 4, 5)}
    assert has_std(sums[4], noise)
    assert not has_std(sums[3], noise)
    assert not has_std(sums[5], noise)
    # One level for all, that of the smallest budget's share, and one cost.
    costs = [
        fed.agreement.cost(Observer.SERVER, own.participant, -1) for own in fed.members.values()
    ]
    (event,) = costs[0].events
    assert {cost.events for cost in costs} == {(event,)}
    assert 0.98 * noise < event.noise_multiplier <= noise
    # The sum over all records that were claimed, exactly.
    state, record = fed.close(plan, uplinks)
    mean = torch.from_numpy(step * sum(sent) / (6 * fed.records)).float()
    assert torch.equal(state.buffers["0.mean"], mean)
    total = SumOfUploads(integers=sum(sent), ids=plan.cohort.ids)
    assert torch.equal(fed.close(plan, (), total)[0].buffers["0.mean"], mean)
    # Too few answers: nothing is written.
    state, record = fed.close(plan, uplinks[:4])
    assert not state.buffers
    assert not record.published
    assert state.round == 0


@pytest.mark.parametrize("steps", [1, 2])
def test_every_release_finds_what_there_is_and_leaves_the_rounds_their_budget(steps: int) -> None:
    x = np.random.default_rng(0).uniform(-0.2, 0.6, size=(300, 4)).astype(np.float32)
    work = {**WORK, "local_steps": steps}
    strategy = over(replace(dpfl.fedavg_dp(**work), releases=RELEASES))
    fed = Federation(strategy, epsilons=(4.0, 8.0), records=x)
    for _ in RELEASES:
        fed.state, record = fed.close(*fed.played())
        assert record.published
    buffers = {name.removeprefix("0."): own for name, own in fed.state.buffers.items()}
    assert torch.allclose(buffers["mean"], torch.tensor(x.mean(0)), atol=0.05)
    assert torch.allclose(buffers["gram"], torch.tensor(x.T @ x / 300), atol=0.05)
    assert torch.allclose(buffers["quantiles"].mean(0), torch.tensor([0.0, 0.4]), atol=0.1)
    assert torch.allclose(buffers["histogram"].sum(1), torch.ones(4))
    for client, own in fed.members.items():
        plan = fed.agreement.plan(Observer.SERVER, own.participant)
        cost = spend(plan.times(4), 1e-5, adjacency=plan.adjacency).epsilon
        assert own.budget is not None
        assert cost <= own.budget.epsilon, client


def test_wide_statistics_do_not_wrap() -> None:
    """16,000 records under little noise leave 32 bits."""
    strategy = over(replace(dpfl.fedavg_dp(**WORK), releases=(Mean(into="0.mean", share=0.9),)))
    x = np.full((20_000, 1), 0.9, np.float32)
    fed = Federation(strategy, inputs=1, epsilons=(10.0,), records=x, rounds=1)
    plan, uplinks = fed.played()
    assert min(abs(own).max() for own in fed.integers(uplinks).values()) > 2**33
    state, _ = fed.close(plan, uplinks)
    assert float(state.buffers["0.mean"][0]) == pytest.approx(0.9, abs=1e-3)


def test_a_metric_is_measured_over_shares() -> None:
    rng = np.random.default_rng(0)
    arrays = {}
    for i in range(8):
        x = rng.normal(size=(100, 4)).astype(np.float32)
        arrays[f"c{i}"] = (x, (x[:, 0] > 0).astype(int))
    budgets = {name: dpfl.Budget(epsilon=3.0, delta=1e-5) for name in arrays}
    fed = dpfl.Federation.from_arrays(arrays, budgets=budgets, classes=2)
    metric = dpfl.AccountedMetric(every=2, share=0.2)
    errors = []
    for strategy in (dpfl.fedavg_dp(**WORK), over(dpfl.fedavg_dp(**WORK))):
        with pytest.warns(dpfl.NotPrivateWarning):
            result = dpfl.train(nn.Linear(4, 2), fed, strategy, rounds=2, seed=0, accounted=metric)
        measured = result.history[-1].measured
        assert measured is not None
        assert all(one.epsilon <= 3.0 for one in result.spent.values())
        errors.append(measured.standard_error)
    assert errors[0] / errors[1] == pytest.approx(math.sqrt(6), rel=1e-3)
    # By itself, without a training run.
    sums = SecureSum(tolerated_dropouts=1)
    plain = dpfl.evaluate(nn.Linear(4, 2), fed, epsilon=1.0, seed=0)
    shared = dpfl.evaluate(nn.Linear(4, 2), fed, epsilon=1.0, seed=0, secure_sum=sums)
    assert plain.standard_error / shared.standard_error == pytest.approx(math.sqrt(6), rel=1e-3)
    assert shared.epsilon <= 1.0
    assert plain.epsilon == pytest.approx(shared.epsilon, rel=1e-3)
    assert not shared.by_client
    # Who needs the most noise decides for all: shares of different noise would be too small for it.
    mixed = {
        name: replace(own, delta=1e-3 if name > "c3" else 1e-5) for name, own in budgets.items()
    }
    other = replace(fed, budgets=mixed)
    common = dpfl.evaluate(nn.Linear(4, 2), other, epsilon=1.0, seed=0, secure_sum=sums)
    assert common.standard_error == pytest.approx(shared.standard_error)
    assert common.costs["c7"].epsilon < common.costs["c0"].epsilon <= 1.0
    with pytest.raises(PrivacyRefusal, match="nobody is left"):
        dpfl.evaluate(nn.Linear(4, 2), fed, epsilon=1.0, seed=0, secure_sum=SecureSum(colluders=8))


def test_noise_of_a_measurement_is_that_of_the_shares_that_are_counted_on() -> None:
    """A histogram of 10,000 empty bins is noise alone."""
    arrays = {f"c{i}": (np.zeros((30, 2), np.float32), np.zeros(30, int)) for i in range(6)}
    fed = dpfl.Federation.from_arrays(arrays, classes=2)
    found = []

    class Noise(dpfl.plugs.measures.BinnedAuc):
        def estimate(self, total: Tensor, variance: float, records: int):  # type: ignore[no-untyped-def]
            found.append((total.numpy(), variance))
            return super().estimate(total, variance, records)

    dpfl.evaluate(
        nn.Linear(2, 2),
        fed,
        metric=Noise(bins=5000),
        noise_multiplier=2.0,
        delta=1e-5,
        seed=0,
        secure_sum=SecureSum(tolerated_dropouts=1),
    )
    total, variance = found[0]
    quiet = total[abs(total) < 30]  # without the bins that hold records
    assert has_std(quiet, 2.0 * math.sqrt(6 / 4))
    assert not has_std(quiet, 2.0 * math.sqrt(6 / 5))
    assert variance == pytest.approx(4.0 * 6 / 4)


# -- what travels ----------------------------------------------------------------------------------


def test_terms_travel_with_weights_and_noise() -> None:
    strategy = over(replace(dpfl.weiavg(**WORK), releases=RELEASES[:2]))
    terms = Federation(strategy, epsilons=(1.0, 4.0)).agreement.terms
    assert terms.weights
    assert terms.release_noise
    said = read_header(write_header(terms_to_dict(terms)))
    assert terms_from_dict(said) == terms
    for name, bad in (("weights", [[1, 0.5]]), ("weights", [["a", "much"]]), ("weights", 3)):
        with pytest.raises(PeerError):
            terms_from_dict({**said, name: bad})
