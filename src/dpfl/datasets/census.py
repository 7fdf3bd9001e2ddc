"""UCI Adult and Bank Marketing: tables with numbers and words, encoded by fixed, public rules.

Numbers are scaled by ranges chosen here, not read off the data; every word of a column's published
list gets an indicator; a missing or unknown word leaves all of them 0. Left out: Adult's ``fnlwgt``
(a survey weight), Bank's ``duration`` (known only after the call, that is after the answer).
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from dpfl.core.errors import DataError

Number = Callable[[float], float]
Columns = Mapping[str, Number | str]


def _scaled(centre: float, width: float) -> Number:
    return lambda value: max(-3.0, min(3.0, (value - centre) / width))


def _logarithm(largest: float) -> Number:
    """Signed logarithm, so that a few huge values do not drown the rest."""
    return lambda value: math.copysign(
        min(1.0, math.log1p(abs(value)) / math.log1p(largest)), value
    )


ADULT_NAMES = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship", "race",
    "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income",
)  # fmt: skip
ADULT: Columns = {
    "age": _scaled(40, 25),
    "workclass": "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked",
    "education-num": _scaled(9, 4),
    "marital-status": "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent Married-AF-spouse",
    "occupation": "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty Handlers-cleaners "
    "Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv Protective-serv Armed-Forces",
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
    "job": "admin. blue-collar entrepreneur housemaid management retired self-employed services student technician "
    "unemployed",
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
    """Turn rows of text into numbers; a number that is missing becomes 0, the middle of its
    range.
    """
    encoded: list[list[float]] = []
    for name, rule in columns.items():
        if isinstance(rule, str):
            encoded.extend([float(row[name] == word) for row in rows] for word in rule.split())
        else:
            encoded.append(
                [
                    rule(float(row[name])) if row[name] not in ("", "?", "unknown") else 0.0
                    for row in rows
                ]
            )
    return np.array(encoded, dtype=np.float32).T


def read_adult(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read ``adult.data.gz`` or ``adult.test.gz``: features, and 1 where income is above 50K."""

    def rows(stream: Sequence[str]) -> list[dict[str, str]]:
        lines = (line.strip().rstrip(".") for line in stream)
        cells = [line.split(", ") for line in lines if line and not line.startswith("|")]
        for number, row in enumerate(cells, 1):
            if len(row) != len(ADULT_NAMES):
                raise ValueError(f"record {number} has {len(row)} cells, not {len(ADULT_NAMES)}")
        return [dict(zip(ADULT_NAMES, row, strict=True)) for row in cells]

    table = _read(path, rows)
    return _encoded(path, table, ADULT), _classes(
        path, [row["income"] for row in table], ("<=50K", ">50K")
    )


def read_bank(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read ``bank-full.csv.gz``: features, and 1 where the client subscribed."""
    table = _read(path, lambda stream: list(csv.DictReader(stream, delimiter=";")))
    needed = [*BANK, "y"]
    absent = next((name for name in needed if name not in table[0]), None)
    if absent is not None:
        raise DataError(
            str(path),
            f"has no column '{absent}' (columns are separated by ;)",
            "fetch the file again",
        )
    return _encoded(path, table, BANK), _classes(path, [row["y"] for row in table], ("no", "yes"))


def _read(
    path: Path, rows: Callable[[Sequence[str]], list[dict[str, str]]]
) -> list[dict[str, str]]:
    try:
        with gzip.open(path, "rt") as stream:
            table = rows(stream.readlines())
        if not table:
            raise ValueError("no record")
        return table
    except (OSError, EOFError, ValueError, KeyError, csv.Error, zlib.error) as error:
        raise DataError(str(path), f"cannot be read ({error})", "fetch the file again") from error


def _encoded(path: Path, table: list[dict[str, str]], columns: Columns) -> np.ndarray:
    try:
        return encode(table, columns)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(str(path), f"cannot be read ({error})", "fetch the file again") from error


def _classes(path: Path, labels: list[str], known: tuple[str, ...]) -> np.ndarray:
    odd = next((label for label in labels if label not in known), None)
    if odd is not None:
        raise DataError(
            str(path),
            f"label '{odd}' is outside the classes {', '.join(known)}",
            "fetch the file again",
        )
    return np.array([known.index(label) for label in labels], dtype=np.int64)
