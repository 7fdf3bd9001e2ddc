"""Who adds up: how many members, how many of them may collude with the server, how many may drop
out.

With n members of whom c collude, t signatures are needed for one list of survivors. Two different
lists that both have t signatures share at least 2 t - n signers; with 2 t > n + c one of them is
honest, and an honest member signs one list only. So one list at most is ever unmasked, and the sum
over it holds what at least ``least`` - c honest members sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from dpfl.core.checks import check, whole_number
from dpfl.core.errors import PrivacyRefusal

COMPLETE = 64
"""Up to so many members, everyone shares a mask with everyone else."""

MOST_FAILURE = 2.0**-64
"""The largest probability, for one round, that a sparse graph of honest members falls apart."""

MOST_ATTEMPTS = 1024
"""How many graphs a round may have: a server can give attempts up until it likes what it sees."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """``members`` of whom ``colluders`` may work together with the server; ``least`` must survive.

    >>> Group(members=10, colluders=2, least=7).threshold, Group(members=3, least=3).threshold
    (7, 3)
    """

    members: int
    least: int
    colluders: int = 1

    def __post_init__(self) -> None:
        where = "secure sum"
        whole_number(where, "colluders", self.colluders, least=0)
        sizes = f"{self.members} members of whom {self.colluders} may collude"
        enough = self.members >= 2 and self.honest >= 1
        remedy = "ask more members, or tolerate fewer dropouts and colluders"
        check(
            enough and self.least <= self.members,
            where,
            f"{sizes} and {self.least} must survive: nobody is left to be hidden among",
            remedy,
            PrivacyRefusal,
        )
        most = self.members - self.threshold
        check(
            self.threshold <= self.least,
            where,
            f"{sizes} tolerate {max(most, 0)} dropouts, not {self.members - self.least}",
            remedy,
            PrivacyRefusal,
        )

    @property
    def threshold(self) -> int:
        """How many signatures one list of survivors needs: the least t with 2 t > n + c."""
        return (self.members + self.colluders) // 2 + 1

    @property
    def honest(self) -> int:
        """How many honest members' inputs are in every sum, one's own included."""
        return self.least - self.colluders

    @property
    def neighbours(self) -> int:
        """How many others each member chooses to share masks and secrets with."""
        if self.members <= COMPLETE:
            return self.members - 1
        return _neighbours(self.members, self.colluders, self.least)

    @property
    def recovering(self) -> int:
        """How many of a member's neighbours can recover its secrets together.

        More than may collude; and so few that those who are left after all dropouts suffice.
        """
        return self.threshold if self.members <= COMPLETE else self.colluders + 1

    @property
    def failure(self) -> float:
        """Probability that honest survivors are not all connected, whoever the server drops, in any
        of a round's attempts.
        """
        if self.members <= COMPLETE:
            return 0.0
        return MOST_ATTEMPTS * parted(self.members, self.colluders, self.least, self.neighbours)


@cache
def _neighbours(members: int, colluders: int, least: int) -> int:
    """The fewest neighbours with which secrets can be recovered and the graph holds together."""
    for number in range(members - least + colluders + 1, members - 1):
        if parted(members, colluders, least, number) <= MOST_FAILURE / MOST_ATTEMPTS:
            return number
    return members - 1


def parted(members: int, colluders: int, least: int, neighbours: int) -> float:
    """Bound the probability that honest survivors fall into two parts without an edge between them.

    Each member chooses ``neighbours`` others at random; an edge is there if either end chose the
    other. The server sees the graph before it decides who dropped out. So this is a union bound
    over all disjoint sets of a and b honest members with a + b = ``least`` - ``colluders``::

        C(n - c, a) C(n - c - a, b) [C(n-1-b, k) / C(n-1, k)]^a [C(n-1-a, k) / C(n-1, k)]^b

    >>> parted(100, 1, 90, 99)
    0.0
    """
    honest = members - colluders
    survivors = least - colluders
    others = members - 1
    total = 0.0
    for a in range(1, survivors // 2 + 1):
        b = survivors - a
        missed = _log_choose(others - b, neighbours), _log_choose(others - a, neighbours)
        if -math.inf in missed:
            continue
        whole = _log_choose(others, neighbours)
        ways = _log_choose(honest, a) + _log_choose(honest - a, b)
        total += math.exp(min(0.0, ways + a * (missed[0] - whole) + b * (missed[1] - whole)))
    return min(1.0, total * (1 + 1e-9))


def _log_choose(n: int, k: int) -> float:
    """The logarithm of n over k; minus infinity where there is no way to choose."""
    if not 0 <= k <= n:
        return -math.inf
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
