"""MNIST and Fashion-MNIST: images of 28 x 28 bytes in idx files.

Both sets have files of the same names; only their folders tell them apart.
"""

import gzip
import struct
from pathlib import Path

import numpy as np

from dpfl.datasets.stored import Four, check_file, readable

PARTS = ("train", "t10k")
KINDS = {"images-idx3-ubyte.gz": 3, "labels-idx1-ubyte.gz": 1}
FILES = [f"{part}-{kind}" for part in PARTS for kind in KINDS]


def read_mnist(folder: Path) -> Four:
    """Return train images (uint8, n x 28 x 28) and labels (uint8), then those of the test part.

    The folder must hold all of ``FILES``.
    """
    arrays: list[np.ndarray] = []
    for part in PARTS:
        images, labels = (_read_idx(folder / f"{part}-{kind}", n) for kind, n in KINDS.items())
        size = " x ".join(map(str, images.shape[1:]))
        good = images.shape[1:] == (28, 28) and len(images) > 0
        check_file(good, folder, f"holds {len(images)} {part} images of {size}, not of 28 x 28")
        problem = f"{len(images)} images and {len(labels)} labels do not belong together"
        check_file(len(images) == len(labels), folder, problem)
        largest = labels.max()
        check_file(largest <= 9, folder, f"label {largest} is outside the 10 classes")
        arrays += [images, labels]
    return arrays[0], arrays[1], arrays[2], arrays[3]


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an idx file of bytes: a magic number, the lengths of all axes, then the values."""
    with readable(path), gzip.open(path) as stream:
        content = stream.read()
        magic, *shape = struct.unpack_from(f">{1 + dimensions}I", content)
        if magic != 0x800 + dimensions:
            raise ValueError("no idx file of bytes")
        return np.frombuffer(content, np.uint8, offset=4 * (1 + dimensions)).reshape(shape)
