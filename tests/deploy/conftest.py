"""For all tests of a deployment: one thread, private folders, and a model that is tried once and not with every
message.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from dpfl.deploy import records as module


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _folders_are_private() -> Iterator[None]:
    """Folders that tests make by hand are as those that an init makes."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def _models_are_tried_elsewhere(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """check_model is half of the time of a small study; what it refuses is tested where it is not
    replaced.
    """
    if not any(
        name in request.node.nodeid for name in ("test_real", "model_that", "[weiavg]", "[centaur]")
    ):
        monkeypatch.setattr(module, "check_model", lambda *rest: None)
