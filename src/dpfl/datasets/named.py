"""Named data sets.

Features are scaled by fixed, public constants: statistics of private data would be releases that
nobody charges.
"""

import gzip
import inspect
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpfl.core.errors import unknown_name
from dpfl.core.files import cache_folder
from dpfl.data.inputs import NUMBERS, Inputs, Numbers, Pixels, Tokens
from dpfl.data.records import Dataset, spans_of
from dpfl.datasets import census, imdb, shakespeare
from dpfl.datasets.cifar import read_cifar10
from dpfl.datasets.heart import read_heart_disease
from dpfl.datasets.stored import Arrays, check_file, not_found, readable
from dpfl.tasks import Regression


@dataclass(frozen=True)
class Source:
    """How to load a data set from a folder, and whether it comes with the package."""

    load: Callable[[Path | None], Dataset]
    embedded: bool = False

    @property
    def about(self) -> str:
        """What the data set is: the first line of its loader's description."""
        return (inspect.getdoc(self.load) or "").splitlines()[0].rstrip(".")


def data_folders(given: Path | None) -> list[Path]:
    """Where data is looked for: only in the folder that was given; without one, in ``DPFL_DATA``
    and then in the user's cache.
    """
    if given is not None:
        return [given]
    named = (os.environ.get("DPFL_DATA"), cache_folder() / "data")
    return [Path(folder) for folder in named if folder]


def load_dataset(name: str, folder: Path | str | None = None) -> Dataset:
    """Load a data set by name, from ``folder`` or one of the usual places (:func:`data_folders`).

    >>> data = load_dataset("digits")
    >>> tuple(data.features.shape), data.classes
    ((1797, 64), 10)
    """
    if name not in DATASETS:
        raise unknown_name("data", "data set", str(name), DATASETS)
    return DATASETS[name].load(None if folder is None else Path(folder))


def _digits(folder: Path | None) -> Dataset:
    """1,797 handwritten digits, 8 x 8 grey, 10 classes (scikit-learn)."""
    rows = _sklearn_rows("digits.csv.gz", delimiter=",")
    return _dataset("digits", 10, (rows[:, :-1] / 16.0, rows[:, -1]), Numbers(picture=(1, 8, 8)))


@cache
def _sklearn_rows(name: str, **layout: Any) -> np.ndarray:
    """A text file of numbers that comes with scikit-learn, which takes long to import; read once a
    process, for that takes longer than a round.
    """
    path = distribution("scikit-learn").locate_file(f"sklearn/datasets/data/{name}")
    return np.loadtxt(str(path), **layout)


# Smallest and largest value of each feature, as the data set's own description publishes them.
_BREAST_CANCER_RANGES = """
6.981 28.11  9.71 39.28  43.79 188.5  143.5 2501  0.053 0.163  0.019 0.345  0 0.427  0 0.201
0.106 0.304  0.05 0.097  0.112 2.873  0.36 4.885  0.757 21.98  6.802 542.2  0.002 0.031  0.002 0.135
0 0.396  0 0.053  0.008 0.079  0.001 0.03  7.93 36.04  12.02 49.54  50.41 251.2  185.2 4254
0.071 0.223  0.027 1.058  0 1.252  0 0.291  0.156 0.664  0.055 0.208
"""


def _breast_cancer(folder: Path | None) -> Dataset:
    """569 biopsies, 30 features, 2 classes (scikit-learn)."""
    rows = _sklearn_rows("breast_cancer.csv", delimiter=",", skiprows=1)
    low, high = np.array(_BREAST_CANCER_RANGES.split(), dtype=float).reshape(-1, 2).T
    return _dataset("breast_cancer", 2, (2 * (rows[:, :-1] - low) / (high - low) - 1, rows[:, -1]))


# Round ranges that hold the values of such measurements: age, sex, body mass index, blood pressure,
# and six blood values.
_DIABETES_RANGES = "0 100  1 2  15 45  50 150  80 320  30 250  20 100  1 10  3 7  50 130"


def _diabetes(folder: Path | None) -> Dataset:
    """442 patients, 10 features, disease progression in hundreds: a regression (scikit-learn)."""
    x = _sklearn_rows("diabetes_data_raw.csv.gz")
    y = _sklearn_rows("diabetes_target.csv.gz")
    low, high = np.array(_DIABETES_RANGES.split(), dtype=float).reshape(-1, 2).T
    features = torch.from_numpy((2 * (x - low) / (high - low) - 1).astype(np.float32))
    targets = torch.from_numpy((y / 100).astype(np.float32))
    task = Regression(outputs_per_record=1)
    return Dataset(name="diabetes", features=features, labels=targets, task=task)


def _heart_disease(folder: Path | None) -> Dataset:
    """920 patients of four hospitals, 32 features, 2 classes (UCI, CC BY 4.0)."""
    x, y, silos = read_heart_disease()
    return replace(_dataset("heart_disease", 2, (x, y)), silos=silos)


def _adult(folder: Path | None) -> Dataset:
    """48,842 people, income above 50K or not, 49 features, 2 classes (UCI, CC BY 4.0)."""
    base = _find("adult", folder, "adult.data.gz", "adult.test.gz")
    train, test = (census.read_adult(base / f"adult.{part}.gz") for part in ("data", "test"))
    return _dataset("adult", 2, (*train, *test))


def _bank_marketing(folder: Path | None) -> Dataset:
    """45,211 clients of a bank, subscribed or not, 42 features, 2 classes (UCI, CC BY 4.0)."""
    base = _find("bank_marketing", folder, "bank-full.csv.gz")
    return _dataset("bank_marketing", 2, census.read_bank(base / "bank-full.csv.gz"))


def _cifar10(folder: Path | None) -> Dataset:
    """60,000 small photographs, 32 x 32 in colour, 10 classes."""
    scale = Pixels(mean=(0.4914, 0.4822, 0.4465), deviation=(0.2470, 0.2435, 0.2616))
    return _dataset("cifar10", 10, read_cifar10(data_folders(folder)), scale)


def _imdb(folder: Path | None) -> Dataset:
    """Film reviews, the last 200 words as tokens, liked or not (20,000 of 50,000 will do)."""
    return _dataset("imdb", 2, imdb.read_imdb(data_folders(folder)), Tokens(imdb.VOCABULARY))


def _shakespeare(folder: Path | None) -> Dataset:
    """Next character after 80, by speaking role: 857 roles of 37 plays (Moby, public domain).

    Every role is a silo. Training windows overlap, and are views of one text; test windows do not
    overlap.
    """
    file = "moby-shakespeare.tar.xz"
    roles = shakespeare.read_shakespeare(_find("shakespeare", folder, file) / file)
    features, labels = shakespeare.windows(torch.from_numpy(roles.tokens))
    silos = {}
    test_x = []
    test_y = []
    for i, (name, first) in enumerate(zip(roles.names, roles.offsets.tolist(), strict=False)):
        train, own = roles.split(i)
        silos[name] = (first, first + len(train) - shakespeare.WINDOW)
        x, y = (part[:: shakespeare.WINDOW] for part in shakespeare.windows(own))
        test_x.append(x)
        test_y.append(y)
    return Dataset(
        name="shakespeare",
        features=features,
        labels=labels,
        classes=shakespeare.VOCABULARY,
        inputs=Tokens(shakespeare.VOCABULARY),
        test=(torch.cat(test_x), torch.cat(test_y)),
        silos=silos,
        test_silos=dict(zip(roles.names, spans_of(test_y), strict=True)),
    )


def _mnist(folder: Path | None) -> Dataset:
    """70,000 handwritten digits, 28 x 28, 10 classes."""
    return _idx_images("mnist", folder, 0.1307, 0.3081)


def _fashion_mnist(folder: Path | None) -> Dataset:
    """70,000 pieces of clothing, 28 x 28, 10 classes."""
    return _idx_images("fashion_mnist", folder, 0.2860, 0.3530)


def _idx_images(name: str, folder: Path | None, mean: float, deviation: float) -> Dataset:
    """Grey images in idx files, scaled by a mean and a deviation.

    Both sets have files of the same names; only their folders tell them apart.
    """
    kinds = {"images-idx3-ubyte.gz": 3, "labels-idx1-ubyte.gz": 1}
    arrays = []
    files = {f"{part}-{kind}": n for part in ("train", "t10k") for kind, n in kinds.items()}
    base = _find(name, folder, *files)
    read = [_read_idx(base / file, dimensions) for file, dimensions in files.items()]
    for images, labels in (read[:2], read[2:]):
        size = " x ".join(map(str, images.shape[1:]))
        largest = labels.max(initial=0)
        check_file(
            images.shape[1:] == (28, 28) and len(images) > 0,
            base,
            f"holds {len(images)} images of {size}, not of 28 x 28",
        )
        check_file(
            len(images) == len(labels),
            base,
            f"{len(images)} images and {len(labels)} labels do not belong together",
        )
        check_file(largest <= 9, base, f"label {largest} is outside the 10 classes")
        arrays += [(images[:, None] / 255.0 - mean) / deviation, labels]
    return _dataset(name, 10, arrays)


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an idx file of bytes: a magic number, the lengths of all axes, then the values."""
    with readable(path), gzip.open(path) as stream:
        content = stream.read()
        magic, *shape = struct.unpack_from(f">{1 + dimensions}I", content)
        if magic != 0x800 + dimensions:
            raise ValueError("no idx file of bytes")
        return np.frombuffer(content, np.uint8, offset=4 * (1 + dimensions)).reshape(shape)


def _dataset(name: str, classes: int, arrays: Arrays, inputs: Inputs = NUMBERS) -> Dataset:
    """A data set of features and labels, and of both again where it has a test part of its own.

    Numbers become float32; bytes and tokens, which ``inputs`` reads, are stored as they are.
    """
    kinds = (np.float32 if isinstance(inputs, Numbers) else arrays[0].dtype, np.int64) * 2
    x, y, *test = (
        torch.from_numpy(np.ascontiguousarray(array, kind))
        for array, kind in zip(arrays, kinds, strict=False)
    )
    own = (test[0], test[1]) if test else None
    return Dataset(name=name, features=x, labels=y, classes=classes, inputs=inputs, test=own)


def _find(name: str, given: Path | None, *files: str) -> Path:
    """The first folder that holds all files.

    In each of the usual places, the subfolder named after the data set comes first, then the place
    itself.
    """
    others = {source.replace("_", "-") for source in DATASETS if source != name}
    places = [base / name.replace("_", "-") for base in data_folders(given)]
    for candidate in (folder for place in places for folder in (place, place.parent)):
        # Another set's folder does not count: Fashion-MNIST's files have MNIST's names.
        if candidate.name not in others and all((candidate / file).is_file() for file in files):
            return candidate
    raise not_found(name, places, ", ".join(files))


_EMBEDDED = (_digits, _breast_cancer, _heart_disease, _diabetes)
_FETCHED = (_adult, _bank_marketing, _cifar10, _imdb, _shakespeare, _mnist, _fashion_mnist)
DATASETS: dict[str, Source] = {
    load.__name__.removeprefix("_"): Source(load, embedded=load in _EMBEDDED)
    for load in (*_EMBEDDED, *_FETCHED)
}
"""Data sets by name."""
