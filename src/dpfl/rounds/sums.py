"""What a secure sum of a round is planned for, and what it leaves."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, PeerError
from dpfl.core.grid import LARGEST_RELEASE, Grid
from dpfl.core.grid_noise import LARGEST
from dpfl.core.types import Terms
from dpfl.secure_sum.session import Group
from dpfl.strategy import Strategy

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SumPlan:
    """How a round's uploads are added up.

    ``step`` is what one unit of an integer is worth, ``numbers`` how many integers an upload has,
    ``largest`` the largest absolute value that one of them can have, and ``group`` who adds up.
    """

    step: float
    numbers: int
    largest: int
    group: Group

    def check_upload(self, integers: Integers, client: str) -> None:
        """Refuse integers that the plan does not allow: a sum of them could wrap."""
        check(
            len(integers) == self.numbers and _most(integers) <= self.largest,
            f"upload of '{client}'",
            f"{len(integers)} integers of up to {_most(integers)} in absolute value",
            f"send {self.numbers} of up to {self.largest}",
            PeerError,
        )


@dataclass(frozen=True, kw_only=True)
class SumOfUploads:
    """The sum of the integers that the clients ``ids`` have sent."""

    integers: Integers
    ids: tuple[str, ...]

    def check_plan(self, plan: SumPlan, drawn: tuple[str, ...]) -> None:
        """Refuse a sum that uploads of this plan, by drawn clients, cannot have."""
        members = len(self.ids)
        least = plan.group.least
        check(
            set(self.ids) <= set(drawn) and members == len(set(self.ids)) >= least,
            "secure sum",
            f"of {members} clients, where at least {least} of {len(drawn)} drawn ones belong",
            "add up uploads of the drawn clients",
            PeerError,
        )
        good = self.integers.shape == (plan.numbers,)
        good = good and _most(self.integers) <= members * plan.largest
        check(
            good,
            "secure sum",
            f"{self.integers.size} integers of up to {_most(self.integers)}",
            f"add up {plan.numbers} of up to {plan.largest} each",
            PeerError,
        )


def upload_grid(strategy: Strategy, terms: Terms, round_: int, drawn: int) -> Grid | None:
    """The grid on which uploads of a round lie, of a release before round one or of a measurement;
    None where they are no multiples of one step.
    """
    if round_ >= 0:
        return strategy.upload_grid(drawn)
    if not strategy.secure:
        return None
    measured = round_ < -len(strategy.releases)  # a test record's statistic is in the unit ball
    bound = 1.0 if measured else strategy.releases[round_].bound
    noise = terms.release_noise[round_] * bound
    return Grid.of(strategy.channel.noise_share(noise, drawn))


def sum_plan(strategy: Strategy, terms: Terms, round_: int, drawn: int) -> SumPlan:
    """Plan the sum of one round's uploads; refused where it cannot hide, or add up, anything."""
    group = strategy.channel.group(drawn)
    grid = upload_grid(strategy, terms, round_, drawn)
    if grid is None:
        raise ConfigurationError(
            strategy.name,
            "its uploads are not whole multiples of one step, which a secure sum adds up",
            "use with_secure_sum",
        )
    if group is None:
        raise ConfigurationError(
            strategy.name,
            f"{type(strategy.channel).__name__} is no secure sum",
            "use with_secure_sum",
        )
    if round_ < 0:
        numbers = terms.releases[round_][1]
        largest = LARGEST_RELEASE + LARGEST
        return SumPlan(step=grid.step, numbers=numbers, largest=largest, group=group)
    sent = strategy.sent(drawn, terms)
    cut_off = strategy.cut_off
    bound = math.ceil(sent.bound / grid.step) + 1 if cut_off is None else cut_off
    return SumPlan(step=grid.step, numbers=sent.numbers, largest=bound + LARGEST, group=group)


def _most(integers: Integers) -> int:
    return int(np.abs(integers).max(initial=0))
