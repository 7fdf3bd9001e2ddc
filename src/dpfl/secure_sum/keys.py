"""The primitives: key agreement, derived keys, sealed messages, signatures and shared secrets.

Everything is that of ``cryptography`` and of pycryptodome. Secrets that others may recover are
seeds of 128 bits, from which keys are derived: a share of a seed takes 16 bytes.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from dpfl.core.checks import check
from dpfl.core.errors import PeerError

SEED = 16  # bytes of a secret that is shared out
_NONCE = 12


def canonical(*content: Any) -> bytes:
    """Write plain values in the one form that is hashed and signed."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def new_seed() -> bytes:
    """Draw a secret that will be shared out."""
    return secrets.token_bytes(SEED)


def derived(secret: bytes, *purpose: Any) -> bytes:
    """Derive a key of 32 bytes for one purpose."""
    hkdf = HKDF(algorithm=SHA256(), length=32, salt=None, info=canonical("dpfl", *purpose))
    return hkdf.derive(secret)


def agreement_key(seed: bytes) -> X25519PrivateKey:
    """The one-time key for key agreement that a seed stands for."""
    return X25519PrivateKey.from_private_bytes(derived(seed, "key agreement"))


def public_half(key: X25519PrivateKey | Ed25519PrivateKey) -> str:
    """A public key in hexadecimal."""
    return key.public_key().public_bytes_raw().hex()


def agreed(own: X25519PrivateKey, other: str, *purpose: Any) -> bytes:
    """The key that two members have in common for one purpose."""
    try:
        secret = own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other)))
    except ValueError as error:
        raise PeerError(
            "secure sum", f"'{other[:64]}' is not a public key", "use a key that dpfl has made"
        ) from error
    return derived(secret, *purpose)


def sealed(key: bytes, content: bytes, about: bytes) -> bytes:
    """Encrypt and authenticate content, together with what it is about."""
    nonce = secrets.token_bytes(_NONCE)
    return nonce + AESGCM(key).encrypt(nonce, content, about)


def opened(key: bytes, content: bytes, about: bytes, sender: str) -> bytes:
    """Decrypt what :func:`sealed` made; anything else is refused."""
    try:
        return AESGCM(key).decrypt(content[:_NONCE], content[_NONCE:], about)
    except (InvalidTag, ValueError) as error:
        raise PeerError(
            f"share of '{sender}'",
            "is not sealed for this member and this session",
            "show all members the same list, and pass messages on as they are",
        ) from error


def sign(identity: Ed25519PrivateKey, content: bytes) -> str:
    """Sign content; the signature is hexadecimal."""
    return identity.sign(content).hex()


def check_signature(identity: str, signature: str, content: bytes, where: str) -> None:
    """Refuse what was not signed with this identity key."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(identity))
        key.verify(bytes.fromhex(signature), content)
    except (ValueError, InvalidSignature) as error:
        raise PeerError(
            where,
            f"is not signed with the identity key {identity[:16]}...",
            "pass on what members have sent, unchanged",
        ) from error


def shares_of(seed: bytes, holders: int, needed: int) -> list[bytes]:
    """Share a seed out: any ``needed`` of the ``holders`` shares give it back, fewer tell nothing.

    Share i belongs to holder i, from 0.
    """
    if needed == 1:  # the library shares among two or more
        return [seed] * holders
    from Crypto.Protocol.SecretSharing import Shamir

    return [bytes(share) for _, share in Shamir.split(needed, holders, seed, ssss=False)]


def recovered(shares: Mapping[int, bytes], needed: int, whose: str) -> bytes:
    """Recover a seed from shares by holder's number."""
    check(
        len(shares) >= needed,
        f"secret of '{whose}'",
        f"{len(shares)} of {needed} shares are there",
        "the sum is lost; begin another round",
        PeerError,
    )
    used = sorted(shares.items())[:needed]
    if needed == 1:
        return used[0][1]
    from Crypto.Protocol.SecretSharing import Shamir

    return bytes(Shamir.combine([(holder + 1, share) for holder, share in used], ssss=False))


def sample(population: Sequence[int], count: int) -> tuple[int, ...]:
    """Draw members at random, from the operating system, in ascending order."""
    return tuple(sorted(secrets.SystemRandom().sample(population, count)))
