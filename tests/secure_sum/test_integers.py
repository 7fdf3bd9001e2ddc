"""Integers modulo a power of two: exact, as wide as they must be, and no wider."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, strategies as st

from dpfl.core.errors import PeerError, PrivacyRefusal
from dpfl.secure_sum import integers


@given(largest=st.integers(1, 2**40), members=st.integers(1, 2000))
def test_the_width_is_the_least_that_cannot_wrap(largest, members):
    width = integers.width_for(largest, members)
    assert largest * members < 2 ** (width - 1)
    assert largest * members >= 2 ** (width - 2)


def test_too_wide_sums_are_refused():
    with pytest.raises(PrivacyRefusal, match="needs 66 bits"):
        integers.width_for(2**60, 16)


@given(data=st.data(), width=st.integers(2, 62), count=st.integers(1, 50))
def test_packing_keeps_every_bit(data, width, count):
    largest = 2 ** (width - 1) - 1
    values = data.draw(st.lists(st.integers(-largest, largest), min_size=count, max_size=count))
    words = integers.residues(np.array(values), largest, width)
    payload = integers.packed(words, width)
    assert len(payload) == integers.packed_size(count, width) <= (width * count + 7 * width) / 8
    read = integers.unpacked(payload, count, width, "a")
    assert integers.signed(read, width).tolist() == values


@given(values=st.lists(st.integers(-(2**20), 2**20), min_size=2, max_size=9))
def test_a_sum_of_residues_is_the_residue_of_the_sum(values):
    width = integers.width_for(2**20, len(values))
    words = [integers.residues(np.array([value]), 2**20, width) for value in values]
    assert integers.signed(sum(words), width).tolist() == [sum(values)]


@pytest.mark.parametrize("width", [20, 32, 40])
def test_masks_cancel_and_depend_on_their_key(width):
    words = np.arange(40_000).astype(integers.word(width))
    masked = words.copy()
    integers.add_masks(masked, [(bytes(32), 1)])
    other = words.copy()
    integers.add_masks(other, [(bytes(31) + b"1", 1)])
    assert (masked != words).mean() > 0.99
    assert (masked != other).mean() > 0.99
    integers.add_masks(masked, [(bytes(32), -1)])
    assert np.array_equal(masked, words)


def test_a_mask_has_no_repetition():
    # A keystream that began anew with every chunk would repeat.
    words = np.zeros(100_000, integers.word(32))
    integers.add_masks(words, [(bytes(32), 1)])
    assert len(np.unique(words)) > 99_900


@pytest.mark.parametrize("width", [20, 40])
def test_several_masks_are_added_as_one_after_the_other(width):
    masks = [(bytes([number]) * 32, 1 if number % 3 else -1) for number in range(7)]
    together = np.arange(100_003).astype(integers.word(width))
    apart = together.copy()
    integers.add_masks(together, masks)
    for mask in masks:
        integers.add_masks(apart, [mask])
    assert np.array_equal(together, apart)


def test_a_mask_is_the_keystream_of_the_cipher():
    words, key = np.zeros(50_000, integers.word(32)), bytes(range(32))
    integers.add_masks(words, [(key, 1)])
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    assert words.tobytes() == stream.update(bytes(words.nbytes))


def test_another_length_is_refused():
    with pytest.raises(PeerError, match=r"'north'.*3 bytes"):
        integers.unpacked(b"abc", 1, 32, "north")
