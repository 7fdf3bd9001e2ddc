"""The least noise that keeps a plan within its budget: never overshooting, at most half a percent below."""

from __future__ import annotations

import math
import re
import sqlite3
import time
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.types import Adjacency
from dpfl.privacy import cache
from dpfl.privacy.accountant import RULES, epsilon
from dpfl.privacy.calibrate import SMALLEST_MULTIPLIER, calibrate

ADD_REMOVE, REPLACE_ONE = Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE


def random_plans(count: int, seed: int) -> list[tuple[float, float, float, int]]:
    """(epsilon, delta, rate, steps) that need enough noise for a quick evaluation."""
    random = np.random.default_rng(seed)
    return [
        (
            round(float(10 ** random.uniform(-1, 0.7)), 3),
            float(10.0 ** random.integers(-8, -3)),
            round(float(10 ** random.uniform(-1.5, 0)), 4),
            int(10 ** random.uniform(1.5, 3.5)),
        )
        for _ in range(count)
    ]


def assert_tight(target: float, reached: float) -> None:
    assert 0.995 * target <= reached <= target


@pytest.mark.parametrize(("target", "delta", "rate", "steps"), random_plans(12, seed=1))
def test_calibrated_noise_costs_what_was_asked_and_not_more(
    target: float, delta: float, rate: float, steps: int
) -> None:
    noise = calibrate(target, delta, rate, steps)
    assert_tight(target, epsilon(noise, rate, steps, delta))


@pytest.mark.parametrize(("target", "delta", "rate", "steps"), random_plans(4, seed=2))
def test_the_same_holds_under_replace_one(target: float, delta: float, rate: float, steps: int) -> None:
    noise = calibrate(target, delta, rate, steps, adjacency="replace_one")
    assert_tight(target, epsilon(noise, rate, steps, delta, adjacency="replace_one"))
    assert noise > calibrate(target, delta, rate, steps)


@pytest.mark.parametrize(
    ("target", "delta", "rate", "steps"), [(2.0, 1e-5, 0.1, 100), (0.7, 1e-4, 0.05, 30), (8.0, 1e-6, 0.3, 500)]
)
def test_the_same_holds_for_fixed_size_samples(target: float, delta: float, rate: float, steps: int) -> None:
    noise = calibrate(target, delta, rate, steps, sampling="uniform", adjacency=REPLACE_ONE)
    assert_tight(target, epsilon(noise, rate, steps, delta, sampling="uniform", adjacency=REPLACE_ONE))


@pytest.mark.parametrize("adjacency", [ADD_REMOVE, REPLACE_ONE])
@pytest.mark.parametrize(("target", "delta", "steps"), [(1.0, 1e-5, 1), (0.05, 1e-7, 40), (9.0, 1e-4, 300)])
def test_the_same_holds_without_sampling(target: float, delta: float, steps: int, adjacency: Adjacency) -> None:
    noise = calibrate(target, delta, 0.123, steps, sampling="none", adjacency=adjacency)
    assert_tight(target, epsilon(noise, 1.0, steps, delta, sampling="none", adjacency=adjacency))
    assert calibrate(target, delta, 1.0, steps, sampling="none", adjacency=adjacency) == noise


@pytest.mark.parametrize(("target", "delta", "rate", "steps"), random_plans(3, seed=3))
def test_the_same_holds_for_a_named_accountant(target: float, delta: float, rate: float, steps: int) -> None:
    noise = calibrate(target, delta, rate, steps, accountant="rdp")
    assert_tight(target, epsilon(noise, rate, steps, delta, accountant="rdp"))
    assert noise > calibrate(target, delta, rate, steps)


def test_one_step_and_a_large_epsilon_need_hardly_any_noise() -> None:
    noise = calibrate(1e6, 1e-5, 1.0, 1, sampling="none", accountant="rdp")
    assert noise == SMALLEST_MULTIPLIER
    assert epsilon(noise, 1.0, 1, 1e-5, sampling="none", accountant="rdp") <= 1e6


@pytest.mark.parametrize(
    ("target", "sampling", "adjacency"), [(1e-9, "poisson", ADD_REMOVE), (1e-4, "uniform", REPLACE_ONE)]
)
def test_an_epsilon_that_no_noise_reaches_is_refused_with_the_smallest_that_can_be(
    target: float, sampling: str, adjacency: Adjacency
) -> None:
    with pytest.raises(PrivacyRefusal) as caught:
        calibrate(target, 1e-12, 0.5, 10_000, sampling=sampling, adjacency=adjacency)
    named = re.search(r"smallest epsilon this plan can reach is ([\d.e+-]+):", caught.value.remedy)
    assert named is not None
    smallest = float(named[1])
    assert smallest > target
    assert epsilon(1e5, 0.5, 10_000, 1e-12, sampling=sampling, adjacency=adjacency) == pytest.approx(smallest, rel=1e-3)


@pytest.mark.parametrize("target", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_a_target_that_is_no_positive_finite_number_is_refused(target: float) -> None:
    with pytest.raises(ConfigurationError, match="epsilon"):
        calibrate(target, 1e-5, 0.1, 10)


@pytest.mark.parametrize("delta", [math.nan, 0.0, 1.0, -1e-5])
def test_a_delta_outside_the_open_unit_interval_is_refused(delta: float) -> None:
    with pytest.raises(ConfigurationError, match="delta"):
        calibrate(1.0, delta, 0.1, 10)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan])
def test_a_sampling_rate_at_which_nothing_or_too_much_is_drawn_is_refused(rate: float) -> None:
    with pytest.raises(ConfigurationError, match="sampling_rate"):
        calibrate(1.0, 1e-5, rate, 10)


@pytest.mark.parametrize("steps", [0, -3])
def test_a_plan_without_steps_is_refused(steps: int) -> None:
    with pytest.raises(ConfigurationError, match="steps"):
        calibrate(1.0, 1e-5, 0.1, steps)


def test_a_combination_without_a_proof_is_refused_before_any_noise_is_named() -> None:
    with pytest.raises(PrivacyRefusal, match="fixed-size"):
        calibrate(1.0, 1e-5, 0.1, 10, sampling="uniform", adjacency=ADD_REMOVE)


# ---- the cache ------------------------------------------------------------------------------------------------------


def test_a_cached_result_is_identical_and_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFL_CACHE", str(tmp_path / "cache"))
    cache.forget()
    first = calibrate(2.0, 1e-5, 0.02, 50), epsilon(2.0, 0.02, 50, 1e-5)
    cache.forget()
    began = time.perf_counter()
    second = calibrate(2.0, 1e-5, 0.02, 50), epsilon(2.0, 0.02, 50, 1e-5)
    seconds = time.perf_counter() - began
    cache.forget()
    assert first == second
    assert seconds < 0.2


def test_after_forgetting_a_calibration_comes_from_the_disk_and_not_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPFL_CACHE", str(tmp_path))
    cache.forget()
    calibrate(2.0, 1e-5, 0.03, 50)
    with closing(sqlite3.connect(tmp_path / "accounting.sqlite")) as connection, connection:
        changed = connection.execute("UPDATE results SET value = 123.0 WHERE key LIKE 'calibrate|%'").rowcount
    cache.forget()
    again = calibrate(2.0, 1e-5, 0.03, 50)
    cache.forget()
    assert changed == 1
    assert again == 123.0


def test_different_questions_are_never_answered_from_the_same_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPFL_CACHE", str(tmp_path))
    cache.forget()
    answers = [
        calibrate(2.0, 1e-5, 0.5, 50),
        calibrate(2.1, 1e-5, 0.5, 50),
        calibrate(2.0, 2e-5, 0.5, 50),
        calibrate(2.0, 1e-5, 0.6, 50),
        calibrate(2.0, 1e-5, 0.5, 60),
        calibrate(2.0, 1e-5, 0.5, 50, adjacency="replace_one"),
        calibrate(2.0, 1e-5, 0.5, 50, accountant="rdp"),
        calibrate(2.0, 1e-5, 0.5, 55, sampling="none"),
    ]
    cache.forget()
    assert len(set(answers)) == len(answers)


def test_a_stored_result_names_the_versions_of_everything_that_computed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a corrected release would go on reporting the epsilons of the one with the mistake."""
    monkeypatch.setenv("DPFL_CACHE", str(tmp_path))
    cache.forget()
    calibrate(2.0, 1e-5, 0.04, 50)
    epsilon(5.0, 1.0, 3, 1e-5, sampling="none")
    cache.forget()
    with closing(sqlite3.connect(tmp_path / "accounting.sqlite")) as connection:
        keys = [row[0] for row in connection.execute("SELECT key FROM results")]
    assert len(keys) >= 3
    for key in keys:
        assert f"dp-accounting {version('dp-accounting')}" in key
        assert RULES in key  # a digest of the code itself: an editable install has no version that would change


@pytest.mark.parametrize("obstacle", ["file in the way", "not a database"])
def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    if obstacle == "file in the way":
        (tmp_path / "in the way").write_text("a file, not a folder")
        folder = tmp_path / "in the way" / "cache"
    else:
        folder = tmp_path
        (folder / "accounting.sqlite").write_bytes(b"this is not a database at all" * 200)
    expected = epsilon(5.0, 1.0, 3, 1e-5, sampling="none")
    monkeypatch.setenv("DPFL_CACHE", str(folder))
    cache.forget()
    with pytest.warns(RuntimeWarning, match="not cached on disk"):
        found = epsilon(5.0, 1.0, 3, 1e-5, sampling="none")
    cache.forget()
    assert found == expected


def test_an_infinite_result_survives_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFL_CACHE", str(tmp_path))
    assert cache.remembered("test|infinite", lambda: math.inf) == math.inf
    cache.forget()
    assert cache.remembered("test|infinite", lambda: 0.0) == math.inf
    cache.forget()
