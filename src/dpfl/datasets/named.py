"""Named data sets.

Features are scaled by fixed, public constants: statistics of private data would be releases that
nobody charges.
"""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpfl.core.errors import unknown_name
from dpfl.core.files import cache_folder
from dpfl.data.inputs import NUMBERS, Inputs, Pixels, Tokens
from dpfl.data.records import Dataset, spans_of
from dpfl.datasets import census, imdb, mnist, shakespeare
from dpfl.datasets.cifar import read_cifar10
from dpfl.datasets.heart import read_heart_disease
from dpfl.datasets.stored import Four, not_found


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
    """Where data is looked for: what was given, ``DPFL_DATA``, the user's cache; in this order."""
    named = os.environ.get("DPFL_DATA")
    return [*([given] if given else []), *([Path(named)] if named else []), cache_folder() / "data"]


def load_dataset(name: str, folder: Path | None = None) -> Dataset:
    """Load a data set by name, from ``folder`` or one of the usual places (:func:`data_folders`).

    >>> data = load_dataset("digits")
    >>> tuple(data.features.shape), data.classes
    ((1797, 64), 10)
    """
    if name not in DATASETS:
        raise unknown_name("data", "data set", name, DATASETS)
    return DATASETS[name].load(folder)


def _digits(folder: Path | None) -> Dataset:
    """1,797 handwritten digits, 8 x 8 grey, 10 classes (scikit-learn)."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return Dataset(name="digits", features=_float(x / 16.0), labels=_int(y), classes=10)


# Smallest and largest value of each feature, as the data set's own description publishes them.
_BREAST_CANCER_RANGES = """
6.981 28.11  9.71 39.28  43.79 188.5  143.5 2501  0.053 0.163  0.019 0.345  0 0.427  0 0.201
0.106 0.304  0.05 0.097  0.112 2.873  0.36 4.885  0.757 21.98  6.802 542.2  0.002 0.031  0.002 0.135
0 0.396  0 0.053  0.008 0.079  0.001 0.03  7.93 36.04  12.02 49.54  50.41 251.2  185.2 4254
0.071 0.223  0.027 1.058  0 1.252  0 0.291  0.156 0.664  0.055 0.208
"""


def _breast_cancer(folder: Path | None) -> Dataset:
    """569 biopsies, 30 features, 2 classes (scikit-learn)."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    low, high = np.array(_BREAST_CANCER_RANGES.split(), dtype=float).reshape(-1, 2).T
    scaled = 2 * (x - low) / (high - low) - 1
    return Dataset(name="breast_cancer", features=_float(scaled), labels=_int(y), classes=2)


def _heart_disease(folder: Path | None) -> Dataset:
    """920 patients of four hospitals, 32 features, 2 classes (UCI, CC BY 4.0)."""
    x, y, silos = read_heart_disease()
    return Dataset(name="heart_disease", features=_float(x), labels=_int(y), classes=2, silos=silos)


def _adult(folder: Path | None) -> Dataset:
    """48,842 people, income above 50K or not, 49 features, 2 classes (UCI, CC BY 4.0)."""
    base = _find("adult", folder, "adult.data.gz", "adult.test.gz")
    train, test = (census.read_adult(base / f"adult.{part}.gz") for part in ("data", "test"))
    return _with_test("adult", 2, (*train, *test))


def _bank_marketing(folder: Path | None) -> Dataset:
    """45,211 clients of a bank, subscribed or not, 42 features, 2 classes (UCI, CC BY 4.0)."""
    base = _find("bank_marketing", folder, "bank-full.csv.gz")
    x, y = census.read_bank(base / "bank-full.csv.gz")
    return Dataset(name="bank_marketing", features=_float(x), labels=_int(y), classes=2)


def _cifar10(folder: Path | None) -> Dataset:
    """60,000 small photographs, 32 x 32 in colour, 10 classes."""
    scale = Pixels(mean=(0.4914, 0.4822, 0.4465), deviation=(0.2470, 0.2435, 0.2616))
    return _with_test("cifar10", 10, read_cifar10(data_folders(folder)), scale)


def _imdb(folder: Path | None) -> Dataset:
    """Film reviews, the last 200 words as tokens, liked or not (20,000 of 50,000 will do)."""
    reviews = imdb.read_imdb(data_folders(folder))
    return _with_test("imdb", 2, reviews, Tokens(imdb.VOCABULARY))


def _shakespeare(folder: Path | None) -> Dataset:
    """Next character after 80, by speaking role: 857 roles of 37 plays (Moby, public domain).

    Every role is a silo. Training windows overlap, and are views of one text; test windows do not
    overlap.
    """
    file = "moby-shakespeare.tar.xz"
    roles = shakespeare.read_shakespeare(_find("shakespeare", folder, file) / file)
    features, labels = shakespeare.windows(torch.from_numpy(roles.tokens))
    silos, test_x, test_y, every = {}, [], [], slice(None, None, shakespeare.WINDOW)
    for i, name in enumerate(roles.names):
        train, own = roles.split(i)
        first = int(roles.offsets[i])
        silos[name] = (first, first + len(train) - shakespeare.WINDOW)
        x, y = shakespeare.windows(own)
        test_x.append(x[every])
        test_y.append(y[every])
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
    """Grey images, scaled by a mean and a deviation."""
    x, y, test_x, test_y = mnist.read_mnist(_find(name, folder, *mnist.FILES))
    x, test_x = ((part[:, None] / 255.0 - mean) / deviation for part in (x, test_x))
    return _with_test(name, 10, (_float(x).numpy(), y, _float(test_x).numpy(), test_y))


def _with_test(name: str, classes: int, arrays: Four, inputs: Inputs = NUMBERS) -> Dataset:
    """A data set with a test part of its own.

    Features are stored as they are, as bytes or tokens where ``inputs`` reads them.
    """
    x, test_x = torch.from_numpy(arrays[0]), torch.from_numpy(arrays[2])
    y, test_y = _int(arrays[1]), _int(arrays[3])
    return Dataset(
        name=name, features=x, labels=y, classes=classes, inputs=inputs, test=(test_x, test_y)
    )


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


def _float(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


def _int(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))


DATASETS: dict[str, Source] = {
    "digits": Source(_digits, embedded=True),
    "breast_cancer": Source(_breast_cancer, embedded=True),
    "heart_disease": Source(_heart_disease, embedded=True),
    "adult": Source(_adult),
    "bank_marketing": Source(_bank_marketing),
    "cifar10": Source(_cifar10),
    "imdb": Source(_imdb),
    "shakespeare": Source(_shakespeare),
    "mnist": Source(_mnist),
    "fashion_mnist": Source(_fashion_mnist),
}
"""Data sets by name."""
