"""What poisoning does, as typed results: a cell for each method, defence and attack."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from dpfl.attacks.poisoning.defences import Reliance
from dpfl.core.types import Plain
from dpfl.tasks import MetricWords

FORMAT = "dpfl-poisoning-1"


@dataclass(frozen=True, kw_only=True)
class DishonestClient:
    """Who is dishonest in the runs of a ``seed``: its true ``epsilon``, if any, and records."""

    seed: int
    client: str
    epsilon: float | None
    records: int


@dataclass(frozen=True, kw_only=True)
class PoisonedRun:
    """One run.

    ``score`` is the task's metric of the published model on the honest clients' test records, and
    ``backdoor`` the share of these, with the trigger and of another class, that get its label.
    ``weight`` is the dishonest client's mean share of all weights, None where clients have none.
    ``diverged``: the loss is not finite, or more than ten times that of the first model. ``cut`` is
    the share of the dishonest client's numbers that bounds have cut off. ``epsilon`` is the largest
    one of an honest client, and ``epsilon_change`` by how much any honest client's differs from
    that of the same run without an attack. ``within_budgets``: no honest client's is above its own
    budget.
    """

    seed: int
    score: float
    backdoor: float | None
    weight: float | None
    diverged: bool
    cut: float
    epsilon: float | None
    epsilon_change: float
    within_budgets: bool


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The ``runs`` of one method with one defence under one attack, one for each seed."""

    method: str
    defence: str
    attack: str
    runs: tuple[PoisonedRun, ...]

    @property
    def scores(self) -> list[float]:
        """The score of each seed."""
        return [run.score for run in self.runs]

    @property
    def backdoors(self) -> list[float]:
        """How often the trigger works, for each seed; empty for a task without classes."""
        return [run.backdoor for run in self.runs if run.backdoor is not None]

    @property
    def weights(self) -> list[float]:
        """The dishonest client's weight for each seed; empty where clients have none."""
        return [run.weight for run in self.runs if run.weight is not None]

    @property
    def diverged(self) -> int:
        """How many of the runs diverged."""
        return sum(run.diverged for run in self.runs)


@dataclass(frozen=True, kw_only=True)
class AttackedMethod:
    """A method: its ``promise`` in words, and what the others' guarantees rest on."""

    name: str
    promise: str
    reliance: Reliance


@dataclass(frozen=True, kw_only=True)
class Poisoning:
    """What one dishonest client does to the model, and to the others' privacy.

    ``metric`` names the scores. ``attacks`` says in words what the client does, by name; ``chosen``
    how it was chosen, ``trigger`` what a backdoor's records look like. ``left_out`` are sentences
    about what could not be compared; ``seeded`` says that noise came from the seeds.
    """

    metric: str
    higher_is_better: bool
    chosen: str
    attacks: Mapping[str, str]
    trigger: str
    clients: tuple[DishonestClient, ...]
    methods: tuple[AttackedMethod, ...]
    cells: tuple[Cell, ...]
    left_out: tuple[str, ...] = ()
    seeded: bool = True

    @property
    def words(self) -> MetricWords:
        """How scores are shown."""
        return MetricWords(self.metric)

    def of_method(self, name: str) -> list[Cell]:
        """The cells of a method, by defence, in the order in which they were run."""
        return [cell for cell in self.cells if cell.method == name]

    def drops(self, cell: Cell) -> list[float]:
        """How much worse each seed is than the same run without an attack; below 0 is better."""
        sign = 1 if self.higher_is_better else -1
        own = cell.method, cell.defence
        (plain,) = [c for c in self.cells if (c.method, c.defence) == own and c.attack == "none"]
        pairs = zip(plain.scores, cell.scores, strict=True)
        return [sign * (before - after) for before, after in pairs]

    @property
    def epsilon_change(self) -> float:
        """By how much any honest client's epsilon differs with and without an attack, at most."""
        return max((run.epsilon_change for cell in self.cells for run in cell.runs), default=0.0)

    def changed(self) -> list[Cell]:
        """Cells in which the epsilon of an honest client is not what it is without an attack."""
        return [cell for cell in self.cells if any(run.epsilon_change for run in cell.runs)]

    def to_dict(self) -> Plain:
        """Return plain values that JSON can carry; infinity is the word "infinite"."""
        cells = [{**vars(cell), "runs": [_plain(run) for run in cell.runs]} for cell in self.cells]
        methods = [{**vars(one), "reliance": _plain(one.reliance)} for one in self.methods]
        clients = [_plain(one) for one in self.clients]
        parts = {"clients": clients, "methods": methods, "cells": cells}
        own = {**vars(self), "attacks": dict(self.attacks), "left_out": list(self.left_out)}
        return {"format": FORMAT, **own, **parts}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read back what :meth:`to_dict` wrote."""
        own = {name: value for name, value in values.items() if name not in ("format", "folder")}
        methods = [{**m, "reliance": Reliance(**_read(m["reliance"]))} for m in own["methods"]]
        cells = [
            {**cell, "runs": tuple(PoisonedRun(**_read(run)) for run in cell["runs"])}
            for cell in own["cells"]
        ]
        parts = {
            "clients": tuple(DishonestClient(**_read(one)) for one in own["clients"]),
            "methods": tuple(AttackedMethod(**one) for one in methods),
            "cells": tuple(Cell(**cell) for cell in cells),
            "left_out": tuple(own["left_out"]),
        }
        return cls(**{**own, **parts})


def by_defence(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """The cells of one method by defence."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.defence, []).append(cell)
    return found


def _plain(value: object) -> Plain:
    return {k: "infinite" if v == math.inf else v for k, v in vars(value).items()}


def _read(values: Mapping[str, Any]) -> Plain:
    return {k: math.inf if v == "infinite" else v for k, v in values.items()}
