"""Accounting does not need torch: a hospital's ledger can be read on a machine without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dpfl

SOURCE = Path(dpfl.__file__).parent
MODULES = [
    "dpfl.core.checks",
    "dpfl.core.errors",
    "dpfl.core.grid",
    "dpfl.core.seeds",
    "dpfl.core.types",
    "dpfl.privacy",
    *sorted(f"dpfl.privacy.{path.stem}" for path in (SOURCE / "privacy").glob("[a-z]*.py")),
]
# The package itself may offer more than accounting: a bare parent stands in for it.
IMPORT = """
import importlib, sys, types
parent = types.ModuleType("dpfl")
parent.__path__ = [sys.argv[1]]
sys.modules["dpfl"] = parent
sys.modules["torch"] = None  # importing it raises
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def run(*modules: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IMPORT, str(SOURCE), *modules]
    return subprocess.run(command, capture_output=True, text=True)


def test_every_module_of_privacy_imports_without_torch() -> None:
    done = run(*MODULES)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["dpfl.core.random"])
def test_the_check_notices_a_module_that_needs_torch(module: str) -> None:
    done = run(module)
    assert done.returncode != 0
    assert "torch" in done.stderr
