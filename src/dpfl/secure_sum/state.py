"""What a member remembers of a sum, and what it sends of its secrets."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dpfl.core.errors import PeerError
from dpfl.secure_sum.session import Announcement, MemberKeys, Roster, SumTerms


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
