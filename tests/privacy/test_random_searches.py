"""The best of a random number of runs: its law, its bound, and what an attack can show."""

from __future__ import annotations

import math
from collections import Counter

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event
from hypothesis import given, settings, strategies as st

from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Adjacency
from dpfl.privacy.accountant import spend
from dpfl.privacy.events import Event
from dpfl.privacy.selection import (
    SEARCH_ORDERS,
    RandomRuns,
    calibrate_search,
    search_spend,
    search_spend_of,
)

SHAPES = [0.0, 0.5, 1.0, 3.0, math.inf]
ZERO_OUT = Adjacency.ZERO_OUT
any_runs = st.builds(
    RandomRuns,
    mean=st.floats(1.01, 60.0),
    shape=st.one_of(st.sampled_from([0.0, 1.0, math.inf]), st.floats(0.01, 10.0)),
)


# ---- the law of the number of runs ---------------------------------------------------------------


@given(runs=any_runs)
@settings(max_examples=40, deadline=None)
def test_the_table_is_the_law(runs: RandomRuns) -> None:
    law = runs.probabilities
    assert float(sum(law)) == pytest.approx(1.0, abs=1e-25)
    assert all(probability >= 0 for probability in law)
    mean = sum(k * float(p) for k, p in enumerate(law, runs.first))
    assert mean == pytest.approx(runs.mean, rel=1e-9)
    beyond = law[-1] - law[-2] * runs._ratio(runs.most - 1)
    assert abs(float(beyond)) < 2**-80


@pytest.mark.parametrize("shape", SHAPES)
def test_probabilities_are_those_of_scipy(shape: float) -> None:
    from scipy import stats

    runs = RandomRuns(mean=7.0, shape=shape)
    if shape == math.inf:
        known = stats.poisson(7.0).pmf(np.arange(20))
    elif shape == 0:
        known = stats.logser(1 - runs.gamma).pmf(np.arange(1, 21))
    else:
        whole = stats.nbinom(shape, runs.gamma)
        known = whole.pmf(np.arange(1, 21)) / whole.sf(0)
    assert [float(p) for p in runs.probabilities[:20]] == pytest.approx(list(known), rel=1e-9)


def test_draws_have_the_law() -> None:
    """20,000 draws by 128 secret bits: a chi-square that a mean of 4.2 instead of 4 fails."""
    from scipy import stats

    rng = SecretRng.simulated(PublicSeed(3))
    words = [rng.secret_seed().value for _ in range(20_000)]

    def p_value(drawn: RandomRuns, claimed: RandomRuns) -> float:
        counts = Counter(min(drawn.drawn(word), 16) for word in words)
        law = [float(p) for p in claimed.probabilities[:15]]
        expected = [*law, 1 - sum(law)]
        seen = [counts[k] for k in range(1, 17)]
        return float(stats.chisquare(seen, [20_000 * p for p in expected]).pvalue)

    right, wrong = RandomRuns(mean=4.0), RandomRuns(mean=4.2)
    assert p_value(right, right) > 1e-3
    assert p_value(wrong, right) < 1e-6


# ---- the bound -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("noise", [0.8, 3.0, 20.0])
@pytest.mark.parametrize("mean", [2.0, 15.0])
def test_divergences_are_those_of_dp_accounting(shape: float, noise: float, mean: float) -> None:
    """An independent implementation of Theorems 2 and 6, at the same orders."""
    gaussian = dp_event.GaussianDpEvent(noise)
    theirs = dp_accounting.rdp.RdpAccountant(orders=SEARCH_ORDERS)
    theirs.compose(dp_event.RepeatAndSelectDpEvent(gaussian, mean, shape))
    one_run = [order / (2 * noise**2) for order in SEARCH_ORDERS]
    ours = RandomRuns(mean=mean, shape=shape).divergences(SEARCH_ORDERS, one_run)
    if shape == math.inf:  # theirs are not brought down from larger orders; a better delta here
        assert all(own <= other * (1 + 1e-9) for own, other in zip(ours, theirs.rdp, strict=True))
        ratio = min(ours) / min(theirs.rdp)
        assert 0.8 < ratio <= 1 + 1e-9
    else:
        assert ours == pytest.approx(list(theirs.rdp), rel=1e-6)


@pytest.mark.parametrize("shape", [0.0, 1.0, 2.0])
def test_corollary_4_for_gaussian_runs(shape: float) -> None:
    """The paper's closed form of concentrated DP, for orders above 1 + sqrt(log(E K) / rho)."""
    runs, rho = RandomRuns(mean=10.0, shape=shape), 0.05
    log = -math.log(runs.gamma)
    assert rho <= log
    best, order = math.sqrt(log / rho), 1 + 2 * math.sqrt(math.log(runs.mean) / rho)
    orders = sorted([best, order])
    found = runs.divergences(orders, [rho * a for a in orders])[orders.index(order)]
    rest = 2 * (1 + shape) * math.sqrt(rho * log) - shape * rho
    wanted = rho * (order - 1) + math.log(runs.mean) / (order - 1) + rest
    assert found == pytest.approx(wanted, rel=1e-8)


def test_golden_epsilons() -> None:
    """Computed once with dp-accounting 0.6.0's RepeatAndSelectDpEvent on its default orders."""
    known = {(8.0, 10.0, 0.0): 0.874, (8.0, 10.0, 1.0): 1.067, (2.0, 10.0, 1.0): 4.319}
    for (noise, mean, shape), epsilon in known.items():
        accountant = dp_accounting.rdp.RdpAccountant()
        gaussian = dp_event.GaussianDpEvent(noise)
        accountant.compose(dp_event.RepeatAndSelectDpEvent(gaussian, mean, shape))
        theirs = accountant.get_epsilon(1e-5)
        runs = RandomRuns(mean=mean, shape=shape)
        ours = search_spend((Event(noise_multiplier=noise),), 1e-5, adjacency=ZERO_OUT, runs=runs)
        assert ours.epsilon == pytest.approx(epsilon, abs=3e-3)
        assert ours.epsilon == pytest.approx(theirs, rel=5e-3)


@given(
    runs=any_runs,
    noise=st.floats(0.5, 50.0),
    delta=st.sampled_from([1e-4, 1e-6]),
    numbers=st.sampled_from([0, 1, 10_000]),
)
@settings(max_examples=40, deadline=None)
def test_a_search_never_costs_less_than_one_run(
    runs: RandomRuns, noise: float, delta: float, numbers: int
) -> None:
    one = (Event(noise_multiplier=noise, numbers=numbers),)
    whole = search_spend(one, delta, adjacency=ZERO_OUT, runs=runs).epsilon
    assert whole >= spend(one, delta, adjacency=ZERO_OUT).epsilon
    more = search_spend((*one, Event(noise_multiplier=9.0)), delta, adjacency=ZERO_OUT, runs=runs)
    assert more.epsilon >= whole


def test_candidates_of_different_costs_count_by_the_largest() -> None:
    runs = RandomRuns(mean=5.0)
    cheap, costly = (Event(noise_multiplier=9.0),), (Event(noise_multiplier=2.0),)
    both = search_spend_of([cheap, costly], 1e-5, adjacency=ZERO_OUT, runs=runs).epsilon
    assert both == search_spend(costly, 1e-5, adjacency=ZERO_OUT, runs=runs).epsilon


@pytest.mark.parametrize("runs", [RandomRuns(mean=5.0), RandomRuns(mean=5.0, shape=math.inf)])
def test_calibrated_noise_is_the_least_that_fits(runs: RandomRuns) -> None:
    score = (Event(noise_multiplier=30.0, numbers=1),)
    noise = calibrate_search(2.0, 1e-5, 1.0, 10, runs=runs, beside=score, sampling="none")

    def cost(multiplier: float) -> float:
        history = (*score, Event(noise_multiplier=multiplier, steps=10))
        return search_spend(history, 1e-5, adjacency=Adjacency.ADD_REMOVE, runs=runs).epsilon

    assert cost(noise) <= 2.0 < cost(noise / 1.005)


def test_what_cannot_be_searched_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"mean = 1\.0"):
        RandomRuns(mean=1.0)
    with pytest.raises(ConfigurationError, match="shape = -1"):
        RandomRuns(mean=2.0, shape=-1)
    with pytest.raises(ConfigurationError, match="shape = nan"):
        RandomRuns(mean=2.0, shape=math.nan)
    runs, failing = RandomRuns(mean=2.0), (Event(noise_multiplier=3.0, failure=1e-9),)
    with pytest.raises(PrivacyRefusal, match="may fail"):
        search_spend(failing, 1e-5, adjacency=ZERO_OUT, runs=runs)
    with pytest.raises(PrivacyRefusal, match="no noise keeps"):
        calibrate_search(1e-9, 1e-5, 1.0, 1, runs=runs, sampling="none")
    nothing = search_spend((Event(noise_multiplier=0.0),), 1e-5, adjacency=ZERO_OUT, runs=runs)
    assert nothing.epsilon == math.inf
    tiny = (Event(noise_multiplier=3.0, numbers=10**11),)  # the sampler would take all of delta
    assert search_spend(tiny, 1e-11, adjacency=ZERO_OUT, runs=runs).epsilon == math.inf


# ---- an attack -----------------------------------------------------------------------------------


def randomised_response(epsilon: float, order: float) -> float:
    """The Renyi divergence of one bit that is told truly with odds exp(epsilon)."""
    p = 1 / (1 + math.exp(-epsilon))
    q = 1 - p
    terms = [a * math.log(x) + (1 - a) * math.log(y) for a, x, y in ((order, p, q), (order, q, p))]
    return float(np.logaddexp(*terms)) / (order - 1)


def best_of(law: list[float], first: int, epsilon: float, bit: int) -> float:
    """The exact probability that the best of K answers is 0: none of them was 1."""
    no = 1 / (1 + math.exp(epsilon if bit else -epsilon))
    return math.fsum(p * no**k for k, p in enumerate(law, first))


def exact_delta(law: list[float], first: int, epsilon: float, at: float) -> float:
    """delta(at) of publishing the best answer: its law has two outcomes (and "no run")."""
    worlds = []
    for bit in (0, 1):
        none = law[0] if first == 0 else 0.0
        zero = best_of(law, first, epsilon, bit) - none
        worlds.append([none, zero, 1 - zero - none])
    pairs = [worlds, worlds[::-1]]
    return max(
        sum(max(0.0, a - math.exp(at) * b) for a, b in zip(x, y, strict=True)) for x, y in pairs
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("epsilon", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("mean", [3.0, 10.0])
def test_the_bound_holds_for_randomised_response(shape: float, epsilon: float, mean: float) -> None:
    """At every order the exact divergence of the best answer is below the bound."""
    runs = RandomRuns(mean=mean, shape=shape)
    law = [float(p) for p in runs.probabilities]
    orders = [1.5, 2.0, 4.0, 16.0, 64.0]
    one_run = [randomised_response(epsilon, order) for order in orders]
    bound = runs.divergences(orders, one_run)
    worlds = []
    for bit in (0, 1):
        none = law[0] if runs.first == 0 else 0.0
        zero = best_of(law, runs.first, epsilon, bit) - none
        worlds.append(np.array([none, zero, 1 - zero - none]))
    for order, most in zip(orders, bound, strict=True):
        for x, y in (worlds, worlds[::-1]):
            kept = x > 0
            total = np.sum(x[kept] ** order * y[kept] ** (1 - order))
            assert math.log(total) / (order - 1) <= most + 1e-9


def test_the_best_of_a_fixed_number_breaks_what_a_random_number_keeps() -> None:
    """Ten runs at epsilon 0.5: "no answer was 1" is exp(5) times as likely in one world."""
    epsilon, delta = 0.5, 1e-6
    runs = RandomRuns(mean=10.0, shape=0.0)
    stated = 2.0 * epsilon * 1.0001  # Corollary 3: (2 + eta) epsilon
    law = [float(p) for p in runs.probabilities]
    assert exact_delta(law, runs.first, epsilon, stated) <= delta
    fixed = [0.0] * 9 + [1.0]
    assert exact_delta(fixed, 1, epsilon, epsilon) > 0.005  # at the epsilon of one run: violated
    assert exact_delta(fixed, 1, epsilon, stated) > 0.005  # and at that of the random search
    no = [best_of(fixed, 1, epsilon, bit) for bit in (0, 1)]
    assert math.log(no[0] / no[1]) == pytest.approx(10 * epsilon)


def largest_of_gaussians(law: list[float], first: int, noise: float, at: float) -> float:
    """delta(at), by quadrature, of publishing the largest of K noisy numbers.

    One record moves the mean from 0 to 1. The largest has the density  phi(y) f'(F(y)),  where f is
    the generating function of K.
    """
    from scipy import stats

    y = np.linspace(-12 * noise, 12 * noise + 1, 4_001)
    counts = np.arange(first, first + len(law))
    densities = []
    for mean in (0.0, 1.0):
        below = stats.norm.logcdf(y, mean, noise)
        terms = np.zeros_like(y)
        for k, p in zip(counts, law, strict=True):
            if k and p > 1e-13:
                terms += p * k * np.exp((k - 1) * below)
        densities.append(stats.norm.pdf(y, mean, noise) * terms)
    pairs = [densities, densities[::-1]]
    excess = [np.maximum(a - math.exp(at) * b, 0.0) for a, b in pairs]
    return float(max(one.sum() for one in excess)) * float(y[1] - y[0])


@pytest.mark.parametrize("noise", [1.5, 4.0])
@pytest.mark.parametrize("shape", [0.0, 1.0, math.inf])
def test_the_stated_epsilon_holds_for_the_largest_of_noisy_numbers(
    noise: float, shape: float
) -> None:
    """The whole path, from events to epsilon, against an exact computation."""
    delta, runs = 1e-3, RandomRuns(mean=8.0, shape=shape)
    law = [float(p) for p in runs.probabilities]
    one = (Event(noise_multiplier=noise),)
    stated = search_spend(one, delta, adjacency=ZERO_OUT, runs=runs).epsilon
    exact = largest_of_gaussians(law, runs.first, noise, stated)
    assert exact <= delta
    single = spend(one, delta, adjacency=ZERO_OUT).epsilon
    assert largest_of_gaussians([1.0], 1, noise, single) == pytest.approx(delta, rel=0.02)
    # At the epsilon of one run, the best of eight is not private.
    assert largest_of_gaussians([0.0] * 7 + [1.0], 1, noise, single) > 1.2 * delta
