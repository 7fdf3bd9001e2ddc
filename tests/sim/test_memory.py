"""How much memory a round takes, seen from a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

GIB = 1 << 30
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs /proc to see a process's own peak"
)

# getrusage would do, but its peak is inherited from the process that starts this one.
_PEAK = """
from pathlib import Path

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

"""


def _memory(code: str, seconds: float) -> tuple[int, int]:
    """Run the code, which prints its peak before training and after; return the last, and by how
    much it grew (bytes).
    """
    began = time.monotonic()
    command = [sys.executable, "-c", _PEAK + textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * seconds)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < seconds
    before, after = map(int, done.stdout.split())
    return after, after - before


def test_sixty_clients_with_the_papers_network_stay_below_two_gibibytes() -> None:
    """Per-record gradients written out would be 60 x 64 x 28,938 numbers: 440 MB, if all clients
    were held at once.
    """
    peak, grown = _memory(
        """
        import numpy as np
        import dpfl
        from dpfl.models import make_model

        rng = np.random.default_rng(0)
        names = [f"site-{i:02d}" for i in range(60)]
        shape = (1, 28, 28)
        arrays = {c: (rng.normal(size=(100, *shape)), rng.integers(0, 10, 100),
                      rng.normal(size=(2, *shape)), rng.integers(0, 10, 2)) for c in names}
        budget = dpfl.Budget(epsilon=8.0, delta=1e-3)
        federation = dpfl.Federation.from_arrays(arrays, classes=10, budgets=dict.fromkeys(names, budget))
        model = make_model("cnn", shape, 10, dpfl.PublicSeed(0))
        strategy = dpfl.weiavg(lr=0.1, clip=1.0, batch_size=64, local_steps=1)
        print(peak())
        result = dpfl.train(model, federation, strategy, rounds=1)
        assert result.summary.parameters == 28_938
        assert len(result.history[0].arrived) == 60
        print(peak())
        """,
        seconds=60,
    )
    assert peak < 2 * GIB
    assert grown < 0.4 * GIB


def test_eleven_million_parameters_take_a_step_below_three_gibibytes() -> None:
    """Per-record gradients written out would be 4 x 45 MB a client: the model itself is most of it."""
    peak, grown = _memory(
        """
        import numpy as np
        import dpfl
        from dpfl.models import make_model

        rng = np.random.default_rng(0)
        shape = (3, 16, 16)  # as many parameters as with 32 x 32, and a quarter of the work
        arrays = {c: (rng.normal(size=(20, *shape)), rng.integers(0, 10, 20),
                      rng.normal(size=(2, *shape)), rng.integers(0, 10, 2)) for c in "ab"}
        budget = dpfl.Budget(epsilon=8.0, delta=1e-3)
        federation = dpfl.Federation.from_arrays(arrays, classes=10, budgets=dict.fromkeys("ab", budget))
        model = make_model("resnet18", shape, 10, dpfl.PublicSeed(0))
        strategy = dpfl.weiavg(lr=0.1, clip=1.0, batch_size=4, local_steps=1)
        print(peak())
        result = dpfl.train(model, federation, strategy, rounds=1)
        assert result.summary.parameters == 11_173_962
        assert result.history[0].arrived == ("a", "b")
        print(peak())
        """,
        seconds=60,
    )
    assert peak < 3 * GIB
    assert grown < 1.5 * GIB
