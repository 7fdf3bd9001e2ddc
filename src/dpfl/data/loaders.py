"""Torch datasets, loaders, Hugging Face datasets and iterables, read into arrays record by record.

They are recognised by what their objects can do; datasets and PIL are not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from dpfl.core.errors import DataError, did_you_mean
from dpfl.data.records import check_data
from dpfl.data.sources import MEMORY, Arrays

Transform = Callable[[Any], Any]
_OBJECTS = 250  # bytes that Python takes for a record beside its numbers


def read_items(
    where: str,
    source: Any,
    *,
    transform: Transform | None = None,
    fields: tuple[str, str] | None = None,
    memory: int = MEMORY,
) -> Arrays:
    """Read a source of (features, target) to its end, and stack both.

    ``source``: a torch dataset, map-style or iterable, a DataLoader, a Hugging Face dataset, or any
    iterable. ``transform`` is applied to the features of each record. ``fields`` names features and
    target where a record is a dict. A source that is longer than ``memory`` bytes is refused.
    """
    features: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    used = 0
    sized = _sized(source)
    problem = f"has a source without a length, and more than {memory / 2**30:.3g} GiB of records"
    remedy = "end it, give a part of it, raise memory=, or give a memory-mapped array"
    for item in _items(where, source):
        x, y = _pair(where, item, fields)
        features.append(_numbers(where, x if transform is None else transform(x)))
        targets.append(np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y))
        used += features[-1].nbytes + targets[-1].nbytes + _OBJECTS
        check_data(sized or used <= memory, where, problem, remedy)
    check_data(bool(features), where, "has no data", "leave it out of the federation")
    for what, arrays in (("records", features), ("targets", targets)):
        shapes = {array.shape for array in arrays}
        check_data(
            len(shapes) == 1,
            where,
            f"has {what} of different shapes {sorted(shapes)[:3]}",
            "bring them to one shape by a transform",
        )
    return np.stack(features), np.stack(targets)


def _sized(source: Any) -> bool:
    """Whether a source says how long it is; a loader of an iterable dataset does not know."""
    try:
        return len(getattr(source, "dataset", source)) >= 0
    except TypeError:
        return False


def _items(where: str, source: Any) -> Iterator[Any]:
    """The records of a source, one by one.

    A loader that shuffles is read in the order of its dataset, so that the same data give the same
    federation. One that takes only some records is held to those.
    """
    dataset: Any = getattr(source, "dataset", None)
    sampler: Any = getattr(source, "sampler", None)
    if dataset is not None and hasattr(source, "batch_size"):  # a DataLoader
        if hasattr(dataset, "__getitem__") and source.batch_sampler is not None:
            indices = getattr(sampler, "indices", None)
            whole = _sized(sampler) and len(sampler) == len(dataset)
            if indices is not None or (whole and not getattr(sampler, "replacement", False)):
                chosen = range(len(dataset)) if indices is None else sorted(set(map(int, indices)))
                yield from (dataset[index] for index in chosen)
                return
        for batch in source:
            yield from _unbatched(where, batch) if source.batch_size is not None else [batch]
    elif hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        yield from (source[index] for index in range(len(source)))
    else:
        check_data(
            hasattr(source, "__iter__"),
            where,
            f"{type(source).__name__} is no source of records",
            "give a torch dataset, a DataLoader or an iterable of (features, target)",
        )
        yield from source


def _unbatched(where: str, batch: Any) -> Iterator[Any]:
    """The records of a batch that a loader has put together."""
    if isinstance(batch, Mapping):
        columns = list(batch.values())
        yield from (dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True))
    else:
        check_data(
            isinstance(batch, list | tuple) and len(batch) == 2,
            where,
            f"a batch is a {type(batch).__name__}, not a pair",
            "let the loader give (features, targets)",
        )
        yield from zip(*batch, strict=True)


def _pair(where: str, item: Any, fields: tuple[str, str] | None) -> Arrays:
    """Features and target of one record."""
    if isinstance(item, Mapping):
        if fields is None:
            raise DataError(
                where,
                f"a record is a dict of {', '.join(map(str, item))}",
                "name them: features='image', target='label'",
            )
        for name in fields:
            check_data(
                name in item, where, f"a record has no '{name}'", did_you_mean(name, map(str, item))
            )
        return item[fields[0]], item[fields[1]]
    check_data(
        isinstance(item, list | tuple) and len(item) == 2,
        where,
        f"a record is a {type(item).__name__}, not (features, target)",
        "let the dataset give pairs",
    )
    features, target = item
    return features, target


def _numbers(where: str, value: Any) -> np.ndarray:
    """One record's features as an array; an image becomes numbers 0..1, channels first."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    if hasattr(value, "getbands"):  # PIL
        pixels = np.asarray(value, dtype=np.float32) / 255
        return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)
    found = np.asarray(value)
    check_data(
        found.dtype.kind in "iufb",
        where,
        f"a record's features are a {type(value).__name__}, not numbers",
        "give a transform that returns numbers",
    )
    return found
