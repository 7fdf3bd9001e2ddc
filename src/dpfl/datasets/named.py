"""Named data sets. Features are scaled by fixed, public constants: statistics of private data would
be unbilled releases.
"""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpfl.core.errors import DataError, unknown_name
from dpfl.data.inputs import Pixels, Tokens
from dpfl.data.records import Dataset
from dpfl.datasets import imdb, shakespeare
from dpfl.datasets.census import read_adult, read_bank
from dpfl.datasets.cifar import read_cifar10
from dpfl.datasets.imdb import read_imdb
from dpfl.datasets.shakespeare import WINDOW, read_shakespeare, windows
from dpfl.privacy.cache import cache_folder


@dataclass(frozen=True)
class Source:
    """How to get a data set, and what a person should know of it before."""

    load: Callable[[Path | None], Dataset]
    about: str
    embedded: bool


def data_folders(given: Path | None) -> list[Path]:
    """Where data is looked for: what was given, ``DPFL_DATA``, the user's cache; in this order."""
    named = os.environ.get("DPFL_DATA")
    return [*([given] if given else []), *([Path(named)] if named else []), cache_folder() / "data"]


def load_dataset(name: str, folder: Path | None = None) -> Dataset:
    """Load a data set by name.

    >>> data = load_dataset("digits")
    >>> tuple(data.features.shape), data.classes
    ((1797, 64), 10)
    """
    if name not in DATASETS:
        raise unknown_name("data", "data set", name, DATASETS)
    return DATASETS[name].load(folder)


def _digits(folder: Path | None) -> Dataset:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return Dataset(name="digits", features=_float(x / 16.0), labels=_int(y), classes=10)


# Smallest and largest value of each feature, as the data set's own description publishes them.
_BREAST_CANCER_RANGES = """
6.981 28.11  9.71 39.28  43.79 188.5  143.5 2501  0.053 0.163  0.019 0.345  0 0.427  0 0.201  0.106 0.304  0.05 0.097
0.112 2.873  0.36 4.885  0.757 21.98  6.802 542.2  0.002 0.031  0.002 0.135  0 0.396  0 0.053  0.008 0.079  0.001 0.03
7.93 36.04  12.02 49.54  50.41 251.2  185.2 4254  0.071 0.223  0.027 1.058  0 1.252  0 0.291  0.156 0.664  0.055 0.208
"""


def _breast_cancer(folder: Path | None) -> Dataset:
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    low, high = np.array(_BREAST_CANCER_RANGES.split(), dtype=float).reshape(-1, 2).T
    scaled = 2 * (x - low) / (high - low) - 1
    return Dataset(name="breast_cancer", features=_float(scaled), labels=_int(y), classes=2)


HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
# Column: centre and half-width of the clinically usual range; fixed by us, not read off the data.
_HEART_NUMBERS = {0: (55, 25), 3: (130, 40), 4: (240, 100), 7: (140, 50), 9: (1, 2), 11: (1, 2)}
_HEART_CATEGORIES = {2: (1, 2, 3, 4), 6: (0, 1, 2), 10: (1, 2, 3), 12: (3, 6, 7)}
_HEART_FLAGS = (1, 5, 8)
_ZERO_IS_MISSING = (3, 4)  # nobody has no blood pressure and no cholesterol


def _heart_disease(folder: Path | None) -> Dataset:
    features, labels, silos, start = [], [], {}, 0
    for hospital in HOSPITALS:
        text = (
            resources.files("dpfl.datasets")
            .joinpath("embedded", f"processed.{hospital}.data")
            .read_text()
        )
        rows = [
            [np.nan if cell == "?" else float(cell) for cell in line.split(",")]
            for line in text.split()
        ]
        table = np.array(rows)
        features.append(_heart_features(table[:, :13]))
        labels.append((table[:, 13] > 0).astype(np.int64))
        silos[hospital] = (start, start + len(table))
        start += len(table)
    x, y = np.concatenate(features), np.concatenate(labels)
    return Dataset(name="heart_disease", features=_float(x), labels=_int(y), classes=2, silos=silos)


def _heart_features(table: np.ndarray) -> np.ndarray:
    """Scale by fixed ranges, one indicator a category, zero where missing, and a column that says
    what is missing.
    """
    table = table.copy()
    for column in _ZERO_IS_MISSING:
        table[table[:, column] == 0, column] = np.nan
    columns = []
    for column, (centre, width) in _HEART_NUMBERS.items():
        columns.append(np.clip((table[:, column] - centre) / width, -3, 3))
    columns.extend(2 * table[:, column] - 1 for column in _HEART_FLAGS)
    for column, values in _HEART_CATEGORIES.items():
        columns.extend((table[:, column] == value).astype(float) for value in values)
    missing = np.isnan(table)
    columns.extend(
        missing[:, column].astype(float)
        for column in range(table.shape[1])
        if column not in (0, 1, 2)
    )
    stacked: np.ndarray = np.nan_to_num(np.stack(columns, axis=1), nan=0.0)
    return stacked


def _idx_images(
    name: str, subfolder: str, mean: float, deviation: float
) -> Callable[[Path | None], Dataset]:
    def load(folder: Path | None) -> Dataset:
        base = _find(name, subfolder, folder, ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz",
                                               "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"])  # fmt: skip
        parts = []
        for part in ("train", "t10k"):
            images = _read_idx(base / f"{part}-images-idx3-ubyte.gz", 3)
            labels = _read_idx(base / f"{part}-labels-idx1-ubyte.gz", 1)
            if images.shape[1:] != (28, 28) or len(images) == 0:
                size = " x ".join(map(str, images.shape[1:]))
                raise DataError(
                    str(base),
                    f"holds {len(images)} {part} images of {size}, not of 28 x 28",
                    "fetch the files again",
                )
            if len(images) != len(labels):
                raise DataError(
                    str(base),
                    f"{len(images)} images and {len(labels)} labels do not belong together",
                    "fetch the files again",
                )
            if labels.size and labels.max() > 9:
                raise DataError(
                    str(base),
                    f"label {labels.max()} is outside the 10 classes",
                    "fetch the files again",
                )
            parts.append((_float((images[:, None] / 255.0 - mean) / deviation), _int(labels)))
        (x, y), test = parts
        return Dataset(name=name, features=x, labels=y, classes=10, test=test)

    return load


def _adult(folder: Path | None) -> Dataset:
    base = _find("adult", "adult", folder, ["adult.data.gz", "adult.test.gz"])
    (x, y), (test_x, test_y) = (read_adult(base / f"adult.{part}.gz") for part in ("data", "test"))
    test = (_float(test_x), _int(test_y))
    return Dataset(name="adult", features=_float(x), labels=_int(y), classes=2, test=test)


def _bank_marketing(folder: Path | None) -> Dataset:
    base = _find("bank_marketing", "bank-marketing", folder, ["bank-full.csv.gz"])
    x, y = read_bank(base / "bank-full.csv.gz")
    return Dataset(name="bank_marketing", features=_float(x), labels=_int(y), classes=2)


def _cifar10(folder: Path | None) -> Dataset:
    x, y, test_x, test_y = read_cifar10(data_folders(folder))
    return Dataset(
        name="cifar10",
        features=torch.from_numpy(x),
        labels=_int(y),
        classes=10,
        inputs=Pixels(mean=(0.4914, 0.4822, 0.4465), deviation=(0.2470, 0.2435, 0.2616)),
        test=(torch.from_numpy(test_x), _int(test_y)),
    )


def _imdb(folder: Path | None) -> Dataset:
    x, y, test_x, test_y = read_imdb(data_folders(folder))
    test = (torch.from_numpy(test_x), _int(test_y))
    inputs = Tokens(imdb.VOCABULARY)
    return Dataset(
        name="imdb",
        features=torch.from_numpy(x),
        labels=_int(y),
        classes=2,
        inputs=inputs,
        test=test,
    )


def _shakespeare(folder: Path | None) -> Dataset:
    """Every role is a silo. Training windows overlap, and are views of one text; test windows do
    not overlap.
    """
    file = "moby-shakespeare.tar.xz"
    roles = read_shakespeare(_find("shakespeare", "shakespeare", folder, [file]) / file)
    text = torch.from_numpy(roles.tokens)
    features, labels = windows(text)
    silos, test_silos, test = {}, {}, []
    end = 0
    for i, name in enumerate(roles.names):
        train, own = roles.split(i)
        first = int(roles.offsets[i])
        silos[name] = (first, first + len(train) - WINDOW)
        x, y = windows(own)
        test.append((x[::WINDOW], y[::WINDOW]))
        test_silos[name] = (end, end + len(test[-1][1]))
        end = test_silos[name][1]
    return Dataset(
        name="shakespeare",
        features=features,
        labels=labels,
        classes=shakespeare.VOCABULARY,
        inputs=Tokens(shakespeare.VOCABULARY),
        test=(torch.cat([x for x, _ in test]), torch.cat([y for _, y in test])),
        silos=silos,
        test_silos=test_silos,
    )


_SUBFOLDERS = {
    "mnist",
    "fashion-mnist",
    "adult",
    "bank-marketing",
    "imdb",
    "shakespeare",
    "cifar-10-binary",
}


def _find(name: str, subfolder: str, given: Path | None, files: list[str]) -> Path:
    for base in data_folders(given):
        for candidate in (base / subfolder, base):
            if candidate.name in _SUBFOLDERS - {
                subfolder
            }:  # another set's folder: Fashion-MNIST's files have MNIST's names
                continue
            if all((candidate / file).is_file() for file in files):
                return candidate
    places = ", ".join(str(base / subfolder) for base in data_folders(given))
    raise DataError(
        f"data set '{name}'",
        f"its files are in none of {places}",
        f"put {', '.join(files)} there, or name the folder with --data",
    )


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    try:
        with gzip.open(path) as stream:
            content = stream.read()
        magic, *shape = struct.unpack_from(f">{1 + dimensions}I", content)
        if magic != 0x800 + dimensions:
            raise ValueError("no idx file of bytes")
        return np.frombuffer(content, np.uint8, offset=4 * (1 + dimensions)).reshape(shape)
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise DataError(str(path), f"cannot be read ({error})", "fetch the file again") from error


def _float(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


def _int(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))


DATASETS: dict[str, Source] = {
    "digits": Source(
        _digits, "1,797 handwritten digits, 8 x 8 grey, 10 classes (scikit-learn)", True
    ),
    "breast_cancer": Source(
        _breast_cancer, "569 biopsies, 30 features, 2 classes (scikit-learn)", True
    ),
    "heart_disease": Source(
        _heart_disease,
        "920 patients of four hospitals, 32 features, 2 classes (UCI, CC BY 4.0)",
        True,
    ),
    "adult": Source(
        _adult,
        "48,842 people, income above 50K or not, 49 features, 2 classes (UCI, CC BY 4.0)",
        False,
    ),
    "bank_marketing": Source(
        _bank_marketing,
        "45,211 clients of a bank, subscribed or not, 42 features, 2 classes (UCI, CC BY 4.0)",
        False,
    ),
    "cifar10": Source(_cifar10, "60,000 small photographs, 32 x 32 in colour, 10 classes", False),
    "imdb": Source(
        _imdb,
        "film reviews, the last 200 words as tokens, liked or not (20,000 of 50,000 will do)",
        False,
    ),
    "shakespeare": Source(
        _shakespeare,
        "next character after 80, by speaking role: 857 roles of 37 plays (Moby, public domain)",
        False,
    ),
    "mnist": Source(
        _idx_images("mnist", "mnist", 0.1307, 0.3081),
        "70,000 handwritten digits, 28 x 28, 10 classes",
        False,
    ),
    "fashion_mnist": Source(
        _idx_images("fashion_mnist", "fashion-mnist", 0.2860, 0.3530),
        "70,000 pieces of clothing, 28 x 28, 10 classes",
        False,
    ),
}
