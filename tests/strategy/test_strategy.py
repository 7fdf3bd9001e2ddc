"""Building a strategy proves that its pieces fit; folding it over an exposure gives the bill."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.random import SecretRng
from dpfl.core.types import (
    Adjacency,
    ClientSettings,
    Metrics,
    Observer,
    Phase,
    PlugState,
    Rows,
    Shared,
    Terms,
    Total,
    Unit,
    Who,
)
from dpfl.plugs.central_noise import CentralNoise
from dpfl.plugs.channels import Channel
from dpfl.plugs.denoise import RowDenoiser
from dpfl.plugs.local_work import DpSgd, Sgd
from dpfl.plugs.secure_sum import SecureSum
from dpfl.plugs.selection import FixedCohort, PoissonCohort, Selection
from dpfl.plugs.stages import Clip, GaussianNoise, Stage
from dpfl.plugs.weights import EpsilonWeights, ExpectedCohortWeights, UniformWeights
from dpfl.privacy.exposure import Exposure
from dpfl.strategy import Strategy

PRACTICE = ClientSettings(batch_size=4, local_steps=2, lr=0.1)
TERMS = Terms(
    rounds=10,
    population=20,
    expected_cohort=5.0,
    participations=3,
    smallest_epsilon=1.0,
    largest_epsilon=1.0,
    parameters=10,
)


class charged:  # noqa: N801
    """Equal to what is charged for a noise multiplier: a little less than it, by rounding onto the
    grid, never more.
    """

    def __init__(self, noise_multiplier: float, rel: float = 1e-4) -> None:
        self.noise_multiplier, self.rel = noise_multiplier, rel

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, float)
            and (1 - self.rel) * self.noise_multiplier <= other < self.noise_multiplier
        )

    def __repr__(self) -> str:
        return f"a little below {self.noise_multiplier}"


def central(**changes: object) -> Strategy:
    """A trusted server that adds noise to a sum of clipped updates: DP-FedAvg."""
    base = {
        "name": "central",
        "unit": Unit.CLIENT,
        "observer": Observer.WORLD,
        "adjacency": Adjacency.ZERO_OUT,
        "local": Sgd(client_settings=PRACTICE),
        "selection": PoissonCohort(sampling_rate=0.25),
        "stages": (Clip(clip=2.0),),
        "weights": ExpectedCohortWeights(expected_cohort=5),
        "central_noise": CentralNoise(noise_multiplier=1.5),
    }
    return Strategy(**{**base, **changes})  # type: ignore[arg-type]


class Identity(RowDenoiser):
    ordered: ClassVar[bool] = False

    def __call__(
        self, state: PlugState, rows: Rows, round_: int
    ) -> tuple[Tensor, PlugState, Metrics]:
        return rows.matrix, state, {}


@dataclass(frozen=True)
class Crooked(Stage):
    linear: ClassVar[bool] = False

    def client(self, x: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        return x.sign()

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        return exposure.processed()


def test_a_central_strategy_bills_its_own_multiplier_amplified_against_the_world_only() -> None:
    strategy = central()
    (world,) = strategy.cost(Observer.WORLD, (), 1, TERMS).events
    assert world.noise_multiplier == charged(1.5)
    assert (world.sampling, world.sampling_rate) == ("poisson", 0.25)
    (server,) = strategy.cost(Observer.SERVER, (), 1, TERMS).events
    assert server.noise_multiplier == 0
    assert server.sampling == "none"


@given(st.floats(0.1, 10), st.floats(0.1, 5), st.floats(1, 50))
def test_noise_follows_the_object_that_clips(clip: float, multiplier: float, cohort: float) -> None:
    strategy = central(
        stages=(Clip(clip=clip),),
        central_noise=CentralNoise(noise_multiplier=multiplier),
        weights=ExpectedCohortWeights(expected_cohort=cohort),
    )
    assert strategy.contribution_bound(TERMS) == clip
    exposure = strategy.exposure(Observer.WORLD, TERMS)
    assert exposure.bound == pytest.approx(clip / cohort, rel=1e-4)
    assert strategy.cost(Observer.WORLD, (), 1, TERMS).events[0].noise_multiplier == charged(
        multiplier
    )


def test_local_noise_bills_sigma_for_a_row_and_sigma_sqrt_k_for_the_sum() -> None:
    """FedCEO's two numbers from one fold: the row's multiplier against the server, the sum's
    against the world.
    """
    strategy = central(
        selection=FixedCohort(size=4),
        adjacency=Adjacency.REPLACE_ONE,
        stages=(Clip(clip=3.0), GaussianNoise(noise_multiplier=0.5, clip=3.0)),
        weights=ExpectedCohortWeights(expected_cohort=4),
        central_noise=None,
    )
    assert strategy.cost(Observer.SERVER, (), 1, TERMS).events[0].noise_multiplier == charged(0.5)
    world = strategy.cost(Observer.WORLD, (), 1, TERMS).events[0]
    assert world.noise_multiplier == charged(0.5 * math.sqrt(4))
    assert (world.sampling, world.sampling_rate) == ("uniform", 0.2)
    assert strategy.shares_needed(TERMS, 4) == 4
    assert replace(strategy, tolerated_dropouts=1).shares_needed(TERMS, 4) == 3


def test_where_weights_are_not_constant_the_world_pays_as_the_server_does() -> None:
    strategy = central(
        stages=(Clip(clip=3.0), GaussianNoise(noise_multiplier=0.5, clip=3.0)),
        weights=UniformWeights(),
        central_noise=None,
    )
    world = strategy.cost(Observer.WORLD, (), 1, TERMS).events[0]
    assert world.noise_multiplier == charged(0.5)
    assert world.sampling == "none"
    assert strategy.shares_needed(TERMS, 4) == 0


def test_dp_sgd_bills_the_same_against_server_and_world() -> None:
    strategy = Strategy(
        name="record",
        unit=Unit.RECORD,
        observer=Observer.SERVER,
        adjacency=Adjacency.ZERO_OUT,
        local=DpSgd(client_settings=PRACTICE, clip=1.0),
        selection=FixedCohort(size=4),
    )
    phases = (
        Phase(steps=7, batch_size=5, sampling="poisson", lr=0.1, clip=1.0, noise_multiplier=1.3),
    )
    costs = {
        strategy.cost(observer, phases, 50, TERMS) for observer in (Observer.SERVER, Observer.WORLD)
    }
    assert len(costs) == 1
    (event,) = costs.pop().events
    assert (event.steps, event.sampling, event.sampling_rate) == (7, "poisson", 0.1)
    assert event.noise_multiplier == charged(1.3, rel=1e-3)


def test_a_summing_channel_refuses_what_needs_rows() -> None:
    central(channel=SecureSum())
    with pytest.raises(ConfigurationError, match="no rows to clean"):
        central(channel=SecureSum(), clean=Identity(), central_noise=None, observer=Observer.NOBODY)
    with pytest.raises(ConfigurationError, match="need rows"):
        central(
            channel=SecureSum(),
            weights=EpsilonWeights(),
            central_noise=None,
            observer=Observer.NOBODY,
        )
    with pytest.raises(ConfigurationError, match="not linear"):
        central(channel=SecureSum(), stages=(Clip(clip=1.0), Crooked()))


def test_central_noise_needs_constant_weights_and_untouched_rows() -> None:
    with pytest.raises(PrivacyRefusal, match="not constants"):
        central(weights=UniformWeights())
    with pytest.raises(PrivacyRefusal, match="cleaned"):
        central(clean=Identity())


def test_a_promise_without_protection_is_refused_unless_nobody_is_said_aloud() -> None:
    with pytest.raises(PrivacyRefusal, match="nothing protects"):
        central(stages=())  # noise without a bound
    with pytest.raises(PrivacyRefusal, match="nothing protects"):
        central(central_noise=None)
    with pytest.raises(PrivacyRefusal, match="nothing protects"):
        # the noise comes after the server has seen everything
        central(observer=Observer.SERVER, adjacency=Adjacency.ZERO_OUT)
    assert central(central_noise=None, observer=Observer.NOBODY).name == "central"


def test_fixed_cohorts_are_billed_replace_one_or_not_at_all() -> None:
    with pytest.raises(PrivacyRefusal, match="replace_one"):
        central(selection=FixedCohort(size=5))
    central(selection=FixedCohort(size=5), adjacency=Adjacency.REPLACE_ONE)


def test_units_must_agree() -> None:
    with pytest.raises(ConfigurationError, match="protects a record"):
        central(local=DpSgd(client_settings=PRACTICE, clip=1.0))


def test_an_unbounded_function_before_noise_bounds_nothing() -> None:
    with pytest.raises(PrivacyRefusal):
        central(stages=(Clip(clip=1.0), Crooked()))


def test_describe_names_every_piece_in_order() -> None:
    steps = [step for step, _ in central().describe()]
    assert steps == [
        "select",
        "local work",
        "client stage",
        "channel",
        "weigh",
        "central noise",
        "step",
    ]
    assert "clip=2.0" in dict(central().describe())["client stage"]


def test_torch_is_not_touched_by_building() -> None:
    before = torch.get_rng_state()
    central()
    assert torch.equal(before, torch.get_rng_state())


def test_a_cohort_of_any_size_can_be_built_before_the_population_is_known() -> None:
    strategy = central(selection=FixedCohort(size=100_000), adjacency=Adjacency.REPLACE_ONE)
    with pytest.raises(ConfigurationError, match=r"\b100000\b.*\b20\b"):
        strategy.cost(Observer.WORLD, (), 1, TERMS)


def test_clipping_whole_updates_does_not_protect_a_record() -> None:
    """One changed record may turn a clipped update into its opposite: the difference is up to twice
    the clip.
    """
    with pytest.raises(PrivacyRefusal, match="one changed record"):
        Strategy(
            name="wrong",
            unit=Unit.RECORD,
            observer=Observer.SERVER,
            adjacency=Adjacency.ZERO_OUT,
            local=Sgd(client_settings=PRACTICE, unit=Unit.RECORD),
            stages=(Clip(clip=1.0), GaussianNoise(noise_multiplier=1.0, clip=1.0)),
        )


def test_presence_is_not_hidden_where_sizes_are_public() -> None:
    with pytest.raises(PrivacyRefusal, match="zero_out"):
        Strategy(
            name="wrong",
            unit=Unit.RECORD,
            observer=Observer.SERVER,
            adjacency=Adjacency.ADD_REMOVE,
            local=DpSgd(client_settings=PRACTICE, clip=1.0),
        )
    rows = {
        "stages": (Clip(clip=1.0), GaussianNoise(noise_multiplier=1.0, clip=1.0)),
        "central_noise": None,
    }
    with pytest.raises(PrivacyRefusal, match="zero_out"):
        central(observer=Observer.SERVER, adjacency=Adjacency.ADD_REMOVE, **rows)
    with pytest.raises(PrivacyRefusal, match="zero_out"):
        central(adjacency=Adjacency.ADD_REMOVE)  # the denominator tells how many clients there are


class Roots(Clip):
    """Not linear on arrival: it cannot act on a noisy sum, so it would have to act before it."""

    linear: ClassVar[bool] = False


class Learns(Clip):
    """Remembers something of what arrives, which carries no central noise yet."""

    def learn(self, state: PlugState, rows: Rows | Total) -> PlugState:
        return state


@pytest.mark.parametrize("stage", [Roots(clip=1.0), Learns(clip=1.0)])
def test_central_noise_refuses_stages_that_look_at_uploads_on_arrival(stage: Clip) -> None:
    with pytest.raises(PrivacyRefusal, match="on arrival"):
        central(stages=(stage,))


def test_a_ball_alone_is_no_bound_to_bill() -> None:
    with pytest.raises(PrivacyRefusal, match="nothing protects"):
        central(local=Sgd(client_settings=PRACTICE, ball=1.0), stages=())


def test_clipped_noisy_shares_no_longer_add_up_as_noise() -> None:
    strategy = central(
        selection=FixedCohort(size=16),
        adjacency=Adjacency.REPLACE_ONE,
        stages=(Clip(clip=1.0), GaussianNoise(noise_multiplier=0.3, clip=1.0), Clip(clip=0.5)),
        weights=ExpectedCohortWeights(expected_cohort=16),
        central_noise=None,
    )
    assert strategy.cost(Observer.WORLD, (), 1, TERMS).events[0].noise_multiplier == pytest.approx(
        0.3
    )


def test_noise_of_clients_over_a_cohort_of_random_size_amplifies_nothing() -> None:
    """How much noise is published tells how many were drawn, and nothing is when nobody was: 0.573
    stated, 6.001 true.
    """
    strategy = central(
        stages=(Clip(clip=1.0), GaussianNoise(noise_multiplier=2.0, clip=1.0)), central_noise=None
    )
    assert not strategy.amplifies(Observer.WORLD)
    assert strategy.cost(Observer.WORLD, (), 1, TERMS).events[0].sampling == "none"


@dataclass(frozen=True, kw_only=True)
class ForeignNoise(Stage):
    """A stage of another package that adds noise, and says so by its exposure alone."""

    std: float

    def client(self, x: Tensor, shared: Any, who: Any, rng: Any) -> Tensor:
        return x + self.std

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        return exposure.noised(self.std)


def test_noise_that_is_declared_by_its_exposure_alone_amplifies_nothing_either() -> None:
    strategy = central(stages=(Clip(clip=1.0), ForeignNoise(std=2.0)), central_noise=None)
    assert not strategy.amplifies(Observer.WORLD)
    assert central(central_noise=CentralNoise(noise_multiplier=2.0)).amplifies(Observer.WORLD)


class NoSize(Selection):
    """Says that it draws a fixed number, and not which."""

    sampling: ClassVar[Any] = "uniform"

    def rate(self, population: int) -> float:
        return 1 / population

    def order(self, candidates: Any, seed: Any) -> list[str]:
        return list(candidates)


class NoExposure(Channel):
    """Amplifies what is sent, and does not say so."""

    sees_rows: ClassVar[bool] = False
    simulated: ClassVar[bool] = True

    def send(self, message: Tensor, shared: Any, who: Any, rng: Any) -> Tensor:
        return 10 * message


def test_a_component_that_leaves_out_what_its_cost_rests_on_is_refused() -> None:
    replaced = {"selection": NoSize(), "adjacency": Adjacency.REPLACE_ONE}
    for changes in (replaced, {"channel": NoExposure()}):
        with pytest.raises(NotImplementedError):
            central(**changes).cost(Observer.WORLD, (), 1, TERMS)
