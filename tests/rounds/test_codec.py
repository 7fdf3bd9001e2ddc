from __future__ import annotations

import json
import os
import pickle
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from dpfl.core.errors import PeerError
from dpfl.core.grid import Grid
from dpfl.core.types import Downlink
from dpfl.rounds.codec import (
    FRAME_BYTES,
    decode_download,
    decode_upload,
    encode_download,
    encode_upload,
    tag,
)

RUN, ROUND, CLIENT = "run-1", 3, "hospital-a"


def decode(payload: bytes, length: int | None = None) -> Tensor:
    return decode_upload(payload, length, RUN, ROUND, CLIENT)


def upload(numbers: int = 5) -> bytes:
    return encode_upload(torch.arange(numbers) + 0.5, RUN, ROUND, CLIENT)


def bits(vector: Tensor) -> bytes:
    return vector.numpy().tobytes()


# ---- uploads ---------------------------------------------------------------------------------------------------------


@given(raw=st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_an_upload_arrives_bit_for_bit(raw: list[int]) -> None:
    """Every pattern of 32 bits: infinities, subnormals and not-a-numbers included."""
    vector = torch.from_numpy(np.array(raw, dtype=np.uint32).view(np.float32).copy())
    payload = encode_upload(vector, RUN, ROUND, CLIENT)
    for length in (None, len(raw)):
        assert bits(decode(payload, length)) == bits(vector)


@given(numbers=st.integers(0, 200))
def test_an_upload_takes_exactly_four_bytes_a_number_and_a_frame(numbers: int) -> None:
    assert FRAME_BYTES == 40 <= 64
    assert len(upload(numbers)) == 40 + 4 * numbers


def test_numbers_travel_as_little_endian_floats() -> None:
    assert upload(2)[FRAME_BYTES:] == struct.pack("<2f", 0.5, 1.5)


def test_equal_uploads_are_equal_bytes() -> None:
    assert upload() == upload()


def test_an_upload_may_come_from_a_view_and_arrives_in_memory_of_its_own() -> None:
    strided = torch.arange(10.0)[::2]
    arrived = decode(encode_upload(strided, RUN, ROUND, CLIENT))
    assert arrived.tolist() == [0, 2, 4, 6, 8]
    arrived += 1  # writable, and nobody else's


@given(raw=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50), std=st.floats(1e-6, 1e6))
def test_multiples_of_a_grid_arrive_as_the_very_multiples_that_were_sent(
    raw: list[int], std: float
) -> None:
    """In double precision, for every integer of 32 bits: a sum of uploads is exact."""
    grid = Grid.of(std)
    sent = torch.tensor(raw, dtype=torch.float64) * grid.step
    payload = encode_upload(sent, RUN, ROUND, CLIENT, grid)
    assert payload[FRAME_BYTES:] == struct.pack(f"<{len(raw)}i", *raw)
    arrived = decode_upload(payload, len(raw), RUN, ROUND, CLIENT, grid)
    assert arrived.dtype == torch.float64
    assert bits(arrived) == bits(sent + 0.0)  # zero has one sign
    arrived += 1  # writable


def test_floats_are_refused_where_integers_were_agreed_on_and_the_other_way_round() -> None:
    """Else a client could send what is not finite, or what lies between the grid's points."""
    grid = Grid.of(1.0)
    with pytest.raises(PeerError, match="not a dpfl upload of this version"):
        decode_upload(upload(), 5, RUN, ROUND, CLIENT, grid)
    with pytest.raises(PeerError, match="not a dpfl upload of this version"):
        decode(encode_upload(torch.zeros(5), RUN, ROUND, CLIENT, grid), 5)


FRAME, BODY = range(FRAME_BYTES), range(FRAME_BYTES, FRAME_BYTES + 20)


@pytest.mark.parametrize("part", [FRAME, BODY], ids=["frame", "body"])
@pytest.mark.parametrize("length", [None, 5])
def test_every_single_corrupted_bit_is_refused(part: range, length: int | None) -> None:
    payload = upload()
    assert len(payload) == BODY.stop
    accepted = []
    for position in part:
        for bit in range(8):
            damaged = bytearray(payload)
            damaged[position] ^= 1 << bit
            try:
                decode(bytes(damaged), length)
            except PeerError:
                continue
            accepted.append((position, bit))
    assert accepted == []


@given(position=st.integers(0, 10**6), value=st.integers(0, 255), numbers=st.integers(1, 40))
def test_any_replaced_byte_of_the_body_is_refused(position: int, value: int, numbers: int) -> None:
    payload = bytearray(upload(numbers))
    position = FRAME_BYTES + position % (len(payload) - FRAME_BYTES)
    if payload[position] == value:
        value ^= 0xFF
    payload[position] = value
    with pytest.raises(PeerError, match="damaged"):
        decode(bytes(payload), numbers)


@pytest.mark.parametrize(
    ("run", "round_", "client"),
    [("run-2", 3, "hospital-a"), ("run-1", 4, "hospital-a"), ("run-1", 3, "hospital-b")],
)
def test_an_upload_is_no_good_to_another_run_round_or_client(
    run: str, round_: int, client: str
) -> None:
    with pytest.raises(PeerError, match="belongs to another run, round or client"):
        decode_upload(upload(), 5, run, round_, client)


def test_the_round_cannot_be_rewritten_in_the_frame() -> None:
    payload = bytearray(upload())
    payload[8:12] = struct.pack("<I", ROUND + 1)
    with pytest.raises(PeerError, match="another run, round or client"):
        decode_upload(bytes(payload), 5, RUN, ROUND + 1, CLIENT)


@pytest.mark.parametrize("separator", ["\x1f", "/", "|", "\x00", " ", ":"])
def test_no_name_can_be_cut_in_two_ways(separator: str) -> None:
    """Run 'a', client '1?b' and run 'a?1', client 'b' are different destinations of the same round."""
    assert tag("a", 1, f"1{separator}b") != tag(f"a{separator}1", 1, "b")


def test_a_truncated_upload_is_refused_at_every_length() -> None:
    payload = upload()
    for length in range(len(payload)):
        with pytest.raises(PeerError):
            decode(payload[:length])


@pytest.mark.parametrize("extra", [b"\x00", bytes(4), bytes(1000)])
def test_trailing_bytes_are_refused(extra: bytes) -> None:
    with pytest.raises(PeerError, match="announces 5 numbers in"):
        decode(upload() + extra)


@pytest.mark.parametrize("agreed", [0, 4, 6])
def test_another_number_of_numbers_than_agreed_is_refused(agreed: int) -> None:
    with pytest.raises(PeerError, match=f"announces 5 numbers; send {agreed}"):
        decode(upload(), agreed)


@pytest.mark.parametrize("claimed", [2**60, 2**62, 2**64 - 1, 2**30])
@pytest.mark.parametrize("agreed", [None, 5])
def test_an_oversized_claim_is_refused_without_allocating(claimed: int, agreed: int | None) -> None:
    """2**62 and beyond times four wraps around in 64 bits; it must not here."""
    payload = bytearray(upload())
    payload[12:20] = struct.pack("<Q", claimed)
    tracemalloc.start()
    try:
        with pytest.raises(PeerError, match="announces"):
            decode(bytes(payload), agreed)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_claim_that_wraps_around_to_the_true_size_is_refused() -> None:
    payload = bytearray(upload(4))
    payload[12:20] = struct.pack("<Q", 4 + 2**62)
    with pytest.raises(PeerError, match="announces"):
        decode(bytes(payload))


@given(junk=st.binary(max_size=200))
def test_any_other_bytes_are_refused(junk: bytes) -> None:
    with pytest.raises(PeerError):
        decode(junk)


# ---- downloads -------------------------------------------------------------------------------------------------------


def download(**fields: object) -> Downlink:
    shared = {
        "stage0": {"basis": torch.arange(6.0).reshape(2, 3), "seed": torch.tensor([2**62 + 1])},
        "channel": {
            "gain": torch.tensor(0.25, dtype=torch.float64),
            "nested/name": torch.zeros(0, 3),
        },
    }
    values: dict[str, object] = {"round": 7, "start": torch.randn(5), "shared": shared, "drawn": 4}
    return Downlink(**(values | fields))  # type: ignore[arg-type]


def document(header: dict[str, object], body: bytes = b"", claimed: int | None = None) -> bytes:
    """A safetensors document with any header at all."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text + body


def test_a_download_arrives_bit_for_bit_with_what_the_plugs_share() -> None:
    sent = download()
    got = decode_download(encode_download(sent), 5)
    assert (got.round, got.drawn) == (7, 4)
    assert bits(got.start) == bits(sent.start)
    assert {slot: set(tensors) for slot, tensors in got.shared.items()} == {
        slot: set(tensors) for slot, tensors in sent.shared.items()
    }
    for slot, tensors in sent.shared.items():
        for name, tensor in tensors.items():
            arrived = got.shared[slot][name]
            assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(arrived, tensor)


@given(size=st.integers(0, 30), round_=st.integers(0, 10**6), drawn=st.integers(0, 10**6))
def test_a_download_without_shared_tensors_arrives(size: int, round_: int, drawn: int) -> None:
    start = torch.arange(float(size))
    got = decode_download(
        encode_download(Downlink(round=round_, start=start, shared={}, drawn=drawn)), size
    )
    assert (got.round, got.drawn, got.shared) == (round_, drawn, {})
    assert torch.equal(got.start, start)


def test_equal_downloads_are_equal_bytes() -> None:
    """Bytes are what a round is repeated with, counted in, and compared by."""
    sent = download()
    assert len({encode_download(sent) for _ in range(64)}) == 1


def test_a_start_that_is_a_view_travels() -> None:
    got = decode_download(encode_download(download(start=torch.arange(10.0)[::2])), 5)
    assert got.start.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    "start", [torch.zeros(4), torch.zeros(5, 1), torch.zeros(5, dtype=torch.float64)]
)
def test_a_start_of_another_shape_or_type_is_refused(start: Tensor) -> None:
    with pytest.raises(PeerError, match="send 5 float32 numbers"):
        decode_download(encode_download(download(start=start)), 5)


def test_a_truncated_download_is_refused_at_every_length() -> None:
    payload = encode_download(download())
    for length in range(len(payload)):
        with pytest.raises(PeerError):
            decode_download(payload[:length], 5)


START = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
GOOD_METADATA = {"dpfl": '{"round": 1, "drawn": 2}'}


def test_the_documents_of_these_tests_would_be_read_if_they_were_right() -> None:
    got = decode_download(document({"start": START, "__metadata__": GOOD_METADATA}, bytes(8)), 2)
    assert (got.round, got.drawn, got.start.tolist()) == (1, 2, [0.0, 0.0])


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {},
        {"round": "1", "drawn": "1"},
        {"dpfl": 7},
        {"dpfl": "no json"},
        {"dpfl": "[1, 2]"},
        {"dpfl": '{"round": 1}'},
        {"dpfl": '{"drawn": 1}'},
        {"dpfl": '{"round": "one", "drawn": 1}'},
        {"dpfl": '{"round": null, "drawn": 1}'},
        {"dpfl": '{"round": 1, "drawn": -1}'},
        [],
        "text",
    ],
)
def test_a_download_that_does_not_say_its_round_and_cohort_is_refused(metadata: object) -> None:
    with pytest.raises(PeerError):
        decode_download(document({"start": START, "__metadata__": metadata}, bytes(8)), 2)


def test_releases_before_round_one_have_negative_rounds() -> None:
    metadata = {"dpfl": '{"round": -2, "drawn": 1}'}
    found = decode_download(document({"start": START, "__metadata__": metadata}, bytes(8)), 2)
    assert (found.round, found.drawn) == (-2, 1)


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"__metadata__": GOOD_METADATA},
        {"begin": START, "__metadata__": GOOD_METADATA},
        {"start": START | {"dtype": "F31"}, "__metadata__": GOOD_METADATA},
        {"start": START | {"shape": [-2]}, "__metadata__": GOOD_METADATA},
        {"start": START | {"data_offsets": [8, 0]}, "__metadata__": GOOD_METADATA},
        {"start": START | {"data_offsets": [4, 12]}, "__metadata__": GOOD_METADATA},
        {"start": 7, "__metadata__": GOOD_METADATA},
    ],
)
def test_a_download_whose_header_makes_no_sense_is_refused(header: dict[str, object]) -> None:
    with pytest.raises(PeerError):
        decode_download(document(header, bytes(8)), 2)


def test_a_header_claiming_terabytes_is_refused_without_allocating() -> None:
    tera = 2**42
    claims = [
        document(
            {"start": {"dtype": "F32", "shape": [tera], "data_offsets": [0, 4 * tera]}}, bytes(8)
        ),
        document(
            {"start": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 8]}}, bytes(8)
        ),
        document({"start": START}, bytes(8), claimed=tera),
        document({"start": START}, bytes(8), claimed=2**64 - 1),
    ]
    for payload in claims:
        tracemalloc.start()
        try:
            with pytest.raises(PeerError):
                decode_download(payload, 2)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 1 << 20


@given(position=st.integers(0, 10**6), value=st.integers(0, 255))
def test_a_download_with_a_replaced_byte_is_read_or_refused_and_nothing_else(
    position: int, value: int
) -> None:
    """Downloads carry no checksum; damage may go unseen, but never ends in anything but a
    PeerError.
    """
    payload = bytearray(encode_download(download(start=torch.zeros(5))))
    payload[position % len(payload)] = value
    try:
        got = decode_download(bytes(payload), 5)
    except PeerError:
        return
    assert got.start.shape == (5,)


@given(junk=st.binary(max_size=100))
def test_any_other_bytes_are_no_download(junk: bytes) -> None:
    with pytest.raises(PeerError):
        decode_download(junk, 5)


# ---- pickle ----------------------------------------------------------------------------------------------------------


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.trace}",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_by_either_door_is_refused_and_leaves_no_trace(
    protocol: int, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    bomb = pickle.dumps(Bomb(trace), protocol=protocol)
    pickle.loads(bomb)
    assert trace.exists(), "the bomb itself does not work"
    trace.unlink()
    framed = upload()[:FRAME_BYTES] + bomb
    torch_file = tmp_path / "bomb.pt"
    torch.save(Bomb(trace), torch_file)
    for payload in (bomb, framed, document({"start": START}, bomb), torch_file.read_bytes()):
        with pytest.raises(PeerError):
            decode(payload)
        with pytest.raises(PeerError):
            decode_download(payload, 2)
    assert not trace.exists()
