"""A recipe: what a strategy leaves open until it knows its model, and everyone's claims.

A method that plans itself has a recipe instead of settings. It first learns what model it trains
(:meth:`Recipe.for_model`). At enrolment it plans numbers from the claims of all clients
(:meth:`Recipe.plan`), which become part of the terms, and from which everyone builds the same
strategy (:meth:`Recipe.apply`). No record is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from dpfl.core.checks import check
from dpfl.core.errors import PeerError
from dpfl.core.types import Claims

if TYPE_CHECKING:
    from torch import nn

    from dpfl.strategy.slots import Slots

Numbers = Mapping[str, float]
S = TypeVar("S", bound="Slots")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a strategy leaves open.

    Laws: ``plan`` depends on claims and the model's shape alone; ``apply`` with equal numbers gives
    equal strategies; a number named "rounds" is how many rounds are planned.
    """

    def for_model(self, strategy: S, model: nn.Module) -> S:
        """Return the strategy for a model; one that it cannot train is refused."""
        return strategy

    def plan(self, strategy: Slots, claims: Mapping[str, Claims], rounds: int | None) -> Numbers:
        """Plan from the claims of all clients; ``rounds`` are those that somebody asked for."""
        raise NotImplementedError

    def apply(self, strategy: S, numbers: Numbers) -> S:
        """Return the strategy with these numbers; numbers that cannot be are refused."""
        raise NotImplementedError

    def words(self, numbers: Numbers) -> list[tuple[str, str]]:
        """What was planned and why, a line each."""
        return [(name, f"{value:.4g}") for name, value in numbers.items()]

    def reach(self, numbers: Numbers) -> float | None:
        """How many times the signal exceeds the noise on all parameters, if that is known."""
        return None

    def warning(self, numbers: Numbers) -> str:
        """What to say of a plan before it is run; empty where there is nothing to say."""
        return ""


def checked_numbers(given: Numbers, names: tuple[str, ...]) -> dict[str, float]:
    """Return planned numbers of just these names, or refuse them: a server may send anything."""
    check(
        set(given) == set(names) and all(map(math.isfinite, given.values())),
        "terms",
        f"plan {sorted(given)}, not finite numbers for {', '.join(names)}",
        "enrol again, with the same version",
        PeerError,
    )
    return dict(given)
