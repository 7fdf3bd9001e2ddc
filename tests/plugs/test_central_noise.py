from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dpfl.core.errors import ConfigurationError
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Claims, Cohort, Rows, Terms, Unit, Who
from dpfl.plugs.central_noise import CentralNoise
from dpfl.plugs.stages import Clip
from dpfl.plugs.weights import ExpectedCohortWeights
from dpfl.privacy.exposure import Exposure

DRAWS = 100_000
CLAIMS = Claims(epsilon=1.0, delta=1e-5, examples=10)
TERMS = Terms(
    rounds=5,
    population=20,
    expected_cohort=8.0,
    participations=2,
    smallest_epsilon=1,
    largest_epsilon=1,
    parameters=10,
)


def rng(seed: int = 0) -> SecretRng:
    return SecretRng.simulated(PublicSeed(seed))


def accepted(sample: Tensor, std: float) -> bool:
    """The law of SAFETY.md: 10^5 draws, ratio of standard deviations within [0.9926, 1.0074]."""
    return 0.9926 <= float(sample.to(torch.float64).square().mean().sqrt()) / std <= 1.0074


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("noise_multiplier", "bound"), [(1.0, 1.0), (0.3, 0.02), (12.0, 5.0)])
def test_central_noise_has_the_multiplier_times_the_bound_and_the_test_would_see_three_percent(
    noise_multiplier: float, bound: float, seed: int
) -> None:
    noise = CentralNoise(noise_multiplier=noise_multiplier)
    sample, state, metrics = noise.add({}, torch.zeros(DRAWS), bound, rng(seed))
    std = noise_multiplier * bound
    assert state == {}
    assert metrics["expected_norm"] == pytest.approx(std * math.sqrt(DRAWS))
    assert metrics["norm"] == pytest.approx(float(sample.norm()), rel=1e-6)
    assert accepted(sample, std)
    assert not accepted(0.97 * sample, std)
    assert not accepted(1.03 * sample, std)


def test_central_noise_is_added_to_the_aggregate_and_drawn_afresh() -> None:
    noise, generator, aggregate = (
        CentralNoise(noise_multiplier=1.0),
        rng(),
        torch.full((DRAWS,), -3.0),
    )
    first, second = (noise.add({}, aggregate, 1.0, generator)[0] - aggregate for _ in range(2))
    assert accepted(first, 1.0)
    assert abs(float((first * second).mean())) < 4 / math.sqrt(DRAWS)
    assert bool((aggregate == -3.0).all())


def test_central_noise_is_not_drawn_from_the_global_generator() -> None:
    noise, zeros = CentralNoise(noise_multiplier=1.0), torch.zeros(20)
    torch.manual_seed(0)
    first = noise.add({}, zeros, 1.0, rng(4))[0]
    untouched = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(1), untouched)
    assert torch.equal(noise.add({}, zeros, 1.0, rng(4))[0], first)
    assert not torch.equal(
        noise.add({}, zeros, 1.0, SecretRng.from_system())[0],
        noise.add({}, zeros, 1.0, SecretRng.from_system())[0],
    )


def released(updates: list[Tensor], seed: int) -> tuple[Tensor, float]:
    """The weighted, noisy sum of clipped updates as a round makes it, and the std its bill rests
    on.
    """
    clip, weights, noise = (
        Clip(clip=2.0),
        ExpectedCohortWeights(expected_cohort=8.0),
        CentralNoise(noise_multiplier=1.5),
    )
    who = Who(id="", claims=CLAIMS, drawn=8)
    clipped = [clip.client(update, {}, who, rng()) for update in updates]
    matrix = torch.stack(clipped) if clipped else torch.zeros(0, DRAWS)
    cohort = Cohort.of({f"c{i:02d}": CLAIMS for i in range(len(updates))})
    layout = Layout.of({"weight": torch.zeros(DRAWS)})
    rows = Rows(matrix=matrix, origin=torch.zeros(DRAWS), cohort=cohort, layout=layout)
    values, _, _ = weights({}, rows, 0)
    exposure = clip.exposure(Exposure(unit=Unit.CLIENT), 8).scaled(weights.value(TERMS))
    noisy, _, _ = noise.add({}, values @ matrix, exposure.bound, rng(seed))
    return noisy, noise.std(exposure.bound)


@pytest.mark.parametrize("missing", [0, 1, 4, 7, 8])
def test_dropping_any_number_of_clients_leaves_the_std_of_the_release_unchanged(
    missing: int,
) -> None:
    sample, std = released([torch.zeros(DRAWS)] * (8 - missing), seed=missing)
    assert std == 1.5 * 2.0 / 8
    assert accepted(sample, std)


def test_one_client_more_moves_the_release_by_at_most_the_bound() -> None:
    """Its weighted contribution over the noise is the multiplier, whoever else came."""
    others = [torch.randn(DRAWS, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    huge = torch.full((DRAWS,), 1e6)
    without, std = released(others, seed=1)
    with_it, same = released([*others, huge], seed=1)
    assert std == same
    moved = float(torch.linalg.vector_norm((with_it - without).to(torch.float64)))
    assert moved <= 2.0 / 8 * (1 + 1e-4)
    assert moved >= 2.0 / 8 * (1 - 1e-3)


def test_an_update_that_is_not_finite_leaves_the_release_finite() -> None:
    sample, _ = released([torch.zeros(DRAWS), torch.full((DRAWS,), math.nan)], seed=0)
    assert bool(torch.isfinite(sample).all())


@pytest.mark.parametrize("noise_multiplier", [0.0, -1.0, math.nan, math.inf])
def test_central_noise_that_hides_nothing_is_refused(noise_multiplier: float) -> None:
    with pytest.raises(ConfigurationError, match="CentralNoise"):
        CentralNoise(noise_multiplier=noise_multiplier)
