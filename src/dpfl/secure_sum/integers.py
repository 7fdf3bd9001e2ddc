"""Integers modulo a power of two: how wide they are, how they travel, and how masks are added.

The width follows from a bound on one member's integers, so that the sum of all never wraps. In
memory, numbers are unsigned words of 32 or 64 bits, whose own overflow is arithmetic modulo a
multiple of 2^width; only ``width`` bits of each number travel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dpfl.core.checks import check
from dpfl.core.errors import PeerError, PrivacyRefusal

MOST_BITS = 62  # a sum still fits into a signed word of 64 bits
_CHUNK = 1 << 16  # bytes of a mask made at once: they stay in the processor's cache
_ZEROS = memoryview(bytes(_CHUNK))


def width_for(largest: int, members: int) -> int:
    """The bits of a number modulo which a sum of ``members`` integers of at most ``largest`` in
    absolute value cannot wrap.

    >>> width_for(1, 1), width_for(127, 1), width_for(2**24, 50)
    (2, 8, 31)
    """
    width = (largest * members).bit_length() + 1
    check(
        width <= MOST_BITS,
        "secure sum",
        f"a sum of {members} integers up to {largest} needs {width} bits",
        "use more noise, a smaller clip or fewer members",
        PrivacyRefusal,
    )
    return width


def word(width: int) -> np.dtype[Any]:
    """The unsigned type in which numbers of this width are added up."""
    return np.dtype("<u4" if width <= 32 else "<u8")


def residues(integers: np.ndarray, largest: int, width: int) -> np.ndarray:
    """Return integers modulo 2^width; refuse what is longer than was agreed.

    >>> residues(np.array([-1, 5]), largest=5, width=4).tolist()
    [15, 5]
    """
    most = max(int(integers.max(initial=0)), -int(integers.min(initial=0)))
    check(
        most <= largest,
        "secure sum",
        f"an integer of {most}, where at most {largest} were agreed",
        "this is a defect: report it",
        PrivacyRefusal,
    )
    numbers = integers.astype(np.int64, copy=False).astype(word(width))
    numbers &= numbers.dtype.type((1 << width) - 1)
    return numbers


def signed(numbers: np.ndarray, width: int) -> np.ndarray:
    """Return the integers between -2^(width-1) and 2^(width-1) that numbers modulo 2^width are.

    >>> signed(np.array([15, 5], dtype="<u4"), width=4).tolist()
    [-1, 5]
    """
    spare = numbers.dtype.type(8 * numbers.itemsize - width)
    # The highest bit of a number becomes the sign of a word.
    found: np.ndarray = (numbers << spare).view(f"<i{numbers.itemsize}")
    found >>= spare.astype(found.dtype)
    return found.astype(np.int64, copy=False)


def packed(numbers: np.ndarray, width: int) -> bytes:
    """Write the lowest ``width`` bits of each number.

    The lowest byte of all numbers comes first, then the next byte of all; bits that do not fill a
    byte come last, one bit of all numbers after the other.
    """
    whole, rest = divmod(width, 8)
    planes = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, numbers.itemsize)
    parts = [planes[:, byte].tobytes() for byte in range(whole)]
    top = planes[:, whole].copy() if rest else planes[:, 0]
    parts += [np.packbits(top & (1 << bit)).tobytes() for bit in range(rest)]
    return b"".join(parts)


def packed_size(count: int, width: int) -> int:
    """How many bytes ``count`` packed numbers take.

    >>> packed_size(100, 31)
    391
    """
    whole, rest = divmod(width, 8)
    return whole * count + rest * ((count + 7) // 8)


def unpacked(payload: bytes, count: int, width: int, sender: str) -> np.ndarray:
    """Read numbers that :func:`packed` has written; another length is refused."""
    size, whole, rest = packed_size(count, width), *divmod(width, 8)
    check(
        len(payload) == size,
        f"masked input of '{sender}'",
        f"{len(payload)} bytes, where {count} numbers of {width} bits take {size}",
        "use the same version and study on both sides",
        PeerError,
    )
    read = np.frombuffer(payload, np.uint8)
    planes = np.zeros((count, word(width).itemsize), np.uint8)
    for byte in range(whole):
        planes[:, byte] = read[byte * count : (byte + 1) * count]
    bits = read[whole * count :]
    length = (count + 7) // 8
    top = np.zeros(count, np.uint8)
    for bit in range(rest):
        ones = np.unpackbits(bits[bit * length : (bit + 1) * length], count=count)
        ones <<= bit
        top |= ones
    if rest:
        planes[:, whole] = top
    return planes.view(word(width)).reshape(count)


def add_masks(numbers: np.ndarray, masks: Iterable[tuple[bytes, int]]) -> None:
    """Add masks in place: each is what a one-time key expands to, times a sign.

    A mask is the keystream of AES-256 in counter mode, a word for each number. All masks are added
    to one part of the numbers before the next part, so that it stays in the processor's cache.
    """
    streams = [
        (Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor(), sign) for key, sign in masks
    ]
    buffer = bytearray(_CHUNK + 15)
    words = np.frombuffer(buffer, numbers.dtype, _CHUNK // numbers.itemsize)
    for start in range(0, len(numbers), len(words)):
        part = numbers[start : start + len(words)]
        zeros = _ZEROS[: part.nbytes]
        mask = words[: len(part)]
        for stream, sign in streams:
            stream.update_into(zeros, buffer)
            (np.add if sign > 0 else np.subtract)(part, mask, out=part)
