"""How long calibrations and statements take, cold and in one thread, with room for slow machines.

``python tests/privacy/test_accounting_speed.py`` prints the figures.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from dpfl.core.types import Adjacency
from dpfl.privacy.accountant import _with_sampler, quick_epsilon, spend
from dpfl.privacy.calibrate import _calibrated, calibrate
from dpfl.privacy.events import Event

DELTA, BATCH, ROUNDS = 1e-5, 32, 20
ROOM = 3.0  # the limits of the tests, in units of what is aimed at


def forget() -> None:
    """Drop what this process remembers (the disk keeps its proposals)."""
    _with_sampler.cache_clear()
    _calibrated.cache_clear()


def clients(count: int, seed: int) -> list[tuple[float, float, int]]:
    """(epsilon, rate, steps) of clients with different numbers of records, one epoch a round."""
    random = np.random.default_rng(seed)
    sizes = random.permutation(np.arange(100, 5000))[:count]
    return [
        (float(random.uniform(0.5, 8)), BATCH / int(n), ROUNDS * math.ceil(int(n) / BATCH))
        for n in sizes
    ]


def calibrations(count: int) -> float:
    """CPU seconds of calibrating ``count`` different clients."""
    forget()
    began = time.process_time()
    for target, rate, steps in clients(count, seed=1):
        calibrate(target, DELTA, rate, steps)
    return time.process_time() - began


def statements(count: int) -> float:
    """CPU seconds of the epsilons of ``count`` different clients."""
    random = np.random.default_rng(2)
    histories = [
        (
            Event(
                noise_multiplier=float(random.uniform(0.6, 3)),
                sampling="poisson",
                sampling_rate=q,
                steps=t,
                numbers=7850,
            ),
        )
        for _, q, t in clients(count, seed=2)
    ]
    forget()
    began = time.process_time()
    for history in histories:
        spend(history, DELTA, adjacency=Adjacency.ADD_REMOVE)
    return time.process_time() - began


def growing(rounds: int) -> float:
    """CPU seconds of asking, after each of ``rounds`` rounds, whether a growing
    history still fits.
    """
    event = Event(noise_multiplier=1.2, sampling="poisson", sampling_rate=0.02, steps=1)
    forget()
    began = time.process_time()
    for count in range(1, rounds + 1):
        quick_epsilon((event.times(50 * count),), DELTA, adjacency=Adjacency.ADD_REMOVE)
    return time.process_time() - began


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No proposals on disk, and the modules imported."""
    monkeypatch.setenv("DPFL_CACHE", str(tmp_path))
    spend(
        (Event(noise_multiplier=1.0, sampling="poisson", sampling_rate=0.5),),
        DELTA,
        adjacency=Adjacency.ADD_REMOVE,
    )


def test_sixty_clients_are_calibrated_in_three_seconds() -> None:
    assert calibrations(60) < 3 * ROOM


def test_the_statements_of_857_clients_take_ten_seconds() -> None:
    assert statements(857 // 4) < 10 / 4 * ROOM


def test_asking_every_round_whether_a_history_fits_takes_milliseconds() -> None:
    assert growing(300) < 1 * ROOM


if __name__ == "__main__":
    os.environ["DPFL_CACHE"] = tempfile.mkdtemp()
    statements(1)
    print(f"60 calibrations: {calibrations(60):.2f} s, 857 calibrations: {calibrations(857):.2f} s")
    print(f"857 statements: {statements(857):.2f} s, 300 questions: {growing(300):.2f} s")
