"""Shared by all tests: a cache of their own, and data that may be absent."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# One thread a process: with as many workers as cores, more of them wait for each other; small
# matrices take up to twenty times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Proposals of calibrated noise, apart from the user's own; every one is evaluated afresh.
os.environ["DPFL_CACHE"] = str(Path(__file__).parent.parent / ".pytest_cache" / "dpfl")

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dpfl", max_examples=30, derandomize=True, **_COMMON)
settings.register_profile("nightly", max_examples=1000, **_COMMON)
settings.register_profile("fuzz", max_examples=500, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("DPFL_HYPOTHESIS", "dpfl"))


def require(what: str, reason: str) -> None:
    """Skip with a reason; where ``DPFL_REQUIRE`` names it (as CI does), fail instead."""
    if what in os.environ.get("DPFL_REQUIRE", "").split(","):
        pytest.fail(f"{reason}, and DPFL_REQUIRE asks for '{what}'")
    pytest.skip(reason)


# Tests that share costly fixtures stay in one worker, so that those are made once; all others go
# where there is room.
TOGETHER = (
    "report",
    "test_tune",
    "test_sweep",
    "test_compare",
    "test_plan",
    "test_tuning",
    "test_ray",
    "test_planning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group what shares fixtures (for ``--dist loadgroup``)."""
    for item in items:
        for name in TOGETHER:
            if name in (item.path.parent.name, item.path.stem):
                item.add_marker(pytest.mark.xdist_group(name))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: no later search for garbage looks through them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the folder of data sets that do not ship with the package."""
    folder = Path(os.environ.get("DPFL_DATA", "")) if os.environ.get("DPFL_DATA") else None
    if folder is None or not (folder / "mnist").is_dir():
        require("data", "DPFL_DATA names no folder with MNIST")
    assert folder is not None
    return folder
