"""local_only and pooled_dp: whose records are in which model, and what it costs whom."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from torch import Tensor, nn

import dpfl
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.phases import Phase
from dpfl.core.types import Claims, Observer, Terms
from dpfl.data.partition import Partition
from dpfl.data.records import Shard
from dpfl.datasets.named import load_dataset
from dpfl.models import make_model
from dpfl.plugs.base import Participant
from dpfl.plugs.pooled import PooledDpSgd
from dpfl.plugs.sampling import PoissonBatches, RatedBatches, sampler
from dpfl.privacy.calibrate import LADDER, calibrate, largest_rate
from dpfl.privacy.flags import Flag
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.statement import statement
from dpfl.runs.experiment import Experiment
from dpfl.sim.loop import Simulation
from dpfl.sim.train import run_experiment

WORK: dict[str, Any] = {"lr": 0.5, "clip": 1.0, "batch_size": 16, "local_steps": 5}
ROUNDS, DELTA = 4, 1e-3
EPSILONS = [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]


def digits(epsilons: Any = EPSILONS, clients: int = 6, seed: int = 0) -> dpfl.Federation:
    root = dpfl.PublicSeed(seed)
    found = dpfl.Federation.from_dataset(load_dataset("digits"), Partition(), clients, root)
    return found.with_budgets(dpfl.make_budgets(epsilons, DELTA, found.ids, root.child("budgets")))


def logistic() -> nn.Module:
    return make_model("logistic", (64,), 10, dpfl.PublicSeed(0))


def played(strategy: dpfl.Strategy, federation: dpfl.Federation, **more: Any) -> Simulation:
    """A whole seeded simulation, with the models that stay at clients."""
    ledger = Ledger.create(":memory:", "memory")
    ledger.register("run", seeded=True, title=strategy.name)
    from dpfl.rounds import Run

    seed = dpfl.PublicSeed(0)
    run = Run(name="run", ledger=ledger, seed=seed.child("secret"), public=seed.child("run"))
    simulation = Simulation(
        model=logistic(), federation=federation, strategy=strategy, rounds=ROUNDS, run=run, **more
    )
    simulation.play()
    return simulation


def experiment(method: str, **run: Any) -> Experiment:
    return Experiment.from_dict(
        {
            "data": {"name": "digits"},
            "partition": {"clients": 6},
            "budgets": {"epsilon": EPSILONS, "delta": DELTA},
            "method": {"name": method, **WORK},
            "run": {"rounds": ROUNDS, **run},
        }
    )


# ---- local_only ----------------------------------------------------------------------------------


def changed(federation: dpfl.Federation, client: str) -> dpfl.Federation:
    own = federation.shards[client]
    other = Shard.of(1 - own.features, own.labels.flip(0), own.test_features, own.test_labels)
    return replace(federation, shards={**federation.shards, client: other})


@pytest.mark.parametrize("engine", ["stacked", "one_by_one"])
def test_a_client_alone_is_the_client_in_the_federation(engine: str) -> None:
    federation = digits()
    client = federation.ids[2]
    together = played(dpfl.local_only(**WORK), federation, engine=engine)
    alone = replace(
        federation,
        shards={client: federation.shards[client]},
        budgets={client: federation.budgets[client]},
    )
    single = played(dpfl.local_only(**WORK), alone, engine=engine)
    assert torch.allclose(together.private[client], single.private[client], atol=1e-6)
    # FedAvg over one client is that client's DP-SGD as well.
    averaged = played(dpfl.fedavg_dp(**WORK), alone, engine=engine)
    assert torch.allclose(single.private[client], averaged.state.model, atol=1e-5)
    assert single.run.ledger.charged("run") == averaged.run.ledger.charged("run")


def test_nobodys_records_are_in_anybody_elses_model_nor_in_any_message() -> None:
    federation = digits()
    victim = federation.ids[0]
    before = played(dpfl.local_only(**WORK), federation)
    after = played(dpfl.local_only(**WORK), changed(federation, victim))
    for client in federation.ids:
        same = torch.equal(before.private[client], after.private[client])
        assert same == (client != victim)
    start = before.layout.read(logistic())
    for simulation in (before, after):
        assert torch.equal(simulation.state.model, start)  # nothing was ever sent
        assert {line.payload_bytes_up for line in simulation.history} == {0}
    assert not torch.equal(before.private[victim], start)
    # In a federation the others' models do change: the check above can fail.
    shared = [
        played(dpfl.fedavg_dp(**WORK), one) for one in (federation, changed(federation, victim))
    ]
    assert not torch.equal(shared[0].state.model, shared[1].state.model)


def test_local_only_costs_what_dp_sgd_costs_and_is_tested_at_home() -> None:
    federation = digits()
    local = dpfl.train(logistic(), federation, dpfl.local_only(**WORK), rounds=ROUNDS)
    common = dpfl.train(logistic(), federation, dpfl.fedavg_dp(**WORK), rounds=ROUNDS)
    assert {c: s.epsilon for c, s in local.spent.items()} == {
        c: s.epsilon for c, s in common.spent.items()
    }
    assert str(local.summary.tested) != str(common.summary.tested)
    assert local.summary.promise == common.summary.promise
    assert Flag.ALONE in {raised.flag for raised in local.summary.flags}


# ---- pooled_dp: accounting -----------------------------------------------------------------------


def events_of(simulation: Simulation, client: str, observer: Observer) -> Any:
    participant = simulation.members[client].participant
    (event,) = simulation.agreement.cost(observer, participant).events
    return event


def test_every_client_meets_its_own_budget_at_one_noise_level() -> None:
    simulation = played(dpfl.pooled_dp(**WORK), digits())
    noises, expected = set(), 0.0
    for client, member in simulation.members.items():
        assert member.budget is not None
        event = events_of(simulation, client, Observer.WORLD)
        noises.add(event.noise_multiplier)
        expected += member.shard.examples * event.sampling_rate
        line = statement(simulation.run.ledger, client, Observer.WORLD)
        assert line is not None
        assert 0.97 * member.budget.epsilon < line.epsilon <= member.budget.epsilon
        # The curator itself has the records.
        server = statement(simulation.run.ledger, client, Observer.SERVER)
        assert server is not None
        assert server.epsilon == float("inf")
        # dp-accounting's own PLD of this rate and these steps; it takes its time.
        if client not in simulation.federation.ids[::4]:
            continue
        theirs = dp_accounting.pld.PLDAccountant(
            dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
        )
        gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier)
        sampled = dp_accounting.PoissonSampledDpEvent(event.sampling_rate, gaussian)
        theirs.compose(sampled, event.steps * ROUNDS)
        assert line.epsilon == pytest.approx(theirs.get_epsilon(DELTA), rel=5e-3)
    assert len(noises) == 1
    assert 0.98 * 16 * 6 <= expected <= 1.01 * 16 * 6 + 1
    assert simulation.agreement.terms.batch - 1 < expected <= simulation.agreement.terms.batch


def test_charges_are_made_before_the_round_and_for_each_client_alone() -> None:
    simulation = played(dpfl.pooled_dp(**WORK), digits())
    charged = simulation.run.ledger.charged("run")
    assert charged == {(round_, c) for round_ in range(ROUNDS) for c in simulation.members}
    rates = {c: events_of(simulation, c, Observer.WORLD).sampling_rate for c in simulation.members}
    ordered = sorted(simulation.members, key=lambda c: simulation.members[c].budget.epsilon)  # type: ignore[union-attr]
    assert [rates[c] for c in ordered] == sorted(rates.values())
    assert rates[ordered[-1]] > 4 * rates[ordered[0]]


def test_with_equal_budgets_it_is_plain_dp_sgd_on_the_pooled_records() -> None:
    federation = digits(2.0)
    records = sum(shard.examples for shard in federation.shards.values())
    simulation = played(dpfl.pooled_dp(**WORK), federation)
    event = events_of(simulation, federation.ids[0], Observer.WORLD)
    plain = calibrate(2.0, DELTA, 16 * 6 / records, 5 * ROUNDS, numbers=650)
    assert event.sampling_rate == pytest.approx(16 * 6 / records, rel=0.02)
    assert event.noise_multiplier == pytest.approx(plain, rel=2 * (LADDER - 1))


def test_full_batches_of_the_pool_are_full_batches_of_all_records() -> None:
    """A pool whose every record is in every step moves as one client with all records does."""
    federation = digits(4.0, clients=2)
    shards = list(federation.shards.values())
    features = torch.cat([shard.features for shard in shards])
    labels = torch.cat([shard.labels for shard in shards])
    pool = dpfl.Federation.from_arrays(
        {"pool": (features, labels, features[:10], labels[:10])},
        classes=10,
        budgets={"pool": dpfl.Budget(epsilon=4.0, delta=DELTA)},
    )
    work = {**WORK, "batch_size": len(labels), "local_steps": 2}
    both = [played(dpfl.pooled_dp(**work), federation), played(dpfl.fedavg_dp(**work), pool)]
    start = both[0].layout.read(logistic())
    moved = [one.state.model - start for one in both]
    # Full batches leave no chance but the noise, which is small beside the sum of all gradients.
    assert float((moved[0] - moved[1]).norm() / moved[1].norm()) < 0.2


def test_misreporting_never_changes_what_is_charged_beyond_the_budget() -> None:
    federation = digits()
    liar = federation.ids[0]
    found = dpfl.train(
        logistic(), federation, dpfl.pooled_dp(**WORK), rounds=ROUNDS, misreports={liar: 8.0}
    )
    for line in found.spent.values():
        assert line.budget is not None
        assert line.epsilon <= line.budget


def test_a_client_whose_budget_is_used_up_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    """Two runs on one ledger: the first uses up one client's budget only."""
    path, federation = tmp_path / "ledger.sqlite", digits()
    first = federation.ids[0]
    alone = replace(
        federation,
        shards={first: federation.shards[first]},
        budgets={first: federation.budgets[first]},
    )
    work = {**WORK, "batch_size": 4}
    kept: dict[str, Any] = {"rounds": 2, "ledger": path, "filter": "allotments"}
    dpfl.train(logistic(), alone, dpfl.pooled_dp(**work), new_ledger=True, **kept)
    second = dpfl.train(logistic(), federation, dpfl.pooled_dp(**work), **kept)
    assert second.summary.clients_left == (first,)
    assert all(first not in line.arrived for line in second.history)
    assert {len(line.arrived) for line in second.history} == {5}
    assert all(line.epsilon <= (line.budget or 0) for line in second.spent.values())


# ---- pooled_dp: sampling -------------------------------------------------------------------------


def test_records_join_with_their_owners_rate_and_parts_cover_every_batch() -> None:
    rates = ((50, 0.02), (30, 0.3), (1, 1.0))
    batches = RatedBatches(81, 11, rates)
    rng = dpfl.SecretRng.simulated(dpfl.PublicSeed(3))
    draw, steps = batches.draw(rng, 4000), 4000
    counts = torch.bincount(draw.records, minlength=81).double() / steps
    first = 0
    for count, rate in rates:
        own = counts[first : first + count]
        spread = (rate * (1 - rate) / steps / count) ** 0.5
        assert float(own.mean()) == pytest.approx(rate, abs=5 * spread + 1e-12)
        first += count
    assert int(draw.sizes.sum()) == len(draw.records)
    assert all(len(set(step.tolist())) == len(step) for step in list(draw)[:200])
    assert batches.parts * 16 >= int(draw.sizes.max())
    assert batches.expected_size == 11
    assert batches.rate == 1.0


def test_one_rate_for_all_is_a_poisson_batch_and_its_tail_is_covered() -> None:
    for examples, size in ((1000, 16), (200, 64), (5000, 300)):
        rated = RatedBatches(examples, size, ((examples, size / examples),))
        plain = PoissonBatches(examples, size)
        assert rated.rate == plain.rate
        assert plain.parts <= rated.parts <= plain.parts + 2


def test_more_records_than_were_planned_are_refused() -> None:
    phase = Phase(steps=1, batch_size=4, sampling="poisson", lr=0.1, rates=((10, 0.5),))
    with pytest.raises(PrivacyRefusal, match="5 records a step"):
        sampler(phase, 10)


@pytest.mark.parametrize("accountant", [None, "renyi"])
def test_the_largest_rate_is_the_largest(accountant: Any) -> None:
    from dpfl.privacy import epsilon

    for target, noise in ((0.5, 1.2), (3.0, 0.8), (8.0, 2.0)):
        rate = largest_rate(target, 1e-4, noise, 100, accountant=accountant)
        assert epsilon(noise, rate, 100, 1e-4, accountant=accountant) <= target
        more = min(1.0, rate * LADDER)
        assert rate == 1 or epsilon(noise, more, 100, 1e-4, accountant=accountant) > target
    assert largest_rate(50.0, 1e-4, 5.0, 2) == 1.0


def test_twenty_budgets_are_planned_with_few_evaluations() -> None:
    """Clients share the points of the curve: counted, since seconds depend on the machine."""
    from dpfl.privacy import accountant

    claims = {
        f"c{i}": Claims(epsilon=0.37 + 0.41 * i, delta=1e-3, examples=40 + 3 * i) for i in range(20)
    }
    terms = Terms(
        rounds=31,
        population=20,
        expected_cohort=20,
        participations=31,
        smallest_epsilon=0.37,
        largest_epsilon=9.0,
        parameters=650,
    )
    settings = dpfl.ClientSettings(lr=0.5, batch_size=16, local_steps=5)
    work, before = (
        PooledDpSgd(client_settings=settings, clip=1.0),
        accountant._with_sampler.cache_info(),
    )
    terms = work.resolve_terms(terms, claims)
    asked = accountant._with_sampler.cache_info().misses - before.misses
    assert 20 <= asked < 250
    budget = dpfl.Budget(epsilon=claims["c3"].epsilon, delta=1e-3)
    own = Participant(examples=49, client_settings=dpfl.ClientSettings(), budget=budget)
    (phase,) = work.phases(terms, own)
    assert 0 < phase.rates[0][1] < 1


# ---- in experiments ------------------------------------------------------------------------------


def test_what_the_three_reach_is_in_the_order_it_must_be() -> None:
    """Alone, together, pooled: nine tenths of the clients have next to no budget."""
    federation, reached = digits("mixgauss1", clients=20), {}
    for name in ("local_only", "fedavg_dp", "weiavg", "robust_hdp", "pooled_dp"):
        strategy = getattr(dpfl, name)(**WORK | {"local_steps": 10})
        result = dpfl.train(logistic(), federation, strategy, rounds=20, evaluate_every=20)
        reached[name] = result.accuracy
    best = max(reached[name] for name in ("fedavg_dp", "weiavg", "robust_hdp"))
    assert reached["pooled_dp"] > best > reached["local_only"], reached


@pytest.mark.parametrize("name", ["local_only", "pooled_dp"])
def test_resumed_runs_and_several_workers_give_the_same_bits(name: str, tmp_path: Path) -> None:
    from dpfl.sim.train import run_until

    def kept(folder: str) -> tuple[Any, ...]:
        place = tmp_path / folder
        rounds = [json.loads(line) for line in (place / "rounds.jsonl").read_text().splitlines()]
        summary = json.loads((place / "summary.json").read_text())
        return rounds, summary["accuracy"], (place / "model.safetensors").read_bytes()

    run_experiment(experiment(name), tmp_path / "whole")
    run_until(experiment(name), tmp_path / "halted", 2)
    run_experiment(experiment(name), tmp_path / "halted", resume=True)
    assert kept("halted") == kept("whole")
    run_experiment(experiment(name), tmp_path / "two", workers=2)
    assert kept("two") == kept("whole")


def test_flags_say_what_is_trusted_wherever_a_result_goes(tmp_path: Path) -> None:
    from safetensors import safe_open

    result = run_experiment(experiment("pooled_dp"), tmp_path / "run")
    assert Flag.CURATOR in {raised.flag for raised in result.summary.flags}
    with safe_open(tmp_path / "run" / "model.safetensors", "pt") as file:
        assert "TRUSTED CURATOR" in str(file.metadata())
    assert "curator" in Flag.CURATOR.about.lower()
    assert result.summary.promise.observer is Observer.WORLD


def test_a_pool_that_promises_more_than_it_keeps_is_refused() -> None:
    pooled = dpfl.pooled_dp(**WORK)
    with pytest.raises(PrivacyRefusal, match="as they are"):
        replace(pooled, observer=Observer.SERVER)
    against = {c: replace(b, observer=Observer.SERVER) for c, b in digits().budgets.items()}
    with pytest.raises(dpfl.DpflError, match="against the server"):
        dpfl.train(logistic(), digits().with_budgets(against), pooled, rounds=1)


def vector(result: dpfl.Result) -> Tensor:
    return torch.cat([p.detach().flatten() for p in result.model.parameters()])


def test_a_cohort_is_not_drawn_from_a_pool_and_epochs_are_those_of_a_client() -> None:
    drawn = {**WORK, "selection": dpfl.FixedCohort(size=2)}
    federation = digits(clients=6)
    one, other = (
        dpfl.train(logistic(), federation, dpfl.pooled_dp(**work), rounds=2)
        for work in (WORK, drawn)
    )
    assert torch.equal(vector(one), vector(other))
    epochs = {name: value for name, value in WORK.items() if name != "local_steps"}
    simulation = played(dpfl.pooled_dp(**epochs, local_epochs=1), federation)
    mean = sum(shard.examples for shard in federation.shards.values()) / 6
    assert events_of(simulation, federation.ids[0], Observer.WORLD).steps == -(-mean // 16)


def test_the_pool_samples_every_clients_records_with_the_rate_it_is_charged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Labels stand for their owners here: what is sampled is what was charged, client by client."""
    from dpfl.engine.stacked import Stacked

    seen: list[Any] = []
    original = Stacked.run

    def watched(self: Stacked, model: Any, layout: Any, jobs: Any) -> list[Tensor]:
        seen.extend(jobs)
        return original(self, model, layout, jobs)

    monkeypatch.setattr(Stacked, "run", watched)
    federation = digits()
    shards = {
        client: Shard.of(
            own.features, torch.full_like(own.labels, i), own.test_features, own.test_labels
        )
        for i, (client, own) in enumerate(federation.shards.items())
    }
    simulation = played(dpfl.pooled_dp(**WORK), replace(federation, shards=shards))
    assert len(seen) == ROUNDS  # one job a round, whoever has records in it
    for job in seen:
        (phase,) = job.phases
        owners = torch.split(job.labels, [count for count, _ in phase.rates])
        for i, (own, (_, rate)) in enumerate(zip(owners, phase.rates, strict=True)):
            client = federation.ids[i]
            assert bool((own == i).all())
            assert len(own) == shards[client].examples
            assert rate == events_of(simulation, client, Observer.WORLD).sampling_rate


def test_a_pool_has_no_accounted_metric() -> None:
    """Its rates use up the whole budgets, and leave nothing for a metric."""
    with pytest.raises(PrivacyRefusal, match="accounted metric"):
        dpfl.pooled_dp(**WORK).check_measured(0.1)
    dpfl.fedavg_dp(**WORK).check_measured(0.1)
