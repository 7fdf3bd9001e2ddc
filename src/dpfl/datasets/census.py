"""UCI Adult and Bank Marketing: tables with numbers and words, encoded by fixed, public rules.

Numbers are scaled by ranges chosen here, not read off the data; every word of a column's published
list gets an indicator; a missing or unknown word leaves all of them 0. Left out: Adult's ``fnlwgt``
(a survey weight), Bank's ``duration`` (known only after the call, that is after the answer).
"""

import csv
import gzip
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from dpfl.datasets.stored import check_file, readable

Number = Callable[[float], float]
Columns = Mapping[str, Number | str]


def _scaled(centre: float, width: float) -> Number:
    """Distance from the centre in widths, at most 3 either way."""
    return lambda value: max(-3.0, min(3.0, (value - centre) / width))


def _logarithm(largest: float) -> Number:
    """Signed logarithm, so that a few huge values do not drown the rest."""
    unit = math.log1p(largest)
    return lambda value: math.copysign(min(1.0, math.log1p(abs(value)) / unit), value)


_MISSING = ("", "?", "unknown")
_ADULT_HEADER = (
    "age workclass fnlwgt education education-num marital-status occupation relationship race sex "
    "capital-gain capital-loss hours-per-week native-country income"
)
ADULT_NAMES = tuple(_ADULT_HEADER.split())
ADULT: Columns = {
    "age": _scaled(40, 25),
    "workclass": "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov "
    "Without-pay Never-worked",
    "education-num": _scaled(9, 4),
    "marital-status": "Married-civ-spouse Divorced Never-married Separated Widowed "
    "Married-spouse-absent Married-AF-spouse",
    "occupation": "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty "
    "Handlers-cleaners Machine-op-inspct Adm-clerical Farming-fishing Transport-moving "
    "Priv-house-serv Protective-serv Armed-Forces",
    "relationship": "Wife Own-child Husband Not-in-family Other-relative Unmarried",
    "race": "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black",
    "sex": "Female Male",
    "capital-gain": _logarithm(1e5),
    "capital-loss": _logarithm(1e4),
    "hours-per-week": _scaled(40, 20),
    "native-country": "United-States Mexico",  # the two common ones; all others stay 0
}
BANK: Columns = {
    "age": _scaled(40, 25),
    "job": "admin. blue-collar entrepreneur housemaid management retired self-employed services "
    "student technician unemployed",
    "marital": "divorced married single",
    "education": "primary secondary tertiary",
    "default": "yes",
    "balance": _logarithm(1e5),
    "housing": "yes",
    "loan": "yes",
    "contact": "cellular telephone",
    "month": "jan feb mar apr may jun jul aug sep oct nov dec",
    "campaign": _logarithm(50),
    "pdays": _logarithm(1000),
    "previous": _logarithm(50),
    "poutcome": "failure other success",
}


def encode(rows: Sequence[Mapping[str, str]], columns: Columns) -> np.ndarray:
    """Turn rows of text into numbers (float32), column by column.

    A rule of words gives one indicator per word; a missing number becomes 0, the middle of its
    range.

    >>> encode([{"age": "65", "sex": "Male"}], {"age": _scaled(40, 25), "sex": "Female Male"})
    array([[1., 0., 1.]], dtype=float32)
    """
    encoded: list[list[float]] = []
    for name, rule in columns.items():
        cells = [row[name] for row in rows]
        if isinstance(rule, str):
            encoded.extend([float(cell == word) for cell in cells] for word in rule.split())
        else:
            encoded.append([0.0 if cell in _MISSING else rule(float(cell)) for cell in cells])
    return np.ascontiguousarray(np.array(encoded, dtype=np.float32).T)


def read_adult(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read ``adult.data.gz`` or ``adult.test.gz``.

    Returns features, and labels: 1 where income is above 50K.
    """
    with readable(path), gzip.open(path, "rt") as stream:
        lines = (line.strip().rstrip(".") for line in stream)
        cells = [line.split(", ") for line in lines if line and not line.startswith("|")]
        for number, row in enumerate(cells, 1):
            if len(row) != len(ADULT_NAMES):
                raise ValueError(f"record {number} has {len(row)} cells, not {len(ADULT_NAMES)}")
        rows = [dict(zip(ADULT_NAMES, row, strict=True)) for row in cells]
    return _encode_all(path, rows, ADULT, "income", ("<=50K", ">50K"))


def read_bank(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read ``bank-full.csv.gz``.

    Returns features, and labels: 1 where the client of the bank subscribed.
    """
    with readable(path), gzip.open(path, "rt") as stream:
        rows = list(csv.DictReader(stream, delimiter=";"))
    for name in (*BANK, "y"):
        check_file(
            not rows or name in rows[0],
            path,
            f"has no column '{name}' (columns are separated by ;)",
        )
    return _encode_all(path, rows, BANK, "y", ("no", "yes"))


def _encode_all(
    path: Path, rows: list[dict[str, str]], columns: Columns, label: str, classes: tuple[str, str]
) -> tuple[np.ndarray, np.ndarray]:
    """Features by the rules of columns, and each row's place among the classes.

    ``label`` is the column of the labels.
    """
    check_file(bool(rows), path, "cannot be read (no record)")
    for row in rows:
        check_file(
            row[label] in classes,
            path,
            f"label '{row[label]}' is outside the classes {', '.join(classes)}",
        )
    with readable(path):
        labels = np.array([classes.index(row[label]) for row in rows], dtype=np.int64)
        return encode(rows, columns), labels
