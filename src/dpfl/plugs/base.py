"""What every plug has in common. :mod:`dpfl.testing` checks the laws in the docstrings of this
package.

A plug is a frozen dataclass: fields are public settings, secrets are arguments. It keeps no state
of its own; what it must remember between rounds is a dict of tensors that the round hands in and
takes back, and that is checkpointed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.core.types import (
    Budget,
    Claims,
    ClientSettings,
    Cohort,
    PlugState,
    Shared,
    Terms,
)
from dpfl.plugs.figures import FigureSpec


class Plug:
    """What every slot may do; the defaults suit a piece that remembers, shares and agrees on
    nothing.

    Laws: ``agree`` depends on claims and terms only. ``start`` and ``open`` are pure: equal
    arguments give equal tensors. What ``open`` returns travels to every client and holds nothing
    secret.
    """

    def agree(self, terms: Terms, claims: Mapping[str, Claims]) -> Terms:
        """Settle once, at enrolment, what this piece needs everyone to know."""
        return terms

    def resolve(self, terms: Terms) -> Self:
        """Fill what was left open (a noise level, a cohort's size) from the terms; itself where
        nothing was.
        """
        return self

    def start(self, terms: Terms, layout: Layout) -> PlugState:
        """Return the state before the first round."""
        return {}

    def open(self, state: PlugState, round_: int, cohort: Cohort, seed: PublicSeed) -> Shared:
        """Return what this piece shares with every client of the round."""
        return {}

    def figures(self) -> tuple[FigureSpec, ...]:
        """Return the pictures that explain what this piece reports."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Participant:
    """What local work may know of the client it is for: its own side of the contract."""

    examples: int
    client_settings: ClientSettings
    budget: Budget | None


@runtime_checkable
class NoiseMaker(Protocol):
    """A piece whose Gaussian noise protects whole clients; a multiplier of None is settled at
    enrolment.
    """

    @property
    def noise_multiplier(self) -> float | None:
        """Std over the bound of one client's contribution."""
        ...

    @property
    def makes_noise(self) -> bool:
        """Whether this component adds noise of its own."""
        ...
