"""One fold gives noise, sensitivity and bill, so the three cannot drift apart."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, strategies as st

from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.types import Adjacency, Unit
from dpfl.privacy.accountant import spend
from dpfl.privacy.events import Event
from dpfl.privacy.exposure import Exposure

POSITIVE = st.floats(1e-3, 1e3)
UNITS = st.sampled_from(list(Unit))
PAID = (
    Event(noise_multiplier=1.1, sampling="poisson", sampling_rate=0.1, steps=7),
    Event(noise_multiplier=3.0, steps=2),
)


def multiplier(exposure: Exposure) -> float:
    (event,) = exposure.events()
    return event.noise_multiplier


@st.composite
def protected(draw: st.DrawFn) -> Exposure:
    """Something clipped and noised, perhaps scaled in between."""
    exposure = Exposure(unit=draw(UNITS)).clipped(draw(POSITIVE))
    return exposure.scaled(draw(st.floats(0.1, 10))).noised(draw(POSITIVE))


@given(POSITIVE, POSITIVE)
def test_clip_then_noise_gives_their_ratio(clip: float, noise: float) -> None:
    exposure = Exposure(unit=Unit.CLIENT).clipped(clip).noised(noise)
    assert exposure.finite
    assert multiplier(exposure) == pytest.approx(noise / clip, rel=1e-12)


@given(POSITIVE, POSITIVE, POSITIVE)
def test_the_tighter_of_two_clips_before_noise_counts(
    one: float, other: float, noise: float
) -> None:
    exposure = Exposure(unit=Unit.CLIENT).clipped(one).clipped(other).noised(noise)
    assert multiplier(exposure) == pytest.approx(noise / min(one, other), rel=1e-12)


@given(protected(), st.floats(-100, 100))
def test_scaling_what_is_noisy_leaves_the_event_as_it_is(exposure: Exposure, factor: float) -> None:
    assume(abs(factor) > 1e-3)
    scaled = exposure.scaled(factor)
    assert multiplier(scaled) == pytest.approx(multiplier(exposure), rel=1e-12)
    assert scaled.bound == pytest.approx(abs(factor) * exposure.bound)


@given(POSITIVE, st.floats(0.01, 100), POSITIVE)
def test_scaling_before_noise_moves_the_sensitivity(
    clip: float, factor: float, noise: float
) -> None:
    exposure = Exposure(unit=Unit.CLIENT).clipped(clip).scaled(-factor).noised(noise)
    assert multiplier(exposure) == pytest.approx(noise / (clip * factor), rel=1e-12)


@given(protected(), POSITIVE)
def test_of_noise_on_two_grids_the_larger_counts(exposure: Exposure, more: float) -> None:
    """Given the first noise, the second protects alone; beside the second, the first does. Their
    sum has no proven law.
    """
    again = exposure.noised(more)
    assert again.noise == max(exposure.noise, more)
    assert multiplier(again) >= multiplier(exposure) * (1 - 1e-9)


@given(st.floats(0.1, 10), st.floats(0.1, 50), st.integers(1, 10**8))
def test_rounding_onto_the_grid_widens_the_bound(clip: float, noise: float, numbers: int) -> None:
    exposure = Exposure(unit=Unit.CLIENT, numbers=numbers).clipped(clip)
    rounding = noise / 2**20 * math.sqrt(numbers)
    if rounding >= clip:
        with pytest.raises(PrivacyRefusal, match="coarser"):
            exposure.noised(noise)
        return
    assert multiplier(exposure.noised(noise)) == pytest.approx(noise / (clip + rounding), rel=1e-9)
    (event,) = exposure.noised(noise).events()
    assert event.numbers == numbers
    (summed,) = exposure.noised(noise).summed(0.5, 7).events()
    assert summed.numbers == 7 * numbers


@given(protected(), POSITIVE, st.sampled_from(["clip", "projection", "function"]))
def test_whatever_follows_the_noise_is_post_processing_and_seals(
    exposure: Exposure, size: float, kind: str
) -> None:
    if kind == "clip":
        after = exposure.clipped(size)
    elif kind == "projection":
        after = exposure.projected(size, 1, failure=0.01)
    else:
        after = exposure.processed()
    assert after.sealed
    assert after.events() == exposure.events()


@given(protected(), POSITIVE, POSITIVE)
def test_noise_after_sealing_does_not_improve_the_event(
    exposure: Exposure, clip: float, more: float
) -> None:
    """Noise on a clipped noisy vector is not noise on the vector: the two do not add."""
    assert exposure.clipped(clip).noised(more).events() == exposure.events()


@given(protected(), POSITIVE, st.integers(2, 1000))
def test_summing_sealed_shares_does_not_improve_the_event(
    exposure: Exposure, clip: float, shares: int
) -> None:
    """The sum of clipped noisy shares carries no Gaussian noise of sqrt(shares) times one's own.

    Clip 1, noise 0.1, then keep the sign: the others' signs are all but certain, so their sum hides
    nothing, while sqrt(100) shares would claim a multiplier of 1.
    """
    sealed = exposure.clipped(clip)
    assert multiplier(sealed.summed(1.0, shares)) <= multiplier(exposure) * (1 + 1e-12)


@given(POSITIVE, POSITIVE, st.floats(0.01, 10), st.floats(0, 1))
def test_a_projection_before_noise_stretches_the_bound_and_adds_its_failure(
    clip: float, noise: float, stretch: float, failure: float
) -> None:
    exposure = Exposure(unit=Unit.CLIENT).clipped(clip).projected(stretch, 0, failure).noised(noise)
    (event,) = exposure.events()
    assert event.noise_multiplier == pytest.approx(noise / (clip * stretch), rel=1e-12)
    assert event.failure == failure


def test_failures_of_several_projections_add_up() -> None:
    exposure = (
        Exposure(unit=Unit.CLIENT)
        .clipped(1.0)
        .projected(2.0, 5, 1e-7)
        .projected(3.0, 0, 2e-7)
        .noised(6.0)
    )
    (event,) = exposure.events()
    assert event.failure == pytest.approx(3e-7)
    assert event.noise_multiplier == pytest.approx(1.0)


@given(POSITIVE, POSITIVE, st.floats(0.01, 100), st.integers(1, 1000))
def test_a_sum_carries_the_noise_of_all_honest_shares_and_ones_own_weight(
    clip: float, noise: float, weight: float, shares: int
) -> None:
    summed = Exposure(unit=Unit.CLIENT).clipped(clip).noised(noise).summed(weight, shares)
    assert summed.bound == pytest.approx(weight * clip)
    assert summed.noise == pytest.approx(weight * noise * math.sqrt(shares))
    assert multiplier(summed) == pytest.approx(math.sqrt(shares) * noise / clip, rel=1e-12)


@given(POSITIVE, POSITIVE, st.floats(0.001, 1), st.integers(1, 100))
def test_central_noise_on_a_sum_is_measured_against_one_weighted_contribution(
    clip: float, noise: float, weight: float, shares: int
) -> None:
    """DP-FedAvg: the sensitivity of a mean over a fixed denominator is the clip over that
    denominator.
    """
    exposure = Exposure(unit=Unit.CLIENT).clipped(clip).summed(weight, shares).noised(noise)
    assert multiplier(exposure) == pytest.approx(noise / (clip * weight), rel=1e-12)


@pytest.mark.parametrize(
    "exposure",
    [
        Exposure(unit=Unit.CLIENT),
        Exposure(unit=Unit.CLIENT).clipped(1.0),
        Exposure(unit=Unit.CLIENT).noised(5.0),
        Exposure(unit=Unit.CLIENT).noised(5.0).clipped(1.0),
        Exposure(unit=Unit.CLIENT).clipped(1.0).processed().noised(5.0),
        Exposure(unit=Unit.CLIENT).clipped(1.0).noised(0.0),
        Exposure(unit=Unit.CLIENT, paid=(Event(noise_multiplier=0.0),)),
    ],
    ids=[
        "nothing",
        "clip only",
        "noise only",
        "noise then clip",
        "function of a clip",
        "no noise",
        "paid without noise",
    ],
)
def test_what_is_not_protected_is_billed_as_hiding_nothing(exposure: Exposure) -> None:
    assert not exposure.finite
    assert any(event.noise_multiplier == 0 for event in exposure.events())
    assert spend(exposure.events(), 1e-5, adjacency=Adjacency.ADD_REMOVE).epsilon == math.inf


@given(
    st.lists(st.sampled_from(["clip", "scale", "project", "noise", "process", "sum"]), max_size=6),
    POSITIVE,
)
def test_paid_events_pass_through_whatever_follows(steps: list[str], size: float) -> None:
    exposure = Exposure(unit=Unit.RECORD, paid=PAID)
    for step in steps:
        exposure = {
            "clip": lambda e: e.clipped(size),
            "scale": lambda e: e.scaled(size),
            "project": lambda e: e.projected(size, 0.1),
            "noise": lambda e: e.noised(size),
            "process": lambda e: e.processed(),
            "sum": lambda e: e.summed(size, 10),
        }[step](exposure)
    assert exposure.finite
    assert exposure.events() == PAID
    assert exposure.events("poisson", 0.5) == PAID


@given(protected(), st.floats(0, 1))
def test_the_sampling_is_written_into_the_event(exposure: Exposure, rate: float) -> None:
    for sampling in ("poisson", "uniform"):
        (event,) = exposure.events(sampling, rate)
        assert (event.sampling, event.sampling_rate) == (sampling, rate)
        assert event.noise_multiplier == multiplier(exposure)
    (plain,) = exposure.events("none", rate)
    assert (plain.sampling, plain.sampling_rate) == ("none", 1.0)


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan])
def test_a_clip_that_is_no_positive_number_is_refused(clip: float) -> None:
    with pytest.raises(ConfigurationError, match="clip"):
        Exposure(unit=Unit.CLIENT).clipped(clip)
