"""The least noise on the ladder that keeps a plan within its budget: never overshooting, the next
rung does.
"""

from __future__ import annotations

import functools
import math
import re
import sqlite3
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.types import Adjacency
from dpfl.privacy.accountant import ACCOUNTING_VERSION, _with_sampler, epsilon, spend
from dpfl.privacy.calibrate import _FIRST, _LAST, LADDER, _calibrated, calibrate, rung
from dpfl.privacy.events import Event

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


def assert_smallest(target: float, noise: float, cost: Callable[[float], float]) -> None:
    """The budget is kept, and the next smaller multiplier of the ladder would break it."""
    index = round(math.log(noise) / math.log(LADDER))
    assert noise == rung(index)
    assert cost(noise) <= target < cost(rung(index - 1))


@pytest.mark.parametrize(("target", "delta", "rate", "steps"), random_plans(12, seed=1))
def test_calibrated_noise_costs_what_was_asked_and_not_more(
    target: float, delta: float, rate: float, steps: int
) -> None:
    noise = calibrate(target, delta, rate, steps)
    assert_smallest(target, noise, lambda z: epsilon(z, rate, steps, delta))
    assert epsilon(noise, rate, steps, delta) >= 0.985 * target


@pytest.mark.parametrize(("target", "delta", "rate", "steps"), random_plans(4, seed=2))
def test_the_same_holds_under_replace_one(
    target: float, delta: float, rate: float, steps: int
) -> None:
    noise = calibrate(target, delta, rate, steps, adjacency="replace_one")
    assert_smallest(
        target, noise, lambda z: epsilon(z, rate, steps, delta, adjacency="replace_one")
    )
    assert noise > calibrate(target, delta, rate, steps)


@pytest.mark.parametrize(
    ("target", "delta", "rate", "steps"),
    [(2.0, 1e-5, 0.1, 100), (0.7, 1e-4, 0.05, 30), (8.0, 1e-6, 0.3, 500)],
)
def test_the_same_holds_for_fixed_size_samples(
    target: float, delta: float, rate: float, steps: int
) -> None:
    noise = calibrate(target, delta, rate, steps, sampling="uniform", adjacency=REPLACE_ONE)
    plan = {"sampling": "uniform", "adjacency": REPLACE_ONE}
    assert_smallest(target, noise, lambda z: epsilon(z, rate, steps, delta, **plan))  # type: ignore[arg-type]


@pytest.mark.parametrize("adjacency", [ADD_REMOVE, REPLACE_ONE])
@pytest.mark.parametrize(
    ("target", "delta", "steps"), [(1.0, 1e-5, 1), (0.05, 1e-7, 40), (9.0, 1e-4, 300)]
)
def test_the_same_holds_without_sampling(
    target: float, delta: float, steps: int, adjacency: Adjacency
) -> None:
    noise = calibrate(target, delta, 0.123, steps, sampling="none", adjacency=adjacency)
    cost = functools.partial(
        epsilon, sampling_rate=1.0, steps=steps, delta=delta, sampling="none", adjacency=adjacency
    )
    assert_smallest(target, noise, cost)
    assert calibrate(target, delta, 1.0, steps, sampling="none", adjacency=adjacency) == noise


@pytest.mark.parametrize(("target", "delta", "rate", "steps"), random_plans(3, seed=3))
def test_the_same_holds_for_a_named_accountant(
    target: float, delta: float, rate: float, steps: int
) -> None:
    noises = [
        calibrate(target, delta, rate, steps, accountant=name) for name in (None, "rdp", "renyi")
    ]
    for name, noise in zip(("rdp", "renyi"), noises[1:], strict=True):
        assert_smallest(
            target, noise, lambda z, name=name: epsilon(z, rate, steps, delta, accountant=name)
        )
    assert noises[0] <= min(noises[1:])  # the tightest of all is PLD


def test_one_step_and_a_large_epsilon_need_hardly_any_noise() -> None:
    noise = calibrate(1e6, 1e-5, 1.0, 1, sampling="none", accountant="rdp")
    assert noise == rung(_FIRST)
    assert epsilon(noise, 1.0, 1, 1e-5, sampling="none", accountant="rdp") <= 1e6


@pytest.mark.parametrize(
    ("target", "sampling", "adjacency"),
    [(1e-9, "poisson", ADD_REMOVE), (1e-4, "uniform", REPLACE_ONE)],
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
    assert epsilon(
        rung(_LAST), 0.5, 10_000, 1e-12, sampling=sampling, adjacency=adjacency
    ) == pytest.approx(smallest, rel=1e-3)


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


@pytest.mark.parametrize("sampling", ["poisson", "none"])
def test_the_noise_covers_the_sampler_that_draws_it(sampling: str) -> None:
    ideal = calibrate(2.0, 1e-5, 0.05, 400, sampling=sampling)
    noise = calibrate(
        2.0, 1e-5, 0.05, 400, sampling=sampling, numbers=10**9
    )  # one per cent of delta and more
    assert noise >= ideal
    plan = Event(
        noise_multiplier=noise,
        sampling=sampling,
        sampling_rate=0.05 if sampling == "poisson" else 1.0,
    )
    plan = replace(plan, steps=400, numbers=10**9)
    assert spend((plan,), 1e-5, adjacency=ADD_REMOVE).epsilon <= 2.0


@pytest.mark.parametrize(
    ("target", "delta", "numbers"), [(1.0, 1e-5, 10**10), (1.0, 1e-11, 10**9), (25.0, 1e-5, 1)]
)
def test_a_plan_whose_sampler_takes_too_much_of_delta_is_refused(
    target: float, delta: float, numbers: int
) -> None:
    with pytest.raises(PrivacyRefusal, match="noise sampler"):
        calibrate(target, delta, 0.1, 1000, numbers=numbers)


# ---- the cache -----------------------------------------------------------------------------------


def forget() -> None:
    """Drop what this process remembers (the disk keeps its proposals)."""
    _with_sampler.cache_clear()
    _calibrated.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and nothing remembered before or after."""
    monkeypatch.setenv("DPFL_CACHE", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def test_a_proposal_that_verifies_is_taken_without_a_warning_and_without_a_search(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = calibrate(2.0, 1e-5, 0.02, 50)
    forget()
    monkeypatch.setattr(sys.modules["dpfl.privacy.calibrate"], "search_rungs", None)
    assert calibrate(2.0, 1e-5, 0.02, 50) == first


@pytest.mark.parametrize(
    "value", [0.01, "rung below", "rung above", 123.0, math.inf, -1.0, "text", b"bytes"], ids=str
)
def test_an_edited_cache_changes_no_number_and_is_repaired_with_a_warning(
    folder: Path, value: object
) -> None:
    event = Event(noise_multiplier=1.0, sampling="poisson", sampling_rate=0.03, steps=50)
    noise = calibrate(2.0, 1e-5, 0.03, 50)
    before = spend((replace(event, noise_multiplier=noise),), 1e-5, adjacency=ADD_REMOVE)
    edited = {
        "rung below": noise / LADDER,
        "rung above": rung(round(math.log(noise, LADDER)) + 1),
    }.get(str(value), value)
    with closing(sqlite3.connect(folder / "accounting.sqlite")) as connection, connection:
        assert connection.execute("UPDATE results SET value = ?", (edited,)).rowcount == 1
    forget()
    with pytest.warns(RuntimeWarning, match="does not verify"):
        assert calibrate(2.0, 1e-5, 0.03, 50) == noise
    assert spend((replace(event, noise_multiplier=noise),), 1e-5, adjacency=ADD_REMOVE) == before
    forget()
    assert calibrate(2.0, 1e-5, 0.03, 50) == noise  # repaired: no warning now


def test_a_nan_in_the_cache_changes_no_number(folder: Path) -> None:
    """SQLite stores NaN as NULL, which this table refuses; a table without that rule
    may hold it.
    """
    noise = calibrate(2.0, 1e-5, 0.03, 50)
    with closing(sqlite3.connect(folder / "accounting.sqlite")) as connection, connection:
        key = connection.execute("SELECT key FROM results").fetchone()[0]
        connection.execute("DROP TABLE results")
        connection.execute("CREATE TABLE results (key TEXT PRIMARY KEY, value REAL)")
        connection.execute("INSERT INTO results VALUES (?, ?)", (key, math.nan))
    forget()
    assert calibrate(2.0, 1e-5, 0.03, 50) == noise


def test_a_truncated_cache_changes_no_number(folder: Path) -> None:
    noise = calibrate(2.0, 1e-5, 0.03, 50)
    path = folder / "accounting.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    path.write_bytes(path.read_bytes()[:1500])
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert calibrate(2.0, 1e-5, 0.03, 50) == noise


def test_different_questions_have_different_entries(folder: Path) -> None:
    questions: list[dict[str, object]] = [
        {},
        {"epsilon": 2.1},
        {"delta": 2e-5},
        {"sampling_rate": 0.6},
        {"steps": 60},
        {"adjacency": "replace_one"},
        {"accountant": "rdp"},
        {"sampling": "none"},
        {"numbers": 5},
    ]
    for question in questions:
        calibrate(**{"epsilon": 2.0, "delta": 1e-5, "sampling_rate": 0.5, "steps": 50, **question})  # type: ignore[arg-type]
    with closing(sqlite3.connect(folder / "accounting.sqlite")) as connection:
        keys = [row[0] for row in connection.execute("SELECT key FROM results")]
    assert len(keys) == len(questions)
    # The versions: no proposal that rests on other numbers is even looked at.
    rules = f"dp-accounting {version('dp-accounting')}, dpfl accounting {ACCOUNTING_VERSION}"
    assert all(rules in key for key in keys)


@pytest.mark.parametrize("obstacle", ["file in the way", "not a database"])
def test_a_cache_that_cannot_be_written_is_done_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    expected = calibrate(5.0, 1e-5, 1.0, 3, sampling="none")
    forget()
    (folder / "accounting.sqlite").unlink()
    if obstacle == "file in the way":
        monkeypatch.setenv("DPFL_CACHE", str(folder / "in the way" / "cache"))
        (folder / "in the way").write_text("a file, not a folder")
    else:
        (folder / "accounting.sqlite").write_bytes(b"this is not a database at all" * 200)
    with pytest.warns(RuntimeWarning, match="not cached on disk"):
        assert calibrate(5.0, 1e-5, 1.0, 3, sampling="none") == expected
