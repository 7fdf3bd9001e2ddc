"""One local step over a secure sum: integers with a bounded sensitivity, on one grid."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import dpfl
from dpfl import testing
from dpfl.core.errors import ConfigurationError, PeerError, PrivacyRefusal
from dpfl.core.grid import LARGEST_SUM, Grid
from dpfl.core.grid_noise import LARGEST, SCALE
from dpfl.core.layout import Layout
from dpfl.core.phases import Phase
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Claims, ClientSettings, Who
from dpfl.engine import make_engine
from dpfl.engine.base import Job
from dpfl.experiments.planned_costs import sum_text
from dpfl.plugs.base import Participant
from dpfl.plugs.local_work import DpSgd
from dpfl.plugs.sampling import PoissonBatches
from dpfl.plugs.secure_sum import SecureSum
from dpfl.plugs.selection import PoissonCohort
from dpfl.plugs.shared_gradient import ALONE, SHARED, OnCommonGrid, SharedGradient
from dpfl.plugs.weights import EnrolledWeights, EpsilonWeights, own_weight
from dpfl.rounds.members import honest_members
from dpfl.strategy import Strategy, with_secure_sum

CLIP = 0.7
WORK = {"lr": 0.5, "batch_size": 20, "local_steps": 1, "clip": CLIP}
MODELS = {
    "logistic": lambda: nn.Linear(6, 3),
    "layers": lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)
    ),
}


def phase_of(noise: float, batch_size: int) -> Phase:
    kept = {"sampling": "poisson", "lr": 0.5, "clip": CLIP, "sum_only": True}
    return Phase(steps=1, batch_size=batch_size, noise_multiplier=noise, **kept)


def integers(
    model: nn.Module, records: list[Tensor], noise: float, engine: str, batch_size: int = 10**6
) -> list[Tensor]:
    """What clients with these records send, of batches with all records unless a size is given."""
    layout = Layout.of_module(model)
    jobs = [
        Job(
            client=str(i),
            start=layout.read(model),
            phases=(phase_of(noise, batch_size),),
            features=own,
            labels=torch.arange(len(own)) % 3,
            rng=SecretRng.simulated(PublicSeed(i)),
        )
        for i, own in enumerate(records)
    ]
    return make_engine(engine).run(model, layout, jobs)


@pytest.mark.parametrize("name", MODELS)
def test_engines_agree_on_exact_integers(name: str) -> None:
    torch.manual_seed(0)
    model, records = MODELS[name](), [torch.randn(n, 6) for n in (70, 90, 3)]
    # Four parts of a batch; a share of 0.02 leaves float32's exact integers far behind.
    for noise, size in ((0.02, 60), (1.0, 1), (0.5, 10**6)):
        fast = integers(model, records, noise, "stacked", size)
        slow = integers(model, records, noise, "one_by_one", size)
        for one, other in zip(fast, slow, strict=True):
            assert one.dtype == torch.float64
            assert torch.equal(one, one.round())
            assert float((one - other).norm()) <= 1e-4 * SCALE / noise


ODD = st.sampled_from([0.0, 1e-30, 1e-3, 1.0, -30.0, 1e10, 1e20, 3e38, math.inf, math.nan])


@pytest.mark.filterwarnings("ignore:.*cut off")
@pytest.mark.parametrize("engine", ["stacked", "one_by_one"])
@given(
    odd=st.lists(ODD, min_size=6, max_size=6),
    place=st.integers(0, 40),
    noise=st.sampled_from([1e-3, 0.05, 2.0]),
)
def test_removing_a_record_moves_integers_by_at_most_what_is_charged(
    engine: str, odd: list[float], place: int, noise: float
) -> None:
    torch.manual_seed(1)
    model, records = nn.Linear(6, 3), 3 * torch.randn(41, 6)
    records[place] = torch.tensor(odd)
    other = torch.randn(17, 6)
    # Labels go by place, so the record that is taken out is put last.
    order = torch.cat([torch.arange(41)[torch.arange(41) != place], torch.tensor([place])])
    whole, one = integers(model, [records[order], other], noise, engine)
    less, same = integers(model, [records[order][:-1], other], noise, engine)
    assert torch.equal(one, same), "another client's integers moved"
    work = SharedGradient(
        client_settings=ClientSettings(lr=1.0, batch_size=1, local_steps=1), clip=CLIP
    )
    exposure = work.exposure((phase_of(noise, 10**6),), 41, Layout.of_module(model).size)
    step = noise * CLIP / SCALE
    assert float((whole - less).norm()) <= exposure.bound / step
    assert exposure.bound < 1.01 * CLIP + 1e-3


def test_a_clip_that_is_reached_is_charged_in_full() -> None:
    """The bound above is not idle: a long gradient moves the integers by nearly all of it."""
    model, far = nn.Linear(6, 3), 1e3 * torch.ones(2, 6)
    nn.init.zeros_(model.weight)
    (both,), (one,) = (integers(model, [far[:n]], 0.5, "stacked") for n in (2, 1))
    assert float((both - one).norm()) > 0.99 * SCALE / 0.5


@pytest.mark.parametrize("engine", ["stacked", "one_by_one"])
def test_integers_have_a_public_bound(engine: str) -> None:
    model, far = nn.Linear(6, 3), 1e3 * torch.ones(40, 6)
    nn.init.zeros_(model.weight)
    model.bias.data = torch.tensor([50.0, 0.0, 0.0])  # all but the first class are wrong
    noise = 40 * SCALE / (100 * LARGEST_SUM)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        (sent,) = integers(model, [far], noise, engine)
    assert engine != "stacked" or "cut off" in str(said[0].message)
    assert LARGEST_SUM - LARGEST <= float(sent.abs().max()) <= LARGEST_SUM + LARGEST


def test_an_empty_batch_sends_noise_and_nothing_else() -> None:
    model, records = nn.Linear(6, 3), [torch.randn(500, 6)] * 12
    size = Layout.of_module(model).size
    sent, empty = integers(model, records, 1.0, "stacked", batch_size=1), 0
    for i, own in enumerate(sent):
        rng = SecretRng.simulated(PublicSeed(i))
        drawn = PoissonBatches(500, 1).draw(rng.child("records", 0), 1)
        alone = torch.equal(-own, rng.child("noise", 0).grid_noise_(torch.empty(size)).double())
        assert alone == (int(drawn.sizes[0]) == 0)
        empty += alone
    assert 0 < empty < 12


# -- plans -----------------------------------------------------------------------------------------


def test_what_cannot_share_its_noise_is_refused() -> None:
    over = with_secure_sum
    with pytest.raises(ConfigurationError, match=r"weight_decay = 0\.1"):
        over(dpfl.fedavg_dp(**WORK, weight_decay=0.1))
    with pytest.raises(ConfigurationError, match="heterogeneous"):
        over(dpfl.fedavg_dp(**WORK, spending="uniform"))
    with pytest.raises(PrivacyRefusal, match="random size"):
        over(dpfl.fedavg_dp(**WORK, selection=PoissonCohort(sampling_rate=0.5)))
    for method in (dpfl.robust_hdp, dpfl.pfa, dpfl.local_only, dpfl.krum):
        with pytest.raises((ConfigurationError, PrivacyRefusal)):
            over(method(**WORK))
    alone = SharedGradient.of(dpfl.fedavg_dp(**WORK).local, 1)
    with pytest.raises(PrivacyRefusal, match="secure sum"):
        replace(dpfl.fedavg_dp(**WORK), local=alone)
    with pytest.raises(ConfigurationError, match="3 dropouts"):
        replace(over(dpfl.fedavg_dp(**WORK)), local=SharedGradient.of(alone, 3))
    with pytest.raises(ConfigurationError, match="one noisy step"):
        replace(phase_of(1.0, 5), steps=2)


def test_momentum_and_the_proximal_term_do_nothing_in_one_step() -> None:
    plain, pulled = (
        with_secure_sum(dpfl.fedavg_dp(**WORK, **more))
        for more in ({}, {"momentum": 0.9, "proximal": 0.1})
    )
    torch.manual_seed(0)
    records = [torch.randn(30, 6)]
    model, layout = nn.Linear(6, 3), Layout.of_module(nn.Linear(6, 3))
    found = []
    for strategy in (plain, pulled):
        agreement = dpfl.rounds.enrol(strategy, CLAIMS, 4, layout)
        (phase,) = agreement.phases(participant("a"))
        found.append(replace(phase_of(1.0, 10), momentum=phase.momentum, proximal=phase.proximal))
    one, other = (
        make_engine("stacked").run(
            model,
            layout,
            [
                Job(
                    client="a",
                    start=layout.read(model),
                    phases=(phase,),
                    features=records[0],
                    labels=torch.arange(30) % 3,
                    rng=SecretRng.simulated(PublicSeed(0)),
                )
            ],
        )[0]
        for phase in found
    )
    assert torch.equal(one, other)


CLAIMS = {
    name: Claims(epsilon=epsilon, delta=1e-5, examples=200)
    for name, epsilon in zip("abcdef", (1.0, 1.0, 2.0, 4.0, 8.0, 8.0), strict=True)
}


def participant(client: str, **settings: float) -> Participant:
    claim = CLAIMS[client]
    return Participant(
        examples=claim.examples,
        client_settings=ClientSettings(**settings),  # type: ignore[arg-type]
        budget=dpfl.Budget(epsilon=claim.epsilon, delta=claim.delta),
        client=client,
    )


def agreed(strategy: Strategy, rounds: int = 10) -> dpfl.rounds.Agreement:
    return dpfl.rounds.enrol(strategy, CLAIMS, rounds, Layout.of_module(nn.Linear(6, 3)))


def spent(agreement: dpfl.rounds.Agreement, who: Participant, rounds: int = 10) -> float:
    cost = agreement.cost(dpfl.Observer.SERVER, who)
    found = dpfl.privacy.accountant.spend(cost.times(rounds), 1e-5, adjacency=cost.adjacency)
    return found.epsilon


def test_weiavg_costs_everyone_by_its_budget_and_never_more() -> None:
    agreement = agreed(with_secure_sum(dpfl.weiavg(**WORK)))
    costs = {name: spent(agreement, participant(name)) for name in CLAIMS}
    assert all(cost <= CLAIMS[name].epsilon for name, cost in costs.items()), costs
    assert costs["a"] == costs["b"] < costs["c"] < costs["d"] < costs["e"] == costs["f"]
    # Somebody's budget is used up: less noise would exceed it.
    assert max(costs[name] / CLAIMS[name].epsilon for name in CLAIMS) > 0.98


def test_equal_weights_cost_everyone_what_the_smallest_claim_allows() -> None:
    agreement = agreed(with_secure_sum(dpfl.fedavg_dp(**WORK)))
    costs = {spent(agreement, participant(name)) for name in CLAIMS}
    assert len(costs) == 1
    assert 0.98 < costs.pop() <= 1.0


def test_a_site_pays_for_its_own_settings() -> None:
    agreement = agreed(with_secure_sum(dpfl.fedavg_dp(**WORK)))
    usual = spent(agreement, participant("f"))
    assert spent(agreement, participant("f", lr=1.0)) > 1.5 * usual  # twice the sensitivity
    # Larger batches halve the sensitivity and double the rate.
    (event,) = agreement.cost(dpfl.Observer.SERVER, participant("f", batch_size=40)).events
    (before,) = agreement.cost(dpfl.Observer.SERVER, participant("f")).events
    assert event.sampling == "poisson"
    assert event.sampling_rate == pytest.approx(0.2)
    assert event.noise_multiplier == pytest.approx(2 * before.noise_multiplier, rel=1e-2)
    with pytest.raises(ConfigurationError, match="client 'f': it takes 3 local steps"):
        agreement.phases(participant("f", local_steps=3))


def test_the_charge_counts_on_the_honest_alone() -> None:
    """The multiplier charged is that of h shares: with a share for h + 1 it would be less."""
    strategy = with_secure_sum(dpfl.fedavg_dp(**WORK), tolerated_dropouts=1, colluders=1)
    agreement = agreed(strategy)
    phases = agreement.phases(participant("a"))
    (share,) = strategy.local.in_cohort(phases, 6)
    whole = share.noise_multiplier * math.sqrt(4)
    (event,) = agreement.cost(dpfl.Observer.SERVER, participant("a")).events
    assert 0.99 * whole < event.noise_multiplier <= whole
    assert event.numbers == 4 * agreement.layout.size
    # Where fewer are drawn, shares are larger, and so is the step of their grid.
    (larger,) = strategy.local.in_cohort(phases, 4)
    assert larger.noise_multiplier * math.sqrt(2) == pytest.approx(whole)
    grids = [agreement.upload_grid(0, drawn) for drawn in (4, 6)]
    assert grids[0].step == pytest.approx(grids[1].step * math.sqrt(2))  # type: ignore[union-attr]


def test_the_common_grid_is_every_clients_own() -> None:
    """The step of a client's integers, in units of the model, is the same for all of them."""
    strategy = with_secure_sum(dpfl.weiavg(**WORK))
    agreement = agreed(strategy)
    for name, settings in (("a", {}), ("f", {"lr": 0.1}), ("d", {"batch_size": 50})):
        who = participant(name, **settings)
        (phase,) = strategy.local.in_cohort(agreement.phases(who), 6)
        weight = own_weight(agreement.terms.weights, name)
        factor = weight * phase.lr / phase.batch_size
        step = Grid.of(phase.noise_multiplier * CLIP).step * factor
        assert step == pytest.approx(agreement.upload_grid(0, 6).step)  # type: ignore[union-attr]


def test_several_steps_keep_every_clients_own_noise_and_cost() -> None:
    plain = dpfl.weiavg(**{**WORK, "local_steps": 3})
    over = with_secure_sum(plain, tolerated_dropouts=1)
    assert isinstance(over.local, DpSgd)
    assert not over.local.shares_noise
    assert ALONE in over.assumptions
    assert not any("shares" in text for text in over.assumptions)
    assert {*SHARED} <= {*with_secure_sum(dpfl.weiavg(**WORK)).assumptions}
    for name in "af":
        costs = [agreed(one).cost(dpfl.Observer.SERVER, participant(name)) for one in (plain, over)]
        assert costs[0] == costs[1]


def test_a_description_says_whose_noise_counts() -> None:
    group = SecureSum().group(6)
    assert "the noise of 5 counts" in sum_text(group, SHARED)
    assert "every client's own noise counts alone" in sum_text(group, (ALONE,))


@given(seed=st.integers(0, 1000), weight=st.sampled_from([0.0, 1e-6, 0.3, 1.0]))
def test_an_update_on_the_common_grid_is_weighed_rounded_and_bounded(
    seed: int, weight: float
) -> None:
    stage, grid = OnCommonGrid(), OnCommonGrid().grid(5)
    assert grid is not None
    x = torch.randn(50, generator=PublicSeed(seed).generator())
    x[:4] = torch.tensor([math.nan, math.inf, -math.inf, 3e38])
    who = Who(id="a", claims=CLAIMS["a"], drawn=5, weight=weight)
    sent = stage.client(x, {}, who, SecretRng.simulated(PublicSeed(0)))
    assert torch.equal(grid.integers(sent) * grid.step, sent)
    assert float(grid.integers(sent).abs().max()) <= LARGEST_SUM
    assert sent[:3].tolist() == [0.0, 0.0, 0.0]
    assert torch.allclose(sent[4:], x[4:].double() * weight, atol=grid.step)


# -- weights ---------------------------------------------------------------------------------------


def test_weights_by_constants_pass_the_laws() -> None:
    for weights in (EnrolledWeights(), EnrolledWeights(claim="epsilon")):
        testing.check_weights(weights)


def test_constants_are_those_of_the_rule() -> None:
    weights = dict(agreed(with_secure_sum(dpfl.weiavg(**WORK))).terms.weights)
    assert weights == pytest.approx(
        EpsilonWeights().expected_weights(CLAIMS, {}, Layout.of_module(nn.Linear(6, 3)))
    )
    uniform = dict(agreed(with_secure_sum(dpfl.fedavg_dp(**WORK))).terms.weights)
    assert uniform == pytest.approx(dict.fromkeys(CLAIMS, 1 / 6))


@pytest.mark.parametrize(
    "weights",
    [
        (("a", 0.5), ("b", 0.6)),
        (("a", math.nan),),
        (("a", -0.1), ("b", 0.2)),
        (("a", 1.5),),
        (("a", 0.2), ("a", 0.3)),
        (("b", 1.0),),
        (),
    ],
)
def test_weights_that_no_enrolment_settles_are_refused(
    weights: tuple[tuple[str, float], ...],
) -> None:
    with pytest.raises(PeerError, match="weight"):
        own_weight(weights, "a")


def test_a_client_without_a_weight_sends_its_share_of_the_noise_and_pays_next_to_nothing() -> None:
    claims = {**CLAIMS, "f": Claims(epsilon=math.nan, delta=1e-5, examples=200)}
    strategy = with_secure_sum(dpfl.weiavg(**WORK))
    agreement = dpfl.rounds.enrol(strategy, claims, 10, Layout.of_module(nn.Linear(6, 3)))
    assert dict(agreement.terms.weights)["f"] == 0.0
    assert spent(agreement, participant("f")) < 0.01
    (phase,) = strategy.local.in_cohort(agreement.phases(participant("f")), 6)
    assert Grid.of(phase.noise_multiplier * CLIP).step > 0


# -- persons ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 3])
def test_a_person_is_protected_as_a_record_is(most: int) -> None:
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(80), rng.integers(1, 6, 80))
    table = {
        "site": [f"s{number}" for number in who % 4],
        "who": who.tolist(),
        "x": (100 * rng.normal(size=len(who))).tolist(),
        "ill": (who % 3 == 0).tolist(),
    }
    plain = {"target": "ill", "person": "who", "person_word": "patient"}
    columns = {"x": {"type": "number"}, "ill": {"type": "boolean"}}
    schema = dpfl.Schema.from_dict({**plain, "records_per_person": most, "columns": columns})
    budgets = {f"s{i}": dpfl.Budget(epsilon=4.0, delta=1e-3) for i in range(4)}
    made = dpfl.Federation.from_frame(table, client="site", schema=schema, budgets=budgets)
    strategy = with_secure_sum(dpfl.weiavg(**{**WORK, "batch_size": 8}))
    result = dpfl.train(nn.Linear(1, 2), made, strategy, rounds=2)
    assert {line.unit for line in result.spent.values()} == {"patient"}
    assert all(0 < line.epsilon <= 4.0 for line in result.spent.values())
    assert "record" not in " ".join([str(result.summary.promise), *result.summary.assumptions])
    # Brute force: without a person, all of whose records count.
    member, model = honest_members(made)["s0"], nn.Linear(1, 2)
    nn.init.zeros_(model.weight)
    layout, shard, noise = Layout.of_module(model), member.shard, 0.05
    work = SharedGradient.of(dpfl.weiavg(**WORK).local, 1)
    bound = work.exposure((phase_of(noise, 10**6),), shard.examples, layout.size).bound
    found = []
    for count in (shard.examples, shard.examples - 1):
        job = Job(
            client="s0",
            start=layout.read(model),
            phases=(phase_of(noise, 10**6),),
            features=shard.features[:count],
            labels=shard.labels[:count],
            rng=SecretRng.simulated(PublicSeed(0)),
            inputs=member.inputs,
            task=member.task,
        )
        found += make_engine("stacked").run(model, layout, [job])
    moved = float((found[0] - found[1]).norm()) * noise * CLIP / SCALE
    assert 0 < moved <= bound
