"""Every plug of a strategy as a Protocol, its laws in the docstring. ``dpfl.testing`` checks the laws.

A plug is a frozen dataclass: fields are public settings, secrets are arguments. It keeps no state of its own; what it
must remember between rounds is a dict of tensors that the round hands in and takes back, and that is checkpointed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self, runtime_checkable

from torch import Tensor, nn

from dpfl.core.grid import Grid
from dpfl.core.inputs import NUMBERS, Inputs
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import (
    Aggregate,
    Budget,
    Claims,
    Cohort,
    Metrics,
    Phase,
    PlugState,
    Practice,
    Rows,
    Shared,
    Terms,
    Total,
    Unit,
    Who,
)
from dpfl.privacy.events import Sampling
from dpfl.privacy.exposure import Exposure


class Plug:
    """What every slot may do; the defaults suit a piece that remembers, shares and agrees on nothing.

    Laws: ``agree`` depends on claims and terms only. ``start`` and ``open`` are pure: equal arguments give equal
    tensors. What ``open`` returns travels to every client and holds nothing secret.
    """

    def agree(self, terms: Terms, claims: Mapping[str, Claims]) -> Terms:
        """Settle once, at enrolment, what this piece needs everyone to know."""
        return terms

    def settled(self, terms: Terms) -> Self:
        """Fill what was left open (a noise level, a cohort's size) from the terms; itself where nothing was."""
        return self

    def start(self, terms: Terms, layout: Layout) -> PlugState:
        """Return the state before the first round."""
        return {}

    def open(self, state: PlugState, round_: int, cohort: Cohort, seed: PublicSeed) -> Shared:
        """Return what this piece shares with every client of the round."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Participant:
    """What local work may know of the client it is for: its own side of the contract."""

    examples: int
    practice: Practice
    budget: Budget | None


@runtime_checkable
class LocalWork(Protocol):
    """What a client does with its data, as a list of phases.

    Laws: ``phases`` is pure. ``exposure`` describes exactly what those phases release, noise and sampling included: the
    sampler that the engine will use writes the event. ``private`` is True if that exposure is finite. ``hypothetical``
    work plans beyond what clients grant: only a simulation may run it, with budgets raised and a stamp that says so.
    """

    @property
    def unit(self) -> Unit:
        """Whose presence the exposure is about."""
        ...

    @property
    def private(self) -> bool:
        """Whether the work itself carries noise."""
        ...

    @property
    def hypothetical(self) -> bool:
        """Whether the plan exceeds what clients grant."""
        ...

    def agree(self, terms: Terms, claims: Mapping[str, Claims]) -> Terms:
        """Settle what all clients share (one noise level, for instance)."""
        ...

    def phases(self, terms: Terms, participant: Participant) -> tuple[Phase, ...]:
        """Plan one round's work, calibrated to the participant's own budget."""
        ...

    def exposure(self, phases: Sequence[Phase], examples: int, parameters: int) -> Exposure:
        """What the result of these phases, on a model of so many parameters, shows of one unit."""
        ...


class Selection(Plug):
    """Who takes part.

    Laws: ``order`` depends on the seed only, which the server keeps to itself. Inclusion has the law that ``sampling``
    names: ``poisson`` draws each on its own with ``rate``, ``uniform`` a fixed number without replacement, ``none``
    everyone. ``rate`` is the fraction of the population an average round has.
    """

    sampling: ClassVar[Sampling]

    def rate(self, population: int) -> float:
        """Probability that a given client takes part in a given round."""
        raise NotImplementedError

    def charged_rate(self, population: int) -> float:
        """The largest probability with which a client is ever drawn: what amplification is charged at."""
        return self.rate(population)

    def least_willing(self, population: int) -> int:
        """With fewer willing clients than this the plan ends: the charged rate would no longer hold."""
        return 1

    def cohort_size(self, population: int) -> int | None:
        """How many are drawn, where that number is fixed."""
        raise NotImplementedError

    def order(self, candidates: Sequence[str], seed: PublicSeed) -> list[str]:
        """Return the candidates that are drawn, in drawing order; a fixed-size draw lists everyone, the first ones count."""
        raise NotImplementedError


class Stage(Plug):
    """The client half and the server half of one step: clip, noise, projection, subspace.

    Laws: client then server keeps the length that the layout says; with ``linear`` the server half of a sum is the sum of
    the server halves; ``exposure`` never promises a bound that ``client`` does not enforce, for any finite or non-finite
    input; noise comes from ``rng`` and from nowhere else.
    """

    linear: ClassVar[bool]

    @property
    def shares_noise(self) -> bool:
        """Whether the noise it adds is a share of a whole that is complete only in the sum over the cohort."""
        return False

    def grid(self, drawn: int) -> Grid | None:
        """On which grid what it sends lies, where it adds noise: uploads then travel as whole multiples of its step."""
        return None

    def client_rows(self, rows: Tensor, shared: Shared) -> Tensor:
        """Act as ``client`` does for many clients at once, a row each; only where no secret and no name is needed."""
        raise NotImplementedError

    @property
    def acts_on_rows(self) -> bool:
        """Whether ``client_rows`` is there, and not older than the ``client`` it stands for."""
        order = type(self).__mro__
        rows, one = (next(c for c in order if name in c.__dict__) for name in ("client_rows", "client"))
        return rows is not Stage and order.index(rows) <= order.index(one)

    def client(self, x: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        """Act before sending."""
        raise NotImplementedError

    def server(self, y: Tensor, shared: Shared, who: Who | None) -> Tensor:
        """Undo on arrival; ``who`` is None where the sum is handled."""
        return y

    def learn(self, state: PlugState, rows: Rows | Total) -> PlugState:
        """Remember something of this round for the next."""
        return state

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """What the client half does to the exposure."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Summed:
    """What a summing channel hands over: the sum, and whose messages are in it."""

    vector: Tensor
    ids: tuple[str, ...]


class Channel(Plug):
    """How messages reach the server.

    Laws: with ``sees_rows`` every row arrives as it was sent; otherwise only the sum does, and it equals the sum of what
    was sent. ``simulated`` channels cannot exist outside a simulation and refuse deployment.
    """

    sees_rows: ClassVar[bool]
    simulated: ClassVar[bool]

    @property
    def shares_noise(self) -> bool:
        """Whether the noise that protects a message is made of what all clients add on the way."""
        return False

    def reachable(self, client: str, round_: int, seed: PublicSeed) -> bool:
        """Whether a client can be heard in this round at all; it is not drawn otherwise."""
        return True

    def send(self, message: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        """The client's half: what leaves its antenna."""
        return message

    def deliver(
        self, messages: Mapping[str, Tensor], shared: Shared, seed: PublicSeed, rng: SecretRng
    ) -> dict[str, Tensor] | Summed:
        """Return each arrived message by client, or their sum. ``seed`` draws what may be known, ``rng`` the noise."""
        raise NotImplementedError

    def told(self, shared: Shared) -> Metrics:
        """What a person would ask about this round's channel."""
        return {}

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """What the server sees of one message."""
        raise NotImplementedError


class RowDenoiser(Plug):
    """Cleans the rows against each other (PFA, FedCEO).

    Laws: the matrix keeps its shape; unless ``ordered``, permuting clients permutes rows. After a round of which
    ``personal_starts`` is True each client of the cohort starts the next one from its own cleaned row.
    """

    ordered: ClassVar[bool]

    def personal_starts(self, round_: int) -> bool:
        """Whether clients start the next round from their own rows."""
        return False

    def __call__(self, state: PlugState, rows: Rows, round_: int) -> tuple[Tensor, PlugState, Metrics]:
        """Return the cleaned matrix, the next state, and what a person would ask about."""
        raise NotImplementedError


TRUE_NOISE = "true_noise/"
"""Under this prefix a simulator, and nobody else, tells weights that ask for it each client's true noise."""


class Weights(Plug):
    """One weight per client.

    Laws: finite, non-negative; unless ``constant``, they sum to one; permuting clients permutes weights. ``constant``
    weights depend on nothing but the terms, so that a bill may rest on them. ``needs_rows`` refuses a summing channel.
    """

    needs_rows: ClassVar[bool]
    constant: ClassVar[bool]

    def __call__(self, state: PlugState, received: Rows | Total, round_: int) -> tuple[Tensor, PlugState, Metrics]:
        """Return the weights, the next state, and what a person would ask about."""
        raise NotImplementedError

    def value(self, terms: Terms) -> float:
        """Return the constant weight; only where ``constant``."""
        raise NotImplementedError

    @property
    def asks_for_the_truth(self) -> bool:
        """Whether the weights know the clients' true noise: in a simulation only, for comparison."""
        return False


class Denoiser(Plug):
    """Smooths the aggregate (Laplacian smoothing, the low-rank mean).

    Laws: pure, keeps the length, finite in gives finite out. A ``linear`` one acts on noise as it does on the rest, so
    that what it leaves of the noise can be told.
    """

    linear: ClassVar[bool] = False

    def __call__(self, aggregate: Aggregate) -> tuple[Tensor, Metrics]:
        """Return the smoothed vector, and what a person would ask about."""
        raise NotImplementedError


@runtime_checkable
class NoiseMaker(Protocol):
    """A piece whose Gaussian noise protects whole clients; a multiplier of None is settled at enrolment."""

    @property
    def noise_multiplier(self) -> float | None:
        """Std over the bound of one client's contribution."""
        ...

    @property
    def makes_noise(self) -> bool:
        """Whether this component adds noise of its own."""
        ...


@runtime_checkable
class Personal(Protocol):
    """A part of the model that stays at the client, from round to round (PPSGD, CENTAUR).

    Laws: what counts as the client's shared model depends on the private part only through local work, and the private
    part is never in a message. ``private`` is None before a client's first round.
    """

    def merge(self, shared: Tensor, private: Tensor | None, layout: Layout) -> Tensor:
        """The model the client works with."""
        ...

    def split(self, shared: Tensor, before: Tensor, after: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Part what came of the work into the shared model and the private part."""
        ...


@dataclass(frozen=True, kw_only=True)
class Job:
    """One client's local work: where it starts, its phases, its data and how to read them, its secret generator."""

    client: str
    start: Tensor
    phases: tuple[Phase, ...]
    features: Tensor
    labels: Tensor
    rng: SecretRng
    inputs: Inputs = NUMBERS


@runtime_checkable
class Engine(Protocol):
    """Runs phases.

    Laws: the result depends on the jobs only, not on how many workers there are; every engine agrees with ``one_by_one``
    to 5e-5 relative error of the update with noise off, and in distribution with noise on.
    """

    def blocks(self, plans: Sequence[tuple[Phase, ...]]) -> list[list[int]]:
        """Group clients into blocks that one worker takes whole; a pure function of the plans in canonical order."""
        ...

    def run(self, model: nn.Module, layout: Layout, jobs: Sequence[Job]) -> list[Tensor]:
        """Return each client's model after its work, in the order of the jobs."""
        ...
