"""No adversary who chooses the next study by the outputs of the last exceeds a budget, under any
filter.

The adversary's true epsilon is computed by explicit integration over the first study's output;
nothing of the accountant is used for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from scipy import optimize
from scipy.special import ndtr
from tests.privacy.ledgers import DELTA, SERVER, charge, cost, exact_epsilon, plan

from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.types import Adjacency, Budget, Unit
from dpfl.privacy.accountant import spend
from dpfl.privacy.costs import PrivacyCost
from dpfl.privacy.events import Event
from dpfl.privacy.filters import FILTERS, FilterName, Limit, Portion, filter_named
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.renyi import RESERVED, renyi_costs, renyi_epsilon

RULES: tuple[FilterName, ...] = ("allotments", "renyi", "gaussian")
AR = Adjacency.ADD_REMOVE
FIRST = 5.0  # noise of the first study
RATES = (1.0, 0.1, 0.01, 0.001)
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Option:
    """A second study: a Gaussian over a Poisson sample; ``repeats`` only if it is not sampled."""

    rate: float
    noise: float
    repeats: int = 1

    @property
    def cost(self) -> PrivacyCost:
        sampled = "poisson" if self.rate < 1 else "none"
        event = Event(
            noise_multiplier=self.noise,
            sampling=sampled,
            sampling_rate=self.rate,
            steps=self.repeats,
        )
        return PrivacyCost(unit=Unit.CLIENT, adjacency=AR, events=(event,))

    def delta(self, epsilon: Array, removed: bool) -> Array:
        """Hockey-stick divergence between with and without the client, in one of the two
        directions.
        """
        mu, rate = math.sqrt(self.repeats) / self.noise, self.rate
        sign = 1.0 if removed else -1.0
        with np.errstate(divide="ignore", over="ignore"):
            level = (
                np.exp(sign * epsilon) - 1 + rate
            ) / rate  # of exp(mu x - mu^2 / 2), where the ratio is reached
            edge = np.where(
                level > 0, (np.log(np.maximum(level, 1e-300)) + mu**2 / 2) / mu, -np.inf
            )
            if removed:
                present = (1 - rate) * ndtr(-edge) + rate * ndtr(mu - edge)
                return np.asarray(np.maximum(present - np.exp(epsilon) * ndtr(-edge), 0.0))
            present = (1 - rate) * ndtr(edge) + rate * ndtr(edge - mu)
            return np.asarray(np.maximum(ndtr(edge) - np.exp(epsilon) * present, 0.0))


def adaptive_delta(epsilon: float, first: float, options: Sequence[Option]) -> float:
    """Delta of: release with noise ``first``, look at it, take the option that
    distinguishes best.
    """
    mu, found = 1 / first, []
    for removed in (True, False):
        centre = mu if removed else 0.0
        grid = np.linspace(centre - 10, centre + 10, 8001)
        weights = np.exp(-((grid - centre) ** 2) / 2) / math.sqrt(2 * math.pi) * (grid[1] - grid[0])
        loss = (mu * grid - mu**2 / 2) * (1 if removed else -1)
        best = np.max([option.delta(epsilon - loss, removed) for option in options], axis=0)
        found.append(float(weights @ best))
    return max(found)


def adaptive_epsilon(first: float, options: Sequence[Option]) -> float:
    return float(
        optimize.brentq(lambda value: adaptive_delta(value, first, options) - DELTA, 1e-3, 20)
    )


def shares(rule: FilterName) -> float | None:
    return DELTA / 2 if rule == "allotments" else None


def least_noise(rule: FilterName, first: float, rate: float, repeats: int) -> Option | None:
    """The second study with the least noise that a filter still admits after the first, for epsilon
    1.
    """
    limit = Limit(epsilon=1.0, delta=DELTA, adjacency=AR)
    known = Portion(cost=cost(first), count=1, delta=shares(rule))

    def admitted(noise: float) -> bool:
        new = Portion(cost=Option(rate, noise, repeats).cost, count=1, delta=shares(rule))
        return FILTERS[rule].admits([known, new], limit)

    low, high = 0.25, 100.0
    if not admitted(high):
        return None
    for _ in range(12 if rule == "allotments" else 24):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if admitted(middle) else (middle, high)
    return Option(rate, high, repeats)


def accepted(rule: FilterName, first: float, option: Option) -> bool:
    """Whether a real ledger lets both studies take place."""
    with closing(Ledger.create(":memory:", "test", filter=rule)) as ledger:
        ledger.set_budgets(
            {"a": Budget(epsilon=1.0, delta=DELTA)}, unit=Unit.CLIENT, observer=SERVER
        )
        for run, what in (("first", cost(first)), ("second", option.cost)):
            ledger.register(run, seeded=False, title=run)
            refused = ledger.commit(run, [plan("a", what, releases=1, delta=shares(rule))])
            if refused or ledger.charge(run, 0, [charge("a", what)]):
                return False
    return True


# ---- the adversary -------------------------------------------------------------------------------


def test_composing_what_was_realised_is_exceeded_by_two_stages_and_four_options() -> None:
    """The positive control: whatever the outcome, the composed PLD says 1.0; the adversary has
    1.114.
    """
    options = []
    for rate in RATES:

        def excess(noise: float, rate: float = rate) -> float:
            return adaptive_delta(1.0, FIRST, [Option(rate, noise)]) - DELTA

        options.append(Option(rate, float(optimize.brentq(excess, 0.1, 100))))
    for option in options:
        history = (Event(noise_multiplier=FIRST), *option.cost.events)
        assert spend(history, DELTA, adjacency=AR).epsilon == pytest.approx(1.0, abs=2e-3)
        assert adaptive_epsilon(FIRST, [option]) == pytest.approx(1.0, abs=1e-6)
    assert adaptive_epsilon(FIRST, options) == pytest.approx(1.114, abs=2e-3)


@pytest.mark.parametrize("rule", ["allotments", "renyi"])
def test_the_same_adversary_stays_within_the_budget_of_a_filter(rule: FilterName) -> None:
    found = [least_noise(rule, FIRST, rate, 1) for rate in RATES]
    options = [option for option in found if option is not None]
    assert len(options) == len(RATES)
    assert adaptive_epsilon(FIRST, options) <= 1.0
    for option in options:
        assert accepted(rule, FIRST, option)
        assert not accepted(rule, FIRST, Option(option.rate, 0.98 * option.noise))


def test_the_gaussian_filter_is_exact_for_an_adversary_with_gaussians() -> None:
    """It admits everything up to the optimum, and the adversary gains nothing from choosing."""
    found = [least_noise("gaussian", FIRST, 1.0, repeats) for repeats in (1, 2, 7, 40)]
    options = [option for option in found if option is not None]
    assert len(options) == 4
    assert 0.995 < adaptive_epsilon(FIRST, options) <= 1.0
    for option in options:
        assert accepted("gaussian", FIRST, option)
        assert not accepted("gaussian", FIRST, Option(1.0, 0.999 * option.noise, option.repeats))


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=4)
@given(
    st.floats(4.0, 30.0),
    st.lists(st.sampled_from([1.0, 0.5, 0.2, 0.05, 0.02, 0.004]), min_size=2, max_size=4),
)
def test_no_two_stage_adversary_exceeds_the_budget(
    rule: FilterName, first: float, rates: list[float]
) -> None:
    kinds = (
        [(1.0, n + 1) for n in range(len(rates))]
        if rule == "gaussian"
        else [(rate, 1) for rate in rates]
    )
    found = [least_noise(rule, first, rate, repeats) for rate, repeats in kinds]
    options = [option for option in found if option is not None]
    if options:
        assert adaptive_epsilon(first, options) <= 1.0


# ---- what is admitted ----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@given(
    st.lists(st.tuples(st.sampled_from([4.0, 9.0, 25.0]), st.integers(1, 12)), max_size=2),
    st.sampled_from([5.0, 15.0]),
    st.sampled_from(list(Adjacency)),
    st.floats(0.3, 4.0),
)
@settings(max_examples=20)
def test_admissions_never_exceed_the_exact_optimum(
    rule: FilterName,
    before: list[tuple[float, int]],
    noise: float,
    adjacency: Adjacency,
    epsilon: float,
) -> None:
    """The optimum for Gaussians is known: one Gaussian of the summed signal to noise."""
    share = DELTA / 4 if rule == "allotments" else None
    portions = [Portion(cost=cost(z), count=count, delta=share) for z, count in before]
    limit = Limit(epsilon=epsilon, delta=DELTA, adjacency=adjacency)
    if portions and not filter_named(rule).admits(portions, limit):
        return
    new = Portion(cost=cost(noise), count=500, delta=share)
    most = filter_named(rule).most(portions, new, limit)
    factor = 4.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
    total = factor * (sum(count / z**2 for z, count in before) + most / noise**2)
    if most:
        assert exact_epsilon(1, total**-0.5) <= epsilon * (1 + 1e-9)
        admitted = [*portions, Portion(cost=cost(noise), count=most, delta=share)]
        assert filter_named(rule).admits(admitted, limit)
        assert filter_named(rule).spent(admitted, DELTA, adjacency).epsilon <= epsilon * (1 + 1e-9)
    if most < 500:
        more = Portion(cost=cost(noise), count=most + 1, delta=share)
        assert not filter_named(rule).admits([*portions, more], limit)
        if rule == "gaussian":
            assert exact_epsilon(1, (total + factor / noise**2) ** -0.5) > epsilon * (
                1 - 1e-3
            )  # but for the reserve, exact


def test_the_renyi_filter_holds_each_order_against_its_own_share_of_delta() -> None:
    event = Event(noise_multiplier=2.0, sampling="poisson", sampling_rate=0.05)
    what = PrivacyCost(unit=Unit.RECORD, adjacency=AR, events=(event,))
    rule, kept = filter_named("renyi"), (1 - RESERVED) * DELTA
    for count in (1, 50, 200, 1000):
        costs = renyi_costs((event.times(count),), AR)
        by_hand = renyi_epsilon(costs, kept)
        portions = [Portion(cost=what, count=count)]
        spent = rule.spent(portions, DELTA, AR)
        assert by_hand < spent.epsilon <= by_hand + 1e-6
        assert spent.epsilon >= renyi_epsilon(costs, DELTA)
        assert spent.epsilon > spend((event.times(count),), DELTA, adjacency=AR).epsilon
        for limit, fits in ((by_hand * 1.0001, True), (by_hand * 0.9999, False)):
            assert rule.admits(portions, Limit(epsilon=limit, delta=DELTA, adjacency=AR)) == fits


def test_the_renyi_filter_keeps_failures_within_their_share_of_delta() -> None:
    event = Event(noise_multiplier=50.0, failure=DELTA / 1000)
    what = PrivacyCost(unit=Unit.RECORD, adjacency=AR, events=(event,))
    limit = Limit(epsilon=2.0, delta=DELTA, adjacency=AR)
    assert filter_named("renyi").most([], Portion(cost=what, count=500), limit) == 5
    assert (
        filter_named("renyi").spent([Portion(cost=what, count=11)], DELTA, AR).epsilon == math.inf
    )


@pytest.mark.parametrize(
    "event",
    [
        Event(noise_multiplier=9.0, sampling="poisson", sampling_rate=0.5),
        Event(noise_multiplier=9.0, sampling="uniform", sampling_rate=0.5),
        Event(noise_multiplier=9.0, failure=1e-9),
    ],
)
def test_the_gaussian_filter_refuses_what_is_no_plain_gaussian(event: Event) -> None:
    what = PrivacyCost(unit=Unit.RECORD, adjacency=Adjacency.REPLACE_ONE, events=(event,))
    with closing(Ledger.create(":memory:", "test", filter="gaussian")) as ledger:
        ledger.register("run", seeded=False, title="t")
        with pytest.raises(PrivacyRefusal, match="renyi or allotments"):
            ledger.commit("run", [plan("a", what)])
        assert ledger.plans("a") == []


@pytest.mark.parametrize("rule", RULES)
def test_no_noise_is_never_admitted_and_never_finite(rule: FilterName) -> None:
    nothing = [Portion(cost=cost(0.0), count=1)]
    assert not filter_named(rule).admits(nothing, Limit(epsilon=1e6, delta=DELTA, adjacency=AR))
    assert filter_named(rule).spent(nothing, DELTA, AR).epsilon == math.inf


def test_an_unknown_filter_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'renyi'"):
        Ledger.create(":memory:", "test", filter="reny")  # type: ignore[arg-type]
