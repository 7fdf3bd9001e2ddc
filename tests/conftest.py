"""Shared by all tests: a cache of their own, and data that may be absent."""

from __future__ import annotations

import gzip
import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from dpfl.privacy import cache

# Accounting curves are pure and slow: keep them between sessions, apart from the user's own cache.
os.environ["DPFL_CACHE"] = str(Path(__file__).parent.parent / ".pytest_cache" / "dpfl")

WARM = Path(__file__).parent / "accounting.tsv.gz"


def _warm_cache() -> None:
    """Begin with the calibrated noise that the suite asks for: it takes minutes to compute and is no test's subject here.

    Keys hold the versions of everything that computed a value. Tests of accounting itself (see ``afresh``) do without.
    """
    folder = Path(os.environ["DPFL_CACHE"])
    if (folder / "accounting.sqlite").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"accounting.{os.getpid()}.new"
    draft.unlink(missing_ok=True)
    rows = [line.rsplit("\t", 1) for line in gzip.decompress(WARM.read_bytes()).decode().splitlines()]
    with closing(sqlite3.connect(draft)) as connection, connection:
        connection.execute("CREATE TABLE results (key TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID")
        connection.executemany("INSERT INTO results VALUES (?, ?)", [(key, float(value)) for key, value in rows])
    with suppress(FileExistsError):  # another worker was faster
        os.link(draft, folder / "accounting.sqlite")
    draft.unlink()


_warm_cache()

settings.register_profile(
    "dpfl", deadline=None, max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("dpfl")


def require(what: str, reason: str) -> None:
    """Skip with a reason; where ``DPFL_REQUIRE`` names it (as CI does), fail instead."""
    if what in os.environ.get("DPFL_REQUIRE", "").split(","):
        pytest.fail(f"{reason}, and DPFL_REQUIRE asks for '{what}'")
    pytest.skip(reason)


# Tests that share costly fixtures stay in one worker, so that those are made once; all others go where there is room.
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


@pytest.fixture(autouse=True)
def afresh(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where accounting is the subject, nothing is taken from what was computed before, unless a test is marked ``stored``."""
    if request.path.parent.name in ("privacy", "golden") and request.node.get_closest_marker("stored") is None:
        monkeypatch.setenv("DPFL_CACHE", f"{os.environ['DPFL_CACHE']}-afresh")
        cache.forget()


@pytest.fixture
def real_data() -> Path:
    """Return the folder of data sets that do not ship with the package."""
    folder = Path(os.environ.get("DPFL_DATA", "")) if os.environ.get("DPFL_DATA") else None
    if folder is None or not (folder / "mnist").is_dir():
        require("data", "DPFL_DATA names no folder with MNIST")
    assert folder is not None
    return folder
