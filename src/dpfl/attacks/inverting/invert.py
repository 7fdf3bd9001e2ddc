"""Invert what leaves a client: every method, every view of it, from no privacy down.

The victim holds a few records and takes one local step on all of them, which is the adversary's
best case; every other client holds as many. The federation is played through the real code: local
work, stages, channel and accounting. What is inverted are the numbers that arrive.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dpfl.attacks.inverting.cases import Case, cases_of, seen_by
from dpfl.attacks.inverting.optimisation import (
    ALGORITHMS,
    Algorithm,
    Seen,
    bytes_of_a_step,
    invert_gradient,
    seconds_of_a_step,
)
from dpfl.attacks.inverting.result import InversionCase, InversionResult
from dpfl.attacks.inverting.similarity import matched, psnr, ssim
from dpfl.attacks.inverting.victim import Victim
from dpfl.core.checks import check, one_of, whole_number
from dpfl.core.threads import one_thread
from dpfl.core.types import Plain

VIEWS = ("row", "cleaned", "sum", "secure sum")
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Inversion:
    """How to invert.

    ``records`` are the victim's, by their number in the data set (or, of a folder, in the victim's
    file). ``epsilons`` are the budgets that are tried after no privacy at all. ``views`` are what
    is inverted: "row", "cleaned", "sum", "secure sum". ``restarts`` is how often an algorithm
    starts anew; the reconstruction whose gradient agrees best is kept. ``seed`` makes all of it
    repeatable.
    """

    records: Sequence[int] = (0,)
    client: str | None = None
    epsilons: Sequence[float] = (20.0, 5.0, 1.0)
    views: Sequence[str] = ("row",)
    algorithms: Sequence[Algorithm] = ("cosine",)
    iterations: int = 300
    restarts: int = 1
    tv: float = 1e-2
    seed: int = 0
    reference: bool = True

    def __post_init__(self) -> None:
        for view in self.views:
            one_of("inversion", VIEWS, view=view)
        for algorithm in self.algorithms:
            one_of("inversion", ALGORITHMS, algorithm=algorithm)
        for name in ("iterations", "restarts"):
            whole_number("inversion", name, getattr(self, name))
        check(
            len(self.records) == len(set(self.records)) > 0 and min(self.records) >= 0,
            "inversion",
            f"records = {list(self.records)}",
            "name different records, from 0",
        )


@one_thread()  # steps are small: threads would wait for each other
def invert(
    values: Plain,
    methods: Sequence[str],
    how: Inversion | None = None,
    *,
    data_folder: Path | None = None,
    announce: Callable[[float], None] = lambda seconds: None,
    progress: Progress = lambda stage, done, total: None,
) -> InversionResult:
    """Invert what leaves a client under ``methods`` of the experiment ``values``.

    Every method is played once without privacy (by the method that protects nobody) and once for
    every epsilon. ``announce`` is told, before the work starts, how many seconds it may take. What
    cannot be inverted is refused before that: records that are tokens, tasks that are no
    classification, methods whose clients send nothing, and models that do not fit into memory.

    ::

        values = {"data": {"name": "digits"}, "model": {"name": "mlp"}, "method": {"lr": 0.1, ...}}
        found = invert(values, ["fedavg_dp"], Inversion(epsilons=[8.0, 1.0]))
    """
    how = how or Inversion()
    began = time.perf_counter()
    victim = Victim.of(values, methods[0], how.records, how.client, data_folder)
    cases, left_out = cases_of(victim, values, methods, how.epsilons, how.views, how.reference)
    seen = [seen_by(victim, case) for case in cases]
    _check_memory(seen)
    rounds = how.iterations * how.restarts * len(how.algorithms)
    announce(sum(2 * rounds * seconds_of_a_step(one) for one in seen))
    found: list[InversionCase] = []
    total = len(cases) * len(how.algorithms)
    for case, one in zip(cases, seen, strict=True):
        for algorithm in how.algorithms:
            progress(f"{case.method}, {case.view}, {algorithm}", len(found), total)
            found.append(_inverted(victim, case, one, algorithm, how))
    progress("done", total, total)
    return InversionResult(
        originals=victim.originals,
        picture=victim.picture,
        labels=tuple(victim.labels.tolist()),
        client=victim.client,
        model=victim.model_name,
        parameters=seen[0].layout.size,
        iterations=how.iterations,
        restarts=how.restarts,
        cases=tuple(found),
        left_out=left_out,
        seconds=time.perf_counter() - began,
    )


def _inverted(
    victim: Victim, case: Case, seen: Seen, algorithm: Algorithm, how: Inversion
) -> InversionCase:
    """Run an algorithm from several starts, and keep what agrees best with what was seen."""
    generator = torch.Generator().manual_seed(how.seed)
    tries = [
        invert_gradient(seen, algorithm, iterations=how.iterations, generator=generator, tv=how.tv)
        for _ in range(how.restarts)
    ]
    best = min(tries, key=lambda one: one.loss if math.isfinite(one.loss) else math.inf)
    records = best.records.clamp(0, 1).nan_to_num(0.5)
    order = matched(victim.originals, records)
    pairs = list(zip(victim.originals, records[order], strict=True))
    right = sorted(best.labels[order].tolist()), sorted(victim.labels.tolist())
    hits = [best.labels[i] == label for i, label in zip(order, victim.labels, strict=True)]
    return InversionCase(
        method=case.method,
        view=case.view,
        epsilon=case.epsilon,
        delta=case.delta,
        promise=case.promise,
        algorithm=algorithm,
        psnr=tuple(psnr(a, b) for a, b in pairs),
        ssim=tuple(_ssim(victim, a, b) for a, b in pairs),
        labels_right=1.0 if right[0] == right[1] else float(sum(hits)) / len(hits),
        loss=best.loss,
        found=records[order],
    )


def _ssim(victim: Victim, original: Tensor, found: Tensor) -> float | None:
    if not victim.picture:
        return None
    return ssim(original.view(victim.picture), found.view(victim.picture))


def _check_memory(seen: Sequence[Seen]) -> None:
    """Refuse a model whose inversion does not fit into the memory that is free."""
    needed = max(bytes_of_a_step(one.model, one.shape, one.records) for one in seen)
    free = _free_bytes()
    check(
        needed <= free,
        "inversion",
        f"a step takes about {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} are free",
        "use a smaller model, fewer records, or the view of a row",
    )


def _free_bytes() -> float:
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):  # this system does not tell
        return math.inf
