"""What inversions found: how alike reconstructions are, for every case."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpfl.attacks.inverting.optimisation import Algorithm
from dpfl.core.promise import Promise


@dataclass(frozen=True, kw_only=True)
class InversionCase:
    """One reconstruction of the same records: by an algorithm, from one view, at one epsilon.

    ``view`` is "row" (what the server receives of the client), "cleaned" (the row after the server
    has cleaned it), "sum" (the published step of the model) or "secure sum". ``epsilon`` is what
    the client is charged against that adversary for all rounds, infinite where the view is not
    protected. ``found`` are the reconstructions, in the order of the originals, from 0 to 1.
    """

    method: str
    view: str
    epsilon: float
    delta: float
    promise: Promise
    algorithm: Algorithm
    psnr: tuple[float, ...]
    ssim: tuple[float | None, ...]
    labels_right: float
    loss: float
    found: Tensor

    @property
    def mean_psnr(self) -> float:
        """The mean over records, in dB."""
        return statistics.mean(self.psnr)

    @property
    def mean_ssim(self) -> float | None:
        """The mean over records; None where they are not images."""
        known = [value for value in self.ssim if value is not None]
        return statistics.mean(known) if known else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can carry, without the pictures."""
        about = {name: getattr(self, name) for name in ("method", "view", "algorithm")}
        found = {name: getattr(self, name) for name in ("psnr", "ssim", "labels_right", "loss")}
        epsilon = "infinite" if self.epsilon == float("inf") else self.epsilon
        promise = self.promise.to_dict()
        return {**about, "epsilon": epsilon, "delta": self.delta, "promise": promise, **found}


@dataclass(frozen=True, kw_only=True)
class InversionResult:
    """All cases of one attack on the same records.

    ``originals`` are the records that the victim holds, from 0 to 1, and ``picture`` is the shape
    in which one of them is an image, empty where it is not. ``left_out`` says which views a method
    does not have, and why.
    """

    originals: Tensor
    picture: tuple[int, ...]
    labels: tuple[int, ...]
    client: str
    model: str
    parameters: int
    iterations: int
    restarts: int
    cases: tuple[InversionCase, ...]
    left_out: Sequence[str]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can carry."""
        names = ("labels", "client", "model", "parameters", "iterations", "restarts")
        return {
            **{name: getattr(self, name) for name in names},
            "records": len(self.originals),
            "seconds": round(self.seconds, 1),
            "cases": [case.to_dict() for case in self.cases],
            "left_out": list(self.left_out),
        }
