"""Lower bounds: they must hold as often as they say, and come near what is true."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.stats import binom

from dpfl.attacks.auditing.claims import Claim, GaussianCurve, PointsCurve
from dpfl.attacks.auditing.lower_bounds import (
    Trials,
    canary_bounds,
    guesses_refute,
    one_run_epsilon,
    one_run_p_value,
    repeated_bounds,
    upper_limit,
)
from dpfl.core.types import Adjacency, Observer, Promise, Unit
from dpfl.privacy.accountant import gaussian_epsilon
from dpfl.privacy.events import Event

PROMISE = Promise(unit=Unit.RECORD, adjacency=Adjacency.ZERO_OUT, observer=Observer.SERVER)


def claimed(mu: float, delta: float = 1e-5, **event: float) -> Claim:
    history = (Event(noise_multiplier=1 / mu, **event),)  # type: ignore[arg-type]
    return Claim(history=history, adjacency=Adjacency.ZERO_OUT, delta=delta, promise=PROMISE)


def gaussian(mu: float, count: int, seed: int) -> Trials:
    rng = np.random.default_rng(seed)
    present = rng.random(count) < 0.5
    return Trials(scores=rng.normal(size=count) + mu * present, present=present)


def randomised_response(epsilon: float, count: int, seed: int) -> Trials:
    """The mechanism for which the bound on guesses is exact: answers are right with probability
    e^epsilon / (1 + e^epsilon).
    """
    rng = np.random.default_rng(seed)
    present = rng.random(count) < 0.5
    honest = rng.random(count) < 1 / (1 + math.exp(-epsilon))
    return Trials(scores=np.where(honest, present, ~present).astype(float), present=present)


# ---- one run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
def test_without_delta_the_p_value_is_that_of_randomised_response(epsilon: float) -> None:
    chance = math.exp(epsilon) / (1 + math.exp(epsilon))
    for right in (0, 50, 80, 100):
        wanted = binom.sf(right - 1, 100, chance)
        assert one_run_p_value(200, 100, right, epsilon, 0.0) == pytest.approx(wanted, rel=1e-9)


def test_delta_adds_what_the_theorem_says() -> None:
    """Theorem 5.2 written out for ten guesses, eight of which are right."""
    epsilon, delta, chance = 0.7, 1e-3, math.exp(0.7) / (1 + math.exp(0.7))
    law = [binom.pmf(i, 10, chance) for i in range(11)]
    worst = max(sum(law[8 - i : 8]) / i for i in range(1, 9))
    wanted = sum(law[8:]) + 2 * 40 * delta * worst
    assert one_run_p_value(40, 10, 8, epsilon, delta) == pytest.approx(wanted, rel=1e-12)


@given(st.integers(1, 200), st.floats(0, 6), st.floats(0, 0.01))
def test_p_values_fall_with_right_guesses_and_rise_with_epsilon(
    guesses: int, epsilon: float, delta: float
) -> None:
    values = [one_run_p_value(300, guesses, right, epsilon, delta) for right in range(guesses + 1)]
    tails = [one_run_p_value(300, guesses, right, epsilon, 0.0) for right in range(guesses + 1)]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(tails))
    assert all(value >= tail - 1e-12 for value, tail in zip(values, tails, strict=True))
    assert (
        one_run_p_value(300, guesses, guesses, epsilon, 0.0)
        <= one_run_p_value(300, guesses, guesses, epsilon + 1, 0.0) + 1e-12
    )


def test_perfect_guesses_show_what_randomised_response_would_need() -> None:
    found = one_run_epsilon(100, 100, 100, 0.05, 0.0)
    assert (math.exp(found) / (1 + math.exp(found))) ** 100 == pytest.approx(0.05, rel=1e-3)


def test_bounds_hold_as_often_as_they_say() -> None:
    """Of 150 audits of a correct Gaussian mechanism, about 10 % at most exceed the truth."""
    mu, wrong = 1.2, Counter[str]()
    claim, truth = claimed(mu), gaussian_epsilon(mu, 1e-5)
    for seed in range(150):
        bounds = canary_bounds(gaussian(mu, 200, seed), claim, 0.9)
        halves = gaussian(mu, 100, 1000 + seed), gaussian(mu, 100, 2000 + seed)
        for bound in (*bounds, *repeated_bounds(*halves, claim, 0.9)):
            wrong[bound.test] += bound.epsilon > truth
    assert max(wrong.values()) <= 150 * 0.1 + 3 * math.sqrt(150 * 0.09)


def test_bounds_hold_where_they_are_tight() -> None:
    """Randomised response is the worst case of the bound on guesses: it holds there, barely."""
    epsilon, wrong, tight = 1.0, 0, []
    for seed in range(300):
        trials = randomised_response(epsilon, 400, seed)
        found = one_run_epsilon(400, 400, trials.guessed(400), 0.1, 0.0)
        wrong += found > epsilon
        tight.append(found)
    assert wrong <= 300 * 0.1 + 3 * math.sqrt(300 * 0.09)
    assert wrong >= 5  # a bound that never errs would be loose here
    assert np.mean(tight) > 0.6 * epsilon


def test_plain_bounds_hold_for_noise_of_another_kind() -> None:
    """Randomised response under a Gaussian claim: what is derived from the curve assumes Gaussian
    noise, and may exceed the truth; what is plain does not.
    """
    plain, curved = [], []
    for seed in range(20):
        trials = randomised_response(2.0, 1000, seed)
        found = [
            *canary_bounds(trials, claimed(1.0), 0.95),
            *repeated_bounds(trials, randomised_response(2.0, 1000, 99 + seed), claimed(1.0), 0.95),
        ]
        plain.append(max(one.epsilon for one in found if one.factor is None))
        curved.append(max(one.epsilon for one in found))
    assert np.mean(np.array(plain) > 2.0) <= 0.2
    assert np.mean(plain) > 1.4
    assert np.mean(curved) > 2.5  # so it must not be called a bound for any mechanism


@pytest.mark.parametrize("mu", [0.8, 1.5])
def test_the_whole_curve_shows_more_than_one_point_of_it(mu: float) -> None:
    plain, whole = canary_bounds(gaussian(mu, 3000, 1), claimed(mu), 0.95)
    assert plain.epsilon < whole.epsilon < gaussian_epsilon(mu, 1e-5)
    assert whole.epsilon > 0.4 * gaussian_epsilon(mu, 1e-5)


def test_repeated_trials_come_near_and_find_half_the_noise() -> None:
    claim = claimed(2.0)
    plain, fair = repeated_bounds(gaussian(2.0, 1000, 3), gaussian(2.0, 1000, 4), claim, 0.95)
    _, broken = repeated_bounds(gaussian(4.0, 1000, 3), gaussian(4.0, 1000, 4), claim, 0.95)
    assert plain.factor is None and not plain.refutes and not fair.refutes and broken.refutes
    assert 0.7 * claim.epsilon() < fair.epsilon < claim.epsilon() < broken.epsilon
    assert fair.factor is not None and broken.factor is not None
    assert fair.factor < 1 < broken.factor


def test_guesses_the_wrong_way_round_show_nothing() -> None:
    trials = gaussian(3.0, 1000, 5)
    turned = Trials(scores=-trials.scores, present=trials.present)
    assert all(bound.epsilon == 0 for bound in canary_bounds(turned, claimed(3.0), 0.95))
    assert all(one.epsilon == 0 for one in repeated_bounds(turned, turned, claimed(3.0), 0.95))


# ---- curves --------------------------------------------------------------------------------------


@given(st.floats(0.05, 4), st.floats(0.001, 0.999))
def test_an_inverse_blow_up_undoes_the_blow_up(mu: float, share: float) -> None:
    curve = GaussianCurve(mu)
    least = curve.inverse_blow_up(share)
    assert 1 - curve.misses(least) == pytest.approx(share, abs=1e-9)


@given(st.floats(0.2, 3), st.floats(0.001, 0.999))
def test_points_of_a_curve_never_claim_more_than_the_curve(mu: float, share: float) -> None:
    """Pairs (delta, epsilon) guarantee less than the whole curve, and near it where they are many."""
    deltas = [10 ** (-9 + 0.25 * i) for i in range(36)]
    points = PointsCurve([(delta, gaussian_epsilon(mu, delta)) for delta in deltas])
    whole = GaussianCurve(mu)
    assert points.misses(share) <= whole.misses(share) + 1e-9
    assert points.inverse_blow_up(share) <= whole.inverse_blow_up(share) + 1e-9
    assert points.misses(share) > whole.misses(share) - 0.1


def test_a_stretched_claim_is_that_of_less_noise() -> None:
    claim = claimed(1.0)
    assert claim.epsilon(2.0) == pytest.approx(claimed(2.0).epsilon(), rel=1e-9)
    assert claim.largest_refuted(lambda curve: curve.misses(0.5) > 1 - 0.5 - 1e-9) == pytest.approx(
        0.0, abs=0.01
    )
    factor = claim.largest_refuted(lambda curve: getattr(curve, "mu", 9.0) < 1.7)
    assert factor == pytest.approx(1.7, rel=1e-3)


def test_sampled_claims_have_a_curve_of_points() -> None:
    claim = claimed(1.0, sampling="poisson", sampling_rate=0.2)  # type: ignore[arg-type]
    assert isinstance(claim.curve(), PointsCurve)
    rate = 0.05
    assert claim.curve().misses(rate) > GaussianCurve(1.0).misses(rate)


def test_a_refutation_needs_more_than_chance() -> None:
    curve = GaussianCurve(0.01)
    assert not guesses_refute(curve, 1000, 100, 50, 0.05)
    assert guesses_refute(curve, 1000, 100, 90, 0.05)


def test_clopper_pearson_limits_are_exact() -> None:
    for errors, trials in ((0, 10), (3, 50), (49, 50)):
        limit = upper_limit(errors, trials, 0.05)
        assert binom.cdf(errors, trials, limit) == pytest.approx(0.05, rel=1e-6)
    assert upper_limit(5, 5, 0.05) == 1.0
