"""Data as people have them: tables with a column of clients, sparse matrices, files that are
mapped into memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl.core.errors import did_you_mean
from dpfl.data.cells import cell_text, column_names, column_of
from dpfl.data.columns import Column
from dpfl.data.records import check_data

MEMORY = 2 * 2**30
"""Bytes that one client's records may take when they are read from a source of unknown length, or
made dense.
"""

Arrays = tuple[Any, Any]


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
    check_data(
        not twice,
        "federation",
        "two clients have one name once numbers are text",
        "name clients either by numbers or by text",
    )
    return names


def _whole(client: Any) -> bool:
    return isinstance(client, int | np.integer) and not isinstance(client, bool)


def renamed(given: Any, names: Mapping[Any, str]) -> Any:
    """What is given by client, under the clients' names; the federation refuses anything else."""
    if not isinstance(given, Mapping):
        return {} if given is None else given
    return {names.get(client, client): own for client, own in given.items()}


def by_client(table: Any, client: str, where: str = "table") -> dict[Any, dict[str, Any]]:
    """Take a table apart by a column that says who holds each record.

    Returns a dict of columns for each client, without that column.
    """
    names = column_names(table)
    check_data(client in names, where, f"has no column '{client}'", did_you_mean(client, names))
    cells = column_of(table, client)
    holders = np.array([cell_text(cell) for cell in cells], dtype=object)
    check_data(len(holders) > 0, where, "holds no record", "give at least two for each client")
    empty = holders == ""
    check_data(
        not empty.any(),
        where,
        f"record {int(empty.argmax()) + 1} names no client in '{client}'",
        "every record needs one",
    )
    if all(map(_whole, cells)):  # these are named when it is known how many there are
        holders = np.array([int(cell) for cell in cells], dtype=object)
    whole = {name: _as_array(column_of(table, name)) for name in names if name != client}
    known, inverse = np.unique(holders, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(inverse[order])) + 1)
    return {
        holder: {name: cells[rows] for name, cells in whole.items()}
        for holder, rows in zip(known.tolist(), groups, strict=True)
    }


def _as_array(cells: Any) -> np.ndarray:
    """A column as an array; anything but numbers stays as it is, one object a cell."""
    if isinstance(cells, np.ndarray):
        return cells
    for kind in (int, float):  # large whole numbers beside others would be rounded
        if all(isinstance(cell, kind) for cell in cells):
            return np.asarray(cells)
    found = np.empty(len(cells), dtype=object)
    found[:] = cells
    return found


@lru_cache
def _number_column(name: str) -> Column:
    """A column of numbers, made once for the tables of all clients."""
    return Column(name=name, type="number")


def number_columns(table: Any, where: str, rows: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Read a table whose columns all hold numbers, by name, and refuse it if a value is missing.

    ``where`` and ``rows`` name the table and its records in messages.
    """
    numbers = {}
    for name in column_names(table):
        column = _number_column(name)
        values = column.read(where, column_of(table, name), rows)
        numbers[name], _ = column.as_target(where, values, rows)
    return numbers


def plain_columns(table: Any, target: str | None, where: str, rows: Sequence[str] = ()) -> Arrays:
    """Features (float32) and target of a table of numbers: all columns but the target are features.

    The last column is the target where none is named.
    """
    features = number_columns(table, where, rows)
    target = next(reversed(features), "") if target is None else target
    check_data(
        target in features, where, f"has no column '{target}'", did_you_mean(target, features)
    )
    targets = features.pop(target)
    check_data(bool(features), where, f"has no column beside '{target}'", "give it features")
    return np.stack(list(features.values()), axis=1).astype(np.float32), targets


# -- sparse and memory-mapped arrays ---------------------------------------------------------------


def dense(where: str, values: Any, memory: int = MEMORY) -> np.ndarray:
    """Return values as an array; a sparse matrix is stored dense if that fits into ``memory``."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.to_dense() if values.layout is not torch.strided else values
    if hasattr(values, "toarray"):  # scipy
        size = float(np.prod(values.shape)) * 4
        check_data(
            size <= memory,
            where,
            f"a sparse matrix of {values.shape} takes {size / 2**30:.3g} GiB when dense",
            "reduce its columns by a public map (hashing, a fixed projection) first",
        )
        values = values.astype(np.float32).toarray()
    return np.asarray(values)


def is_mapped(values: Any) -> bool:
    """Whether an array lies in a memory-mapped file, and must not be copied into memory."""
    if isinstance(values, Tensor):
        on_disk = values.device.type == "cpu" and values.layout is torch.strided
        return on_disk and bool(values.untyped_storage().filename)
    return isinstance(values, np.ndarray) and any(isinstance(a, np.memmap) for a in _bases(values))


def mapped_tensor(where: str, values: Any, dtype: Any) -> Tensor:
    """A memory-mapped array as a tensor over the same file: nothing is read or copied.

    Parts of one file share one storage, from which the engine takes batches of many clients.
    """
    tensor = values if isinstance(values, Tensor) else None
    given = str(values.dtype).removeprefix("torch.")
    wanted = np.dtype(dtype).name
    check_data(
        given == wanted,
        where,
        f"has memory-mapped features of type {given}, which would have to be copied",
        f"store them as {wanted}",
    )
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
