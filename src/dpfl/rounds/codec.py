"""Bytes that travel: exact sizes, no pickle, everything checked before anything is decoded.

An upload is a frame of 40 bytes followed by numbers of four bytes, little-endian: float32, or whole
multiples of a grid's step (int32) where noise was added on a grid, so that a sum of uploads is
exact. The frame's tag binds it to one (run, round, client); a checksum finds damage. A download is
a safetensors document: the start and what the plugs share.
"""

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from dpfl.core.errors import PeerError
from dpfl.core.grid import Grid
from dpfl.core.types import Downlink, Shared

_FRAME = struct.Struct("<4sBBHiQ16sI")
_MAGIC, _VERSION, _FLOAT32, _INTEGERS = b"DPFL", 1, 0, 1
FRAME_BYTES = _FRAME.size
LARGEST_DOWNLINK = 1 << 32


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
        kind, body = (
            _FLOAT32,
            vector.detach()
            .to(torch.float32)
            .contiguous()
            .numpy()
            .astype("<f4", copy=False)
            .tobytes(),
        )
    else:
        kind, body = _INTEGERS, grid.integers(vector.detach()).numpy().astype("<i4").tobytes()
    head = _FRAME.pack(
        _MAGIC,
        _VERSION,
        kind,
        0,
        round_,
        vector.numel(),
        tag(run, round_, client),
        zlib.crc32(body),
    )
    return head + body


def decode_upload(
    payload: bytes, length: int | None, run: str, round_: int, client: str, grid: Grid | None = None
) -> Tensor:
    """Read a frame of exactly ``length`` numbers (any number if None), refusing whatever is not as
    agreed.

    Numbers on a grid come back in double precision, as the very multiples that were sent.
    """
    where = f"upload of '{client}'"
    if len(payload) < FRAME_BYTES:
        raise PeerError(where, f"{len(payload)} bytes are no frame", "send a dpfl upload")
    magic, version, kind, reserved, sent_round, count, sent_tag, checksum = _FRAME.unpack_from(
        payload
    )
    if (magic, version, kind, reserved) != (
        _MAGIC,
        _VERSION,
        _FLOAT32 if grid is None else _INTEGERS,
        0,
    ):
        raise PeerError(
            where, "is not a dpfl upload of this version", "use the same version on both sides"
        )
    if sent_round != round_ or sent_tag != tag(run, round_, client):
        raise PeerError(
            where,
            "belongs to another run, round or client",
            "send each upload once, to its own round",
        )
    if length is not None and count != length:
        raise PeerError(where, f"announces {count} numbers", f"send {length}")
    if len(payload) != FRAME_BYTES + 4 * count:
        raise PeerError(
            where,
            f"announces {count} numbers in {len(payload) - FRAME_BYTES} bytes",
            "send four bytes a number",
        )
    body = memoryview(payload)[FRAME_BYTES:]
    if zlib.crc32(body) != checksum:
        raise PeerError(where, "was damaged on the way", "send it again")
    if grid is not None:
        return torch.from_numpy(np.frombuffer(body, dtype="<i4").astype(np.float64)).mul_(grid.step)
    return torch.from_numpy(np.frombuffer(body, dtype="<f4").astype(np.float32))


def encode_download(downlink: Downlink) -> bytes:
    """Write a download; equal downlinks give equal bytes."""
    tensors: dict[str, Tensor] = {"start": downlink.start.contiguous()}
    for slot, shared in downlink.shared.items():
        for name, tensor in shared.items():
            tensors[f"{slot}/{name}"] = tensor.contiguous()
    return safetensors.save(
        tensors, metadata={"dpfl": json.dumps({"round": downlink.round, "drawn": downlink.drawn})}
    )


def decode_download(payload: bytes, size: int) -> Downlink:
    """Read a download whose start must hold ``size`` numbers.

    Size, shape and type are checked before anything is used; whatever is not as agreed is refused.
    """
    if len(payload) > LARGEST_DOWNLINK:
        raise PeerError("download", f"{len(payload)} bytes", f"send at most {LARGEST_DOWNLINK}")
    try:
        tensors = safetensors.load(payload)
        told = json.loads(_metadata(payload)["dpfl"])
        round_, drawn = int(told["round"]), int(told["drawn"])
        start = tensors.pop("start")
        if drawn < 0:
            raise ValueError("a negative number")
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise PeerError(
            "download", f"cannot be read ({error})", "use the same version on both sides"
        ) from error
    if start.shape != (size,) or start.dtype != torch.float32:
        raise PeerError(
            "download",
            f"start has shape {tuple(start.shape)} of {start.dtype}",
            f"send {size} float32 numbers",
        )
    shared: dict[str, Shared] = {}
    for name, tensor in tensors.items():
        slot, _, field = name.partition("/")
        shared.setdefault(slot, {})[field] = tensor
    return Downlink(round=round_, start=start, shared=shared, drawn=drawn)


def _metadata(payload: bytes) -> Mapping[str, str]:
    (length,) = struct.unpack_from("<Q", payload)
    header = json.loads(payload[8 : 8 + length])
    metadata: Mapping[str, str] = header["__metadata__"]
    return metadata
