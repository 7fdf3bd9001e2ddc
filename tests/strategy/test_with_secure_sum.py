"""Methods over a secure sum: what they become, what it costs, and which of them cannot be."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from scipy.stats import norm

import dpfl
from dpfl.core.errors import ConfigurationError, DpflError, PrivacyRefusal
from dpfl.core.types import Adjacency, Observer, Terms
from dpfl.methods import METHODS
from dpfl.methods.dprp import RandomProjection
from dpfl.plugs.channels import Digital
from dpfl.plugs.releases import Mean
from dpfl.plugs.secure_sum import OUTSIDERS, SecureSum
from dpfl.plugs.stages import Clip, GaussianNoise
from dpfl.plugs.weights import UniformWeights
from dpfl.privacy.accountant import spend
from dpfl.privacy.flags import Flag
from dpfl.report import words
from dpfl.runs.result import promise_in
from dpfl.strategy import Strategy, with_secure_sum
from dpfl.strategy.client_level import HIDDEN_DRAW, SHARES, TRUSTED
from dpfl.strategy.robust import with_aggregation

WORK = {"lr": 0.1, "clip": 2.0, "batch_size": 8, "local_steps": 1}
NEEDED = {"dimension": 4, "byzantine": 1, "public_clients": 1, "k": 1}
TRANSFORMED = {"udp_fedavg", "dp_fed", "dp_fed_ls", "ppsgd", "centaur"}
SHARED_STEPS = {"fedavg_dp", "weiavg", "dpfedavg", "minimum", "maximum"}


def terms(clients: int = 20, parameters: int = 100) -> Terms:
    return Terms(
        rounds=10,
        population=clients,
        expected_cohort=clients,
        participations=10,
        smallest_epsilon=1.0,
        largest_epsilon=1.0,
        parameters=parameters,
    )


def built(name: str, **settings: object) -> Strategy:
    method = METHODS[name]
    known = {key: value for key, value in {**NEEDED, **WORK}.items() if key in method.settings}
    return method(**{**known, **settings})


# ---- every method --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_transformed_or_refused_with_the_reason(name: str) -> None:
    plain = built(name)
    try:
        over = with_secure_sum(plain, tolerated_dropouts=2, colluders=3)
    except DpflError as refused:
        assert isinstance(refused, ConfigurationError | PrivacyRefusal)
        assert name in str(refused)
        assert name not in TRANSFORMED | SHARED_STEPS
        return
    assert (over.observer, over.name, over.unit) == (Observer.SERVER, plain.name, plain.unit)
    assert over.channel == SecureSum(tolerated_dropouts=2, colluders=3)
    assert over.tolerated_dropouts == 2
    assert over.central_noise is None
    assert not {SHARES, TRUSTED, HIDDEN_DRAW} & set(over.assumptions)
    assert "3 members of a sum may work together with it" in over.assumptions[0]
    assert set(over.flags) <= set(plain.flags) & {Flag.HYPOTHETICAL}


@pytest.mark.parametrize("name", [*sorted(TRANSFORMED), "fedceo"])
@pytest.mark.parametrize("quantile", [None, 0.5])
def test_shares_are_made_for_the_honest_ones(name: str, quantile: float | None) -> None:
    more: dict[str, Any] = {"personal_starts": False} if name == "fedceo" else {}
    more |= {"project": "once"} if name.startswith("dp_fed") else {}
    plain = built(name, noise_multiplier=1.5, target_quantile=quantile, **more)
    over = with_secure_sum(plain, tolerated_dropouts=2, colluders=1)
    clip = WORK["clip"] if quantile is None else 1.0
    noise = GaussianNoise(noise_multiplier=1.5, clip=clip, distributed=True, tolerated_dropouts=3)
    assert over.stages == (plain.stages[0], noise)
    settled, _ = over.settle(terms(), {})
    for observer in (Observer.SERVER, Observer.WORLD):
        (event,) = settled.cost(observer, (), 1, terms()).events
        assert event.noise_multiplier == pytest.approx(1.5, rel=1e-4)
        assert event.noise_multiplier < 1.5
        assert (event.sampling, event.sampling_rate) == ("none", 1.0)
    assert settled.shares_needed(terms(), 20) == 18


def test_what_is_left_open_is_planned_for_the_honest_ones() -> None:
    claims = {f"c{i}": dpfl.Claims(epsilon=3.0, delta=1e-5, examples=10) for i in range(20)}
    levels = {}
    for dropouts, colluders in ((0, 0), (2, 1), (0, 9)):
        over = with_secure_sum(built("dp_fed"), tolerated_dropouts=dropouts, colluders=colluders)
        settled, known = over.settle(terms(), claims)
        assert known.noise_multiplier == settled.stages[-1].noise_multiplier
        spent = settled.cost(Observer.SERVER, (), 1, known).events * 10
        epsilon = spend(spent, 1e-5, adjacency=Adjacency.ZERO_OUT).epsilon
        assert 2.99 < epsilon <= 3.0
        levels[dropouts, colluders] = settled.stages[-1].std(20) * math.sqrt(20)
    ratio = levels[2, 1] / levels[0, 0], levels[0, 9] / levels[0, 0]
    assert ratio == pytest.approx((math.sqrt(20 / 17), math.sqrt(20 / 11)), rel=1e-6)


def test_a_bound_that_rests_on_the_servers_draw_is_refused() -> None:
    """A server that is the adversary would draw a projection that stretches one update."""
    plain = built("dp_fed", noise_multiplier=1.0)
    for sure in (True, False):
        stage = RandomProjection(dimension=300, clip=WORK["clip"], clip_after=sure)
        projected = replace(plain, stages=(*plain.stages, stage))
        if sure:
            assert with_secure_sum(projected).stages[-1].clip == WORK["clip"]
            continue
        with pytest.raises(PrivacyRefusal, match=r"bound may fail.*clip_after"):
            with_secure_sum(projected)


# ---- what it costs -------------------------------------------------------------------------------


def epsilon_of(mu: float, delta: float) -> float:
    """By bisection of Dong, Roth, Su 2022, Corollary 2.13."""
    low, high = 0.0, 100.0
    for _ in range(100):
        at = (low + high) / 2
        gone = norm.cdf(-at / mu + mu / 2) - math.exp(at) * norm.cdf(-at / mu - mu / 2)
        low, high = (at, high) if gone > delta else (low, at)
    return high


def test_twenty_clients_cost_what_the_formula_says() -> None:
    """20 clients, 2 dropouts, 1 colluder: 17 shares of std 1.5 x 2 / sqrt(17), 10 rounds."""
    over = with_secure_sum(built("udp_fedavg", noise_multiplier=1.5), tolerated_dropouts=2)
    assert over.channel.group(20).honest == 17
    assert over.stages[-1].std(20) == pytest.approx(1.5 * 2.0 / math.sqrt(17))
    spent = over.resolve(terms()).cost(Observer.SERVER, (), 1, terms()).events * 10
    epsilon = spend(spent, 1e-5, adjacency=Adjacency.ZERO_OUT).epsilon
    by_hand = epsilon_of(math.sqrt(10) / 1.5, 1e-5)
    assert by_hand <= epsilon <= by_hand * 1.001


@pytest.mark.parametrize("name", ["dp_fed", "dp_fed_ls"])
def test_without_colluders_it_costs_what_a_trusted_server_costs(name: str) -> None:
    """The same noise and epsilon; central noise is rounded once, after adding up."""
    claims = {f"c{i}": dpfl.Claims(epsilon=3.0, delta=1e-5, examples=10) for i in range(20)}
    central, _ = built(name).settle(terms(), claims)
    over, _ = with_secure_sum(built(name), colluders=0).settle(terms(), claims)
    assert over.noise_multiplier == pytest.approx(central.noise_multiplier, rel=1e-9)
    trusted = central.cost(Observer.WORLD, (), 1, terms()).events
    summed = over.cost(Observer.SERVER, (), 1, terms()).events
    assert summed[0].noise_multiplier == pytest.approx(trusted[0].noise_multiplier, rel=1e-9)


def test_the_draw_counts_against_outsiders_only() -> None:
    cohort = {"selection": dpfl.FixedCohort(size=5), "noise_multiplier": 1.5}
    over = with_secure_sum(built("udp_fedavg", **cohort)).resolve(terms())
    own = replace(terms(), expected_cohort=5)
    (server,) = over.cost(Observer.SERVER, (), 1, own).events
    (world,) = over.cost(Observer.WORLD, (), 1, own).events
    assert (server.sampling, server.sampling_rate) == ("none", 1.0)
    assert (world.sampling, world.sampling_rate) == ("uniform", 0.25)
    assert world.noise_multiplier == pytest.approx(server.noise_multiplier)
    assert not over.amplifies(Observer.SERVER)
    assert OUTSIDERS in over.assumptions
    # Clients who remember something tell that they were drawn.
    remembering = with_secure_sum(built("ppsgd", **cohort))
    assert not remembering.amplifies(Observer.WORLD)
    assert OUTSIDERS not in remembering.assumptions


def test_a_sum_of_two_hides_one_share_only() -> None:
    """With one honest share the world's cost counts on no more than that one."""
    over = with_secure_sum(built("udp_fedavg", noise_multiplier=1.5)).resolve(terms(2))
    for observer in (Observer.SERVER, Observer.WORLD):
        exposure = over.exposure(observer, terms(2))
        assert exposure.noise / exposure.bound == pytest.approx(1.5, rel=1e-4)


def test_a_sum_needs_its_uploads_whatever_is_promised() -> None:
    """The protocol unmasks no smaller sum, also where nobody's noise is counted on."""
    open_ = replace(built("fedavg"), channel=SecureSum(tolerated_dropouts=2), tolerated_dropouts=2)
    assert open_.shares_needed(terms(), 20) == 18
    assert built("fedavg").shares_needed(terms(), 20) == 0


def test_the_low_rank_step_knows_the_noise_of_a_row() -> None:
    plain = built("fedceo", personal_starts=False, noise_multiplier=1.5)
    over = with_secure_sum(plain, tolerated_dropouts=2, colluders=1).resolve(terms())
    assert over.denoise[0].row_std == pytest.approx(over.stages[-1].std(20))  # type: ignore[attr-defined]


# ---- refusals ------------------------------------------------------------------------------------

LOCAL = {"noise": "local", "noise_multiplier": 1.0}
REFUSED = {
    "personal starts": (lambda: built("fedceo"), "personal_starts = false", ConfigurationError),
    "local noise": (lambda: built("udp_fedavg", **LOCAL), "noise = 'distributed'", PrivacyRefusal),
    "Poisson cohorts": (
        lambda: built("dp_fed", selection=dpfl.PoissonCohort(sampling_rate=0.5)),
        "sampling = 'uniform'",
        PrivacyRefusal,
    ),
    "nobody": (lambda: built("fedavg"), "protects nobody", PrivacyRefusal),
    "the air": (lambda: built("airsgd"), "OverTheAir", ConfigurationError),
    "a pool": (lambda: built("pooled_dp"), "pooled", ConfigurationError),
    "alone": (lambda: built("local_only"), "share nothing", ConfigurationError),
    "public clients": (lambda: built("pfa"), "PublicProjection", ConfigurationError),
    "a median": (
        lambda: with_aggregation(built("udp_fedavg", **LOCAL), "median"),
        "Median needs single uploads",
        ConfigurationError,
    ),
    "Krum": (
        lambda: with_aggregation(built("udp_fedavg", **LOCAL), "krum", byzantine=1),
        "noise = 'distributed'",
        PrivacyRefusal,
    ),
    "two secure sums": (
        lambda: with_secure_sum(built("udp_fedavg")),
        "SecureSum",
        ConfigurationError,
    ),
    "other dropouts": (
        lambda: built("udp_fedavg", tolerated_dropouts=1),
        "tolerates 1 dropouts, the secure sum 2",
        ConfigurationError,
    ),
    "weights of those who came": (
        lambda: replace(
            built("udp_fedavg", **LOCAL),
            stages=(Clip(clip=2.0), replace(built("udp_fedavg").stages[-1], noise_multiplier=1.0)),
            weights=UniformWeights(),
        ),
        "UniformWeights",
        PrivacyRefusal,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_needs_more_than_a_sum_is_refused(case: str) -> None:
    make, reason, kind = REFUSED[case]
    with pytest.raises(kind, match=reason) as refused:
        with_secure_sum(make(), tolerated_dropouts=2)
    assert refused.value.exit_code == (4 if kind is PrivacyRefusal else 2)


def test_shares_and_the_channel_must_agree() -> None:
    """Whoever assembles a strategy by hand cannot count on the colluders' noise."""
    over = with_secure_sum(built("udp_fedavg"), tolerated_dropouts=2)
    clip, noise = over.stages
    with pytest.raises(ConfigurationError, match="2 dropouts, 2 are tolerated beside 1 colluders"):
        replace(over, stages=(clip, replace(noise, tolerated_dropouts=2)))
    with pytest.raises(ConfigurationError, match="channel plans for 1 dropouts, 2 are"):
        replace(over, channel=SecureSum(tolerated_dropouts=1, colluders=2))
    with pytest.raises(ConfigurationError, match="3 dropouts, 2 are tolerated"):
        replace(over, channel=Digital())


def test_a_cohort_that_is_too_small_is_refused_at_once() -> None:
    for size, colluders in ((2, 2), (4, 3)):
        plain = built("udp_fedavg", selection=dpfl.FixedCohort(size=size))
        with pytest.raises(PrivacyRefusal, match=f"{size} members of whom {colluders}"):
            with_secure_sum(plain, tolerated_dropouts=1, colluders=colluders)


@pytest.mark.parametrize(("steps", "colluders"), [(1, 2), (1, 0), (3, math.inf)])
def test_a_promise_names_colluders_where_noise_is_shared(steps: int, colluders: float) -> None:
    plain = dpfl.fedavg_dp(lr=0.1, clip=1.0, batch_size=8, local_steps=steps)
    promise = dpfl.with_secure_sum(plain, colluders=min(colluders, 2)).promise
    assert plain.promise.colluders == math.inf
    assert promise.colluders == colluders
    assert promise_in(promise.to_dict()) == promise
    named = "colluding" if colluders else "all clients trusted"
    assert (named in str(promise)) == (colluders < math.inf)
    assert ("colluders" in promise.to_dict()) == (colluders < math.inf)
    assert (words.promise(promise) == words.promise(plain.promise)) == math.isinf(colluders)


def test_a_client_level_promise_names_colluders() -> None:
    plain = dpfl.dp_fed(lr=0.1, clip=1.0, batch_size=8, local_steps=3)
    promise = dpfl.with_secure_sum(plain).promise
    assert promise.adversary == "server with up to 1 colluding client"
    said = (
        "from the server with up to 1 colluding client, and so everyone who learns anything from it"
    )
    assert said in words.promise(promise)


def test_shares_of_noise_in_measurements_and_releases_name_colluders_too() -> None:
    plain = dpfl.fedavg_dp(lr=0.1, clip=1.0, batch_size=8, local_steps=3)
    over = dpfl.with_secure_sum(plain, colluders=2)
    released = replace(plain, releases=(Mean(into="mean", share=0.1),))
    assert over.promise_with(measured=True).colluders == 2
    assert plain.promise_with(measured=True).colluders == math.inf
    assert dpfl.with_secure_sum(released, colluders=2).promise.colluders == 2
    assert released.promise.colluders == math.inf
