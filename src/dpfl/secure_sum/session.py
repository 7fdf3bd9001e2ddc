"""A session: what one sum is about, and the one-time keys of everyone who takes part in it.

Its name is a hash of all of that. Masks, sealed shares and signatures are bound to the name, so
what members of one session send fits no other one.

Who adds up: how many members, how many of them may collude with the server, how many may drop
out.

With n members of whom c collude, t signatures are needed for one list of survivors. Two different
lists that both have t signatures share at least 2 t - n signers; with 2 t > n + c one of them is
honest, and an honest member signs one list only. So one list at most is ever unmasked, and the sum
over it holds what at least ``least`` - c honest members sent.

What a member remembers of a sum, and what it sends of its secrets.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from typing import Any

from dpfl.core.checks import check, whole_number
from dpfl.core.errors import PeerError, PrivacyRefusal
from dpfl.secure_sum import keys
from dpfl.secure_sum.integers import width_for


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What a member sends in the second phase: its neighbours, and a sealed share for each.

    ``sealed`` holds, by receiver, one share of the seed of the mask key and one of the seed of the
    member's own mask.
    """

    announcement: Announcement
    sealed: Mapping[str, bytes]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        sent = {name: _written(one) for name, one in self.sealed.items()}
        return {"announcement": asdict(self.announcement), "sealed": sent}

    @classmethod
    def read(cls, told: Any) -> Shares:
        """Read shares that somebody has sent."""
        sealed = {str(name): _bytes(one) for name, one in told["sealed"].items()}
        return cls(announcement=Announcement.read(told["announcement"]), sealed=sealed)


@dataclass(frozen=True, kw_only=True)
class MemberState:
    """What a member remembers of one sum; secret until the sum is closed.

    ``mask_seed`` stands for the key of masks between members, ``share_seed`` for that of sealed
    shares, ``own_seed`` for the member's own mask. ``held`` are other members' shares, opened;
    ``survivors`` the list that was signed, ``revealed`` the shares that were given to the server.
    """

    keys: MemberKeys
    terms: SumTerms
    mask_seed: bytes
    share_seed: bytes
    own_seed: bytes = b""
    roster: Roster | None = None
    shares: Shares | None = None
    held: Mapping[str, bytes] | None = None
    survivors: tuple[str, ...] | None = None
    revealed: Mapping[str, bytes] | None = None

    @property
    def joined(self) -> Roster:
        """The roster of the session that was joined."""
        if self.roster is None:
            raise PeerError(
                "secure sum",
                "no session was joined, and its result is asked for",
                "send the phases in order",
            )
        return self.roster

    def to_bytes(self) -> bytes:
        """Write the state, secrets included, for the caller to store."""
        told: dict[str, Any] = {"keys": asdict(self.keys), "terms": asdict(self.terms)}
        for name in ("mask_seed", "share_seed", "own_seed"):
            told[name] = _written(getattr(self, name))
        told["roster"] = None if self.roster is None else self.roster.to_dict()
        told["shares"] = None if self.shares is None else self.shares.to_dict()
        for name in ("held", "revealed"):
            parts = getattr(self, name)
            told[name] = parts and {member: _written(one) for member, one in parts.items()}
        told["survivors"] = None if self.survivors is None else list(self.survivors)
        return json.dumps(told).encode()

    @classmethod
    def from_bytes(cls, stored: bytes) -> MemberState:
        """Read a state that :meth:`to_bytes` has written."""
        told = json.loads(stored)
        found: dict[str, Any] = {
            name: told[name] and {member: _bytes(one) for member, one in told[name].items()}
            for name in ("held", "revealed")
        }
        found |= {name: _bytes(told[name]) for name in ("mask_seed", "share_seed", "own_seed")}
        return cls(
            keys=MemberKeys.read(told["keys"]),
            terms=SumTerms.read(told["terms"]),
            roster=told["roster"] and Roster.read(told["roster"]),
            shares=told["shares"] and Shares.read(told["shares"]),
            survivors=told["survivors"] and tuple(told["survivors"]),
            **found,
        )


def _written(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _bytes(text: Any) -> bytes:
    return base64.b64decode(text, validate=True)


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


WHERE = "secure sum"
_SAME = "use the same version and study on both sides"


@dataclass(frozen=True, kw_only=True)
class SumTerms:
    """What one sum is about: everything but who takes part.

    ``run``, ``round`` and ``attempt`` name it; an attempt is given up when somebody drops out
    before anybody has sent a masked input. ``model`` and ``plan`` are digests of the model that
    work starts from and of what was agreed on. Members send ``numbers`` integers of at most
    ``largest`` in absolute value, in multiples of the grid's ``step``. Of ``asked`` members at
    least ``least`` must survive, and ``colluders`` may work together with the server.
    """

    run: str
    round: int
    attempt: int
    model: str
    plan: str
    step: float
    numbers: int
    largest: int
    asked: int
    least: int
    colluders: int

    @property
    def width(self) -> int:
        """How many bits a number has."""
        return width_for(self.largest, self.asked)

    @classmethod
    def read(cls, told: Any) -> SumTerms:
        """Read terms, checking every type."""
        found: dict[str, Any] = {name: _text(told[name]) for name in ("run", "model", "plan")}
        wholes = ("round", "attempt", "numbers", "largest", "asked", "least", "colluders")
        found |= {name: _whole(told[name]) for name in wholes}
        check(
            min(found[name] for name in wholes[1:]) >= 0 and found["numbers"] > 0,
            WHERE,
            "a negative number in its terms",
            _SAME,
            PeerError,
        )
        check(
            found["attempt"] < MOST_ATTEMPTS,
            WHERE,
            f"attempt {found['attempt']} of a round, which has at most {MOST_ATTEMPTS}",
            "begin another round",
            PeerError,
        )
        return cls(**found, step=float(told["step"]))


@dataclass(frozen=True, kw_only=True)
class MemberKeys:
    """A member's keys: its ``identity``, and two that are used once, for ``mask`` and ``share``.

    All are public and hexadecimal. ``signature`` proves that the identity has made the other two
    for this round and attempt.
    """

    name: str
    identity: str
    mask: str
    share: str
    signature: str = ""

    def content(self, terms: SumTerms) -> bytes:
        """Return the bytes that the identity key signs: both keys, and the sum they are for."""
        about = (terms.run, terms.round, terms.attempt, terms.plan)
        return keys.canonical("dpfl one-time keys", *about, self.name, self.mask, self.share)

    @classmethod
    def read(cls, told: Any) -> MemberKeys:
        """Read keys; whether they are any good is checked when they are used."""
        names = ("name", "identity", "mask", "share", "signature")
        return cls(**{name: _text(told[name]) for name in names})


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The terms of a sum, and the keys of its members in the order of their names."""

    terms: SumTerms
    members: tuple[MemberKeys, ...]

    def __post_init__(self) -> None:
        problem = "names a member twice, or out of order"
        check(
            list(self.names) == sorted(set(self.names)),
            WHERE,
            f"its list {problem}",
            "name each once, in order",
            PeerError,
        )
        for kind in ("identity", "mask", "share"):
            first: dict[str, str] = {}
            for one in self.members:
                other = first.setdefault(getattr(one, kind), one.name)
                check(
                    other == one.name,
                    WHERE,
                    f"'{other}' and '{one.name}' have one {kind} key",
                    "make each site with dpfl site init, and never copy a site's folder",
                    PrivacyRefusal,
                )
        check(
            len(self.members) <= self.terms.asked,
            WHERE,
            f"{len(self.members)} members, where {self.terms.asked} were asked",
            "ask no others than were drawn",
            PrivacyRefusal,
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all members, in order."""
        return tuple(one.name for one in self.members)

    @cached_property
    def place(self) -> dict[str, int]:
        """The number of each member, from 0."""
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def group(self) -> Group:
        """How many of the members must survive, sign and recover; refused if they are too few."""
        terms = self.terms
        return Group(members=len(self.members), least=terms.least, colluders=terms.colluders)

    @cached_property
    def session(self) -> str:
        """The name of the session, hexadecimal: a hash of the terms and of all keys."""
        group = self.group
        members = [asdict(one) for one in self.members]
        sizes = [self.terms.width, group.threshold, group.neighbours, group.recovering]
        content = keys.canonical("dpfl session", asdict(self.terms), sizes, members)
        return hashlib.sha256(content).hexdigest()

    def check_signatures(self) -> None:
        """Refuse keys that their members' identities have not signed for this very sum."""
        for one in self.members:
            where = f"keys of '{one.name}'"
            keys.check_signature(one.identity, one.signature, one.content(self.terms), where)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"terms": asdict(self.terms), "members": [asdict(one) for one in self.members]}

    @classmethod
    def read(cls, told: Any) -> Roster:
        """Read a roster that somebody has sent."""
        members = tuple(MemberKeys.read(one) for one in told["members"])
        return cls(terms=SumTerms.read(told["terms"]), members=members)


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """Whom a member has chosen to share masks and secrets with, by their numbers in the roster.

    Nobody means everybody: up to :data:`~dpfl.secure_sum.session.COMPLETE` members no choice is
    made. ``commitment`` is a hash of the seed of the member's own mask.
    """

    name: str
    chosen: tuple[int, ...]
    commitment: str
    signature: str = ""

    def content(self, session: str) -> bytes:
        """Return the bytes that the identity key signs: the choice, and the session it is for."""
        about = (self.name, list(self.chosen), self.commitment)
        return keys.canonical("dpfl neighbours", session, *about)

    @classmethod
    def read(cls, told: Any) -> Announcement:
        """Read an announcement."""
        chosen = tuple(_whole(one) for one in told["chosen"])
        texts = {name: _text(told[name]) for name in ("name", "commitment", "signature")}
        return cls(chosen=chosen, **texts)

    def check(self, roster: Roster) -> None:
        """Refuse one that its member has not signed, or that chooses another number of others."""
        where = f"announcement of '{self.name}'"
        check(self.name in roster.place, where, "is not a member's", _SAME, PeerError)
        number = roster.place[self.name]
        member = roster.members[roster.place[self.name]]
        wanted = 0 if _complete(roster) else roster.group.neighbours
        good = len(set(self.chosen)) == len(self.chosen) == wanted and number not in self.chosen
        good = good and all(0 <= one < len(roster.members) for one in self.chosen)
        check(
            good,
            where,
            f"chooses {len(self.chosen)} neighbours, not {wanted} others",
            _SAME,
            PeerError,
        )
        keys.check_signature(member.identity, self.signature, self.content(roster.session), where)

    def holders(self, roster: Roster) -> tuple[int, ...]:
        """Who holds a share of this member's secrets: those it has chosen, or everyone."""
        return tuple(range(len(roster.members))) if _complete(roster) else self.chosen


def neighbours(roster: Roster, announced: Mapping[str, Announcement], name: str) -> list[int]:
    """With whom a member shares masks: those it has chosen, and those who have chosen it."""
    number = roster.place[name]
    found = {roster.place[one.name] for one in announced.values() if number in one.holders(roster)}
    return sorted((found | {*announced[name].holders(roster)}) - {number})


def survivors_content(session: str, survivors: tuple[str, ...]) -> bytes:
    """What members sign before they unmask: one list of survivors of one session."""
    return keys.canonical("dpfl survivors", session, list(survivors))


def _complete(roster: Roster) -> bool:
    return roster.group.neighbours == len(roster.members) - 1


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is not text")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r:.60} is not a whole number")
    return value
