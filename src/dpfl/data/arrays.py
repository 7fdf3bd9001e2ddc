"""The user's own arrays: checked, converted, and split into a training and a test part.

Whatever cannot be used is refused with the client's name: arrays that are not numbers, labels that
are not whole numbers from 0, lengths that differ, too few records.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl.core.errors import DataError
from dpfl.core.random import PublicSeed
from dpfl.data.records import Parts, Span, check_data

TEST_FRACTION = 0.2
ENCODE = "encode texts with the vocabulary that was named"


def client_parts(client: Any, arrays: Sequence[Any], *, tokens: bool, seed: PublicSeed) -> Parts:
    """Check one client's arrays: (features, labels), with test features and labels or without.

    Without a test part, a fifth of the records is set aside. ``tokens``: whether features are whole
    numbers for an embedding.
    """
    named = isinstance(client, str) and client.isprintable() and client != ""
    remedy = "name clients by text without control characters"
    check_data(named, f"client {client!r}", "has no printable name", remedy)
    where, remedy = f"client '{client}'", "give (features, labels), test parts too if any"
    problem = f"has a {type(arrays).__name__} instead of arrays"
    torch_remedy = f"{remedy}; torch datasets go to Federation.from_torch"
    check_data(isinstance(arrays, tuple | list), where, problem, torch_remedy)
    check_data(len(arrays) in (2, 4), where, f"has {len(arrays)} arrays", remedy)
    features, labels = _pair(where, arrays[0], arrays[1], tokens)
    if len(arrays) == 4:
        return features, labels, *_pair(where, arrays[2], arrays[3], tokens)
    return split_off(client, features, labels, seed)


def _pair(where: str, features: Any, labels: Any, tokens: bool) -> tuple[Tensor, Tensor]:
    """Convert features and labels to tensors.

    Features become float32, or int64 where they are tokens; labels become int64.
    """
    try:
        given, remedy = _array(features), "give whole numbers, one a token"
        whole = given.dtype.kind in "iu" or not given.size or not tokens
        check_data(whole, where, f"has tokens of type {given.dtype}", remedy)
        remedy = "give arrays of real numbers"
        check_data(given.dtype.kind != "c", where, "has complex features", remedy)
        largest = int(given.max()) if tokens and given.size else 0
        check_data(largest <= np.iinfo(np.int64).max, where, f"has token {largest}", ENCODE)
        with np.errstate(over="ignore"):  # what float32 cannot hold is refused below
            x = torch.from_numpy(np.array(given, dtype=np.int64 if tokens else np.float32))
        y = np.array(_array(labels), dtype=np.float64)
    except (ValueError, TypeError) as error:
        problem = f"has features or labels that are no numbers ({error})"
        raise DataError(where, problem, "give arrays of numbers") from error
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y  # a column of labels
    filled = not len(x) or x[0].numel() > 0
    check_data(filled, where, "has records without a single number", "give at least one feature")
    finite, remedy = bool(torch.isfinite(x).all()), "fill missing values, scale huge ones"
    check_data(finite, where, "has features that are not finite numbers", remedy)
    remedy = "give one class number per record, not one-hot rows"
    check_data(y.ndim == 1 <= x.ndim, where, f"has labels of shape {y.shape}", remedy)
    problem = f"has {len(x)} records and {len(y)} labels"
    check_data(len(x) == len(y), where, problem, "give one label per record")
    whole, remedy = bool(np.all(np.isfinite(y) & (y == np.round(y)))), "number the classes from 0"
    check_data(whole, where, "has labels that are no whole numbers", remedy)
    odd = y[(y < 0) | (y >= 2**31)]
    check_data(not len(odd), where, f"has label {next(iter(odd), 0):g}", remedy)
    return x, torch.from_numpy(y.astype(np.int64))


def counted_classes(labels: Tensor) -> int:
    """How many classes labels show: up to the largest one, if none below it is without a record.

    >>> counted_classes(torch.tensor([0, 2, 1, 1]))
    3
    """
    counts = torch.bincount(labels, minlength=1)
    gaps = torch.nonzero(counts == 0).flatten().tolist() if len(labels) else []
    named = ", ".join(map(str, gaps[:5])) + (", ..." if len(gaps) > 5 else "")
    problem = f"there are labels up to {len(counts) - 1}, and nobody has a record of class {named}"
    remedy = f"number the classes without gaps, or declare classes = {len(counts)}"
    check_data(not gaps, "federation", problem, remedy)
    return len(counts)


def _array(values: Any) -> np.ndarray:
    return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)


def split_off(client: str, features: Tensor, labels: Tensor, seed: PublicSeed) -> Parts:
    """Set a fifth of a client's records aside for testing, by a public seed.

    Both parts keep the order of the records. A client needs two records at least.
    """
    problem = f"has {len(labels)} record(s), too few for a train and a test part"
    remedy = "leave it out, or give both parts"
    check_data(len(labels) >= 2, f"client '{client}'", problem, remedy)
    order = torch.randperm(len(labels), generator=seed.generator())
    cut = max(1, round(TEST_FRACTION * len(labels)))
    test, train = order[:cut].sort().values, order[cut:].sort().values
    return features[train], labels[train], features[test], labels[test]


def split_end(client: str, span: Span) -> tuple[Span, Span]:
    """Set the last fifth of a stretch aside: for windows of a text, which overlap.

    >>> split_end("a", (0, 10))
    ((0, 8), (8, 10))
    """
    first, last = span
    problem = "has one record, too few to set some aside"
    check_data(last - first >= 2, f"client '{client}'", problem, "leave it out")
    cut = last - max(1, round(TEST_FRACTION * (last - first)))
    return (first, cut), (cut, last)
