"""The masks: a member's own, and one for each pair of neighbours. Members add them, and the server
makes those again whose seeds it recovers.
"""

from __future__ import annotations

import hashlib

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from dpfl.secure_sum import keys
from dpfl.secure_sum.session import Roster


def own_mask(seed: bytes, session: str) -> bytes:
    """The key of a member's own mask."""
    return keys.derived(seed, "own mask", session)


def commitment_to(seed: bytes, session: str) -> str:
    """A hash by which a recovered seed is recognised."""
    return hashlib.sha256(keys.canonical("dpfl commitment", session, seed.hex())).hexdigest()


def pair_mask(roster: Roster, key: X25519PrivateKey, member: int, other: int) -> tuple[bytes, int]:
    """The key and the sign of the mask that a member shares with another: each takes one sign."""
    low, high = sorted((member, other))
    purpose = ("mask", roster.session, roster.names[low], roster.names[high])
    mask = keys.agreed(key, roster.members[other].mask, *purpose)
    return mask, 1 if member == low else -1
