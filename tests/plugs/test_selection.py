from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from dpfl.core.errors import ConfigurationError
from dpfl.core.random import PublicSeed
from dpfl.plugs.selection import Everyone, FixedCohort, PoissonCohort, Selection

POPULATION, SIZE, ROUNDS = 10, 4, 10_000
RATE = SIZE / POPULATION
CLIENTS = [f"c{i}" for i in range(POPULATION)]
SEED = PublicSeed(11)


def drawn(selection: Selection, seed: PublicSeed) -> list[str]:
    """The cohort when everyone is willing."""
    order = selection.order(CLIENTS, seed)
    size = selection.cohort_size(POPULATION)
    return order if size is None else order[:size]


@functools.cache
def cohorts(selection: Selection) -> Tensor:
    """One row a round, one column a client: 1 where it was drawn."""
    taken = torch.zeros(ROUNDS, POPULATION, dtype=torch.float64)
    for round_ in range(ROUNDS):
        for client in drawn(selection, SEED.child("cohort", round_)):
            taken[round_, int(client[1:])] = 1.0
    return taken


FIXED, POISSON = FixedCohort(size=SIZE), PoissonCohort(sampling_rate=RATE)
BOTH = pytest.mark.parametrize("selection", [FIXED, POISSON], ids=["fixed", "poisson"])


def size_variance_score(taken: Tensor) -> float:
    """How far the variance of the cohort's size is from K q (1 - q), in its own standard
    deviations.
    """
    variance = POPULATION * RATE * (1 - RATE)
    kurtosis = (1 - 6 * RATE * (1 - RATE)) / variance
    return float((taken.sum(1).var() / variance - 1) / math.sqrt((2 + kurtosis) / ROUNDS))


def pair_scores(taken: Tensor, probability: float) -> list[float]:
    """How far each pair's joint draws are from the probability given."""
    together = taken.T @ taken
    spread = math.sqrt(ROUNDS * probability * (1 - probability))
    pairs = itertools.combinations(range(POPULATION), 2)
    return [(float(together[i, j]) - ROUNDS * probability) / spread for i, j in pairs]


def next_round_score(taken: Tensor) -> float:
    centred = (taken - RATE) / math.sqrt(RATE * (1 - RATE))
    products = centred[1:] * centred[:-1]
    return float(products.sum() / math.sqrt(products.numel()))


def worst(scores: list[float]) -> float:
    return max(map(abs, scores))


FIXED_PAIR = SIZE * (SIZE - 1) / (POPULATION * (POPULATION - 1))
POISSON_PAIR = RATE**2


def test_a_fixed_cohort_has_exactly_its_size_in_every_round() -> None:
    assert bool((cohorts(FIXED).sum(1) == SIZE).all())


def test_every_pair_is_equally_likely_in_a_fixed_cohort() -> None:
    assert worst(pair_scores(cohorts(FIXED), FIXED_PAIR)) < 4
    assert worst(pair_scores(cohorts(FIXED), POISSON_PAIR)) > 4, (
        "the statistic could not tell it from Poisson"
    )


def test_a_poisson_cohort_varies_in_size_as_independent_draws_do() -> None:
    assert abs(size_variance_score(cohorts(POISSON))) < 4
    assert abs(size_variance_score(cohorts(FIXED))) > 20, (
        "the statistic could not tell it from a fixed size"
    )


def test_clients_of_a_poisson_cohort_are_drawn_independently_of_each_other() -> None:
    assert worst(pair_scores(cohorts(POISSON), POISSON_PAIR)) < 4
    assert worst(pair_scores(cohorts(POISSON), FIXED_PAIR)) > 4, (
        "the statistic could not tell it from a fixed size"
    )


@BOTH
def test_every_client_is_drawn_at_the_rate(selection: Selection) -> None:
    def scores(rate: float) -> list[float]:
        counts = cohorts(selection).sum(0)
        return ((counts - ROUNDS * rate) / math.sqrt(ROUNDS * rate * (1 - rate))).tolist()

    assert worst(scores(RATE)) < 4
    assert min(map(abs, scores(1.1 * RATE))) > 4, "the statistic could not see 10 %"


@BOTH
def test_rounds_are_drawn_independently_of_each_other(selection: Selection) -> None:
    taken = cohorts(selection)
    assert abs(next_round_score(taken)) < 4
    assert abs(next_round_score(taken.repeat_interleave(2, dim=0))) > 20


def test_empty_poisson_cohorts_occur() -> None:
    empty = int((cohorts(POISSON).sum(1) == 0).sum())
    expected = ROUNDS * (1 - RATE) ** POPULATION  # 60
    assert abs(empty - expected) < 4 * math.sqrt(expected)


def test_everyone_is_everyone() -> None:
    assert drawn(Everyone(), SEED) == CLIENTS
    assert Everyone().rate(POPULATION) == 1.0
    assert Everyone().cohort_size(POPULATION) == POPULATION


def test_a_rate_of_one_draws_everyone() -> None:
    assert drawn(PoissonCohort(sampling_rate=1.0), SEED) == CLIENTS


SELECTIONS: list[Selection] = [Everyone(), FixedCohort(size=3), PoissonCohort(sampling_rate=0.5)]


@pytest.mark.parametrize("selection", SELECTIONS, ids=lambda s: type(s).__name__)
@given(seed=st.integers(0, 2**64), population=st.integers(3, 40))
def test_the_order_depends_on_the_public_seed_only_and_names_nobody_twice(
    selection: Selection, seed: int, population: int
) -> None:
    clients = [f"c{i}" for i in range(population)]
    torch.manual_seed(seed % 2**32)
    order = selection.order(clients, PublicSeed(seed))
    torch.manual_seed(0)
    assert selection.order(clients, PublicSeed(seed)) == order
    assert len(set(order)) == len(order)
    assert set(order) <= set(clients)
    if not isinstance(selection, PoissonCohort):
        assert set(order) == set(clients)


@given(population=st.integers(1, 1000), size=st.integers(1, 1000))
def test_the_rate_is_what_the_law_draws_and_a_cohort_above_the_population_is_refused(
    population: int, size: int
) -> None:
    selection = FixedCohort(size=size)
    if size <= population:
        assert selection.rate(population) == size / population
        assert selection.cohort_size(population) == size
    else:
        for ask in (selection.rate, selection.cohort_size):
            with pytest.raises(ConfigurationError, match=rf"\b{size}\b.*\b{population}\b"):
                ask(population)


def test_a_random_size_is_not_called_fixed() -> None:
    assert PoissonCohort(sampling_rate=0.3).cohort_size(POPULATION) is None
    assert PoissonCohort(sampling_rate=0.3).rate(POPULATION) == 0.3
    assert [s.sampling for s in SELECTIONS] == ["none", "uniform", "poisson"]


@pytest.mark.parametrize("size", [0, -1])
def test_an_empty_cohort_is_refused(size: int) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        FixedCohort(size=size)


@pytest.mark.parametrize("rate", [0.0, -0.5, 1.01, math.nan])
def test_a_rate_that_draws_nobody_or_more_than_everyone_is_refused(rate: float) -> None:
    with pytest.raises(ConfigurationError, match="rate"):
        PoissonCohort(sampling_rate=rate)
