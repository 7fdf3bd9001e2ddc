from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.types import Adjacency, Budget, Claims, ClientSettings, Phase, Terms, Unit
from dpfl.plugs.base import Participant
from dpfl.plugs.local_work import DpSgd, Sgd
from dpfl.plugs.sampling import PoissonBatches, sampler
from dpfl.privacy.accountant import spend

SETTINGS = ClientSettings(batch_size=8, local_steps=10, lr=0.1)
WORK = DpSgd(client_settings=SETTINGS, clip=1.0)
TERMS = Terms(
    rounds=10,
    population=4,
    expected_cohort=2.0,
    participations=5,
    smallest_epsilon=0.5,
    largest_epsilon=8.0,
    parameters=10,
)
DELTA = 1e-5


def participant(
    epsilon_: float = 1.0, examples: int = 100, client_settings: ClientSettings | None = None
) -> Participant:
    return Participant(
        examples=examples,
        client_settings=client_settings or ClientSettings(),
        budget=Budget(epsilon=epsilon_, delta=DELTA),
    )


def whole_plan_cost(phase: Phase, examples: int, participations: int) -> float:
    """What the plan costs, asked of the accountant for the phase as it will run."""
    rate = PoissonBatches(examples, phase.batch_size).rate
    (event,) = WORK.exposure((phase,), examples, TERMS.parameters).paid
    assert event.sampling_rate == rate
    return spend(
        (event.times(phase.steps * participations),), DELTA, adjacency=Adjacency.ZERO_OUT
    ).epsilon


@pytest.mark.parametrize(
    ("granted", "examples", "client_settings"),
    [
        (1.0, 100, ClientSettings()),
        (0.5, 100, ClientSettings()),
        (8.0, 100, ClientSettings()),
        (1.0, 1200, ClientSettings(batch_size=60, local_epochs=1)),
        (2.0, 30, ClientSettings(batch_size=64, local_steps=2)),
    ],
)
def test_the_planned_participations_cost_the_budget_and_never_more(
    granted: float, examples: int, client_settings: ClientSettings
) -> None:
    (phase,) = WORK.phases(TERMS, participant(granted, examples, client_settings))
    assert 0.985 <= whole_plan_cost(phase, examples, TERMS.participations) / granted <= 1


def test_more_participations_need_more_noise() -> None:
    noises = [
        WORK.phases(replace(TERMS, participations=n), participant())[0].noise_multiplier
        for n in (1, 5, 20)
    ]
    assert noises == sorted(set(noises))


def test_a_phase_is_noisy_clipped_and_poisson_sampled() -> None:
    (phase,) = DpSgd(client_settings=SETTINGS, clip=0.3).phases(TERMS, participant())
    assert (phase.clip, phase.sampling, phase.batch_size, phase.steps, phase.lr) == (
        0.3,
        "poisson",
        8,
        10,
        0.1,
    )
    assert phase.noise_multiplier > 0
    assert (phase.ball, phase.weight_decay) == (None, 0.0)


@given(examples=st.integers(1, 500), batch=st.integers(1, 600), epochs=st.integers(1, 5))
def test_local_epochs_are_turned_into_steps(examples: int, batch: int, epochs: int) -> None:
    """Plain SGD and DP-SGD count epochs alike; a fixed multiplier spares the calibration."""
    client_settings = ClientSettings(batch_size=batch, local_epochs=epochs, lr=0.1)
    expected = epochs * math.ceil(examples / min(batch, examples))
    terms = TERMS.with_noise(1.0)
    for work in (
        Sgd(client_settings=client_settings),
        DpSgd(client_settings=client_settings, clip=1.0),
    ):
        assert work.phases(terms, participant(examples=examples))[0].steps == expected


def test_a_batch_larger_than_the_data_is_billed_at_rate_one() -> None:
    (phase,) = WORK.phases(
        TERMS, participant(examples=30, client_settings=ClientSettings(batch_size=64))
    )
    (event,) = WORK.exposure((phase,), 30, 10).paid
    assert event.sampling_rate == 1.0


def test_settings_of_ones_own_override_the_methods() -> None:
    own = ClientSettings(batch_size=20, local_epochs=2, lr=0.7)
    (phase,) = WORK.phases(TERMS, participant(examples=100, client_settings=own))
    assert (phase.batch_size, phase.steps, phase.lr) == (20, 10, 0.7)
    (partly,) = WORK.phases(
        TERMS, participant(examples=100, client_settings=ClientSettings(lr=0.7))
    )
    assert (partly.batch_size, partly.steps, partly.lr) == (8, 10, 0.7)


@pytest.mark.parametrize("spending", ["heterogeneous", "uniform", "smallest", "largest"])
def test_a_client_without_a_budget_is_refused(spending: str) -> None:
    work = DpSgd(client_settings=SETTINGS, clip=1.0, spending=spending)  # type: ignore[arg-type]
    nobody = Participant(examples=100, client_settings=ClientSettings(), budget=None)
    with pytest.raises(PrivacyRefusal, match="without a budget"):
        work.phases(TERMS.with_noise(1.0), nobody)


# ---- ways to spend ---------------------------------------------------------------------------------------------------

CLAIMS = {
    "a": Claims(epsilon=0.5, delta=DELTA, examples=100),
    "b": Claims(epsilon=8.0, delta=DELTA, examples=100),
    "c": Claims(epsilon=1.0, delta=DELTA, examples=100),
}


def test_a_uniform_plan_gives_everyone_the_median_clients_noise() -> None:
    uniform = DpSgd(client_settings=SETTINGS, clip=1.0, spending="uniform")
    terms = uniform.resolve_terms(TERMS, CLAIMS)
    noises = {
        client: uniform.phases(terms, participant(claim.epsilon))[0].noise_multiplier
        for client, claim in CLAIMS.items()
    }
    (median_phase,) = WORK.phases(TERMS, participant(1.0))
    assert set(noises.values()) == {median_phase.noise_multiplier}


def test_an_even_number_of_clients_takes_the_lower_of_the_two_middle_ones() -> None:
    uniform = DpSgd(client_settings=SETTINGS, clip=1.0, spending="uniform")
    four = {**CLAIMS, "d": Claims(epsilon=2.0, delta=DELTA, examples=100)}
    assert (
        uniform.resolve_terms(TERMS, four).noise_multiplier
        == WORK.phases(TERMS, participant(1.0))[0].noise_multiplier
    )


@pytest.mark.parametrize(
    ("field", "lie"),
    [
        *[("epsilon", lie) for lie in (math.inf, math.nan, 0.0, -1.0, 1e9)],
        *[("delta", lie) for lie in (math.nan, 0.0, -1.0, 2.0)],
        *[("examples", lie) for lie in (0, -1)],
    ],
)
def test_no_lie_of_one_client_stops_a_uniform_plan(field: str, lie: float) -> None:
    """One client of three lies, whichever it is: there is still a noise for all, between the honest
    extremes.
    """
    uniform = DpSgd(client_settings=SETTINGS, clip=1.0, spending="uniform")
    most = WORK.phases(TERMS, participant(0.5))[0].noise_multiplier
    least = WORK.phases(TERMS, participant(8.0))[0].noise_multiplier
    for misreport in CLAIMS:
        claims = {**CLAIMS, misreport: replace(CLAIMS[misreport], **{field: lie})}
        noise = uniform.resolve_terms(TERMS, claims).noise_multiplier
        assert noise is not None
        assert least <= noise <= most


def test_other_plans_agree_on_no_common_noise() -> None:
    for spending in ("heterogeneous", "smallest", "largest"):
        work = DpSgd(client_settings=SETTINGS, clip=1.0, spending=spending)  # type: ignore[arg-type]
        assert work.resolve_terms(TERMS, CLAIMS).noise_multiplier is None


@pytest.mark.parametrize("own", [0.4, 0.5, 1.0, 8.0])
def test_a_plan_for_the_smallest_claim_never_exceeds_ones_own_budget(own: float) -> None:
    """0.4 is below the smallest claim: its client claimed more than it grants."""
    work = DpSgd(client_settings=SETTINGS, clip=1.0, spending="smallest")
    (phase,) = work.phases(TERMS, participant(own))
    cost = whole_plan_cost(phase, 100, TERMS.participations)
    assert 0.985 <= cost / min(own, TERMS.smallest_epsilon) <= 1


def test_only_a_plan_for_the_largest_claim_is_hypothetical() -> None:
    largest = DpSgd(client_settings=SETTINGS, clip=1.0, spending="largest")
    (phase,) = largest.phases(TERMS, participant(0.5))
    assert whole_plan_cost(phase, 100, TERMS.participations) > 0.5
    assert largest.hypothetical
    assert not any(
        DpSgd(client_settings=SETTINGS, clip=1.0, spending=spending).hypothetical  # type: ignore[arg-type]
        for spending in ("heterogeneous", "uniform", "smallest")
    )


# ---- exposure --------------------------------------------------------------------------------------------------------


@given(
    examples=st.integers(1, 5000), batch=st.integers(1, 6000), steps=st.integers(1, 500), z=st.floats(0.01, 50),
    clip=st.floats(1e-3, 1e3),
)  # fmt: skip
def test_what_is_billed_is_what_the_sampler_of_the_phase_will_do(
    examples: int, batch: int, steps: int, z: float, clip: float
) -> None:
    work = DpSgd(
        client_settings=ClientSettings(batch_size=batch, local_steps=steps, lr=0.1), clip=clip
    )
    phases = work.phases(TERMS.with_noise(z), participant(examples=examples))
    exposure = work.exposure(phases, examples, 10)
    (phase,) = phases
    assert exposure.unit is Unit.RECORD
    assert exposure.paid == (sampler(phase, examples).event(z, steps, 10),)
    (event,) = exposure.paid
    assert (event.steps, event.sampling, event.numbers) == (steps, "poisson", 10)
    assert event.sampling_rate == min(1.0, batch / examples)
    assert 0.9 * z < event.noise_multiplier < z
    assert exposure.finite


def test_every_phase_is_paid_for() -> None:
    (phase,) = WORK.phases(TERMS.with_noise(1.0), participant())
    second = replace(phase, steps=3, noise_multiplier=2.0)
    paid = WORK.exposure((phase, second), 100, 10).paid
    assert [(event.steps, event.noise_multiplier) for event in paid] == [
        (10, pytest.approx(1.0, rel=1e-3)),
        (3, pytest.approx(2.0, rel=1e-3)),
    ]


def test_a_phase_without_noise_is_never_called_private() -> None:
    (phase,) = WORK.phases(TERMS.with_noise(1.0), participant())
    bare = replace(phase, noise_multiplier=0.0)
    assert not WORK.exposure((phase, bare), 100, 10).finite


def test_plain_sgd_hides_nothing_and_a_ball_is_no_bound_to_bill() -> None:
    """The ball is kept in float32 around a start that may be large: only a Clip stage promises a
    bound.
    """
    for ball in (None, 0.5):
        work = Sgd(client_settings=SETTINGS, ball=ball)
        phases = work.phases(TERMS, participant())
        exposure = work.exposure(phases, 100, 10)
        assert (exposure.bound, exposure.noise, exposure.paid) == (math.inf, 0.0, ())
        assert not exposure.finite
        assert phases[0].ball == ball


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "client_settings",
    [
        ClientSettings(local_steps=10, lr=0.1),
        ClientSettings(batch_size=8, local_steps=10),
        ClientSettings(batch_size=8, lr=0.1),
    ],
)
def test_a_method_must_leave_nothing_open(client_settings: ClientSettings) -> None:
    with pytest.raises(ConfigurationError, match="missing"):
        DpSgd(client_settings=client_settings, clip=1.0)
    with pytest.raises(ConfigurationError, match="missing"):
        Sgd(client_settings=client_settings)


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan, math.inf])
def test_a_clip_that_bounds_nothing_is_refused(clip: float) -> None:
    """An infinite clip would make the noise infinite, and the bill a fiction."""
    with pytest.raises(ConfigurationError, match="clip"):
        DpSgd(client_settings=SETTINGS, clip=clip)


def test_an_unknown_way_to_spend_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="choose one of heterogeneous"):
        DpSgd(client_settings=SETTINGS, clip=1.0, spending="frugal")  # type: ignore[arg-type]


def test_contradictory_or_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="give one of the two"):
        ClientSettings(local_steps=1, local_epochs=1)
    for field in (
        {"batch_size": 0},
        {"local_steps": 0},
        {"local_epochs": -1},
        {"lr": 0.0},
        {"lr": math.inf},
    ):
        with pytest.raises(ConfigurationError, match="client settings"):
            ClientSettings(**field)  # type: ignore[arg-type]
