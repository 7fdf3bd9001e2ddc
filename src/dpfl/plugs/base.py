"""What every plug has in common. :mod:`dpfl.testing` checks the laws in the docstrings of this
package.

A plug is a frozen dataclass: fields are public settings, secrets are arguments. It keeps no
state of its own; what it must remember between rounds is a dict of tensors that the round hands
in and takes back, and that is checkpointed.

Pictures that explain a plug, declared by the plug as data and drawn by the report.

A plug names the metrics it reports and how they are best looked at. It draws nothing itself, and
the report knows no plug by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import partial
from typing import Self

from dpfl.core.checks import check, positive
from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.core.types import Budget, Claims, ClientSettings, Cohort, PlugState, Shared, Terms


class FigureKind(StrEnum):
    """How metrics are looked at."""

    BY_ROUND = "by_round"
    """Numbers over rounds, one line a metric."""

    SPECTRUM = "spectrum"
    """Lists of numbers of the last round that reports any, one line a metric: every metric whose
    key ends with one of ``metrics``, named by what comes before. ``<name>/slices`` splits a list
    into so many equal parts, of which the first is drawn. ``threshold`` ends the key of a level
    to draw.
    """

    AGAINST_TRUE_NOISE = "against_true_noise"
    """A number per client of the cohort against the noise that was really added (simulation only).
    """

    CLIENT_MAP = "client_map"
    """A map with a column per client that arrived: a flat list, row by row, of the last round that
    reports one; one map a metric."""


@dataclass(frozen=True)
class FigureSpec:
    """One figure. ``metrics`` maps keys (or endings of keys) to what a legend or title calls them;
    the key ``update_norm`` stands for the norm of the round's update.
    """

    kind: FigureKind
    name: str
    title: str
    y_label: str
    metrics: Mapping[str, str]
    caption: str
    x_label: str = "round"
    log_y: bool = False
    threshold: str = ""


by_round = partial(FigureSpec, FigureKind.BY_ROUND, log_y=True)
spectrum = partial(FigureSpec, FigureKind.SPECTRUM, x_label="direction")


SUM_DELTA = 1e-9
"""The share of a delta that is set aside for what a secure sum costs beside its noise."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What a plug does to an update, as far as can be told beforehand.

    ``noise`` multiplies the variance of the noise, ``signal`` the length of the rest, and ``error``
    is an error of the plug's own, relative to the signal.
    """

    noise: float = 1.0
    signal: float = 1.0
    error: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Plug:
    """What every slot may do; the defaults suit a piece that remembers, shares and needs nothing.

    Laws: ``resolve_terms`` depends on claims and terms only. ``start`` and ``open`` are pure: equal
    arguments give equal tensors. What ``open`` returns travels to every client and holds nothing
    secret.
    """

    def resolve_terms(self, terms: Terms, claims: Mapping[str, Claims]) -> Terms:
        """Return the terms with what this piece needs everyone to know; once, at enrolment."""
        return terms

    def resolve(self, terms: Terms) -> Self:
        """Return this piece with nothing left open.

        A setting that is None and has the name of a term (a noise multiplier, the expected cohort)
        takes its value.
        """
        left_open = [f.name for f in fields(self) if f.init and getattr(self, f.name) is None]
        known = {name: vars(terms)[name] for name in left_open if name in vars(terms)}
        return replace(self, **known) if known else self

    def sharing_noise(self, missing: int) -> Self:
        """Return this piece for shares of noise that add up without ``missing`` of the drawn."""
        known = [f.name for f in fields(self) if f.init and f.name == "tolerated_dropouts"]
        return replace(self, **dict.fromkeys(known, missing)) if known else self

    def start(self, terms: Terms, layout: Layout) -> PlugState:
        """Return the state before the first round."""
        return {}

    def open(self, state: PlugState, round_: int, cohort: Cohort, seed: PublicSeed) -> Shared:
        """Return what this piece shares with every client of the round."""
        return {}

    # -- what planners and reports ask -------------------------------------------------------------

    def upload_size(self, numbers: float, terms: Terms, layout: Layout) -> float:
        """How many of ``numbers`` numbers a client sends behind this piece, on average."""
        return numbers

    def download_size(self, layout: Layout) -> int:
        """How many numbers this piece shares with every client, once the method is under way."""
        return 0

    def noise_gain(self, terms: Terms, layout: Layout, client: str | None = None) -> Gain:
        """What this piece does to noise and signal, of one client's row or of the aggregate."""
        return Gain()

    def figures(self) -> tuple[FigureSpec, ...]:
        """Return the pictures that explain what this piece reports."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Participant:
    """What local work may know of the client it is for: its own side of the contract."""

    examples: int
    client_settings: ClientSettings
    budget: Budget | None
    client: str = ""


def claiming(claims: Mapping[str, Claims], *, some: bool = True) -> list[Participant]:
    """Return everyone who claims a usable budget, as a participant that says the truth and has no
    settings of its own.

    ``SUM_DELTA`` of delta is set aside, for what a sum costs beside its noise. That nobody does is
    refused where ``some`` are needed.
    """
    found = []
    for client, own in sorted(claims.items()):
        if own.usable:
            delta = own.delta * (1 - SUM_DELTA)
            kind = own.accountant
            who = Participant(
                examples=own.examples,
                client_settings=ClientSettings(),
                budget=Budget(epsilon=own.epsilon, delta=delta, accountant=kind),
                client=client,
            )
            found.append(who)
    check(
        bool(found) or not some,
        "secure sum",
        "no client claims a usable (epsilon, delta)",
        "one noise level for all needs one",
        PrivacyRefusal,
    )
    return found


@dataclass(frozen=True, kw_only=True)
class NoiseMaker(Plug):
    """A piece whose Gaussian noise protects whole clients.

    ``noise_multiplier`` is its std over the bound of one client's contribution. Left out, it is
    planned at enrolment, from the smallest budget anyone claims.
    """

    noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        if self.noise_multiplier is not None:
            positive(type(self).__name__, noise_multiplier=self.noise_multiplier)

    @property
    def planned_noise(self) -> float:
        """The multiplier, which must have been planned by now."""
        return planned(self.noise_multiplier, f"{type(self).__name__}.noise_multiplier")

    def noise_in_sum(self, ids: tuple[str, ...], terms: Terms, seed: PublicSeed) -> float | None:
        """Noise in the sum of a round's uploads of these clients, over the bound of one client's
        contribution.
        """
        return self.noise_multiplier


def planned(value: float | None, where: str) -> float:
    """Return a number that must have been planned by now."""
    if value is None:
        raise ConfigurationError(where, "is left open", "enrol first, or give a number")
    return value
