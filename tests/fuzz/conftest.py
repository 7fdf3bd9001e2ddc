"""Fuzzing for some time, and what came of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.doors import COUNTS, CURRENT

MINUTES = float(os.environ.get("DPFL_FUZZ_MINUTES", "0"))
"""How long to fuzz, over all doors; without it, each has the examples of the profile once."""


def _is_door(item: pytest.Item) -> bool:
    own = item.path.parent.name == "fuzz" and item.path.stem != "test_harness"
    return own and hasattr(getattr(item, "obj", None), "hypothesis")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Give every door its share of the time: its examples are drawn anew as long as there is some."""
    doors = sum(map(_is_door, pyfuncitem.session.items))
    until = time.monotonic() + 60 * MINUTES / max(doors, 1)
    names = pyfuncitem._fixtureinfo.argnames
    while MINUTES and _is_door(pyfuncitem) and time.monotonic() < until:
        pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many examples came in through each door."""
    if not MINUTES:
        return
    for name, counts in sorted(COUNTS.items()):
        told = ", ".join(f"{number:,} {what}" for what, number in sorted(counts.items()))
        terminalreporter.write_line(f"{name}: {counts.total():,} examples: {told}")
    total = sum(counts.total() for counts in COUNTS.values())
    terminalreporter.write_line(f"{total:,} examples through {len(COUNTS)} doors")


@pytest.fixture(autouse=True, scope="module")
def _away() -> Iterator[None]:
    """Stand in a folder of its own: what is written by a relative path shows there."""
    before = Path.cwd()
    os.chdir(CURRENT)
    yield
    os.chdir(before)
