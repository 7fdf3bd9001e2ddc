"""Who did best, among those that promise the same: paired over seeds, and never across privacy
units.

Two accuracies may be ranked only if the methods hide the same unit, under the same adjacency, from
the same observer. A method that hides nothing, or grants what nobody granted, is shown for
reference and never wins.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpfl.core.errors import ConfigurationError
from dpfl.privacy.accountant import shown

Promise = tuple[str, str, str]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One method in one case: its accuracies by seed, and how far it is behind the best of its
    promise.
    """

    label: str
    promise: Promise
    reference: bool
    runs: tuple[Mapping[str, Any], ...]
    best: bool = False
    behind: float | None = None
    p_value: float | None = None

    @property
    def accuracies(self) -> tuple[float, ...]:
        """By seed."""
        return tuple(run["accuracy"] for run in self.runs)

    @property
    def mean(self) -> float:
        """Over seeds."""
        return statistics.mean(self.accuracies)

    @property
    def tested(self) -> str:
        """On what its accuracy was measured: one common model, or each client's own on its own
        records.
        """
        return str(self.runs[0].get("tested", ""))

    @property
    def unit(self) -> str:
        """What is hidden."""
        return self.promise[0]

    @property
    def against(self) -> str:
        """From whom, in a word or two."""
        return "nobody" if self.reference else self.promise[2]


def promise_of(run: Mapping[str, Any]) -> Promise:
    """Unit, adjacency and observer of a run's epsilon."""
    epsilon = run["epsilon"]
    return epsilon["unit"], epsilon["adjacency"], epsilon["observer"]


def is_reference(run: Mapping[str, Any]) -> bool:
    """Whether a run protects nobody, or only in a hypothetical federation."""
    hypothetical = any(stamp.startswith("HYPOTHETICAL") for stamp in run.get("stamps", ()))
    return run["epsilon"]["observer"] == "nobody" or hypothetical


def standings(cells: Sequence[Mapping[str, Any]]) -> list[Standing]:
    """Compare the methods of one case; seeds are paired, so all must have the same ones."""
    seeds = {tuple(run["seed"] for run in cell["runs"]) for cell in cells}
    if len(seeds) > 1:
        raise ConfigurationError(
            "comparison", "methods were run with different seeds", "run all with the same seeds"
        )
    plain = [
        Standing(
            label=cell["label"],
            promise=promise_of(cell["runs"][0]),
            reference=is_reference(cell["runs"][0]),
            runs=tuple(cell["runs"]),
        )
        for cell in cells
    ]
    ranked: dict[str, Standing] = {}
    for alike in {(one.promise, one.tested) for one in plain if not one.reference}:
        group = [one for one in plain if (one.promise, one.tested) == alike and not one.reference]
        ranked |= {one.label: one for one in _ranked(group)}
    return [ranked.get(one.label, one) for one in plain]


def _ranked(group: list[Standing]) -> list[Standing]:
    best = max(group, key=lambda one: one.mean)
    others = [one for one in group if one is not best]
    adjusted = holm([paired_p_value(best.accuracies, one.accuracies) for one in others])
    compared = [
        replace(one, behind=best.mean - one.mean, p_value=p)
        for one, p in zip(others, adjusted, strict=True)
    ]
    return [replace(best, best=bool(others), behind=0.0), *compared]


def remarks(lines: Sequence[Standing]) -> list[str]:
    """What must stand below a table of these: losses against the server itself, and accuracies of
    another kind.
    """
    found = []
    for one in lines:
        spreads = [
            run.get("epsilon_by_observer", {}).get("server", {}).get("spent") for run in one.runs
        ]
        values = [spread["largest"] for spread in spreads if spread]
        if one.against != "world" or not values:
            continue
        world = [(run["epsilon"].get("spent") or {}).get("largest") for run in one.runs]
        if "infinite" in values:
            found.append(f"{one.label}: the server is trusted; against it nothing is guaranteed")
        elif values != world:
            meaning = f"per {one.unit}, {one.promise[1]} adjacency"
            found.append(
                f"{one.label}: against the server itself epsilon is up to {shown(max(values))}, {meaning}"
            )
    kinds = {one.tested for one in lines if one.tested}
    if len(kinds) > 1:
        personal = [one for one in lines if one.tested.startswith("each client")]
        found += [f"{one.label}: {one.tested}; ranked apart" for one in personal]
    return found


def paired_p_value(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Two-sided paired t-test; None where there are no two seeds to tell a spread from.

    >>> round(paired_p_value([0.9, 0.8, 0.85], [0.7, 0.65, 0.72]), 4)
    0.0165
    >>> paired_p_value([0.9, 0.9], [0.9, 0.9])
    1.0
    """
    differences = [a - b for a, b in zip(one, other, strict=True)]
    if len(differences) < 2:
        return None
    spread = statistics.stdev(differences)
    if spread == 0:
        return 1.0 if differences[0] == 0 else 0.0
    from scipy import stats

    t = statistics.mean(differences) / (spread / math.sqrt(len(differences)))
    return float(2 * stats.t.sf(abs(t), len(differences) - 1))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjust for several comparisons (Holm 1979).

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    known = sorted((p, number) for number, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for place, (p, number) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(known) - place)))
        adjusted[number] = largest
    return adjusted


def grouped(lines: Sequence[Standing]) -> dict[str, list[Standing]]:
    """One table a unit; references that hide nothing stand beside every unit's methods."""
    free = [one for one in lines if one.promise[2] == "nobody"]
    units = sorted({one.unit for one in lines if one not in free}) or sorted(
        {one.unit for one in lines}
    )
    return {
        unit: [one for one in lines if one in free or (one.unit == unit and one not in free)]
        for unit in units
    }
