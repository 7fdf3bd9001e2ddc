"""What a client does to its update before it sends it, and how the server undoes it."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dpfl.core.checks import check, clip_bound, not_negative
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.grid import Grid
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Cohort, Metrics, PlugState, Rows, Shared, Terms, Total, Who
from dpfl.numerics import clipping
from dpfl.plugs.base import NoiseMaker, Plug, planned
from dpfl.privacy.exposure import Exposure


class Stage(Plug):
    """The client half and the server half of one step: clip, noise, projection, subspace.

    Laws: client then server keeps the length that the layout says; with ``linear`` the server half
    of a sum is the sum of the server halves, and acts on a sum that carries all of its noise;
    ``exposure`` never promises a bound that ``client`` does not enforce, for any finite or
    non-finite input; noise comes from ``rng`` and from nowhere else.
    """

    linear: ClassVar[bool]
    needs_sum: ClassVar[bool] = False  # whether it learns from a noisy sum with constant weights
    cut_off: ClassVar[int | None] = None  # where it cuts off what it sends, in steps of its grid

    @property
    def shares_noise(self) -> bool:
        """Whether the noise it adds is a share of a whole that is complete only in the sum over the
        cohort.
        """
        return False

    def grid(self, drawn: int) -> Grid | None:
        """The grid on which what it sends lies, where it adds noise: uploads then travel as whole
        multiples of its step.
        """
        return None

    def client_rows(self, rows: Tensor, shared: Shared) -> Tensor:
        """Act as ``client`` does for many clients at once, a row each; only where no secret and no
        name is needed.
        """
        raise NotImplementedError

    @property
    def acts_on_rows(self) -> bool:
        """Whether ``client_rows`` is there, and not older than the ``client`` it stands for."""
        own = next(c for c in type(self).__mro__ if {"client_rows", "client"} & vars(c).keys())
        return own is not Stage and "client_rows" in vars(own)

    def client(self, x: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        """Act before sending; on one row alone, where ``client_rows`` is all there is."""
        return self.client_rows(x[None], shared)[0]

    def server(self, y: Tensor, shared: Shared, who: Who | None) -> Tensor:
        """Undo on arrival; ``who`` is None where the sum is handled."""
        return y

    def learn(self, state: PlugState, rows: Rows | Total) -> PlugState:
        """Remember something of this round for the next."""
        return state

    def learn_sum(
        self, state: PlugState, total: Tensor, weight: float
    ) -> tuple[PlugState, Metrics]:
        """Remember something of a round's sum before this server half acts on it, and with all
        of its noise; ``weight`` is the constant weight of one message in it.
        """
        return state, {}

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """What the client half does to the exposure."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Clip(Stage):
    """Scale the whole update, all tensors jointly, into a ball of radius ``clip``.

    An update that is not finite becomes zero.
    """

    clip: float
    linear: ClassVar[bool] = True  # the server half does nothing

    def __post_init__(self) -> None:
        clip_bound("clip", clip=self.clip)

    def client_rows(self, rows: Tensor, shared: Shared) -> Tensor:
        """Clip every row on its own."""
        return clipping.clip(rows, self.clip)

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """The bound shrinks, unless there is noise already."""
        return exposure.clipped(self.clip)


@dataclass(frozen=True, kw_only=True)
class GaussianNoise(Stage, NoiseMaker):
    """Add noise of std ``noise_multiplier`` x ``clip`` to every coordinate, the client's own
    protection.

    The update is rounded onto the grid of that noise, and what is sent is a multiple of the grid's
    step. All clients of a round have the same step, so that their shares of noise add up on one
    grid.

    ``distributed``: only a share of it, so that the shares of all drawn clients, less the
    ``tolerated_dropouts``, add up to that std.
    """

    clip: float
    distributed: bool = False
    tolerated_dropouts: int = 0
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        clip_bound("gaussian noise", clip=self.clip)
        not_negative("gaussian noise", noise_multiplier=self.noise_multiplier or 0.0)
        not_negative("gaussian noise", tolerated_dropouts=self.tolerated_dropouts)

    @property
    def shares_noise(self) -> bool:
        """Whether a client adds a share, which is not enough for anyone alone."""
        return self.distributed

    def std(self, drawn: int) -> float:
        """Standard deviation of what one of ``drawn`` clients adds."""
        shares = max(1, drawn - self.tolerated_dropouts) if self.distributed else 1
        return self.planned_noise * self.clip / math.sqrt(shares)

    def noise_in_sum(self, ids: tuple[str, ...], terms: Terms, seed: PublicSeed) -> float | None:
        """Return the noise of all shares over the clip."""
        cohort = max(1, round(terms.expected_cohort))
        return self.std(cohort) * math.sqrt(cohort) / self.clip

    def grid(self, drawn: int) -> Grid | None:
        """The grid on which one of ``drawn`` clients adds its noise; None where it adds none."""
        std = self.std(drawn)
        if std == 0:
            return None
        grid = Grid.of(std)
        check(
            grid.holds(self.clip),
            "gaussian noise",
            f"noise of {std:g} is too small beside a clip of {self.clip:g} for the grid",
            "use more noise, a smaller clip or fewer clients",
            PrivacyRefusal,
        )
        return grid

    def client(self, x: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        """Add noise; the result is made of multiples of the grid's step, in double precision."""
        grid = self.grid(who.drawn)
        return x if grid is None else grid.noised(x, rng)

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """The bound grows by the grid's rounding."""
        return exposure.noised(self.std(drawn))


@dataclass(frozen=True, kw_only=True)
class SharedSubspace(Stage):
    """Send coordinates in a subspace that everyone was sent, one basis a tensor; public clients,
    and rounds without a subspace, send all of the update.

    Bases are state tensors named ``basis/00000`` and so on, in the order of the model.
    """

    k: int = 1
    linear: ClassVar[bool] = False

    def open(self, state: PlugState, round_: int, cohort: Cohort, seed: PublicSeed) -> Shared:
        """Send the subspace."""
        return {name: basis for name, basis in state.items() if name.startswith("basis/")}

    def client(self, x: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        """Return the update's coordinates in the subspace."""
        if who.public or not shared:
            return x
        bases = [shared[name] for name in sorted(shared)]
        parts = torch.split(x, [len(basis) for basis in bases])
        return torch.cat([part @ basis for part, basis in zip(parts, bases, strict=True)])

    def server(self, y: Tensor, shared: Shared, who: Who | None) -> Tensor:
        """Rebuild the update from its coordinates."""
        if who is None or who.public or not shared:
            return y
        bases = [shared[name] for name in sorted(shared)]
        parts = torch.split(y, [basis.shape[1] for basis in bases])
        return torch.cat([basis @ part for part, basis in zip(parts, bases, strict=True)])

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """What arrives here must be noisy already: coordinates are a function of it."""
        return exposure.processed()

    def upload_size(self, numbers: float, terms: Terms, layout: Layout) -> float:
        """Private clients send k numbers a tensor once there is a subspace."""
        public = len(terms.public) / terms.population
        coordinates = sum(min(self.k, block.size) for block in layout)
        return public * numbers + (1 - public) * coordinates

    def download_size(self, layout: Layout) -> int:
        """Return the numbers of the subspace."""
        return sum(min(self.k, block.size) * block.size for block in layout)


@dataclass(frozen=True, kw_only=True)
class Withheld(Stage):
    """Nothing of the update is sent: the message is empty, and stands for no change.

    ``parameters`` is how many numbers an update has; left out, the terms say it.
    """

    parameters: int | None = None
    linear: ClassVar[bool] = True

    def client_rows(self, rows: Tensor, shared: Shared) -> Tensor:
        """Cut every row to nothing: a client's message holds no number of its update."""
        return rows[:, :0]

    def server(self, y: Tensor, shared: Shared, who: Who | None) -> Tensor:
        """Return zeros in place of an empty message: the client's update counts as no change."""
        return y.new_zeros(int(planned(self.parameters, "withheld updates")))

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """Charge as if the update were sent: the client uses what came of the work."""
        return exposure

    def upload_size(self, numbers: float, terms: Terms, layout: Layout) -> float:
        """No number is sent."""
        return 0.0
