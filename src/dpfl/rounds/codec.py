"""Bytes that travel: exact sizes, no pickle, everything checked before anything is decoded.

An upload is a frame of 40 bytes followed by numbers of four bytes, little-endian: float32, or whole
multiples of a grid's step (int32) where noise was added on a grid, so that a sum of uploads is
exact. Multiples in a release before round one have eight bytes. The frame's tag binds it to one
(run, round, client); a checksum finds damage. A download is a safetensors document: the start and
what the plugs share.
"""

import hashlib
import json
import struct
import zlib

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, torch as safetensors
from torch import Tensor

from dpfl.core.checks import check
from dpfl.core.errors import PeerError
from dpfl.core.files import parsed
from dpfl.core.grid import Grid
from dpfl.core.types import Downlink, Shared

_FRAME = struct.Struct("<4sBBHiQ16sI")
_MAGIC, _VERSION, _FLOAT32, _INTEGERS, _WIDE = b"DPFL", 1, 0, 1, 2
FRAME_BYTES = _FRAME.size
LARGEST_DOWNLINK = 1 << 32
_SAME_VERSION = "use the same version on both sides"


def tag(run: str, round_: int, client: str) -> bytes:
    """Bind a message to one run, round and client."""
    return hashlib.sha256(json.dumps([run, round_, client]).encode()).digest()[:16]


def encode_upload(
    vector: Tensor, run: str, round_: int, client: str, grid: Grid | None = None
) -> bytes:
    """Frame a vector: as float32 numbers, or as whole multiples of a grid's step.

    >>> len(encode_upload(torch.zeros(10), "run", 0, "a")) - FRAME_BYTES
    40
    """
    if grid is None:
        kind = _FLOAT32
        numbers = vector.detach().to(torch.float32).numpy().astype("<f4", copy=False)
    else:
        kind, words = _words(round_)
        numbers = grid.integers(vector.detach()).numpy().astype(words)
    body = numbers.tobytes()
    mark = tag(run, round_, client)
    head = (_MAGIC, _VERSION, kind, 0, round_, vector.numel(), mark, zlib.crc32(body))
    return _FRAME.pack(*head) + body


def decode_upload(
    payload: bytes, length: int | None, run: str, round_: int, client: str, grid: Grid | None = None
) -> Tensor:
    """Read a frame of exactly ``length`` numbers (any number if None), refusing whatever is not as
    agreed.

    Numbers on a grid come back in double precision, as the very multiples that were sent.
    """
    if grid is not None:
        integers = decode_integers(payload, length, run, round_, client)
        return torch.from_numpy(integers.astype(np.float64)).mul_(grid.step)
    body = _body(payload, length, tag(run, round_, client), _FLOAT32, round_, client)
    return torch.from_numpy(np.frombuffer(body, dtype="<f4").astype(np.float32))


def decode_integers(
    payload: bytes, length: int | None, run: str, round_: int, client: str
) -> npt.NDArray[np.int64]:
    """Read a frame of whole multiples of a grid's step as integers: what a secure sum adds up."""
    kind, words = _words(round_)
    body = _body(payload, length, tag(run, round_, client), kind, round_, client)
    return np.frombuffer(body, dtype=words).astype(np.int64)


def _words(round_: int) -> tuple[int, str]:
    """How integers travel: statistics over all records, before round one, need wide ones."""
    return (_INTEGERS, "<i4") if round_ >= 0 else (_WIDE, "<i8")


def _body(
    payload: bytes, length: int | None, mark: bytes, wanted: int, round_: int, client: str
) -> memoryview:
    """The numbers of a frame, once everything about it is as agreed."""
    where = f"upload of '{client}'"
    problem = f"{len(payload)} bytes are no frame"
    check(len(payload) >= FRAME_BYTES, where, problem, "send a dpfl upload", PeerError)
    *kind, sent_round, count, sent_tag, checksum = _FRAME.unpack_from(payload)
    body = memoryview(payload)[FRAME_BYTES:]
    own = sent_round == round_ and sent_tag == mark
    size = f"announces {count} numbers"
    wide = 8 if wanted == _WIDE else 4
    for good, problem, remedy in (
        (
            kind == [_MAGIC, _VERSION, wanted, 0],
            "is not a dpfl upload of this version",
            _SAME_VERSION,
        ),
        (own, "belongs to another run, round or client", "send each upload once, to its round"),
        (length in (None, count), size, f"send {length}"),
        (len(body) == wide * count, f"{size} in {len(body)} bytes", f"send {wide} bytes a number"),
        (zlib.crc32(body) == checksum, "was damaged on the way", "send it again"),
    ):
        check(good, where, problem, remedy, PeerError)
    return body


def encode_download(downlink: Downlink) -> bytes:
    """Write a download; equal downlinks give equal bytes."""
    tensors = {"start": downlink.start.contiguous()}
    for slot, shared in downlink.shared.items():
        tensors |= {f"{slot}/{name}": tensor.contiguous() for name, tensor in shared.items()}
    told = json.dumps({"round": downlink.round, "drawn": downlink.drawn})
    return safetensors.save(tensors, metadata={"dpfl": told})


def decode_download(payload: bytes, size: int) -> Downlink:
    """Read a download whose start must hold ``size`` numbers.

    Size, shape and type are checked before anything is used; whatever is not as agreed is refused.
    """
    check(
        len(payload) <= LARGEST_DOWNLINK,
        "download",
        f"{len(payload)} bytes",
        f"send at most {LARGEST_DOWNLINK}",
        PeerError,
    )
    try:
        tensors = safetensors.load(payload)
        (length,) = struct.unpack_from("<Q", payload)
        told = parsed(parsed(payload[8 : 8 + length])["__metadata__"]["dpfl"])
        round_ = int(told["round"])
        drawn = int(told["drawn"])
        start = tensors.pop("start")
        if drawn < 0:
            raise ValueError("a negative number")
    except (SafetensorError, KeyError, ValueError, TypeError, OverflowError) as error:
        raise PeerError("download", f"cannot be read ({error})", _SAME_VERSION) from error
    check(
        start.shape == (size,) and start.dtype == torch.float32,
        "download",
        f"start has shape {tuple(start.shape)} of {start.dtype}",
        f"send {size} float32 numbers",
        PeerError,
    )
    shared: dict[str, Shared] = {}
    for name, tensor in tensors.items():
        slot, _, field = name.partition("/")
        shared.setdefault(slot, {})[field] = tensor
    return Downlink(round=round_, start=start, shared=shared, drawn=drawn)
