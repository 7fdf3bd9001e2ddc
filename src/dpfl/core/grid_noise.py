"""Gaussian noise on the integers, made from AES-256 in counter mode.

The law is X = round(N(0, SCALE^2)). For an integer q, q + X = round(q + N(0, SCALE^2)) is
post-processing of the *continuous* Gaussian mechanism, so accounting for the Gaussian mechanism
holds as it stands. Noise computed in floating point and then added has no such proof: it has holes,
values that prove that something was added to it.

*How.* P, the law above, is a mixture (1 - w) Q + w R with w = 1 / 512.

- Q (fast): ``CELL * c + a - b``, with c from a table of 65,536 equally likely entries and a, b of
  16 random bits each. Q is the piecewise linear interpolation of the table's law, and (1 - w) Q <=
  P on every integer.
- R (rare): the rest, P - (1 - w) Q, by rejection from a piecewise constant envelope. It holds the
  whole tail, up to 10 standard deviations.

Which numbers are rare is decided by geometric gaps, so the fast path tests nothing. No
floating-point number decides a fast draw; a rare one is accepted in double precision.

*Sums of shares.* Over a secure sum h clients add one such number each, of standard deviation S in
steps. Their sum T has the law of round(N(0, h S^2) + U_1 + ... + U_(h-1)), each U uniform on
[-1/2, 1/2], up to a relative error of 3 (h - 1) exp(-pi^2 S^2) on every integer. Hence q + T =
round(q + N(0, h S^2) + U_1 + ... + U_(h-1)) is post-processing of one Gaussian too. *Proof.* With
f_a the density of N(0, a^2), round(N(0, S^2)) has the law P(k) = E f_S(k - U). Adding one more
share to f_b, b^2 = j S^2, convolves both on the integers. For fixed u and v, Poisson summation
gives ::

    sum_i f_S(i - u) f_b(k - i - v) = f_c(k - u - v) (1 + 2 sum_m exp(-2 pi^2 m^2 s^2) cos(..))

over m > 0, with c^2 = S^2 + b^2 and s^2 = S^2 b^2 / c^2 >= S^2 / 2, because the product of two
Gaussian densities is f_c times a Gaussian density of variance s^2. The bracket is within 2.01
exp(-pi^2 S^2) of 1 for S >= 1; densities are positive, so that the mean over u and v keeps this.
After h - 1 steps the errors have multiplied to less than 3 (h - 1) exp(-pi^2 S^2) where that is
below 1. With S = 2^20 it is smaller than any number that a computer holds.

*Formal guarantees.* The law of what this code really does differs from P by at most 2^-28 in log
ratio within 10 standard deviations (2^-42 within 6; 2^-51 in root mean square); 2^-75.8 of the mass
is never produced. :func:`dpfl.testing.check_sampler` computes that law on every integer. The
surcharge for it is in :mod:`dpfl.privacy.accountant`. All of it is computational: AES is taken for
a pseudo-random function.
"""

import math
import operator
from collections.abc import Sequence
from itertools import accumulate, repeat
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

SCALE = 1 << 20
"""Standard deviation of the noise, in steps of the grid."""

CELL = 1 << 16
RARE = 1 / 512
CELLS = 160  # cells of SCALE / 16 up to 10 standard deviations
NEAR = 112  # cells below 7 standard deviations; those beyond are drawn from a second table
LARGEST = CELLS * CELL
"""No number has a larger magnitude."""

# How many entries of the fast table are c = 0, +-1, +-2, ...: at most P(CELL c) 2^32 / (1 - w),
# less where P is convex.
_COUNTS = """
    1636 1632 1622 1606 1584 1557 1524 1486 1443 1396 1345 1291 1234 1175 1115 1054 992 930 868
    807 748 691 636 582 531 482 437 393 354 315 282 250 221 195 170 149 130 112 97 83 71 61 52
    44 37 31 26 21 18 15 12 10 8 6 5 4 3 2 2 1 1 1
"""
COUNTS = tuple(map(int, _COUNTS.split()))
_CENTRES = np.arange(1 - len(COUNTS), len(COUNTS))
_TABLE = np.repeat(_CENTRES * CELL, [COUNTS[abs(c)] for c in _CENTRES]).astype(np.float32)
_HEIGHTS = np.pad(np.array(COUNTS, np.float64), (0, CELLS + 2 - len(COUNTS)))

_LONGEST_GAP = 4096
_POWERS = accumulate(repeat(511, _LONGEST_GAP), operator.mul)  # of 511; those of 512 are shifts
GAPS = np.array(
    [2**64 - ((power << 64) >> 9 * k) for k, power in enumerate(_POWERS, start=1)], dtype=np.uint64
)
"""64 random bits below entry k: the next rare number is at most k numbers away."""

_PASS = 1 << 15  # numbers of one pass: small enough to stay in the cache
_PEAK = 1 / (math.sqrt(2 * math.pi) * SCALE)


def ideal(x: np.ndarray) -> np.ndarray:
    """P at integers (as doubles): the density times the second-order correction for the width of a
    step.
    """
    t = np.square(x / SCALE)
    return np.asarray(_PEAK * np.exp(-t / 2) * (1 + (t - 1) / (24.0 * SCALE * SCALE)))


def fast(x: np.ndarray) -> np.ndarray:
    """Q at integers: exact in double precision."""
    cell = np.abs(x) >> 16
    inside = np.abs(x) & (CELL - 1)
    return np.asarray(_HEIGHTS[cell] * (CELL - inside) + _HEIGHTS[cell + 1] * inside) * 2.0**-48


def rest(x: np.ndarray) -> np.ndarray:
    """P - (1 - w) Q at integers: what the rare path draws from."""
    return np.asarray(ideal(np.abs(x).astype(np.float64)) - (1 - RARE) * fast(x))


def thresholds(weights: np.ndarray) -> np.ndarray:
    """Cumulated shares as 64-bit thresholds. Summed from the end: the smallest shares are the most
    exact.
    """
    behind = np.cumsum(weights[::-1])[::-1]
    return np.array([2**64 - int(part / behind[0] * 2**64) for part in behind[1:]], dtype=np.uint64)


_INSIDE = np.arange(0, CELL + 1, 64)
ROOFS = 1.001 * np.array([rest(cell * CELL + _INSIDE).max() for cell in range(CELLS)])
"""The envelope of ``rest`` on each cell; the margin covers what lies between the points looked at.
"""
NEAR_CELLS = thresholds(np.append(ROOFS[:NEAR], ROOFS[NEAR:].sum()))
FAR_CELLS = thresholds(ROOFS[NEAR:])


class _Search:
    """How many thresholds a 64-bit word reaches: ``searchsorted``, with most words settled by their
    first 16 bits.
    """

    def __init__(self, thresholds: np.ndarray) -> None:
        self._thresholds = thresholds
        first = np.arange(1 << 16, dtype=np.uint64) << np.uint64(48)
        least, most = (
            np.searchsorted(thresholds, words, side="right")
            for words in (first, first | np.uint64((1 << 48) - 1))
        )
        self._settled = np.where(least == most, least, -1).astype(np.int16)

    def __call__(self, words: np.ndarray) -> np.ndarray:
        found = self._settled.take(words >> np.uint64(48), mode="wrap").astype(np.int64)
        (open_,) = np.nonzero(found < 0)
        found[open_] = np.searchsorted(self._thresholds, words[open_], side="right")
        return found


_find_gap, _find_cell = _Search(GAPS), _Search(NEAR_CELLS)


def keystream(key: bytes, purpose: int) -> Any:
    """An endless stream of random bytes: AES-256 in counter mode, one counter range for each
    purpose.
    """
    return Cipher(algorithms.AES(key), modes.CTR(bytes([purpose]) + bytes(15))).encryptor()


class GridNoise:
    """One secret stream of noise. The same numbers come out however a request is split."""

    def __init__(self, key: bytes) -> None:
        # c, a, b, gaps, rare numbers
        self._streams = [keystream(key, purpose) for purpose in range(5)]
        self._given = 0  # numbers handed out
        self._known = 0  # numbers up to which all rare places are known
        self._ahead = 8
        self._places = np.empty(0, np.int64)
        self._rare = np.empty(0, np.float32)

    def look_ahead(self, numbers: int) -> None:
        """Find the rare ones among the next ``numbers`` at once; without it the same ones are found
        bit by bit.
        """
        self._find_places(self._given + numbers)
        self._draw_rare(len(self._places))

    def _words(self, stream: int, count: int) -> np.ndarray:
        return np.frombuffer(self._streams[stream].update(bytes(8 * count)), dtype="<u8")

    def _replace_rare(self, row: np.ndarray) -> None:
        """Put the rare numbers where they belong, and move on."""
        until = self._given + len(row)
        if self._known < until:
            self._find_places(until)
        rare = int(self._places.searchsorted(until))
        self._draw_rare(rare)
        row[self._places[:rare] - self._given] = self._rare[:rare]
        self._places, self._rare, self._given = self._places[rare:], self._rare[rare:], until

    def _find_places(self, until: int) -> None:
        """Draw gaps until every rare place before ``until`` is known; passes grow, since each has a
        fixed cost.
        """
        found = [self._places]
        while self._known < until:
            self._ahead = min(2 * self._ahead, 512)
            count = self._ahead + int(1.1 * RARE * (until - self._known))
            gaps = _find_gap(self._words(3, count))
            # The longest gap means "none among so many numbers": the search continues there.
            moves = np.where(gaps < _LONGEST_GAP, gaps + 1, _LONGEST_GAP)
            places = self._known - 1 + np.cumsum(moves)
            found.append(places[gaps < _LONGEST_GAP])
            self._known = int(places[-1]) + 1
        self._places = np.concatenate(found)

    def _draw_rare(self, wanted: int) -> None:
        """Rejection: a cell by its envelope, a place in it and a sign, then 53 bits against
        ``rest``.
        """
        while len(self._rare) < wanted:
            count = self._ahead + int(1.3 * (wanted - len(self._rare)))
            bits = self._words(4, 4 * count).reshape(-1, 4)
            cell = _find_cell(bits[:, 0])
            (far,) = np.nonzero(cell == NEAR)
            cell[far] += np.searchsorted(FAR_CELLS, bits[far, 1], side="right")
            x = (cell << 16) + (bits[:, 2] & np.uint64(CELL - 1)).astype(np.int64)
            x = np.where(bits[:, 2] >> np.uint64(63), x, -1 - x)
            kept = (bits[:, 3] >> np.uint64(11)) * 2.0**-53 * ROOFS[cell] < rest(x)
            self._rare = np.append(self._rare, x[kept].astype(np.float32))


def fill_rows(sources: Sequence[GridNoise], out: np.ndarray) -> np.ndarray:
    """Fill row i of a contiguous float32 matrix with integers of the law P from ``sources[i]``.

    All are below 2^24, hence exact. Many short rows share one pass.
    """
    rows, length = out.shape
    if length == 0:
        return out
    together = max(1, _PASS // length)
    part = min(length, _PASS)
    size = min(together, rows) * part
    # The cipher may write up to one block less one byte beyond what it is asked for.
    zeros = bytes(2 * part)
    bits = bytearray(2 * size + 16)
    fine = np.empty(size, np.float32)
    for first in range(0, rows, together):
        for start in range(0, length, part):
            some = slice(first, first + together)
            stretch = slice(start, start + part)
            _fill_fast(sources[some], out[some, stretch], zeros, bits, fine)
    for source, row in zip(sources, out, strict=True):
        source._replace_rare(row)
    return out


def _fill_fast(
    sources: Sequence[GridNoise], out: np.ndarray, zeros: bytes, bits: bytearray, fine: np.ndarray
) -> None:
    """Draw from Q: row i from the first three streams of ``sources[i]``, with the scratch space
    given.
    """
    width = 2 * out.shape[1]
    size = out.size
    zeros = zeros if len(zeros) == width else zeros[:width]
    numbers = np.frombuffer(bits, "<u2", size)
    fine = fine[:size]
    places = memoryview(bits)
    target = out.reshape(-1)  # rows of one pass are whole rows, or a stretch of a single one
    for stream in range(3):
        for i, source in enumerate(sources):
            source._streams[stream].update_into(zeros, places[i * width :])
        if stream == 0:
            np.take(_TABLE, numbers, out=target, mode="wrap")
        else:
            # a - b of signed numbers has the same law, and converts faster.
            np.copyto(fine, numbers.view("<i2"))
            (np.add if stream == 1 else np.subtract)(target, fine, out=target)
