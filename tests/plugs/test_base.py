"""What every plug has in common."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from dpfl.core.errors import ConfigurationError
from dpfl.plugs.base import NoiseMaker, Plug
from dpfl.testing.fixtures import TERMS


@dataclass(frozen=True, kw_only=True)
class Open(Plug):
    rounds: int | None = None
    expected_cohort: float | None = None
    other: str | None = None


def test_what_is_left_open_is_the_term_of_its_name_and_what_is_given_stays() -> None:
    found = Open(expected_cohort=0.5).resolve(TERMS)
    assert found == Open(rounds=TERMS.rounds, expected_cohort=0.5)
    assert found.resolve(replace(TERMS, rounds=TERMS.rounds + 1)).rounds == TERMS.rounds


@dataclass(frozen=True, kw_only=True)
class Noise(NoiseMaker):
    pass


def test_a_noise_level_that_nobody_planned_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="enrol first"):
        _ = Noise().planned_noise
    assert Noise().resolve(TERMS.with_noise(1.5)).planned_noise == 1.5
    assert Noise(noise_multiplier=2.0).resolve(TERMS.with_noise(1.5)).planned_noise == 2.0
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="noise_multiplier"):
            Noise(noise_multiplier=wrong)
