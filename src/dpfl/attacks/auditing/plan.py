"""How an audit is planned: sizes, settings, and the games that a method is played with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dpfl.attacks.auditing.canaries import FILLERS, Game
from dpfl.attacks.auditing.lower_bounds import one_run_epsilon
from dpfl.attacks.auditing.probes import Probe
from dpfl.core.checks import check, share, whole_number
from dpfl.core.types import Adjacency, Budget, Observer, Plain
from dpfl.privacy.flags import Flag
from dpfl.strategy import Strategy
from dpfl.strategy.method import Method
from dpfl.strategy.slots import MANY

READINGS = (Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE)
TESTS = 3
"""Bounds of one line, which share its significance."""

_AT_ONCE: dict[Probe, int] = {"linear": 1000, "layered": 128, "split": 64, "head": 192}
_CLIENTS = 64  # canaries that are whole clients, in one run
_VICTIMS = 50  # clients whose rows are trials of their own, in one run
_SETTINGS: Plain = {"lr": 1.0, "clip": 1.0, "batch_size": 10**6, "dimension": 16}
_CHOSEN: Plain = {"local_steps": 1, "force": True}  # one step; a plan that learns nothing will do


@dataclass(frozen=True, kw_only=True)
class Audit:
    """How methods are audited.

    ``canaries`` and ``trials`` are how many units are guessed about in the two tests, ``budget`` is
    that of their clients and ``rounds`` how many there are. ``settings`` go to every method that
    has them. ``seed`` None draws noise from the operating system; ``coins`` is the seed of the
    auditor's own coins.
    """

    budget: Budget = field(default_factory=lambda: Budget(epsilon=4.0, delta=1e-5))
    rounds: int = 3
    canaries: int = 1000
    trials: int = 1000
    confidence: float = 0.95
    readings: Sequence[Adjacency] = READINGS
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    coins: int = 0
    engine: str = "stacked"
    probe: Probe | None = None

    def __post_init__(self) -> None:
        share("audit", confidence=self.confidence)
        for name in ("canaries", "trials", "rounds"):
            whole_number("audit", name, getattr(self, name))
        most = self.most_shown
        check(
            most > self.budget.epsilon / 4,
            "audit",
            f"{self.canaries} canaries and {self.trials} trials show at most an epsilon of "
            f"{most:.2f} with a confidence of {self.confidence:g}",
            "ask for more of them, or for less confidence",
        )

    @property
    def most_shown(self) -> float:
        """The largest epsilon that guesses without an error would show."""
        significance = (1 - self.confidence) / TESTS
        count = self.canaries
        half = max(1, self.trials // 4)
        guessed = one_run_epsilon(count, count, count, significance / 5, self.budget.delta)
        limit = 1 - (significance / 2) ** (1 / half)  # no error in so many trials of either kind
        tried = math.log((1 - self.budget.delta - limit) / limit) if limit < 0.5 else 0.0
        return max(guessed, tried)

    def runs(self, game: Game) -> int:
        """How often a game with few canaries is played."""
        return max(2, min(game.most_runs, -(-self.trials // game.canaries)))

    def settings_of(self, method: Method) -> Plain:
        """What a method is built with: what it needs, and what was asked for that it has."""
        needed = {name for name, own in method.settings.items() if own.default is own.empty}
        light = {name: value for name, value in _SETTINGS.items() if name in needed}
        given = {**light, **_CHOSEN, **self.settings}
        return {name: value for name, value in given.items() if name in method.settings}


def check_audited(method: Method, how: Audit) -> Strategy:
    """Build a method; one that claims nothing, or whose clients send nothing, is refused."""
    strategy = method.build(how.settings_of(method))
    where = f"audit of '{method.name}'"
    check(
        strategy.observer is not Observer.NOBODY,
        where,
        "it protects nobody, and claims nothing",
        "audit another method",
    )
    alone = Flag.ALONE in strategy.flags
    check(not alone, where, "nothing leaves its clients", "audit another method")
    return strategy


def adversaries(strategy: Strategy) -> list[Observer]:
    """Whom a method may claim something against: first the one it is made for."""
    if strategy.observer is Observer.WORLD and not strategy.local.pooled:
        return [Observer.WORLD, Observer.SERVER]
    return [strategy.observer]


def games(
    method: Method, strategy: Strategy, how: Audit, observer: Observer, reading: Adjacency
) -> tuple[Game, Game]:
    """The two games of one adversary and reading: many canaries in few runs, and one canary in
    many runs, or at many clients whose rows are seen apart.
    """
    layered = "two layers" in method.needs
    probe: Probe = "head" if method.model else "layered" if layered else how.probe or "linear"
    clients = not strategy.unit.of_data or probe == "split"
    drawn = strategy.selection.sampling != "none"  # a cohort needs enough to draw from
    many = Game(
        strategy=strategy,
        probe=probe,
        adjacency=reading,
        observer=observer,
        budget=how.budget,
        rounds=None if method.model else how.rounds,
        canaries=min(how.canaries, _CLIENTS if clients else _AT_ONCE[probe]),
        apart=clients,
        fillers=3 * (strategy.selection.cohort_size(MANY) or 1) if drawn else FILLERS,
        engine=how.engine,
    )
    few = replace(many, apart=True, canaries=1)
    victims = min(_VICTIMS, max(1, how.trials // 8)) if few.own_rows and probe != "head" else 1
    return many, replace(few, canaries=victims)
