"""Who takes part in a round."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dpfl.core.checks import check, share, whole_number
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.plugs.base import Plug
from dpfl.privacy.events import Sampling


class Selection(Plug):
    """Who takes part.

    Laws: ``order`` depends on the seed only, which the server keeps to itself. Inclusion has the
    law that ``sampling`` names: ``poisson`` draws each on its own with ``rate``, ``uniform`` a
    fixed number without replacement, ``none`` everyone. ``rate`` is the fraction of the
    population an average round has.
    """

    sampling: ClassVar[Sampling]

    def rate(self, population: int) -> float:
        """Probability that a given client takes part in a given round."""
        size = self.cohort_size(population)
        if size is None:
            raise NotImplementedError
        return size / population

    def charged_rate(self, population: int) -> float:
        """The largest probability with which a client is ever drawn: what amplification is charged
        at.
        """
        return self.rate(population)

    def least_willing(self, population: int) -> int:
        """With fewer willing clients than this the plan ends: the charged rate would no longer
        hold.
        """
        return 1

    def cohort_size(self, population: int) -> int | None:
        """How many are drawn, where that number is fixed; None where it is random."""
        raise NotImplementedError

    def order(self, candidates: Sequence[str], seed: PublicSeed) -> list[str]:
        """Return the candidates that are drawn, in drawing order.

        A fixed-size draw lists everyone; the first ones count.
        """
        raise NotImplementedError


class Everyone(Selection):
    """All candidates, every round."""

    sampling: ClassVar[Sampling] = "none"

    def cohort_size(self, population: int) -> int | None:
        """Return the population."""
        return population

    def order(self, candidates: Sequence[str], seed: PublicSeed) -> list[str]:
        """Return all candidates."""
        return list(candidates)


@dataclass(frozen=True, kw_only=True)
class FixedCohort(Selection):
    """A fixed number, uniformly without replacement, out of those who are willing.

    ``least``: the smallest number of willing clients with which a plan goes on. Amplification is
    charged at ``size`` / ``least`` in every round, so clients may leave without changing what the
    others are charged. Left out, it is the whole population: the smallest charge, and the plan ends
    when the first client leaves.
    """

    size: int
    least: int | None = None
    sampling: ClassVar[Sampling] = "uniform"

    def __post_init__(self) -> None:
        whole_number("cohort", "size", self.size)
        if self.least is not None:
            whole_number("cohort", "least", self.least)
        check(
            self.least is None or self.least >= self.size,
            "cohort",
            f"{self.size} clients cannot be drawn when only {self.least} are willing",
            "make least at least the cohort's size",
        )

    def _within(self, population: int) -> None:
        for count, what in ((self.size, "clients"), (self.least or 0, "willing clients")):
            check(
                count <= population,
                "cohort",
                f"{count} {what} are more than the {population} there are",
                f"give at most {population}",
            )

    def charged_rate(self, population: int) -> float:
        """Return size / (least number of willing clients)."""
        return self.size / self.least_willing(population)

    def least_willing(self, population: int) -> int:
        """Return the least number of willing clients that the plan allows."""
        self._within(population)
        return self.least or population

    def cohort_size(self, population: int) -> int | None:
        """Return the fixed size."""
        self._within(population)
        return self.size

    def order(self, candidates: Sequence[str], seed: PublicSeed) -> list[str]:
        """Return all candidates in random order."""
        drawn = SecretRng.simulated(seed).permutation(len(candidates)).tolist()
        return [candidates[i] for i in drawn]


@dataclass(frozen=True, kw_only=True)
class PoissonCohort(Selection):
    """Each candidate on its own with probability ``sampling_rate``; a cohort may be empty."""

    sampling_rate: float
    sampling: ClassVar[Sampling] = "poisson"

    def __post_init__(self) -> None:
        share("cohort", sampling_rate=self.sampling_rate)

    def cohort_size(self, population: int) -> int | None:
        """Return None: the size is random."""
        return None

    def rate(self, population: int) -> float:
        """Return the sampling rate."""
        return self.sampling_rate

    def order(self, candidates: Sequence[str], seed: PublicSeed) -> list[str]:
        """Return the candidates whose coin came up."""
        (coins,) = SecretRng.simulated(seed).chosen(1, len(candidates), self.sampling_rate)
        return [candidates[i] for i in coins.nonzero().flatten().tolist()]
