"""Data as people have them, read into arrays: torch datasets and loaders, frames with a column of
clients, sparse matrices, images.

pandas, polars, Hugging Face datasets and PIL are recognised by what their objects can do; none of
them is imported.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl.core.errors import did_you_mean
from dpfl.data.columns import cell_text, column_names, column_of
from dpfl.data.records import check_data

MEMORY = 2 * 2**30
"""Bytes that one client's records may take when they are read from a source of unknown length, or
made dense.
"""
_OBJECTS = 250  # bytes that Python takes for a record beside its numbers

Arrays = tuple[Any, Any]
Transform = Callable[[Any], Any]


# -- who ------------------------------------------------------------------------------------------


def client_names(clients: Iterable[Any]) -> dict[Any, str]:
    """Name clients by text. Whole numbers get leading zeros, so that names sort as numbers do.

    >>> client_names([2, 10]), client_names(["b", "a"])
    ({2: '02', 10: '10'}, {'b': 'b', 'a': 'a'})
    """
    ids = list(clients)
    width = max((len(str(one)) for one in ids if _whole(one)), default=1)
    names = {one: f"{int(one):0{width}d}" if _whole(one) else one for one in ids}
    twice = len(set(map(str, names.values()))) < len(names)
    problem = "two clients have one name once numbers are text"
    check_data(not twice, "federation", problem, "name clients either by numbers or by text")
    return names


def _whole(client: Any) -> bool:
    return isinstance(client, int | np.integer) and not isinstance(client, bool)


def renamed(given: Mapping[Any, Any] | None, names: Mapping[Any, str]) -> dict[str, Any]:
    """What is given by client, under the clients' names."""
    return {names.get(client, client): own for client, own in (given or {}).items()}


def by_client(table: Any, client: str, where: str = "table") -> dict[str, dict[str, Any]]:
    """Take a table apart by a column that says who holds each record.

    Returns a dict of columns for each client, without that column.
    """
    names = column_names(table)
    near = did_you_mean(client, names)
    check_data(client in names, where, f"has no column '{client}'", near)
    cells = column_of(table, client)
    holders = np.array([cell_text(cell) for cell in cells], dtype=object)
    empty = holders == ""
    problem = f"record {int(empty.argmax()) + 1} names no client in '{client}'"
    check_data(not empty.any(), where, problem, "every record needs one")
    if all(map(_whole, cells)):
        named = client_names(sorted({int(cell) for cell in cells}))
        holders = np.array([named[int(cell)] for cell in cells], dtype=object)
    whole = {name: _as_array(column_of(table, name)) for name in names if name != client}
    groups = {holder: np.flatnonzero(holders == holder) for holder in sorted(set(holders))}
    return {
        str(holder): {name: cells[rows] for name, cells in whole.items()}
        for holder, rows in groups.items()
    }


def _as_array(cells: Any) -> np.ndarray:
    """A column as an array; anything but numbers stays as it is, one object a cell."""
    if isinstance(cells, np.ndarray):
        return cells
    found = np.empty(len(cells), dtype=object)
    found[:] = cells
    return found


def plain_columns(table: Any, target: str | None, where: str) -> Arrays:
    """Features and target of a table of numbers: every column but the target is a feature.

    The last column is the target where none is named.
    """
    names = column_names(table)
    target = names[-1] if target is None and names else target
    near = did_you_mean(str(target), names)
    check_data(target in names, where, f"has no column '{target}'", near)
    inputs = [name for name in names if name != target]
    check_data(bool(inputs), where, f"has no column beside '{target}'", "give it features")
    features = []
    for name in inputs:
        cells = np.asarray(column_of(table, name))
        problem = f"column '{name}' does not hold numbers"
        remedy = "leave it out, or describe the columns by a Schema"
        check_data(cells.dtype.kind in "iufb", where, problem, remedy)
        features.append(cells)
    return np.stack(features, axis=1), np.asarray(column_of(table, str(target)))


# -- torch datasets, loaders and iterables ---------------------------------------------------------


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
    used, sized = 0, _sized(source)
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
        problem = f"has {what} of different shapes {sorted(shapes)[:3]}"
        check_data(len(shapes) == 1, where, problem, "bring them to one shape by a transform")
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
        remedy = "give a torch dataset, a DataLoader or an iterable of (features, target)"
        problem = f"{type(source).__name__} is no source of records"
        check_data(hasattr(source, "__iter__"), where, problem, remedy)
        yield from source


def _unbatched(where: str, batch: Any) -> Iterator[Any]:
    """The records of a batch that a loader has put together."""
    if isinstance(batch, Mapping):
        columns = list(batch.values())
        yield from (dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True))
    else:
        remedy = "let the loader give (features, targets)"
        pair = isinstance(batch, list | tuple) and len(batch) == 2
        check_data(pair, where, f"a batch is a {type(batch).__name__}, not a pair", remedy)
        yield from zip(*batch, strict=True)


def _pair(where: str, item: Any, fields: tuple[str, str] | None) -> Arrays:
    """Features and target of one record."""
    if isinstance(item, Mapping):
        remedy = "name them: features='image', target='label'"
        problem = f"a record is a dict of {', '.join(map(str, item))}"
        check_data(fields is not None, where, problem, remedy)
        for name in fields or ():
            near = did_you_mean(name, map(str, item))
            check_data(name in item, where, f"a record has no '{name}'", near)
        assert fields is not None
        return item[fields[0]], item[fields[1]]
    pair = isinstance(item, list | tuple) and len(item) == 2
    problem = f"a record is a {type(item).__name__}, not (features, target)"
    check_data(pair, where, problem, "let the dataset give pairs")
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
    problem = f"a record's features are a {type(value).__name__}, not numbers"
    check_data(found.dtype.kind in "iufb", where, problem, "give a transform that returns numbers")
    return found


# -- sparse and memory-mapped arrays ---------------------------------------------------------------


def dense(where: str, values: Any, memory: int = MEMORY) -> np.ndarray:
    """Return values as an array; a sparse matrix is stored dense if that fits into ``memory``."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.to_dense() if values.layout is not torch.strided else values
    if hasattr(values, "toarray"):  # scipy
        size = float(np.prod(values.shape)) * 4
        problem = f"a sparse matrix of {values.shape} takes {size / 2**30:.3g} GiB when dense"
        remedy = "reduce its columns by a public map (hashing, a fixed projection) first"
        check_data(size <= memory, where, problem, remedy)
        values = values.astype(np.float32).toarray()
    return np.asarray(values)


def is_mapped(values: Any) -> bool:
    """Whether an array lies in a memory-mapped file, and must not be copied into memory."""
    if isinstance(values, Tensor):
        return values.device.type == "cpu" and bool(values.untyped_storage().filename)
    return isinstance(values, np.ndarray) and any(isinstance(a, np.memmap) for a in _bases(values))


def mapped_tensor(where: str, values: Any, dtype: Any) -> Tensor:
    """A memory-mapped array as a tensor over the same file: nothing is read or copied.

    Parts of one file share one storage, from which the engine takes batches of many clients.
    """
    tensor = values if isinstance(values, Tensor) else None
    given = str(values.dtype).removeprefix("torch.")
    problem = f"has memory-mapped features of type {given}, which would have to be copied"
    wanted = np.dtype(dtype).name
    check_data(given == wanted, where, problem, f"store them as {wanted}")
    if tensor is None:
        *_, root = _bases(values)
        with warnings.catch_warnings():  # a file that is mapped for reading only; nothing writes
            warnings.simplefilter("ignore")
            whole = torch.from_numpy(root if root.dtype == values.dtype else values)
        start = values.__array_interface__["data"][0] - whole.data_ptr()
        strides = [step // values.itemsize for step in values.strides]
        tensor = whole.as_strided(values.shape, strides, start // values.itemsize)
    return tensor


def _bases(values: np.ndarray) -> Iterator[np.ndarray]:
    """An array, and the arrays that it is a part of."""
    base: Any = values
    while isinstance(base, np.ndarray):
        yield base
        base = base.base
