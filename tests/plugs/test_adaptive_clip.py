"""Adaptive clipping: one bounded vector, one charge, and a clip that finds the quantile."""

from __future__ import annotations

import itertools
import math
from contextlib import closing
from dataclasses import replace
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting import NeighboringRelation, pld
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, strategies as st
from torch import Tensor, nn

import dpfl
from dpfl.core.errors import ConfigurationError, PeerError
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Claims, Metrics, Observer, PlugState
from dpfl.numerics.clipping import clip
from dpfl.plugs.adaptive_clip import RANGE, AdaptiveClip
from dpfl.plugs.central_noise import CentralNoise
from dpfl.privacy.accountant import spend
from dpfl.privacy.ledger import Ledger
from dpfl.rounds import Agreement, Run, close_round, enrol, first_state, open_round
from dpfl.runs.experiment import Experiment
from dpfl.testing import check_stage

HABITS: dict[str, Any] = {"lr": 0.3, "clip": 1.0, "batch_size": 16, "local_steps": 2}
ONCE: dict[str, Any] = {**HABITS, "project": "once"}
LAYOUT = Layout.of({"weight": torch.zeros(3, 7)})


def shared(radius: float) -> dict[str, Tensor]:
    return {"clip": torch.tensor([radius], dtype=torch.float64)}


def agreed(strategy: dpfl.Strategy, rounds: int = 10, population: int = 20) -> Agreement:
    claims = {f"c{i:02d}": Claims(epsilon=4.0, delta=1e-3, examples=10) for i in range(population)}
    return enrol(strategy, claims, rounds, LAYOUT)


# ---- what is sent --------------------------------------------------------------------------------


@pytest.mark.parametrize("vote_share", [0.01, 0.5, 0.99])
def test_it_keeps_the_laws_of_a_stage(vote_share: float) -> None:
    check_stage(AdaptiveClip(clip=2.0, vote_share=vote_share))


@given(
    scale=st.sampled_from([0.0, 1e-40, 1e-6, 0.999, 1.0, 1.001, 1e6, 1e30, math.inf, math.nan]),
    radius=st.floats(1 / RANGE, RANGE),
    vote_share=st.sampled_from([1e-6, 0.01, 0.9]),
    seed=st.integers(0, 99),
)
def test_what_is_sent_is_within_the_unit_ball_whatever_the_clip(
    scale: float, radius: float, vote_share: float, seed: int
) -> None:
    stage = AdaptiveClip(clip=1.0, vote_share=vote_share)
    row = torch.randn(50, generator=torch.Generator().manual_seed(seed))
    row *= scale * radius / row.norm()
    (sent,) = stage.client_rows(row[None], shared(radius))
    assert len(sent) == 51
    assert float(sent.double().norm()) <= 1.0
    norm = float(row.double().norm())
    if not math.isfinite(norm) or norm == 0:
        assert not sent.any()
        return
    assert float(sent[-1]) == pytest.approx(
        math.copysign(math.sqrt(vote_share), radius - norm + 1e-300), rel=1e-4
    )
    back = stage.server(sent.double(), shared(radius), None)
    assert torch.allclose(back.float(), clip(row, radius), rtol=1e-3, atol=1e-6 * radius)


def test_two_clients_may_differ_by_twice_the_norm_which_replace_one_charges() -> None:
    """A vote that turns round beside an update that does: the distance is 2, not sqrt(1 + 1)."""
    stage, direction = AdaptiveClip(clip=1.0, vote_share=0.3), torch.eye(5)[0]
    one, other = stage.client_rows(torch.stack([3 * direction, -0.99999 * direction]), shared(1.0))
    assert 1.999 < float((one - other).double().norm()) <= 2.0
    fixed = agreed(dpfl.dp_fed(**ONCE, target_quantile=0.5, selection=dpfl.FixedCohort(size=5)))
    cost = fixed.strategy.cost(Observer.WORLD, (), 1, fixed.terms)
    assert cost.adjacency == "replace_one"
    assert cost.events[0].noise_multiplier <= fixed.strategy.noise_multiplier


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        shared(0.0),
        shared(-1.0),
        shared(math.nan),
        shared(math.inf),
        shared(1.001 * RANGE),
        shared(0.999 / RANGE),
        {"clip": torch.ones(2)},
    ],
)
def test_a_clip_outside_of_the_plan_is_refused_by_the_client(wrong: dict[str, Tensor]) -> None:
    with pytest.raises(PeerError, match="a clip of"):
        AdaptiveClip(clip=1.0).client_rows(torch.ones(1, 3), wrong)


# ---- the noise, and what it costs ----------------------------------------------------------------


def test_noise_on_updates_and_votes_is_that_of_the_two_mechanisms_of_the_paper() -> None:
    """Measured: 1 % of the one, 5 % of the other, and both multipliers add up to the charged one."""
    z, v, radius, weight = 1.3, 0.2, 2.5, 0.1
    stage, noise = AdaptiveClip(clip=2.0, vote_share=v), CentralNoise(noise_multiplier=z)
    rng, zero = SecretRng.simulated(PublicSeed(3)), torch.zeros(100_001, dtype=torch.float64)
    noisy, _, _ = noise.add({}, zero, 1.0, rng)
    updates = stage.server(noisy, shared(radius), None)
    z_update = float(updates.square().mean().sqrt()) / radius
    assert z_update == pytest.approx(z / math.sqrt(1 - v), rel=0.01)
    means = []
    for _ in range(4000):
        few, _, _ = noise.add({}, torch.zeros(2, dtype=torch.float64), 1.0, rng)
        means.append(stage.learn_sum(shared(radius), few, weight)[1]["share_within"])
    s_votes = float(torch.tensor(means).sub(0.5).square().mean().sqrt()) / weight
    assert s_votes == pytest.approx(z / (2 * math.sqrt(v)), rel=0.05)
    assert (z_update**-2 + (2 * s_votes) ** -2) ** -0.5 == pytest.approx(z, rel=0.02)


def joint(z: float, v: float) -> dp_accounting.DpEvent:
    """The paper's mechanism: updates and votes noised apart, on the same sample of clients."""
    pieces = [z / math.sqrt(1 - v), 2 * z / (2 * math.sqrt(v))]
    return dp_accounting.ComposedDpEvent([*map(dp_accounting.GaussianDpEvent, pieces)])


@pytest.mark.parametrize("v", [0.01, 0.4])
def test_the_charge_is_that_of_the_joint_mechanism(v: float) -> None:
    """Golden: dp-accounting composes updates and votes of all rounds; every client takes part."""
    z, rounds, delta = 3.0, 12, 1e-3
    strategy = dpfl.dp_fed(**ONCE, noise_multiplier=z, target_quantile=0.5, vote_share=v)
    agreement = agreed(strategy, rounds)
    cost = agreement.strategy.cost(Observer.WORLD, (), 1, agreement.terms)
    assert cost.events[0].numbers == LAYOUT.size + 1  # the vote's noise is drawn as well
    stated = spend(cost.events * rounds, delta, adjacency=cost.adjacency).epsilon
    library = pld.PLDAccountant(
        NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-4
    )
    library.compose(joint(z, v), rounds)
    golden = float(library.get_epsilon(delta))
    assert golden - 2e-4 <= stated <= golden + 1e-3
    without = pld.PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    without.compose(dp_accounting.GaussianDpEvent(z / math.sqrt(1 - v)), rounds)
    assert float(without.get_epsilon(delta)) < golden - 2e-3  # votes that nobody pays for are seen


def test_over_poisson_cohorts_the_charge_is_that_of_the_sampled_joint_mechanism() -> None:
    z, v, q, rounds, delta = 1.1, 0.3, 0.25, 30, 1e-3
    how = {"noise_multiplier": z, "target_quantile": 0.5, "vote_share": v}
    strategy = dpfl.dp_fed(**ONCE, **how, selection=dpfl.PoissonCohort(sampling_rate=q))
    agreement = agreed(strategy, rounds)
    (event,) = agreement.strategy.cost(Observer.WORLD, (), 1, agreement.terms).events
    assert (event.sampling, event.sampling_rate) == ("poisson", q)
    assert z * (1 - 1e-4) < event.noise_multiplier < z  # less than z by the grid's rounding
    apart, one = RdpAccountant(), RdpAccountant()
    apart.compose(dp_accounting.PoissonSampledDpEvent(q, joint(z, v)), rounds)
    gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier)
    one.compose(dp_accounting.PoissonSampledDpEvent(q, gaussian), rounds)
    assert apart.get_epsilon(delta) <= one.get_epsilon(delta) <= apart.get_epsilon(delta) + 1e-3


def test_an_adaptive_clip_is_charged_what_a_fixed_one_is_plus_one_number() -> None:
    """Planned from the same budgets: the noise multiplier is that of a fixed clip but for the
    rounding of one coordinate more.
    """
    fixed, moving = (
        agreed(dpfl.udp_fedavg(**HABITS, target_quantile=quantile)).strategy.noise_multiplier
        for quantile in (None, 0.5)
    )
    assert moving == pytest.approx(fixed, rel=1e-4)


# ---- the clip finds the quantile -----------------------------------------------------------------

NORMS = torch.exp(torch.linspace(-2.0, 2.0, 400, dtype=torch.float64))  # of 400 clients' updates


def settled(stage: AdaptiveClip, noise_multiplier: float = 1.0, rounds: int = 300) -> float:
    """The mean share of updates that are really within the clip, over the last half of a run."""
    state, noise = (
        {"clip": torch.tensor([stage.clip])},
        CentralNoise(noise_multiplier=noise_multiplier),
    )
    rng, rows = SecretRng.simulated(PublicSeed(11)), NORMS[:, None].float()
    within = []
    for _ in range(rounds):
        total = stage.client_rows(rows, state).double().sum(0)
        noisy, _, _ = noise.add({}, total, 1.0, rng)
        within.append(float((float(state["clip"]) >= NORMS).double().mean()))
        state, _ = stage.learn_sum(state, noisy, 1 / len(rows))
    return sum(within[rounds // 2 :]) / (rounds - rounds // 2)


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("first", [0.05, 30.0])
def test_the_clip_converges_to_the_true_quantile(quantile: float, first: float) -> None:
    """The noise of a round moves the share by about 0.012; the mean over 150 rounds by 0.004."""
    stage = AdaptiveClip(clip=first, target_quantile=quantile)
    assert settled(stage) == pytest.approx(quantile, abs=0.02)


class WrongSign(AdaptiveClip):
    """Moves the clip away from the quantile."""

    def learn_sum(
        self, state: PlugState, total: Tensor, weight: float
    ) -> tuple[PlugState, Metrics]:
        clip = float(state["clip"])
        moved, told = super().learn_sum(state, total, weight)
        return {"clip": clip**2 / moved["clip"]}, told


class Uncentred(AdaptiveClip):
    """Forgets that votes are centred."""

    def learn_sum(
        self, state: PlugState, total: Tensor, weight: float
    ) -> tuple[PlugState, Metrics]:
        return super().learn_sum(state, total + math.sqrt(self.vote_share) / weight, weight)


@pytest.mark.parametrize("wrong", [WrongSign, Uncentred])
def test_the_test_of_convergence_sees_a_wrong_rule(wrong: type[AdaptiveClip]) -> None:
    stage = wrong(clip=1.0, target_quantile=0.8)
    with pytest.raises((AssertionError, PeerError)):
        assert settled(stage) == pytest.approx(0.8, abs=0.02)


def test_the_clip_stays_within_its_range_however_loud_the_noise() -> None:
    stage = AdaptiveClip(clip=2.0, clip_lr=5.0, vote_share=1e-6)
    for votes in (1e9, -1e9):
        state, _ = stage.learn_sum({"clip": torch.tensor([2.0])}, torch.tensor([0.0, votes]), 1.0)
        assert 2.0 / RANGE <= float(state["clip"]) <= 2.0 * RANGE
        stage.client_rows(torch.ones(1, 1), state)  # which the client accepts


# ---- whole runs ----------------------------------------------------------------------------------


def logistic() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(64, 10)


@pytest.fixture(scope="module")
def sites() -> dpfl.Federation:
    values = {
        "data": {"name": "digits"},
        "partition": {"kind": "iid", "clients": 8, "records": 30},
        "budgets": {"epsilon": 5.0, "delta": 1e-3},
        "model": {"name": "logistic"},
        "method": {"name": "dp_fed", **ONCE},
        "run": {"rounds": 3, "seed": 1},
    }
    return Experiment.from_dict(values).federation()


METHODS = {
    "dp_fed": lambda **more: dpfl.dp_fed(**ONCE, **more),
    "dp_fed_ls": lambda **more: dpfl.dp_fed_ls(**ONCE, **more),
    "udp_fedavg": lambda **more: dpfl.udp_fedavg(**HABITS, **more),
    "ppsgd": lambda **more: dpfl.ppsgd(**HABITS, **more),
    "fedceo": lambda **more: dpfl.fedceo(
        **HABITS, personal_starts=False, interval=2, coefficient=1.0, **more
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_run_moves_its_clip_by_the_printed_rule(name: str, sites: dpfl.Federation) -> None:
    quantile, clip_lr = 0.1, 0.7
    strategy = METHODS[name](target_quantile=quantile, clip_lr=clip_lr, noise_multiplier=2.0)
    result = dpfl.train(logistic(), sites, strategy, rounds=4, seed=2)
    told = [record.metrics["stage0"] for record in result.history]
    assert told[0]["clip"] == HABITS["clip"]
    for now, after in itertools.pairwise(told):
        moved = now["clip"] * math.exp(-clip_lr * (now["share_within"] - quantile))  # type: ignore[operator]
        assert after["clip"] == pytest.approx(moved, rel=1e-9)
    assert told[-1]["clip"] != told[0]["clip"]
    assert all(record.published for record in result.history)


def test_over_a_secure_sum_a_run_is_the_same(sites: dpfl.Federation) -> None:
    """Shares that do not count on one colluder are those that tolerate one dropout."""
    plain = {**HABITS, "target_quantile": 0.3, "noise_multiplier": 2.0}
    tolerant = dpfl.udp_fedavg(**plain, tolerated_dropouts=1)
    models = []
    for strategy in (tolerant, dpfl.with_secure_sum(dpfl.udp_fedavg(**plain))):
        result = dpfl.train(logistic(), sites, strategy, rounds=2, seed=2)
        models.append(Layout.of_module(result.model).read(result.model))
    assert torch.equal(*models)


def test_a_round_of_nobody_is_closed_alike_by_a_server_that_comes_back() -> None:
    """What nobody was sent cannot be read again; it follows from the server's state."""
    nobody = dpfl.PoissonCohort(sampling_rate=1e-6)
    how = {"noise_multiplier": 1e-6, "target_quantile": 0.5, "selection": nobody}
    agreement = agreed(dpfl.dp_fed(**ONCE, **how))
    state = first_state(agreement, torch.zeros(LAYOUT.size))
    with closing(Ledger.create(":memory:", "memory")) as ledger:
        ledger.register("run", seeded=True, title="dp_fed")
        run = Run(name="run", ledger=ledger, seed=PublicSeed(1), public=PublicSeed(2))
        plan = open_round(agreement, state, run, lambda client: True)
        assert plan.cohort.ids == ()
        (one, told), (other, _) = (
            close_round(agreement, state, own, [], run) for own in (plan, replace(plan, shared={}))
        )
    assert told.metrics["stage0"]["clip"] == 1.0
    assert torch.equal(one.model, other.model)
    assert torch.equal(one.plugs["stage0"]["clip"], other.plugs["stage0"]["clip"])


def test_noise_is_reported_in_the_units_of_the_model(sites: dpfl.Federation) -> None:
    """At twice the first clip the noise in the model is twice as long."""
    found = []
    for first in (1.0, 2.0):
        strategy = dpfl.dp_fed(
            **{**ONCE, "clip": first, "lr": 1e-9}, target_quantile=0.5, noise_multiplier=3.0
        )
        model = logistic()
        (record,) = dpfl.train(model, sites, strategy, rounds=1, seed=2).history
        expected = 3.0 * first / math.sqrt(0.99) * math.sqrt(650) / 8
        assert record.metrics["noise"]["norm"] == pytest.approx(expected, rel=0.15)
        assert record.metrics["noise"]["norm"] == pytest.approx(record.update_norm, rel=1e-4)
        found.append(record.metrics["noise"]["norm"])
    assert found[1] == pytest.approx(2 * found[0], rel=1e-3)  # type: ignore[operator]


def test_votes_that_the_noise_would_drown_are_refused_at_enrolment() -> None:
    """z / (2 sqrt(v)) / cohort = 5 / 20 of a share: 0.2 of it is little, 5 times it is a lottery."""
    quiet = {"noise_multiplier": 1.0, "target_quantile": 0.5, "vote_share": 0.01}
    for clip_lr, fits in (0.2, True), (5.0, False):
        agreement = agreed(dpfl.dp_fed(**ONCE, **quiet, clip_lr=clip_lr))
        if fits:
            first_state(agreement, torch.zeros(LAYOUT.size))
            continue
        with pytest.raises(ConfigurationError, match=r"by 1\.25 a round.*vote_share"):
            first_state(agreement, torch.zeros(LAYOUT.size))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: dpfl.dp_fed(**HABITS, target_quantile=0.5), "project = 'every_step'"),
        (lambda: dpfl.fedceo(**HABITS, target_quantile=0.5), "AdaptiveClip learns from a noisy"),
        (
            lambda: dpfl.udp_fedavg(**HABITS, target_quantile=0.5, noise="local"),
            "AdaptiveClip learns from a noisy sum",
        ),
        (lambda: dpfl.dp_fed(**ONCE, target_quantile=1.0), "target_quantile = 1.0"),
        (lambda: dpfl.dp_fed(**ONCE, target_quantile=0.5, vote_share=0.0), "vote_share = 0.0"),
        (lambda: dpfl.dp_fed(**ONCE, target_quantile=0.5, clip_lr=-1.0), "clip_lr = -1.0"),
        (lambda: dpfl.weiavg(**HABITS, target_quantile=0.5), "has no setting 'target_quantile'"),
    ],
)
def test_what_cannot_adapt_is_refused_by_name(build: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        build()
