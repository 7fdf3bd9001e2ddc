"""What one secure sum is asked to do, and how its phases are measured. Shared by all sides.

Seconds are processor seconds of one process, so that other work on the machine counts little.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.gate import peak_mib

ONE = 1 << 20  # steps of the grid, as noise of standard deviation one has
LARGEST = 1 << 24  # steps that one number may have


@dataclass(frozen=True, kw_only=True)
class Task:
    """One sum of ``members`` vectors, of whom the first ``dropouts`` send shares and no input."""

    members: int
    parameters: int
    dropouts: int
    colluders: int = 1

    @property
    def survivors(self) -> int:
        """How many inputs are in the sum."""
        return self.members - self.dropouts

    @property
    def threshold(self) -> int:
        """How many shares recover a secret; the same for both protocols."""
        return (self.members + self.colluders) // 2 + 1

    def vector(self, member: int) -> np.ndarray:
        """Return a member's vector: normal numbers, each time the same."""
        generator = np.random.Generator(np.random.SFC64(member))
        return generator.standard_normal(self.parameters, dtype=np.float32)

    def integers(self, member: int) -> np.ndarray:
        """Return the vector as integers, on a grid on which one is ``ONE``."""
        return np.rint(self.vector(member) * np.float32(ONE)).astype(np.int64)

    def survivors_sum(self) -> np.ndarray:
        """Return the sum of the vectors, as it would be without any protocol."""
        return self._sum(self.vector)

    def survivors_integers(self) -> np.ndarray:
        """Return the sum of the integers."""
        return self._sum(self.integers).astype(np.int64)

    def _sum(self, of: Callable[[int], np.ndarray]) -> np.ndarray:
        total = np.zeros(self.parameters)
        for member in range(self.dropouts, self.members):
            total += of(member)
        return total


@dataclass
class Meter:
    """Adds up processor seconds and bytes, by phase, of the clients and of the server.

    One clock runs at a time: while a client works the server's stands still.
    """

    clients: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    servers: dict[str, float] = field(default_factory=dict)
    _left_out: float = 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what happens inside, whoever works."""
        before, began = self._left_out, time.process_time()
        yield
        self._left_out = before + time.process_time() - began

    @contextlib.contextmanager
    def client(self, phase: str) -> Iterator[dict[str, float]]:
        """Measure one client; the caller adds the bytes ``up`` and ``down`` to what it gets."""
        measured: dict[str, float] = {}
        left_out, began = self._left_out, time.process_time()
        yield measured
        measured["seconds"] = time.process_time() - began - (self._left_out - left_out)
        self.clients.setdefault(phase, []).append(measured)

    @contextlib.contextmanager
    def server(self, phase: str) -> Iterator[None]:
        """Measure the server."""
        left_out, began = self._left_out, time.process_time()
        yield
        spent = time.process_time() - began - (self._left_out - left_out)
        self.servers[phase] = self.servers.get(phase, 0.0) + spent

    def result(self) -> dict[str, Any]:
        """Return by phase: a client's seconds (median) and bytes (mean), the server's seconds."""
        phases = {}
        for phase, clients in self.clients.items():
            phases[phase] = {
                "client": statistics.median(one["seconds"] for one in clients),
                "server": self.servers.get(phase, 0.0),
                "up": statistics.fmean(one["up"] for one in clients),
                "down": statistics.fmean(one["down"] for one in clients),
            }
        return {"phases": phases, "peak_mib": peak_mib()}
