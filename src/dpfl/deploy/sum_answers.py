"""What sites answer in the phases of a secure sum, as the server reads it.

Every reader takes the name of the site and the plain values of its answer; what is not as agreed is
refused in the name of the site.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from dpfl.core.checks import check
from dpfl.core.errors import PeerError
from dpfl.secure_sum import keys, server
from dpfl.secure_sum.session import MemberKeys, Roster, SumTerms
from dpfl.secure_sum.state import Shares


def read_keys(terms: SumTerms) -> Callable[[str, Any], MemberKeys]:
    """Make the reader of one-time keys, which must be signed for this sum."""

    def read(site: str, told: Any) -> MemberKeys:
        own = MemberKeys.read(told)
        _own(own.name, site)
        keys.check_signature(own.identity, own.signature, own.content(terms), "keys")
        return own

    return read


def read_shares(roster: Roster) -> Callable[[str, Any], Shares]:
    """Make the reader of shares: one must be sealed for each neighbour."""

    def read(site: str, told: Any) -> Shares:
        shares = Shares.read(told)
        _own(shares.announcement.name, site)
        shares.announcement.check(roster)
        holders = {roster.names[one] for one in shares.announcement.holders(roster)} - {site}
        check(
            holders == set(shares.sealed),
            "shares",
            "has not sealed a share for each of its neighbours",
            "use the same version",
            PeerError,
        )
        return shares

    return read


def read_signature(roster: Roster, survivors: tuple[str, ...]) -> Callable[[str, Any], str]:
    """Make the reader of signatures under a list of survivors."""

    def read(site: str, told: Any) -> str:
        signature = str(told["signature"])
        server.check_survivor_signature(roster, survivors, site, signature)
        return signature

    return read


def read_revealed(site: str, told: Any) -> dict[str, bytes]:
    """Read the shares that a survivor has revealed, by the member whom they are about."""
    return {
        str(name): base64.b64decode(one, validate=True) for name, one in told["revealed"].items()
    }


def _own(name: str, site: str) -> None:
    """Refuse what a site sends in another's name."""
    check(name == site, "answer", f"is for '{name[:60]}'", "send its own", PeerError)
