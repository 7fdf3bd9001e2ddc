"""Whom a member counts on: the identities it knows, and how many of them may collude."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dpfl.core.checks import check
from dpfl.core.errors import PrivacyRefusal
from dpfl.secure_sum.session import Roster

LEAST_HONEST = 2
"""A site hides its upload among others: itself and one more at least are honest in every sum."""

_PIN = "compare the key with its owner, then put it into this site's file"


@dataclass(frozen=True, kw_only=True)
class Trust:
    """A member's policy.

    ``pinned`` are the identity keys of others that its operator has checked, by name. Up to
    ``colluders`` of them may work together with the server, but for those in ``count_on``, who are
    trusted. Whoever is not pinned may be an invention of the server, and counts as a colluder.
    ``least_honest`` members must be honest in every sum, this one included.
    """

    name: str
    pinned: Mapping[str, str] = field(default_factory=dict)
    colluders: int = 1
    count_on: frozenset[str] = frozenset()
    least_honest: int = LEAST_HONEST

    def colluders_among(self, members: Mapping[str, str]) -> int:
        """How many of these members, by name and identity key, may work with the server.

        A pinned member with another key is refused: somebody has taken its name.
        """
        others = {name: key for name, key in members.items() if name != self.name}
        for name, key in others.items():
            known = self.pinned.get(name, key)
            check(
                known == key,
                f"site '{self.name}'",
                f"'{name}' has the identity key {key[:16]}..., and {known[:16]}... is pinned",
                _PIN,
                PrivacyRefusal,
            )
        unknown = [name for name in others if name not in self.pinned]
        doubted = [name for name in others if name in self.pinned and name not in self.count_on]
        return len(unknown) + min(self.colluders, len(doubted))

    def check(self, roster: Roster) -> None:
        """Refuse a sum in which more members may collude than its noise was planned for."""
        where = f"site '{self.name}'"
        terms = roster.terms
        members = {one.name: one.identity for one in roster.members}
        found = self.colluders_among(members)
        unknown = sorted(members.keys() - {self.name} - self.pinned.keys())
        stated = f" ({', '.join(unknown)} not pinned)" if unknown else ""
        check(
            found <= terms.colluders,
            where,
            f"{found} members may collude{stated}, and {terms.colluders} were planned for",
            _PIN,
            PrivacyRefusal,
        )
        honest = roster.group.honest
        problem = f"{honest} honest members are in every sum, and its policy asks for"
        check(
            honest >= self.least_honest,
            where,
            f"{problem} {self.least_honest}",
            "ask more sites, or tolerate fewer dropouts and colluders",
            PrivacyRefusal,
        )
