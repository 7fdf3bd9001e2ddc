"""Rank methods among those that promise the same: paired over seeds, never across privacy units.

Two scores may be ranked only if the methods protect the same unit, under the same adjacency,
against the same adversary. A method that protects nobody, that raises budgets nobody raised, that
trusts a curator with all records or that shares nothing is shown for reference and never ranked.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpfl.core.checks import check
from dpfl.core.types import Observer, Promise
from dpfl.experiments.results import CellResult, RunScore
from dpfl.privacy.accountant import shown
from dpfl.tasks import MetricWords


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One method (``label``) in one case, with its ``runs``. ``gap`` is how far its mean score is
    behind the best of those that promise the same, ``p_value`` how likely such a gap is by chance;
    None where it is not ranked.
    """

    label: str
    runs: tuple[RunScore, ...]
    best: bool = False
    gap: float | None = None
    p_value: float | None = None

    @property
    def values(self) -> tuple[float, ...]:
        """The ranking metric of each seed."""
        return tuple(run.value for run in self.runs)

    @property
    def mean(self) -> float:
        """The mean of the ranking metric over seeds."""
        return statistics.mean(self.values)

    @property
    def sign(self) -> int:
        """Of the ranking metric: 1 if more is better, else -1."""
        return 1 if self.runs[0].higher_is_better else -1

    @property
    def words(self) -> MetricWords:
        """How the ranking metric is shown."""
        return self.runs[0].words

    @property
    def promise(self) -> Promise:
        """What its epsilon is about."""
        return self.runs[0].promise

    @property
    def reference(self) -> bool:
        """Whether it is shown for reference only."""
        return self.runs[0].reference

    @property
    def unit(self) -> str:
        """What is protected."""
        return str(self.promise.unit)

    @property
    def against(self) -> str:
        """Against whom, in a word."""
        return "nobody" if self.runs[0].hypothetical else str(self.promise.observer)

    @property
    def alone(self) -> bool:
        """Whether no other method promises the same."""
        return self.gap == 0 and not self.best and self.p_value is None


def standings(cells: Sequence[CellResult]) -> list[Standing]:
    """Rank the ``cells`` of one case. Seeds are paired, so all methods must have the same ones.

    The best mean score of each promise is compared with the others by paired t-tests, adjusted for
    their number. Scores of one common model and of clients' own models are ranked apart.
    """
    seeds = {tuple(run.seed for run in cell.runs) for cell in cells}
    check(
        len(seeds) <= 1,
        "comparison",
        "methods were run with different seeds",
        "run all with the same seeds",
    )
    metrics = sorted({run.metric for cell in cells for run in cell.runs})
    check(
        len(metrics) <= 1,
        "comparison",
        f"runs are scored by {' and '.join(metrics)}",
        "score all by one metric",
    )
    plain = [Standing(label=cell.label, runs=cell.runs) for cell in cells]
    groups: dict[tuple[Promise, str], list[Standing]] = {}
    for one in plain:
        if not one.reference:
            groups.setdefault((one.promise, one.runs[0].tested), []).append(one)
    ranked = {one.label: one for group in groups.values() for one in _ranked(group)}
    return [ranked.get(one.label, one) for one in plain]


def _ranked(group: list[Standing]) -> list[Standing]:
    """Rank methods that promise the same against the best of them."""
    best = max(group, key=lambda one: one.sign * one.mean)
    others = [one for one in group if one is not best]
    adjusted = holm([paired_p_value(best.values, one.values) for one in others])
    compared = [
        replace(one, gap=one.sign * (best.mean - one.mean), p_value=p)
        for one, p in zip(others, adjusted, strict=True)
    ]
    return [replace(best, best=bool(others), gap=0.0), *compared]


def remarks(lines: Sequence[Standing]) -> list[str]:
    """What must stand below a table of these ``lines``: losses against the server itself, and
    scores of another kind.
    """
    found = []
    for one in lines:
        against = [run.epsilon_against.get(Observer.SERVER) for run in one.runs]
        server = [spread.spent.largest for spread in against if spread]
        world = [run.epsilon.spent.largest if run.epsilon else None for run in one.runs]
        if one.against != "world" or not server:
            continue
        if math.inf in server:
            found.append(f"{one.label}: the server is trusted; against it nothing is guaranteed")
        elif server != world:
            meaning = f"{shown(max(server))}, per {one.unit}, {one.promise.adjacency} adjacency"
            found.append(f"{one.label}: against the server itself epsilon is up to {meaning}")
    tested = {one.label: one.runs[0].tested for one in lines}
    if len({*tested.values()} - {""}) > 1:
        personal = {label: said for label, said in tested.items() if said.startswith("each client")}
        found += [f"{label}: {said}; ranked apart" for label, said in personal.items()]
    return found


def paired_p_value(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Two-sided paired t-test of ``one`` and the ``other``; None with fewer than two seeds.

    Differences that are all the same have no spread to test with: the test is that of their signs.

    >>> round(paired_p_value([0.9, 0.8, 0.85], [0.7, 0.65, 0.72]), 4)
    0.0165
    >>> paired_p_value([0.9, 0.9], [0.9, 0.9])
    1.0
    """
    differences = [a - b for a, b in zip(one, other, strict=True)]
    if len(differences) < 2:
        return None
    spread = statistics.stdev(differences)
    if spread < 1e-9:
        return 1.0 if abs(differences[0]) < 1e-9 else 2.0 ** (1 - len(differences))
    from scipy import stats

    t = statistics.mean(differences) / (spread / math.sqrt(len(differences)))
    return float(2 * stats.t.sf(abs(t), len(differences) - 1))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjust ``p_values`` for several comparisons (Holm 1979).

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
    """Sort ``lines`` into a table per unit; methods that protect nobody stand in every table."""
    free = [one for one in lines if not one.runs[0].protects]
    units = sorted({one.unit for one in lines if one not in free} or {one.unit for one in lines})
    return {unit: [one for one in lines if one in free or one.unit == unit] for unit in units}
