"""The nouns of a round: frozen, keyword-only, with no behaviour beyond their own consistency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from dpfl.core.checks import check, finite, is_number, learning_rate, one_of, positive, whole_number
from dpfl.core.phases import Phase as Phase
from dpfl.core.promise import (
    Adjacency as Adjacency,
    Observer as Observer,
    Promise as Promise,
    Unit as Unit,
    unit_called as unit_called,
)

if TYPE_CHECKING:  # accounting reads these types without torch
    from torch import Tensor

    from dpfl.core.layout import Layout

Plain = dict[str, Any]  # values that JSON or TOML can carry: what a file or a message holds
PlugState = dict[str, "Tensor"]
Shared = dict[str, "Tensor"]
Metrics = dict[str, float | int | str | list[float]]
PlugOutput = tuple["Tensor", PlugState, Metrics]
"""What most plugs return: a tensor, their next state, and metrics for the operator."""


@dataclass(frozen=True, kw_only=True)
class Claims:
    """A client's claims: ``epsilon``, ``delta``, ``examples``, ``accountant``; never charged.

    ``test_examples`` is claimed where a study measures an accounted metric on test records.
    """

    epsilon: float
    delta: float
    examples: int
    accountant: Literal["renyi"] | None = None  # its ledger's curve, if not the tightest
    test_examples: int = 0

    @property
    def usable(self) -> bool:
        """Whether the numbers make sense; claims that do not are left out of every plan."""
        real = self.epsilon > 0 and finite(self.epsilon)
        return real and 0 < self.delta < 1 and self.examples >= 1


@dataclass(frozen=True, kw_only=True)
class Budget:
    """``epsilon`` and ``delta`` that a client *enforces* against its own ledger; never claimed.

    ``unit`` and ``observer`` left out mean those of the strategy. ``accountant`` is the curve by
    which noise is planned, the tightest by default; a Renyi filter plans with its own.
    """

    epsilon: float
    delta: float
    unit: Unit | None = None
    observer: Observer | None = None
    accountant: Literal["renyi"] | None = None

    def __post_init__(self) -> None:
        positive("budget", epsilon=self.epsilon)
        remedy = "well below 1 / records"
        check(
            is_number(self.delta) and 0 < self.delta < 1,
            "budget",
            f"delta = {self.delta!r:.60}",
            f"give a number {remedy}",
        )
        own = [self.unit] if isinstance(self.unit, Unit) else []  # a person's word
        units = [*Unit, *own]
        for name, known in (("unit", units), ("observer", Observer), ("accountant", ("renyi",))):
            if getattr(self, name) is not None:
                one_of("budget", [*known], **{name: getattr(self, name)})


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """A client's own ``batch_size``, ``local_steps`` or ``local_epochs``, and ``lr``, if any."""

    batch_size: int | None = None
    local_steps: int | None = None
    local_epochs: int | None = None
    lr: float | None = None

    def __post_init__(self) -> None:
        check(
            self.local_steps is None or self.local_epochs is None,
            "client settings",
            "local_steps and local_epochs were both given",
            "give one of the two",
        )
        for name in ("batch_size", "local_steps", "local_epochs"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole_number("client settings", name, value))
        learning_rate("client settings", lr=1.0 if self.lr is None else self.lr)

    def over(self, default: ClientSettings) -> ClientSettings:
        """Fill what these settings leave open from ``default``; a length of work is one setting."""
        own = {name: value for name, value in vars(self).items() if value is not None}
        if own.keys() & {"local_steps", "local_epochs"}:
            default = replace(default, local_steps=None, local_epochs=None)
        return replace(default, **own)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What enrolment settles once, from claims and the model's size alone, and tells everyone."""

    rounds: int
    population: int
    expected_cohort: float
    participations: int
    smallest_epsilon: float
    largest_epsilon: float
    parameters: int  # how many numbers the model has, and so how many coordinates carry noise
    noise_multiplier: float | None = None
    records: int = 0  # of all clients, where they are pooled,
    batch: int = 0  # and how many of them a step takes
    public: tuple[str, ...] = ()
    releases: tuple[tuple[float, int], ...] = ()  # before round one: share of a budget, numbers
    release_noise: tuple[float, ...] = ()  # of each of them, where clients share the noise of a sum
    weights: tuple[tuple[str, float], ...] = ()  # constants by which clients weigh what they send
    measured: int = 0  # how many of the releases are measurements of an accounted metric
    denominator: float = 0.0  # what a sum is divided by, where clients scale what they add
    recipe: tuple[tuple[str, float], ...] = ()  # what a method has planned from all claims

    def with_noise(self, noise_multiplier: float) -> Terms:
        """Agree on one noise level for all."""
        return replace(self, noise_multiplier=noise_multiplier)


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """Who takes part in a round, in canonical order: sorted by id."""

    ids: tuple[str, ...]
    claims: Mapping[str, Claims]

    def __post_init__(self) -> None:
        check(
            list(self.ids) == sorted(set(self.ids)),
            "cohort",
            "ids are not sorted and distinct",
            "build it with Cohort.of",
        )

    @classmethod
    def of(cls, claims: Mapping[str, Claims]) -> Cohort:
        """Put clients into canonical order."""
        return cls(ids=tuple(sorted(claims)), claims=dict(claims))

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True)
class Who:
    """What a stage may know of the client it acts for."""

    id: str
    claims: Claims
    drawn: int
    public: bool = False
    weight: float = 1.0  # by which it weighs what it sends


@dataclass(frozen=True, kw_only=True)
class Rows:
    """``matrix[i]`` is client i's model after its work - ``origin``, wherever it started."""

    matrix: Tensor
    origin: Tensor
    cohort: Cohort
    layout: Layout

    def __post_init__(self) -> None:
        rows = len(self.matrix)
        clients = len(self.cohort)
        check(rows == clients, "rows", f"{rows} rows for {clients} clients", "give one a client")


@dataclass(frozen=True, kw_only=True)
class Total:
    """What a summing channel delivers: no rows exist, and nothing can look at them."""

    vector: Tensor
    cohort: Cohort
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class Aggregate:
    """A round's weighted sum of updates, and where it will be added: what a denoiser acts on."""

    vector: Tensor
    model: Tensor
    layout: Layout
    round: int


@dataclass(frozen=True, kw_only=True)
class Downlink:
    """What one client is sent: where to start, what the plugs share, how many were drawn."""

    round: int
    start: Tensor
    shared: Mapping[str, Shared]
    drawn: int


@dataclass(frozen=True, kw_only=True)
class State:
    """All a server must remember between rounds; all of it goes into the checkpoint."""

    round: int  # below 0 for releases before round one, the last of which is -1
    model: Tensor
    starts: Mapping[str, Tensor] = field(default_factory=dict)
    plugs: Mapping[str, PlugState] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)  # results of early releases
