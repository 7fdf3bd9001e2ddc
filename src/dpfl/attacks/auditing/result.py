"""What an audit found: claimed and audited epsilons, and how often faults were caught."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dpfl.attacks.auditing.lower_bounds import LowerBound
from dpfl.attacks.auditing.support import HOLDS
from dpfl.core.promise import Promise
from dpfl.core.types import Adjacency


@dataclass(frozen=True, kw_only=True)
class AuditLine:
    """One method, read under one adjacency, against one adversary.

    ``promise`` is what the claimed epsilon is about; ``reading`` is what the coins decided, which
    the promise covers. ``bounds`` are lower bounds, which hold together with the confidence of the
    audit. ``reach`` is how far canaries move what the adversary sees, relative to what the claim
    allows: where it is small the tests see little, and None where the claim is no single number.
    ``support`` is the outcome of the support test.
    """

    method: str
    promise: Promise
    reading: Adjacency
    delta: float
    claimed: float
    bounds: tuple[LowerBound, ...]
    reach: float | None = None
    support: str = HOLDS

    @property
    def audited(self) -> float:
        """The largest lower bound that holds for any mechanism."""
        return max(bound.epsilon for bound in self.bounds if bound.factor is None)

    @property
    def by_curve(self) -> float:
        """The largest lower bound if the noise is the claim's, divided by some factor."""
        return max(bound.epsilon for bound in self.bounds)

    @property
    def gap(self) -> float:
        """How far the largest lower bound stays below the claim."""
        return self.claimed - self.by_curve

    @property
    def refuted(self) -> bool:
        """Whether the claim cannot hold."""
        broken = self.support.startswith("broken")
        return broken or any(bound.refutes for bound in self.bounds)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can carry."""
        return {
            "method": self.method,
            "promise": self.promise.to_dict(),
            "reading": str(self.reading),
            "delta": self.delta,
            "claimed": self.claimed,
            "audited": self.audited,
            "by_curve": self.by_curve,
            "reach": self.reach,
            "bounds": [asdict(bound) for bound in self.bounds],
            "support": self.support,
            "refuted": self.refuted,
        }


@dataclass(frozen=True, kw_only=True)
class ControlResult:
    """A deliberate ``fault`` in a method: in how many of ``runs`` audits it was caught, and by
    which tests.
    """

    method: str
    fault: str
    about: str
    runs: int
    caught: int
    by: Mapping[str, int]

    @property
    def rate(self) -> float:
        """The share of audits that caught it."""
        return self.caught / self.runs

    @property
    def caught_by(self) -> str:
        """The tests that caught it, and how often."""
        return ", ".join(f"{test} {count}" for test, count in sorted(self.by.items())) or "-"


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """All lines and controls; ``left_out`` are methods and lines that are missing, and why.

    ``simulated`` is whether clients were simulated; otherwise they were real sites.
    """

    lines: tuple[AuditLine, ...]
    controls: tuple[ControlResult, ...]
    left_out: Mapping[str, str]
    confidence: float
    seconds: float
    seeded: bool
    simulated: bool = True

    @property
    def refuted(self) -> list[AuditLine]:
        """The lines whose claim cannot hold."""
        return [line for line in self.lines if line.refuted]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can carry."""
        return {
            "confidence": self.confidence,
            "seeded": self.seeded,
            "simulated": self.simulated,
            "seconds": round(self.seconds, 1),
            "lines": [line.to_dict() for line in self.lines],
            "controls": [asdict(control) for control in self.controls],
            "left_out": dict(self.left_out),
        }
