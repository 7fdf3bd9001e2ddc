"""The slots of a strategy: about ten plugs in one fixed order.

::

    select -> [releases] -> local work -> client stages -> channel -> server halves, reversed
           -> clean rows -> weigh -> central noise -> denoise -> step

The same objects are folded twice: over data, by :mod:`dpfl.rounds`, and over an exposure, by
:mod:`dpfl.strategy.accounting`, to account for it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Self

from torch import nn

from dpfl.core.checks import check
from dpfl.core.grid import Grid
from dpfl.core.types import Adjacency, Observer, Promise, Terms, Unit
from dpfl.plugs.base import FigureSpec, NoiseMaker, Plug
from dpfl.plugs.central_noise import CentralNoise
from dpfl.plugs.channels import Channel, Digital
from dpfl.plugs.denoise import Denoiser, RowDenoiser
from dpfl.plugs.local_work import LocalWork
from dpfl.plugs.personal import Personal
from dpfl.plugs.releases import Release
from dpfl.plugs.selection import Everyone, Selection
from dpfl.plugs.stages import Stage
from dpfl.plugs.step import ServerSgd, Step
from dpfl.plugs.weights import UniformWeights, Weights
from dpfl.privacy.flags import Flag
from dpfl.strategy.recipe import Recipe

MANY = 10**6  # more clients than any group needs


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The plugs of a strategy, and its promise.

    ``unit``, ``observer`` and ``adjacency`` are the promise: whose presence is hidden, from whom,
    and what counts as a neighbour. ``Observer.NOBODY`` must be said aloud.

    ``local`` is what clients do with their records, ``selection`` who takes part, ``releases`` what
    is released before round one, ``personal`` what stays at clients, ``stages`` what a client does
    to its update before it sends it, ``channel`` how uploads reach the server, ``clean`` how rows
    are cleaned against each other, ``weights`` how much each counts, ``central_noise`` what a
    trusted server adds to the sum, ``denoise`` how the aggregate is smoothed, and ``step`` how the
    model moves.

    ``tolerated_dropouts``: where noise shares of the clients carry the guarantee against the world,
    how many of the drawn may be missing; with more missing, nothing is published, unless the
    secrecy of the draw is counted on: then the server adds the missing shares. ``assumptions``
    are what the promise rests on, in words. ``recipe`` plans what is left open until the model and
    all claims are known.
    """

    name: str
    unit: Unit
    observer: Observer
    adjacency: Adjacency
    local: LocalWork
    selection: Selection = field(default_factory=Everyone)
    releases: tuple[Release, ...] = ()
    personal: Personal | None = None
    stages: tuple[Stage, ...] = ()
    channel: Channel = field(default_factory=Digital)
    clean: RowDenoiser | None = None
    weights: Weights = field(default_factory=UniformWeights)
    central_noise: CentralNoise | None = None
    denoise: tuple[Denoiser, ...] = ()
    step: Step = field(default_factory=ServerSgd)
    tolerated_dropouts: int = 0
    assumptions: tuple[str, ...] = ()
    recipe: Recipe | None = None

    @property
    def promise(self) -> Promise:
        """What an epsilon of this strategy is about."""
        return self.promise_with(measured=False)

    def promise_with(self, measured: bool) -> Promise:
        """The same; ``measured``: beside an accounted metric, whose noise is shared as well."""
        shared = (measured or self.shares_noise) and self.secure
        return Promise(
            unit=self.unit,
            adjacency=self.adjacency,
            observer=self.observer,
            colluders=self.channel.colluders if shared else math.inf,
        )

    @property
    def shares_noise(self) -> bool:
        """Whether noise that protects a client is made of what others add, too.

        Over a secure sum that of releases is.
        """
        shares = self.local.shares_noise or any(stage.shares_noise for stage in self.stages)
        return shares or bool(self.releases and self.secure)

    @property
    def flags(self) -> tuple[Flag, ...]:
        """What must be said of every result, because of the method itself."""
        raised = {
            Flag.UNPROTECTED: self.observer is Observer.NOBODY,
            Flag.HYPOTHETICAL: self.local.hypothetical,
            Flag.CURATOR: self.local.pooled,
            Flag.ALONE: self.personal is not None and self.personal.whole,
        }
        return tuple(flag for flag, holds in raised.items() if holds)

    def protecting(self, unit: Unit, single: bool = True) -> Self:
        """Return the strategy for data whose smallest unit is this one: a record, or a person.

        ``single`` says that every unit is a single record. A strategy that protects whole clients
        stays as it is.
        """
        released = bool(self.releases) or self.recipe is not None
        check(
            single or not released,
            self.name,
            f"its releases before round one take single records, not all of a {unit}'s",
            "use records_per_person = 1",
        )
        if not self.unit.of_data or unit is self.unit:
            return self
        alone = f"a {unit} with data at several clients has a privacy loss at each of them"
        known = map(unit.reworded, self.assumptions)
        return replace(self, unit=unit, assumptions=(*known, f"{alone}, and these add up"))

    def for_model(self, model: nn.Module) -> Self:
        """Return the strategy for a model; one that its recipe cannot train is refused."""
        return self if self.recipe is None else self.recipe.for_model(self, model)

    def slots(self) -> Iterator[tuple[str, Plug]]:
        """Yield every plug, in the order in which they act, with the name its state and shared
        tensors go by.
        """
        for name, (slot, _) in _SLOTS.items():
            filled = getattr(self, name)
            if isinstance(filled, tuple):
                yield from ((f"{slot}{number}", plug) for number, plug in enumerate(filled))
            elif filled is not None:
                yield slot, filled

    def resolve(self, terms: Terms) -> Self:
        """Return the strategy with nothing left open under these terms: what a site works with once
        it knows them.
        """

        changed: dict[str, Any] = {}
        for name in _SLOTS:
            filled = getattr(self, name)
            plugs = filled if isinstance(filled, tuple) else () if filled is None else (filled,)
            new = tuple(plug.resolve(terms) for plug in plugs)
            if any(own is not before for own, before in zip(new, plugs, strict=True)):
                changed[name] = new if isinstance(filled, tuple) else new[0]
        return replace(self, **changed) if changed else self

    @property
    def noise_multiplier(self) -> float | None:
        """The noise of a client-level method, relative to one client's contribution; None where
        it is left open.
        """
        return next((piece.noise_multiplier for piece in self.noise_makers()), None)

    def noise_makers(self) -> list[NoiseMaker]:
        """The pieces whose noise protects whole clients."""
        pieces = (*self.stages, self.channel, self.central_noise)
        return [piece for piece in pieces if isinstance(piece, NoiseMaker)]

    @property
    def sums_only(self) -> bool:
        """Whether what is published depends on the rows only through a sum with constant
        weights.
        """
        return self.weights.constant and self.clean is None

    def upload_grid(self, drawn: int) -> Grid | None:
        """The grid on which uploads lie, if the last thing a client does to its update is to add
        noise, or to round it.
        """
        return self.stages[-1].grid(drawn) if self.stages else self.local.grid(drawn)

    @property
    def cut_off(self) -> int | None:
        """Where the integers of an upload are cut off, before noise; None where a norm bounds
        them.
        """
        return self.stages[-1].cut_off if self.stages else self.local.cut_off

    @property
    def secure(self) -> bool:
        """Whether uploads travel over a secure sum: nobody sees a single one."""
        return self.channel.group(MANY) is not None

    def figures(self) -> list[tuple[str, FigureSpec]]:
        """The pictures that the pieces declare, each with the slot whose metrics it shows."""
        return [(slot, figure) for slot, plug in self.slots() for figure in plug.figures()]

    def describe(self) -> list[tuple[str, str]]:
        """List the pieces in the order they act, in words."""
        words = dict(_SLOTS.values())
        return [(words[slot.rstrip("0123456789")], _words(plug)) for slot, plug in self.slots()]


_SLOTS = {
    "selection": ("selection", "select"),
    "releases": ("release", "release"),
    "local": ("local", "local work"),
    "personal": ("personal", "stays at the client"),
    "stages": ("stage", "client stage"),
    "channel": ("channel", "channel"),
    "clean": ("clean", "clean rows"),
    "weights": ("weights", "weigh"),
    "central_noise": ("noise", "central noise"),
    "denoise": ("denoise", "denoise"),
    "step": ("step", "step"),
}
"""Each slot's field, in the order in which they act: the name its state goes by, and its words."""


def _words(plug: Plug) -> str:
    settings = [f"{f.name}={_setting(getattr(plug, f.name))}" for f in fields(plug)]
    return f"{type(plug).__name__}({', '.join(settings)})"


def _setting(value: object) -> str:
    if not is_dataclass(value):
        return str(value)
    kept = {f.name: getattr(value, f.name) for f in fields(value)}
    return "{" + ", ".join(f"{name}={v}" for name, v in kept.items() if v is not None) + "}"
